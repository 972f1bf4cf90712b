"""Real processes: every strategy gives one curve, and a checkpoint of any goes on under any other, on any ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from muralist.core.errors import UserError
from muralist.train import checkpoint
from muralist.train.distributed import _deepspeed_plugin
from tests.support.disks import small_disk
from tests.support.runs import (
    TINY,
    assert_same_state,
    finish,
    last_checkpoint,
    losses,
    metrics,
    only_run,
    start,
    tensors,
)

STEPS = 24
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def command(strategy: str, ranks: int, data: Path, results: Path, steps: int = STEPS, *more: object) -> list[object]:
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "train.py", *TINY, "--data_path", data, "--enable_condition", "--results_dir", results,
            "--global_batch_size", "12", "--batch_size", "12", "--max_steps", steps, "--epochs", "100", "--max_grad_norm",
            "1", "--strategy", strategy, *more]  # fmt: skip


@pytest.fixture(scope="module")
def alone(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("alone")
    finish(start(*command("ddp", 1, photo_folder, results)))
    return only_run(results)


def assert_same_training(run: Path, other: Path) -> None:
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        assert mine["train/learning_rate"] == theirs["train/learning_rate"]
    assert metrics(run)[-1]["val/loss"] == pytest.approx(metrics(other)[-1]["val/loss"], rel=1e-5)
    mine, theirs = tensors(last_checkpoint(run)), tensors(last_checkpoint(other))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].shape == value.shape
        # Adam turns a rounding error in a gradient near zero into a full step: 24 of them at most.
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp2", 2),
        ("fsdp2", 3),
        pytest.param("zero2", 2, marks=needs_deepspeed),
        pytest.param("zero3", 3, marks=needs_deepspeed),
    ],
)
def test_every_strategy_trains_the_same(
    alone: Path, photo_folder: Path, tmp_path: Path, strategy: str, ranks: int
) -> None:
    output = finish(start(*command(strategy, ranks, photo_folder, tmp_path)))
    run = only_run(tmp_path)
    assert f"Number of processes: {ranks}" in output
    assert_same_training(run, alone)
    parts = list((last_checkpoint(run) / "state").glob("*.distcp"))
    assert len(parts) == (ranks if strategy == "fsdp2" else 1), "under FSDP2 each process writes its part"
    for prompt in (alone / "samples" / f"step_{STEPS:07d}").glob("gpu_0_prompt.txt"):
        mine = run / "samples" / prompt.parent.name / "gpu_0_sample.png"
        with Image.open(mine) as sampled, Image.open(prompt.with_name("gpu_0_sample.png")) as expected:
            assert np.abs(np.asarray(sampled).astype(int) - np.asarray(expected).astype(int)).max() <= 2


@pytest.mark.slow
def test_gradients_are_all_reduced_in_bf16_with_amp(photo_folder: Path, tmp_path: Path) -> None:
    said = {}
    for ranks in (1, 2):
        words = command("ddp", ranks, photo_folder, tmp_path / str(ranks), STEPS, "--use_amp", "--samples_per_gpu", "0")
        said[ranks] = finish(start(*words))
    one, two = (only_run(tmp_path / str(ranks)) for ranks in (1, 2))
    assert "gradients all-reduced in bf16" in said[2] and "gradients all-reduced" not in said[1]
    assert losses(two) == pytest.approx(losses(one), rel=2e-3)
    assert losses(two)[1:] != losses(one)[1:]  # by a rounding: it is not float32 that travels
    for mine, theirs in zip(metrics(two), metrics(one), strict=True):
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=2e-2)


@pytest.mark.slow
@needs_deepspeed
def test_run_resumes_under_any_strategy_on_any_number_of_ranks(alone: Path, photo_folder: Path, tmp_path: Path) -> None:
    legs = [("fsdp2", 4), ("zero3", 2), ("fsdp2", 2), ("zero2", 3), ("fsdp2", 3), ("ddp", 1)]
    for number, (strategy, ranks) in enumerate(legs, start=1):
        steps = STEPS * number // len(legs)
        output = finish(start(*command(strategy, ranks, photo_folder, tmp_path, steps, "--samples_per_gpu", "0")))
        assert number == 1 or f"at step {STEPS * (number - 1) // len(legs)}" in output
    assert_same_training(only_run(tmp_path), alone)


@pytest.mark.slow
def test_interrupted_sharded_run_is_bit_identical(photo_folder: Path, tmp_path: Path) -> None:
    quiet = ["--samples_per_gpu", "0", "--ckpt_every", "6", "--log_every", "1"]
    finish(start(*command("fsdp2", 2, photo_folder, tmp_path / "undisturbed", STEPS, *quiet)))
    words = command("fsdp2", 2, photo_folder, tmp_path / "disturbed", STEPS, *quiet)
    for reached, which in (("step_0000006", signal.SIGTERM), ("step_0000012", signal.SIGKILL)):
        process = start(*words, new_session=True)
        deadline = time.monotonic() + 90
        while not list(tmp_path.glob(f"disturbed/*/checkpoints/{reached}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        if which == signal.SIGTERM:
            process.send_signal(which)  # torchrun passes it on
        else:
            for worker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(worker), which)
        finish(process, expect=None)
    finish(start(*words))
    undisturbed, disturbed = only_run(tmp_path / "undisturbed"), only_run(tmp_path / "disturbed")
    assert_same_state(last_checkpoint(undisturbed), last_checkpoint(disturbed))
    assert losses(disturbed) == losses(undisturbed)
    assert not list(disturbed.glob("checkpoints/.*"))


@pytest.mark.slow
def test_full_disk_ends_all_processes_and_keeps_the_previous_checkpoint(photo_folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "60m") as disk:
        words = command("fsdp2", 2, photo_folder, disk, STEPS, "--samples_per_gpu", "0", "--ckpt_every", "2")
        output = finish(start(*words), expect=1)
        assert "A checkpoint needs 0.04 GB" in output and "Another process could not write" in output
        assert "muralist" in output and "CheckpointException" not in output
        run = next(path for path in disk.iterdir() if (path / "checkpoints").is_dir())
        assert last_checkpoint(run).name == "step_0000002"
        checkpoint.read_manifest(last_checkpoint(run))
        assert not list(run.glob("checkpoints/.*"))


def test_missing_deepspeed_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--strategy zero3 needs DeepSpeed, .*pip install 'muralist\[deepspeed\]'"):
        _deepspeed_plugin(3)
