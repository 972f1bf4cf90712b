"""Real processes: the same run on any number of ranks, and resumed on any other."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.runs import TINY, finish, last_checkpoint, losses, metrics, only_run, start

STEPS, EPOCHS, WARM_UP = 50, 30, 10


def expected_rate(step: int, samples: int) -> float:
    """Warm-up and half cosine, counted in optimizer steps: a scheduler that is stepped once per rank runs ahead of this."""
    last = EPOCHS * samples // 8
    if step < WARM_UP:
        return 1e-3 * (step + 1) / (WARM_UP + 1)
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (last - WARM_UP)))


def run(ranks: int, data: Path, results: Path, steps: int = STEPS) -> Path:
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["train.py", *TINY, "--data_path", data, "--enable_condition", "--results_dir", results, "--batch_size", "8",
             "--global_batch_size", "8", "--max_steps", steps, "--samples_per_gpu", "0", "--epochs", EPOCHS,
             "--lr_schedule", "cosine", "--warmup_steps", WARM_UP]  # fmt: skip
    finish(start(*launcher, *words))
    return only_run(results)


@pytest.fixture(scope="module")
def alone(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(1, photo_folder, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_curve_does_not_depend_on_the_number_of_ranks(
    alone: Path, photo_folder: Path, tmp_path: Path, ranks: int
) -> None:
    together = run(ranks, photo_folder, tmp_path)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    samples = json.loads((last_checkpoint(together) / "manifest.json").read_text())["data"]["samples"]
    for step, (mine, theirs) in enumerate(zip(metrics(together), metrics(alone), strict=True)):
        assert mine["train/learning_rate"] == theirs["train/learning_rate"]
        assert mine["train/learning_rate"] == pytest.approx(expected_rate(step, samples), rel=1e-12)
        assert mine["epoch"] == theirs["epoch"]
    assert metrics(together)[-1]["val/loss"] == pytest.approx(metrics(alone)[-1]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_stopped_on_four_ranks_gone_on_with_two_then_one(alone: Path, photo_folder: Path, tmp_path: Path) -> None:
    for ranks, steps in ((4, 17), (2, 33), (1, STEPS)):
        run(ranks, photo_folder, tmp_path, steps)
    assert losses(only_run(tmp_path)) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_accelerate_launch_and_the_script_run_the_configured_processes(photo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(photo_folder.parent)
    for name in ("train.py", "configs", "scripts", "accelerate_config_single_node.yaml"):
        target = tmp_path / name
        if name == "scripts":
            target.mkdir()
            (target / "train_multi_gpu.sh").write_bytes((REPOSITORY / "scripts" / "train_multi_gpu.sh").read_bytes())
        else:
            target.symlink_to(REPOSITORY / name)
    shrink = ["--model", "JiT-T/8", "--batch_size", "2", "--max_steps", "2", "--num_workers", "0",
              "--sample_steps", "2", "--no_use_amp"]  # fmt: skip
    direct = (
        "accelerate launch --config_file accelerate_config_single_node.yaml train.py --config configs/base_config.yaml"
    )
    output = finish(start(*direct.split(), *shrink, cwd=tmp_path))
    assert "Number of processes: 2" in output
    assert "2 per GPU x 2 GPUs x 1 accumulation = 4" in output
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = start(
        "bash", "scripts/train_multi_gpu.sh", *shrink, "--run_name", "three", cwd=tmp_path, NPROC="3", PATH=path
    )
    assert "Number of processes: 3" in finish(script)
    script = start("bash", "scripts/train_multi_gpu.sh", *shrink, "--run_name", "one", cwd=tmp_path, PATH=path,
                   CUDA_VISIBLE_DEVICES="2")  # fmt: skip
    assert "Number of processes: 1" in finish(script)
