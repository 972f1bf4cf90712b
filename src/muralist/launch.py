"""Starts the processes of one run on this machine, passes signals on, and ends them all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from muralist.errors import STATUS_LOST_OTHERS, UserError
from muralist.settings import Strategy

_GRACE = 30.0  # seconds the others have to save and leave once one has failed


def launch(command: Sequence[str], processes: int, threads: int = 1) -> int:
    """Run `command` as `processes` ranks; returns 0, or the exit status of the first rank that failed and says which.

    Each rank is a session of its own: Ctrl+C reaches this process alone, which passes it on, so that every rank hears it
    exactly once and none is cut off while saving.
    """
    port = _free_port()
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            }
            children.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()


def chosen_processes() -> int | None:
    """NPROC, where it is set: how many processes a machine is to run."""
    wanted = os.environ.get("NPROC", "")
    if wanted and not (wanted.isdecimal() and int(wanted)):
        raise UserError(f"NPROC is {wanted!r}: expected a whole number above 0.")
    return int(wanted) if wanted else None


def default_processes() -> int:
    """NPROC, else the entries of CUDA_VISIBLE_DEVICES, else the GPUs there are, else 1."""
    if chosen := chosen_processes():
        return chosen
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return len(visible.split(","))
    import torch

    return max(1, torch.cuda.device_count())


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    status, told, deadline = 0, "", float("inf")
    while True:
        running = [child for child in children if child.poll() is None]
        failed = [(rank, child) for rank, child in enumerate(children) if child.returncode]
        if failed and not status:
            # One that ended because another is missing is not the one to be named, if there is any other.
            rank, child = min(failed, key=lambda pair: pair[1].returncode == STATUS_LOST_OTHERS)
            # As a shell does it: 128 and the number of the signal.
            status = child.returncode if child.returncode > 0 else 128 - child.returncode
            told, deadline = _obituary(rank, child), time.monotonic() + _GRACE
            for other in running:
                other.terminate()
        if not running or time.monotonic() > deadline:
            if running and status == STATUS_LOST_OTHERS:
                silent = [rank for rank, child in enumerate(children) if child.poll() is None]
                told = f"Rank {', '.join(map(str, silent))} did not answer and was killed. The same command goes on."
            break
        time.sleep(0.05)
    if told:  # last, so that it is not buried under what the others say about losing it
        print(told, file=sys.stderr)
    return status


def _obituary(rank: int, child: subprocess.Popen[bytes]) -> str:
    who = f"Rank {rank} (process {child.pid})"
    if child.returncode < 0:
        how = f"was killed by {signal.Signals(-child.returncode).name}"
        return f"{who} {how}; the other processes were stopped. The same command goes on."
    return f"{who} ended with status {child.returncode}; its own message is above. The other processes were stopped."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configured_strategy() -> Strategy:
    """What `accelerate config` asked for, which `accelerate launch` passes on in the environment."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "zero3" if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3" else "zero2"
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"
