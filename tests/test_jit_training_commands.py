"""Every documented command of JiT training, on a small image folder, with a smaller model, batch and length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.runs import finish, losses, metrics, only_run, start

SHRINK = ["--model", "JiT-T/8", "--batch_size", "2", "--max_steps", "3", "--num_workers", "1", "--sample_steps", "2"]


@pytest.fixture()
def project(photo_folder: Path, tmp_path: Path) -> Path:
    """A folder like the project's root: its entry points, and data where the commands expect it."""
    (tmp_path / "train.py").symlink_to(REPOSITORY / "train.py")
    (tmp_path / "data").symlink_to(photo_folder.parent)
    return tmp_path


def run(project: Path, text: str, **extra: str) -> str:
    return finish(start(*text.split(), *SHRINK, cwd=project, **extra))


@pytest.mark.slow
def test_pretraining_then_fine_tuning(project: Path) -> None:
    run(project, "python train.py --data_path ./data/train --img_size 64 --model JiT-B/4 --batch_size 64 --epochs 100")
    output = run(
        project,
        "python train.py --data_path ./data/train --img_size 64 --model JiT-B/4 --enable_condition "
        "--batch_size 64 --epochs 50",
    )
    assert "starting from the weights of results/JiT-T-8-64-" in output
    runs = sorted((project / "results").iterdir())
    assert len(runs) == 2
    for one in runs:
        assert len(losses(one)) == 3
        assert (one / "samples" / "step_0000003" / "gpu_0_sample.png").is_file()
        assert {"train/loss", "train/learning_rate", "train/grad_norm"} <= metrics(one)[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 8])
def test_several_processes(project: Path, processes: int) -> None:
    output = run(
        project, f"torchrun --nproc_per_node={processes} train.py --data_path ./data/train --batch_size 64 --epochs 100"
    )
    assert f"Number of processes: {processes}" in output
    assert f"2 per GPU x {processes} GPUs x 1 accumulation = {2 * processes}" in output
    one = only_run(project / "results")
    assert len(losses(one)) == 3
    assert len(list((one / "samples" / "step_0000003").glob("gpu_*_sample.png"))) == processes


@pytest.mark.slow
def test_one_and_two_processes_have_the_same_curve(project: Path) -> None:
    common = "train.py --data_path ./data/train --img_size 16 --global_batch_size 8 --max_samples 40 --epochs 100"
    run(project, f"python {common} --run_name one")
    run(project, f"torchrun --nproc_per_node=2 {common} --run_name two")
    one, two = (losses(project / "results" / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_monitoring(project: Path) -> None:
    pytest.importorskip("wandb")
    output = run(
        project,
        "python train.py --data_path ./data/train --use_wandb --wandb_project jit-diffusion --wandb_name jit-v1",
        WANDB_MODE="offline",
    )
    assert "W&B: offline" in output
    assert list((project / "results").glob("*/wandb/offline-run-*"))


@pytest.mark.slow
def test_documented_options(project: Path) -> None:
    output = run(
        project,
        "python train.py --data_path ./data/train --use_amp --gradient_accumulation_steps 2 --persistent_workers true",
    )
    assert "2 per GPU x 1 GPUs x 2 accumulation = 4" in output
