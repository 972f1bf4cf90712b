"""Real processes: the same run on any number of ranks, and resumed on any other."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from muralist.core.errors import EXIT_LOST_PEERS
from tests.conftest import REPOSITORY
from tests.support.runs import TINY, finish, last_checkpoint, losses, metrics, only_run, start

STEPS, DECAY, WARM_UP = 50, 170, 10
WSD = ("--lr_schedule", "wsd", "--lr_decay_steps", STEPS, "--lr_decay_fraction", "0.4")


def expected_rate(step: int, wsd: bool) -> float:
    """The schedule counted in optimizer steps: a scheduler that is stepped once per rank runs ahead of this."""
    if step < WARM_UP:
        return 1e-3 * (step + 1) / (WARM_UP + 1)
    if wsd:
        return 1e-3 * min(1.0, (STEPS - step) / (0.4 * STEPS))
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (DECAY - WARM_UP)))


def run(ranks: int, data: Path, results: Path, steps: int = STEPS, schedule: tuple[object, ...] = ()) -> Path:
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    words = ["train.py", *TINY, "--data_path", data, "--enable_condition", "--results_dir", results, "--batch_size", "8",
             "--global_batch_size", "8", "--max_steps", steps, "--samples_per_gpu", "0",
             *(schedule or ("--lr_schedule", "cosine", "--lr_decay_steps", DECAY)), "--warmup_steps", WARM_UP]  # fmt: skip
    finish(start(*launcher, *words))
    return only_run(results)


@pytest.fixture(scope="module")
def alone(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(1, photo_folder, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "schedule"), [(2, ()), (4, ()), (2, WSD), (4, WSD)])
def test_the_curve_does_not_depend_on_the_number_of_ranks(
    alone: Path, photo_folder: Path, tmp_path: Path, ranks: int, schedule: tuple[object, ...]
) -> None:
    together = run(ranks, photo_folder, tmp_path / "together", schedule=schedule)
    if schedule:
        alone = run(1, photo_folder, tmp_path / "alone", schedule=schedule)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    for step, (mine, theirs) in enumerate(zip(metrics(together), metrics(alone), strict=True)):
        assert mine["train/learning_rate"] == theirs["train/learning_rate"]
        assert mine["train/learning_rate"] == pytest.approx(expected_rate(step, wsd=bool(schedule)), rel=1e-12)
        assert mine["epoch"] == theirs["epoch"]
    assert metrics(together)[-1]["val/loss"] == pytest.approx(metrics(alone)[-1]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_stopped_on_four_ranks_resumed_on_two_then_one(alone: Path, photo_folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "which", "status"),
    [
        (("muralist", "launch", "--nproc", 2, "train"), signal.SIGINT, 130),
        (("muralist", "launch", "--nproc", 2, "train"), signal.SIGTERM, 143),
        (("torchrun", "--standalone", "--nproc_per_node=2", "train.py"), signal.SIGINT, 1),
    ],
    ids=["launch-SIGINT", "launch-SIGTERM", "torchrun-SIGINT"],
)
def test_stopped_launcher_saves_and_fails(
    launcher: tuple[object, ...], which: signal.Signals, status: int, photo_folder: Path, tmp_path: Path
) -> None:
    """Ctrl+C goes to all processes of a terminal, SIGTERM to the launcher; then `train && generate` stops."""
    words = [*TINY, "--data_path", photo_folder, "--results_dir", tmp_path, "--run_name", "run", "--epochs", "100000",
             "--ckpt_every", "100000", "--samples_per_gpu", "0"]  # fmt: skip
    process = start(*launcher, *words, new_session=True)
    file, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while not (file.is_file() and file.read_text().count("\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.05)
    (os.killpg if which == signal.SIGINT else os.kill)(process.pid, which)
    output, step = finish(process, expect=status, timeout=60), len(losses(file.parent))
    assert f"Stopped by {which.name} at step {step}: saved" in output and "ended with status" not in output
    assert last_checkpoint(file.parent).name == f"step_{step:07d}"


@pytest.mark.slow
def test_frozen_rank_ends_the_job_and_is_named(photo_folder: Path, tmp_path: Path) -> None:
    """With the timeouts that users have."""
    words = ["muralist", "launch", "--nproc", "3", "train", *TINY, "--data_path", photo_folder, "--results_dir", tmp_path,
             "--epochs", "100000", "--ckpt_every", "5", "--samples_per_gpu", "0", "--run_name", "run"]  # fmt: skip
    process = start(*words)
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "checkpoints" / "latest").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    frozen = json.loads((tmp_path / "run" / "heartbeats" / "rank_1.json").read_text())["process"]
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    assert process.stdout
    output = next(line for line in process.stdout if "does not respond" in line)
    assert time.monotonic() - began < 60  # 40 s of silence, and a few beats
    output += finish(process, expect=EXIT_LOST_PEERS, timeout=150)
    assert time.monotonic() - began < 100  # 30 s for the others to leave in good order
    assert f"Rank 1 on {socket.gethostname()} (process {frozen}) does not respond" in output
    assert "Rank 1 did not respond and was killed" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_rank_that_never_starts_is_named(photo_folder: Path, tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        alone["MASTER_PORT"] = str(probe.getsockname()[1])
    words = ["python", "train.py", *TINY, "--data_path", photo_folder, "--results_dir", tmp_path, "--dist_timeout", "5"]
    output = finish(start(*words, **alone), expect=EXIT_LOST_PEERS, timeout=60)
    assert "rank 1 never reported" in output.lower() and "Traceback" not in output
