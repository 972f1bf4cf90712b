"""Checkpoints in the background: training does not wait for the disk, and nothing of it leaks into the copy."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from muralist.core.errors import UserError
from muralist.settings import CheckpointSettings
from muralist.train import checkpoint
from muralist.train.checkpoint import CheckpointWriter


def submit(writer: CheckpointWriter, step: int, tensor: torch.Tensor) -> None:
    writer.submit(step, {"model": {"w": tensor}}, {"w.exp_avg": tensor}, {"images": step, "model": {}})


def test_training_continues_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, write = threading.Event(), checkpoint.write

    def slow_write(*arguments: Any) -> Path:
        assert disk.wait(20)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow_write)
    writer = CheckpointWriter(tmp_path, CheckpointSettings())
    tensor = torch.arange(4.0)
    submit(writer, 1, tensor)  # returns although the disk has not moved
    tensor.fill_(-1.0)  # the next optimizer step
    assert not checkpoint.list_checkpoints(tmp_path)
    disk.set()
    writer.finish()
    (only,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.read_manifest(only)["step"] == 1
    assert torch.equal(load_file(only / "model.safetensors")["w"], torch.arange(4.0))
    loaded = {"w.exp_avg": torch.zeros(4)}
    checkpoint.read_state(only, loaded)
    assert torch.equal(loaded["w.exp_avg"], torch.arange(4.0))


def test_checkpoints_are_written_in_order_and_pruned(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSettings(keep_last=2))
    for step in range(1, 6):
        submit(writer, step, torch.full((2,), float(step)))
    writer.finish()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_0000004", "step_0000005"]


def test_background_error_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> Path:
        raise UserError("No space left.")

    monkeypatch.setattr(checkpoint, "write", full_disk)
    writer = CheckpointWriter(tmp_path, CheckpointSettings())
    submit(writer, 1, torch.zeros(2))
    with pytest.raises(UserError, match="No space left"):
        writer.finish()
    writer.check()
    writer.finish()


def test_checkpoint_is_completed_at_interpreter_exit(tmp_path: Path) -> None:
    """Somebody who presses Ctrl+C again and again leaves every wait; Python itself then waits for the thread."""
    script = f"""
import threading, time, torch
from pathlib import Path
from muralist.train import checkpoint
complete = checkpoint._complete
checkpoint._complete = lambda *inputs: (time.sleep(1), complete(*inputs))[1]  # the program has ended by then
tensors = {{"w": torch.ones(4)}}
inputs = Path({str(tmp_path)!r}), 7, {{"model": tensors}}, tensors, {{"model": {{}}}}
threading.Thread(target=checkpoint.write, args=inputs).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (only,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.read_manifest(only)["step"] == 7
