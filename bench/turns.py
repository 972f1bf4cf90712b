"""Let several benchmarks share a GPU: they build and compile at the same time, and are timed one after the other.

Compilation takes most of the time and hardly uses the GPU. Give all benchmarks one file:

MURALIST_TURNS=/tmp/turns python bench/train_speed.py first JiT-B/4@64x64 &
MURALIST_TURNS=/tmp/turns python bench/train_speed.py second JiT-B/4@64x256 &

A benchmark that wants to be timed waits until no other is running, first come, first served. Without the variable nothing
waits. Set OMP_NUM_THREADS=2 or so: ten processes with sixteen threads each block each other for minutes.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

VARIABLE = "MURALIST_TURNS"


class Turns:
    """The state of one process: running, waiting, or alone."""

    def __init__(self, path: Path) -> None:
        self.work = path.open("a")  # shared lock of running processes, exclusive lock of one that is alone
        self.queue = path.with_name(f"{path.name}.queue").open("a")  # held by the next in line
        self._take(fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run without other benchmarks."""
        asked = time.monotonic()
        fcntl.flock(self.work, fcntl.LOCK_UN)
        self._take(fcntl.LOCK_EX)
        print(f"alone after {time.monotonic() - asked:.0f} s", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            fcntl.flock(self.work, fcntl.LOCK_UN)
            self._take(fcntl.LOCK_SH)

    def _take(self, kind: int) -> None:
        # Through the queue: with newcomers let in at once, one who waits to be alone would wait for ever.
        with _held(self.queue):
            fcntl.flock(self.work, kind)


@contextmanager
def _held(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


_turns = Turns(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None


@contextmanager
def alone() -> Iterator[None]:
    """For what is timed."""
    with _turns.alone() if _turns else nullcontext():
        yield
