"""Turns the results of steps into metrics, in groups, and those of a GPU a few steps later, while it computes on.

Monitors take half a millisecond or more for a step. A GPU that had nothing to do meanwhile would stand still for a few
percent of the time where steps are short.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muralist.copies import to_host
from muralist.errors import UserError
from muralist.train.distributed import Engine
from muralist.train.forecast import Forecast
from muralist.train.monitors import Monitor, ProgressLine
from muralist.train.schedule import Clock
from muralist.train.stepper import StepResult

log = logging.getLogger("muralist")
_MOST_IN_A_ROW = 10  # skipped steps: more are no accident
_LONGEST_SILENCE = 1.0  # seconds between updates of the progress line, however slow a step is
_LATER = 4  # steps that a GPU has to do while results are written out


class Moment:
    """A moment in a GPU's queue; on other devices, which have none, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds from another one that has come to this one, which has too."""
        if self._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._time - earlier._time


@dataclass(frozen=True)
class Reading:
    """Results of some steps on their way to the host."""

    results: list[tuple[int, StepResult]]
    numbers: Tensor
    """Losses and norms of gradients, [2, steps]."""
    moment: Moment
    """When the last of these steps is done, and its numbers are on the host."""
    waited: float
    paused: float
    due: int
    """The step after which they are written out."""


@dataclass
class EpochLoss:
    """Mean loss of the epoch under way; part of the checkpoint, so that a resumed epoch has the same mean."""

    total: float = 0.0
    steps: int = 0

    def add(self, loss: float) -> None:
        """Take in one step."""
        self.total, self.steps = self.total + loss, self.steps + 1

    def take(self) -> float:
        """The mean, starting over."""
        mean = self.total / self.steps
        self.total, self.steps = 0.0, 0
        return mean


@dataclass
class SkippedSteps:
    """Steps whose gradient was not finite and which changed nothing; part of the checkpoint too."""

    total: int = 0
    in_a_row: int = 0

    def add(self, finite: bool) -> None:
        """Take in one step."""
        self.total, self.in_a_row = (self.total, 0) if finite else (self.total + 1, self.in_a_row + 1)


@dataclass
class Recorder:
    """Collects results and writes them out; the numbers of a step do not depend on when that happens."""

    engine: Engine
    clock: Clock
    monitors: Sequence[Monitor]
    line: ProgressLine
    flush_every: int
    tokens_per_image: int
    flops_per_image: int
    peak_flops: float
    loss_is_scaled: bool  # then a gradient that is not finite is no accident: the step is skipped and the scale lowered
    forecast: Forecast
    epoch_loss: EpochLoss = field(default_factory=EpochLoss)
    skips: bool = False
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    _results: list[tuple[int, StepResult]] = field(default_factory=list)
    _reading: Reading | None = None
    _last_moment: Moment = field(init=False)
    _read_at: float = field(init=False)
    _waited: float = 0.0
    _paused: float = 0.0

    def __post_init__(self) -> None:
        self._last_moment, self._read_at = Moment(self.engine.device), time.perf_counter()

    def add(self, step: int, result: StepResult, waited: float) -> None:
        """Keep the result of a step and the seconds it waited for data."""
        self._results.append((step, result))
        self._waited += waited

    def flush_if_due(self, step: int) -> None:
        """Write out every so many steps, or when a person would wonder whether anything still moves."""
        # With several ranks the step alone decides: a flush has a collective, so all must agree without asking. And all
        # of them end at the same step where its numbers say so.
        slow = self.engine.size == 1 and time.perf_counter() - self._read_at > _LONGEST_SILENCE
        due = step % self.flush_every == 0 or slow
        if self._reading and (due or step >= self._reading.due):
            self._write_out()
        if due:
            # Where a step takes a second, what is written takes no part of it.
            self._read(step + (0 if slow else min(self.flush_every, self._steps_later())))
            if self._reading and step >= self._reading.due:
                self._write_out()

    def _steps_later(self) -> int:
        return _LATER if self.engine.device.type == "cuda" else 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave time spent on something else (held-out loss, a checkpoint, samples) out of the speed."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)  # steps still under way on the GPU are not that something else
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._paused, self._read_at = self._paused + seconds, self._read_at + seconds

    def flush(self, extra: Mapping[str, float] | None = None) -> None:
        """Write out all steps so far; `extra` goes with the last of them."""
        if self._reading:
            self._write_out()
        self._read(0)
        self._write_out(extra)

    def _read(self, due: int) -> None:
        """Have the results so far brought to the host."""
        if not self._results:
            return
        losses, norms = (
            torch.stack(values).float()
            for values in zip(*((result.loss, result.grad_norm) for _, result in self._results), strict=True)
        )
        numbers = to_host(torch.stack((self.engine.mean(losses), norms)))
        moment = Moment(self.engine.device)
        self._reading = Reading(self._results, numbers, moment, self._waited, self._paused, due)
        self._results, self._waited, self._paused = [], 0.0, 0.0
        self._read_at = time.perf_counter()

    def _write_out(self, extra: Mapping[str, float] | None = None) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        reading.moment.wait()
        seconds, count = max(1e-9, reading.moment.since(self._last_moment) - reading.paused), len(reading.results)
        self._last_moment = reading.moment
        images_per_second = count * self.clock.total_batch / seconds
        values: dict[str, float] = {}
        for (step, result), loss, norm in zip(reading.results, *reading.numbers.tolist(), strict=True):
            self._judge(step, loss, norm)
            if math.isfinite(loss):
                self.epoch_loss.add(loss)
            values = {
                "images": step * self.clock.total_batch,
                "epoch": self.clock.epoch_at(step),
                "time": time.time(),
                "train/loss": loss,
                "train/learning_rate": result.learning_rate,
                "train/grad_norm": norm,
                "train/samples_per_second": images_per_second,
                "train/tokens_per_second": images_per_second * self.tokens_per_image,
                "train/mfu": images_per_second * self.flops_per_image / (self.peak_flops * self.engine.size),
                "train/data_wait_fraction": min(1.0, reading.waited / seconds),
            }
            values = {
                name: value for name, value in values.items() if math.isfinite(value)
            }  # not those of a skipped step
            if self.skips:
                values["train/skipped_steps"] = self.skipped.total
            if self.clock.ends_epoch(step) and self.epoch_loss.steps:
                values["train/epoch_loss"] = self.epoch_loss.take()
            if extra and step == reading.results[-1][0]:
                values |= extra
            for monitor in self.monitors:
                monitor.scalars(step, values)
        self.line.show(reading.results[-1][0], values)
        self.forecast.add(count, seconds, reading.paused)

    def _judge(self, step: int, loss: float, norm: float) -> None:
        """Count a step that was skipped; end the run at one that has spoiled the weights."""
        if self.skips:
            self.skipped.add(math.isfinite(norm))
        spoiled = not (math.isfinite(norm) or self.loss_is_scaled)
        if self.skips and not math.isfinite(norm) and self.skipped.in_a_row < _MOST_IN_A_ROW:
            if self.engine.is_main:
                log.warning("Step %d is skipped: its gradient is not finite (%d so far).", step, self.skipped.total)
        elif spoiled or not math.isfinite(loss):
            self._results = []
            what = f"The loss became {loss}" if not math.isfinite(loss) else f"The gradient's norm became {norm}"
            in_a_row = f", the last of {_MOST_IN_A_ROW} skipped in a row" if self.skips else ""
            also = "" if self.skips else ", or go on with --non_finite skip if it happens once in a while"
            raise UserError(
                f"{what} at step {step}{in_a_row}.",
                "The learning rate may be too high, or the data holds broken values. Nothing was saved after it.",
                "Start a new run (--run_name, and --init_from this one) with a lower --learning_rate, a longer "
                f"--warmup_steps or --max_grad_norm 1{also}.",
            )
