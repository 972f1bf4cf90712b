"""Signals and files by which a person or a scheduler speaks to a running training."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType


class Request(IntEnum):
    """What was asked for, the more urgent the larger."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    FAIL = 3


class Requests:
    """Collects requests; the loop asks at every step boundary, where everything is whole."""

    def __init__(self, save_file: Path) -> None:
        self.save_file = save_file
        self.signal_name: str | None = None
        self._next_look = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGUSR1 (SLURM, ahead of a time limit) ask for a stop; a second SIGINT does not wait."""
        asking = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, self._note) for number in asking}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def look(self, savable: bool) -> Request:
        """The most urgent request since the last look; the save file is looked for five times a second and taken away."""
        if self.signal_name is not None:
            return Request.STOP
        now = time.monotonic()
        if not savable or now < self._next_look:
            return Request.NOTHING
        self._next_look = now + 0.2
        if not self.save_file.exists():
            return Request.NOTHING
        self.save_file.unlink(missing_ok=True)
        return Request.SAVE
