"""Test the comparison of losses in fp32, bf16 and fp8, and that page and figure match the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import draw_loss_curves
from scripts.draw_fid_curve import replace_section

from bench import loss_curves
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


def measured(fp8: float) -> dict[str, Any]:
    """Return falling losses; every second step of fp8 is above fp32 by a factor."""
    exact = [1.0 / (1 + step / 50) for step in range(100)]
    loss = {
        "fp32": exact,
        "bf16": [value * 1.001 for value in exact],
        "fp8": [value * (1 + fp8 * (step % 2)) for step, value in enumerate(exact)],
        "bf16, another seed": [value * 1.011 for value in exact],
    }
    return {
        "model": "JiT-S/4 at 32 px",
        "images": 4000,
        "batch": 256,
        "steps": 100,
        "hardware": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11.0+cu130"},
        **loss_curves.compared(loss, 40),
        "loss": loss,
    }


def test_differences_are_paired_by_step_and_compared_with_seed_noise() -> None:
    near, far = measured(fp8=0.004), measured(fp8=0.04)
    assert near["from fp32"]["fp8"]["of the mean"] == pytest.approx(0.002, rel=0.02)
    assert near["from fp32"]["bf16"] == {
        "of the mean": pytest.approx(0.001),
        "standard error": pytest.approx(0, abs=1e-4),
    }
    assert near["from fp32"]["fp8"]["standard error"] == pytest.approx(0.002 / 40**0.5, rel=0.1)
    assert near["from seed to seed"] == pytest.approx(0.00999, rel=0.01)
    assert near["fp8 is within chance"] and not far["fp8 is within chance"]


def test_figure_has_curves_and_differences() -> None:
    drawn = draw_loss_curves.draw(measured(fp8=0.003))
    lines = [line.split('"')[1] for line in drawn.splitlines() if line.startswith("<polyline")]
    assert len(lines) == 5  # three losses, two differences
    losses = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert [len(points) for points in losses] == [5] * 5
    assert all(a[1] < b[1] for a, b in zip(losses[0], losses[0][1:], strict=False))  # y grows downwards
    middle = draw_loss_curves.TOP + draw_loss_curves.UPPER + draw_loss_curves.BETWEEN + draw_loss_curves.LOWER / 2
    assert all(y == pytest.approx(middle - draw_loss_curves.LOWER / 2 * 0.1 / 0.2, abs=0.2) for _, y in losses[3])
    assert ">steps of 256 images; points are means of 20 steps; NVIDIA H200, torch 2.11.0+cu130<" in drawn


def test_section_states_the_result() -> None:
    page = "# Page\n\n## The flags\n\ntext\n\n## Memory\n\ntext\n"
    near = measured(fp8=0.004)
    text, exact = draw_loss_curves.section(near), sum(near["loss"]["fp8"][-40:]) / 40
    once = replace_section(page, draw_loss_curves.HEADING, draw_loss_curves.NEXT, text)
    assert once.replace(text, "") == page
    assert f"| fp8 | {exact:.4f} | +0.20% (± 0.03%) |" in text
    assert "Another seed in bf16 ends 1.00% from the first;\nthe difference between fp8 and fp32 is smaller." in text
    assert "the difference between fp8 and fp32 is larger." in draw_loss_curves.section(measured(fp8=0.04))


def test_tiny_run_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 40)
    np.savez(tmp_path / "c.npz", train_x=images, train_y=labels)
    arguments = ["loss_curves.py", "trial", "--data", str(tmp_path / "c.npz"), "--folder", str(tmp_path), "--tiny"]
    monkeypatch.setattr(sys, "argv", arguments)
    loss_curves.main()
    result = json.loads((tmp_path / "trial.json").read_text())
    curves = result["loss"]
    assert [len(curve) for curve in curves.values()] == [4] * 4
    assert curves["fp8"] == pytest.approx(curves["fp32"], rel=1e-3)
    assert result["from fp32"]["fp8"] != result["from fp32"]["bf16"]
    assert curves["bf16, another seed"] != pytest.approx(curves["bf16"], rel=1e-2)


def test_page_and_figure_match_the_record() -> None:
    if not draw_loss_curves.RECORD.is_file():
        pytest.skip("the curves have not been measured on a GPU yet")
    found = json.loads(draw_loss_curves.RECORD.read_text())
    assert (DOCS / draw_loss_curves.FIGURE).read_text() == draw_loss_curves.draw(found), "draw_loss_curves.py docs"
    assert draw_loss_curves.section(found) in (DOCS / draw_loss_curves.PAGE).read_text()
