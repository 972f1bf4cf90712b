"""Starts the processes of one run on this machine, passes signals on, and ends them all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

_GRACE = 30.0  # seconds the others have to save and leave once one has failed


def launch(command: Sequence[str], processes: int, threads: int = 1) -> int:
    """Run `command` as `processes` ranks and return the first bad exit status, or 0.

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


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    status, deadline = 0, float("inf")
    while running := [child for child in children if child.poll() is None]:
        failed = [child.returncode for child in children if child.returncode]
        if failed and not status:
            status, deadline = failed[0], time.monotonic() + _GRACE
            for child in running:
                child.terminate()
        if time.monotonic() > deadline:
            return status
        time.sleep(0.05)
    return status or next((child.returncode for child in children if child.returncode), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
