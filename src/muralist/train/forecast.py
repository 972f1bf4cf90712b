"""What a run expects of its own length once its speed is known, and, when it ends, how far that was off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from muralist.runfolder import write_json
from muralist.words import duration

log = logging.getLogger("muralist")
_FEWEST_STEPS = 40  # of a run that is worth a forecast
_PART = 0.05  # of the steps, after which the speed is known
_LATEST = 0.6  # of the steps, after which a new forecast would be none
_LEAST_SECONDS = 1.0  # of steps: less is noise


class _Passed(NamedTuple):
    """What a run has behind it."""

    steps: int = 0
    seconds: float = 0.0
    pauses: float = 0.0
    """Seconds between steps, in which checkpoints, samples and held-out losses are made."""


@dataclass
class Forecast:
    """Says how long a run takes: when its speed is known, when its first pause is, and when a whole round is.

    A round is the steps from one checkpoint to the next, and one pause. The first pause takes longer than those that follow:
    memory is laid out, kernels are loaded. And steps are slower while files are written.
    """

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
    _passed: _Passed = field(default=_Passed(), init=False)
    _warm: _Passed | None = field(default=None, init=False)
    """After the first steps, which load kernels and wait for the first images."""
    _after: list[_Passed] = field(default_factory=list, init=False)
    """After the first pause, and after the second."""

    def __post_init__(self) -> None:
        self._began = self.clock()

    def add(self, steps: int, seconds: float, paused: float = 0.0) -> None:
        """Take in some steps, the seconds they took, and those that passed between them and the steps before."""
        before = self._passed._replace(pauses=self._passed.pauses + paused)
        self._passed = _Passed(before.steps + steps, before.seconds + seconds, before.pauses)
        pauses = self._pauses(self.first_step + before.steps)
        news = self.expected is None
        if pauses > len(self._after) and len(self._after) < 2:  # the first steps after a pause
            self._after += [before] * (min(pauses, 2) - len(self._after))
            news = True
        total, done = self.last_step - self.first_step, self._passed.steps
        if self._warm is not None:
            known = done >= max(_FEWEST_STEPS // 4, _PART * total)
            known &= self._passed.seconds - self._warm.seconds >= _LEAST_SECONDS
            if total >= _FEWEST_STEPS and known and news and done <= _LATEST * total:
                self._state(pauses)
        else:
            self._warm = self._passed

    def _pauses(self, step: int) -> int:
        """How many there are up to a step; the last step has one too."""
        regular = step // self.pause_every - self.first_step // self.pause_every
        return regular + (step == self.last_step and step % self.pause_every > 0)

    @property
    def _round(self) -> tuple[_Passed, _Passed] | None:
        """Where the first whole round begins and where it ends."""
        if len(self._after) < 2 or self._after[0].steps == self._after[1].steps:
            return None
        return self._after[0], self._after[1]

    def _pace(self) -> tuple[float, float]:
        """Seconds of a step, and of a pause: those of a whole round, else of all there was."""
        assert self._warm is not None
        since, now = self._round or (self._warm, self._passed)
        pause = now.pauses - since.pauses if self._round else now.pauses / max(1, len(self._after))
        return (now.seconds - since.seconds) / (now.steps - since.steps), pause

    def _state(self, pauses: int) -> None:
        step, pause = self._pace()
        behind = self._round[1] if self._round else self._passed  # from its end on, as in the round before
        to_come = self._pauses(self.last_step) - pauses if self._after else 0
        left = (self.last_step - self.first_step - behind.steps) * step + to_come * pause
        self.expected = behind.seconds + behind.pauses + left
        self.at_step = self.first_step + self._passed.steps
        what = "with its checkpoints and samples" if self._after else "checkpoints and samples not counted"
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
            "steps per second": round(1 / self._pace()[0], 4),
            **more,
        }
        try:
            write_json(self.file, told)
        except OSError as error:
            log.warning("Cannot write %s: %s. Training goes on.", self.file, error.strerror)
