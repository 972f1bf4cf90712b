"""Test bench/few_step_rate.py in miniature, and the rate that it takes from a folder of images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench.cifar_fid import warm_rate

from muralist.cli import main
from muralist.data.ledger_reader import LEDGER
from tests.bench.test_speedrun import finish
from tests.support.jit_models import checkpoint, family, network_of


def test_the_rate_leaves_out_the_beginning_and_the_end(tmp_path: Path) -> None:
    """Images every 10 ms but the first ones, which wait for a compiler, and the last."""
    spec = family("cat", "dog")
    model = checkpoint(tmp_path / "run", spec.describe(), network_of(spec).state_dict())
    (tmp_path / "prompts.csv").write_text("prompt\n" + "cat\n" * 40)
    words = ["--model_path", model, "--prompts_csv", tmp_path / "prompts.csv", "--output_dir", tmp_path / "images",
             "--num_inference_steps", 1, "--batch_size", 20, "--compile", "false"]  # fmt: skip
    assert main(["generate", *map(str, words)]) == 0
    header, *lines = (tmp_path / "images" / LEDGER).read_text().splitlines()
    changed = []
    for line in lines:
        content = json.loads(line)
        if "changed" in content:
            row = content["index"]
            seconds = 100 + row / 100 + (50 if row == 39 else 0) - (90 if row < 4 else 0)
            content["changed"] = int(seconds * 1e9)
        changed.append(json.dumps(content))
    (tmp_path / "images" / LEDGER).write_text("\n".join([header, *changed]) + "\n")
    assert warm_rate(tmp_path / "images", 4) == pytest.approx(100)


@pytest.mark.slow
def test_a_student_and_its_teacher_are_timed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    words = ["--folder", tmp_path / "work", "--model", "JiT-T/8", "--img_size", "32", "--images", "60",
             "--teacher_images", "20", "--batch", "10"]  # fmt: skip
    finish([sys.executable, "bench/few_step_rate.py", str(record), *map(str, words)])
    found = json.loads(record.read_text())
    rates = [found[f"student, {kind}"] for kind in ("PNG files", "tar shards")] + [found["teacher, 50 Heun steps"]]
    assert [rate["images"] for rate in rates] == [60, 60, 20]
    assert all(rate["images/s"] > 0 and rate["seconds of the command"] > 0 for rate in rates)
    ratio = found["student, PNG files / teacher"]
    assert ratio == pytest.approx(rates[0]["images/s"] / rates[2]["images/s"], abs=0.1) and ratio > 5
