"""Several benches on one card: they build and compile at the same time, and have the clock one after the other.

Compiling takes most of a bench's time and hardly any of the card's. Give all of them one file:

MURALIST_TURNS=/tmp/turns python bench/train_speed.py first JiT-B/4@64x64 &
MURALIST_TURNS=/tmp/turns python bench/train_speed.py second JiT-B/4@64x256 &

Whoever wants the clock waits until nobody is at work, in the order in which they came. Without the variable nobody waits.
Give each OMP_NUM_THREADS=2 or so: ten processes with sixteen threads each stand in each other's way for minutes.
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
    """One process's part in it: at work, waiting for the clock, or alone with it."""

    def __init__(self, path: Path) -> None:
        self.work = path.open("a")  # shared by all who are at work, held by one who is alone
        self.queue = path.with_name(f"{path.name}.queue").open("a")  # held by the one who is next
        self._take(fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is at work in here."""
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
