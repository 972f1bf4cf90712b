"""What a run expects of its own length once its speed is known, and, when it ends, how far that was off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muralist.runfolder import write_json
from muralist.words import duration

log = logging.getLogger("muralist")
_FEWEST_STEPS = 40  # of a run that is worth a forecast
_PART = 0.05  # of the steps, after which the speed is known
_LEAST_SECONDS = 1.0  # of steps: less is noise


@dataclass
class Forecast:
    """Counts the seconds of steps, and those between them, in which checkpoints, samples and held-out losses are made."""

    file: Path | None
    """Where it is written; None in processes that write nothing."""
    first_step: int
    last_step: int
    pause_every: int
    """Steps between checkpoints."""
    clock: Callable[[], float] = time.perf_counter
    expected: float | None = field(default=None, init=False)
    at_step: int = field(default=0, init=False)
    """When it was said."""
    _began: float = field(init=False)
    _step: int = field(init=False)
    _seconds: float = field(default=0.0, init=False)
    _timed_steps: int = field(default=0, init=False)
    _timed_seconds: float = field(default=0.0, init=False)
    _knows_pauses: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._began, self._step = self.clock(), self.first_step

    def add(self, steps: int, seconds: float) -> None:
        """Take in some steps and the seconds they took."""
        if self._step > self.first_step:  # the first ones load kernels and wait for the first images
            self._timed_steps += steps
            self._timed_seconds += seconds
        pauses = self._pauses(self._step)  # those before these steps are over
        self._step += steps
        self._seconds += seconds
        total, done = self.last_step - self.first_step, self._step - self.first_step
        known = done >= max(_FEWEST_STEPS // 4, _PART * total) and self._timed_seconds >= _LEAST_SECONDS
        new = self.expected is None or (pauses > 0 and not self._knows_pauses)
        if total >= _FEWEST_STEPS and known and new and done <= total // 2:
            self._state(pauses)

    def _pauses(self, step: int) -> int:
        """How many there are up to a step; the last step has one too."""
        regular = step // self.pause_every - self.first_step // self.pause_every
        return regular + (step == self.last_step and step % self.pause_every > 0)

    def _state(self, pauses: int) -> None:
        elapsed = self.clock() - self._began
        each = max(0.0, elapsed - self._seconds) / pauses if pauses else 0.0
        pace = self._timed_seconds / self._timed_steps
        left = (self.last_step - self._step) * pace + (self._pauses(self.last_step) - pauses) * each
        self.expected, self.at_step, self._knows_pauses = elapsed + left, self._step, pauses > 0
        what = "with its checkpoints and samples" if pauses else "checkpoints and samples not counted"
        log.info("At this pace steps %d to %d take %s, %s.", self.first_step + 1, self.last_step,
                 duration(self.expected), what)  # fmt: skip
        self._write({})

    def conclude(self) -> None:
        """Compare what was expected with what it took."""
        if self.expected is None:
            return
        took = self.clock() - self._began
        off = self.expected / took - 1
        log.info("Took %s, estimated %s at step %d: off by %+.1f%%.", duration(took), duration(self.expected),
                 self.at_step, 100 * off)  # fmt: skip
        self._write({"seconds, taken": round(took, 2), "off": round(off, 4)})

    def _write(self, more: dict[str, Any]) -> None:
        if self.file is None or self.expected is None:
            return
        told = {
            "first step": self.first_step,
            "last step": self.last_step,
            "estimated at step": self.at_step,
            "seconds, estimated": round(self.expected, 2),
            "steps per second": round(self._timed_steps / self._timed_seconds, 4),
            **more,
        }
        try:
            write_json(self.file, told)
        except OSError as error:
            log.warning("Cannot write %s: %s. Training goes on.", self.file, error.strerror)
