"""Trains tiny models, in this process or in real ones, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from muralist.cli import main
from tests.conftest import REPOSITORY
from tests.support.fork_server import Command

HARDWARE = {"world_size", "device"}
TIMING = {"time", "train/samples_per_second", "train/tokens_per_second", "train/mfu", "train/data_wait_fraction"}
TINY = ["--model", "JiT-T/8", "--img_size", "16", "--batch_size", "4", "--num_workers", "0", "--warmup_steps", "3",
        "--learning_rate", "1e-3", "--sample_steps", "2", "--no_use_tensorboard"]  # fmt: skip


def train(*arguments: object, expect: int = 0) -> None:
    """Train in this process."""
    assert main(["train", *TINY, *map(str, arguments)]) == expect


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a real process: one thread, nothing inherited from a launcher."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def start(*command: object, cwd: Path = REPOSITORY, new_session: bool = False, **extra: str) -> subprocess.Popen[str]:
    """Start a real process of the project's Python."""
    words = [str(word) for word in command]
    tools = Path(sys.executable).parent
    if words[0] == "python":
        words[0] = sys.executable
    elif (tools / words[0]).exists():
        words[0] = str(tools / words[0])
    elif words[0] == "muralist":  # not installed: the source is on PYTHONPATH
        words[:1] = [sys.executable, "-m", "muralist"]
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=new_session,
    )


def fork(*command: object, cwd: Path = REPOSITORY, **extra: str) -> Command:
    """Start `muralist ...` or `python SCRIPT ...` as a real process, forked from one that has imported everything heavy.

    For tests of what commands do; `start` is for those of how they start, and of what a fresh Python does.
    """
    assert command[0] in ("muralist", "python"), command
    words = [str(word) for word in command[1:]]
    return Command(words[2:] if words[:2] == ["-m", "muralist"] else words, cwd, environment(**extra))


def finish(process: subprocess.Popen[str] | Command, expect: int | None = 0, timeout: float = 480) -> str:
    """Wait for a process and return what it printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {timeout} s:\n{process.communicate()[0]}") from None
    assert expect is None or process.returncode == expect, f"exit status {process.returncode}:\n{output}"
    return output


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what differs between machines."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING | HARDWARE} for line in lines]


def losses(run: Path) -> list[float]:
    """The loss of every step."""
    return [line["train/loss"] for line in metrics(run)]


def only_run(results: Path) -> Path:
    """The one run in a results folder."""
    (run,) = [path for path in results.iterdir() if path.is_dir()]
    return run


def last_checkpoint(run: Path) -> Path:
    """The checkpoint that `latest` names."""
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, EMA weights, optimizer."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = {
        f"{which}.{name}": value
        for which in ("model", "ema1", "ema2")
        for name, value in load_file(checkpoint / f"{which}.safetensors").items()
    }
    flat = checkpoint.parent / f"{checkpoint.name}.flat.pt"
    dcp_to_torch_save(checkpoint / "state", flat)
    found |= torch.load(flat, weights_only=True)
    flat.unlink()
    return found


def assert_same_state(one: Path, other: Path) -> None:
    """Two checkpoints hold the same bits."""
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"{len(different)} of {len(left)} tensors differ, e.g. {different[:3]}"


def train_through_and_in_legs(results: Path, common: list[object], *stops: int) -> tuple[Path, Path]:
    """Train to the last stop at once and in several commands; the end must have the same bits. Returns both runs."""
    train(*common, "--results_dir", results / "through", "--max_steps", stops[-1])
    for stop in stops:
        train(*common, "--results_dir", results / "legs", "--max_steps", stop)
    through, legs = only_run(results / "through"), only_run(results / "legs")
    assert_same_state(last_checkpoint(through), last_checkpoint(legs))
    assert losses(through) == losses(legs)
    return through, legs
