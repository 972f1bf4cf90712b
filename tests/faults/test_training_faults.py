"""Real training processes, interrupted in every way: nothing is lost, and the end is the same to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muralist.train import checkpoint
from tests.support.disks import read_only_view
from tests.support.runs import TINY, assert_same_state, finish, fork, last_checkpoint, metrics, only_run

STEPS = 60


def command(data: Path, results: Path) -> list[object]:
    return ["python", "train.py", *TINY, "--data_path", data, "--enable_condition", "--results_dir", results,
            "--max_steps", STEPS, "--ckpt_every", "20", "--samples_per_gpu", "0", "--log_every", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("undisturbed")
    finish(fork(*command(photo_folder, results)))
    return only_run(results)


def wait_until(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def steps_written(results: Path) -> int:
    files = list(results.glob("*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def assert_ends_alike(undisturbed: Path, results: Path) -> None:
    run = only_run(results)
    assert_same_state(last_checkpoint(undisturbed), last_checkpoint(run))
    mine = [{key: value for key, value in line.items() if key != "val/loss"} for line in metrics(run)]
    assert mine == [{k: v for k, v in line.items() if k != "val/loss"} for line in metrics(undisturbed)]


def test_signal_saves_and_ends_the_run(photo_folder: Path, tmp_path: Path, undisturbed: Path) -> None:
    stopped_at = 0
    # `train && generate` stops; SIGUSR1 comes from SLURM, which requeues the job.
    for which, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 0)):
        process = fork(*command(photo_folder, tmp_path))
        wait_until(lambda before=stopped_at: steps_written(tmp_path) > before + 2)  # type: ignore[misc]
        process.send_signal(which)
        output = finish(process, expect=status)
        before, stopped_at = stopped_at, int(last_checkpoint(only_run(tmp_path)).name.removeprefix("step_"))
        assert f"Stopped by {which.name} at step {stopped_at}" in output
        assert before < stopped_at < STEPS
        assert len(metrics(only_run(tmp_path))) == stopped_at
    assert f"at step {stopped_at}" in finish(fork(*command(photo_folder, tmp_path)))
    assert_ends_alike(undisturbed, tmp_path)


def test_killed_by_sigkill(photo_folder: Path, tmp_path: Path, undisturbed: Path) -> None:
    for name in ("step_0000020", "step_0000040"):
        process = fork(*command(photo_folder, tmp_path))
        wait_until(lambda name=name: bool(list(tmp_path.glob(f"*/checkpoints/{name}"))))  # type: ignore[misc]
        time.sleep(0.1)
        process.kill()
        finish(process, expect=-signal.SIGKILL)
    finish(fork(*command(photo_folder, tmp_path)))
    assert_ends_alike(undisturbed, tmp_path)
    assert not list(tmp_path.glob("*/checkpoints/.*"))


def test_killed_while_checkpoints_are_written(photo_folder: Path, tmp_path: Path, undisturbed: Path) -> None:
    words = [*command(photo_folder, tmp_path), "--ckpt_every", "1"]
    for rounds, delay in enumerate((0.0, 0.013, 0.031), start=1):
        process = fork(*words)
        wait_until(lambda goal=15 * rounds: steps_written(tmp_path) >= goal)  # type: ignore[misc]
        time.sleep(delay)
        process.kill()
        finish(process, expect=-signal.SIGKILL)
    finish(fork(*command(photo_folder, tmp_path)))
    assert_ends_alike(undisturbed, tmp_path)
    assert not list(tmp_path.glob("*/checkpoints/.*"))


def test_disk_that_becomes_read_only_at_a_save(photo_folder: Path, tmp_path: Path, undisturbed: Path) -> None:
    process = fork(*command(photo_folder, tmp_path))
    wait_until(lambda: bool(list(tmp_path.glob("*/checkpoints/step_0000020"))))
    process.send_signal(signal.SIGSTOP)  # so that it is not through before the disk is read-only
    folder = only_run(tmp_path) / "checkpoints"
    there = sorted(path.name for path in folder.glob("step_*"))
    with read_only_view(folder, folder):
        process.send_signal(signal.SIGCONT)
        output = finish(process, expect=1)
    assert "Read-only file system" in output and "Traceback" not in output
    assert output.count("muralist: ") == 1, output
    assert sorted(path.name for path in folder.glob("step_*")) == there
    checkpoint.read_manifest(last_checkpoint(folder.parent))
    finish(fork(*command(photo_folder, tmp_path)))
    assert_ends_alike(undisturbed, tmp_path)


def test_save_file_requests_a_checkpoint(photo_folder: Path, tmp_path: Path) -> None:
    words = command(photo_folder, tmp_path)
    words[words.index("--max_steps") + 1] = 100_000
    words[words.index("--ckpt_every") + 1] = 50_000
    process = fork(*words, "--epochs", "100000")
    wait_until(lambda: steps_written(tmp_path) > 3)
    (only_run(tmp_path) / "save").touch()
    wait_until(lambda: bool(list(tmp_path.glob("*/checkpoints/step_*"))))
    assert not (only_run(tmp_path) / "save").exists()
    assert process.poll() is None, "it must go on"
    process.send_signal(signal.SIGTERM)
    finish(process, expect=143)


def test_second_trainer_on_one_run_is_refused(photo_folder: Path, tmp_path: Path) -> None:
    words = command(photo_folder, tmp_path)
    words[words.index("--max_steps") + 1] = 100_000
    first = fork(*words, "--epochs", "100000")
    wait_until(lambda: steps_written(tmp_path) > 1)
    refused = finish(fork(*words, "--epochs", "100000"), expect=1)
    assert f"is being trained by process {first.pid}" in refused
    first.send_signal(signal.SIGTERM)
    finish(first, expect=143)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_dead_loader_process_is_reported_and_the_run_is_saved(
    photo_folder: Path, tmp_path: Path, undisturbed: Path
) -> None:
    words = [*command(photo_folder, tmp_path), "--num_workers", "2"]
    process = fork(*words)
    wait_until(lambda: steps_written(tmp_path) > 3)
    for child in children_of(process.pid):
        os.kill(child, signal.SIGKILL)
    output = finish(process, expect=1)
    assert "A DataLoader worker died" in output and "Traceback" not in output
    assert len(metrics(only_run(tmp_path))) == int(last_checkpoint(only_run(tmp_path)).name.removeprefix("step_"))
    finish(fork(*words))
    assert_ends_alike(undisturbed, tmp_path)


def test_signal_to_the_process_group_saves_too(photo_folder: Path, tmp_path: Path, undisturbed: Path) -> None:
    words = [*command(photo_folder, tmp_path), "--num_workers", "2"]
    process = fork(*words)
    wait_until(lambda: steps_written(tmp_path) > 3)
    os.killpg(process.pid, signal.SIGTERM)
    assert "Stopped by SIGTERM" in finish(process, expect=143)
    finish(fork(*words))
    assert_ends_alike(undisturbed, tmp_path)
