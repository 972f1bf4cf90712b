"""Start the ranks of one run on this machine, forward signals to them, and stop all of them when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from muralist.core.errors import EXIT_LOST_PEERS

_GRACE_SECONDS = 30.0  # that the other ranks have to save and exit once one has failed


def launch(command: Sequence[str], processes: int, threads: int = 1) -> int:
    """Run `command` as `processes` ranks; return 0, or the exit status of the first rank that failed.

    Each rank runs in its own session: Ctrl+C reaches this process alone, which forwards it, so that every rank receives
    it exactly once and none is interrupted while saving.
    """
    port = _free_port()
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
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
    status, report, deadline = 0, "", float("inf")
    while True:
        running = [child for child in children if child.poll() is None]
        failed = [(rank, child) for rank, child in enumerate(children) if child.returncode]
        if failed and not status:
            # A rank that exited because it lost a peer is not the cause if any other rank failed.
            rank, child = min(failed, key=lambda pair: pair[1].returncode == EXIT_LOST_PEERS)
            # As a shell reports it: 128 plus the signal's number.
            status = child.returncode if child.returncode > 0 else 128 - child.returncode
            report, deadline = _exit_report(rank, child), time.monotonic() + _GRACE_SECONDS
            for other in running:
                other.terminate()
        if not running or time.monotonic() > deadline:
            if running and status == EXIT_LOST_PEERS:
                ranks = ", ".join(str(rank) for rank, child in enumerate(children) if child.poll() is None)
                report = f"Rank {ranks} did not respond and was killed. Run the same command to resume."
            break
        time.sleep(0.05)
    if report:  # printed last, below the messages of the ranks that lost it
        print(report, file=sys.stderr)
    return status


def _exit_report(rank: int, child: subprocess.Popen[bytes]) -> str:
    who = f"Rank {rank} (process {child.pid})"
    if child.returncode < 0:
        how = f"was killed by {signal.Signals(-child.returncode).name}"
        return f"{who} {how}; the other processes were stopped. Run the same command to resume."
    return f"{who} ended with status {child.returncode}; its own message is above. The other processes were stopped."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
