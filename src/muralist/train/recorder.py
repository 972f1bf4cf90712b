"""Turns the results of steps into metrics, in groups, so that the device is waited for now and then, not every step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from muralist.errors import UserError
from muralist.train.distributed import Engine
from muralist.train.forecast import Forecast
from muralist.train.monitors import Monitor, ProgressLine
from muralist.train.schedule import Clock
from muralist.train.stepper import StepResult

log = logging.getLogger("muralist")
_MOST_IN_A_ROW = 10  # skipped steps: more are no accident
_LONGEST_SILENCE = 1.0  # seconds between updates of the progress line, however slow a step is


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
    _since: float = field(default_factory=time.perf_counter)
    _waited: float = 0.0

    def add(self, step: int, result: StepResult, waited: float) -> None:
        """Keep the result of a step and the seconds it waited for data."""
        self._results.append((step, result))
        self._waited += waited

    def flush_if_due(self, step: int) -> None:
        """Write out every so many steps, or when a person would wonder whether anything still moves."""
        # With several ranks the step alone decides: a flush has a collective, so all must agree without asking.
        slow = self.engine.size == 1 and time.perf_counter() - self._since > _LONGEST_SILENCE
        if step % self.flush_every == 0 or slow:
            self.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave time spent on something else (held-out loss, a checkpoint, samples) out of the speed."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)  # steps still under way on the GPU are not that something else
        started = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - started

    def flush(self, extra: Mapping[str, float] | None = None) -> None:
        """Write out all steps since the last time; `extra` goes with the last of them."""
        if not self._results:
            return
        pairs = torch.stack([torch.stack((r.loss.float(), r.grad_norm.float())) for _, r in self._results])
        losses = self.engine.mean(pairs)[:, 0].tolist()
        norms = pairs[:, 1].tolist()
        now = time.perf_counter()
        seconds, count = max(1e-9, now - self._since), len(self._results)
        images_per_second = count * self.clock.total_batch / seconds
        values: dict[str, float] = {}
        for (step, result), loss, norm in zip(self._results, losses, norms, strict=True):
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
                "train/data_wait_fraction": min(1.0, self._waited / seconds),
            }
            values = {
                name: value for name, value in values.items() if math.isfinite(value)
            }  # not those of a skipped step
            if self.skips:
                values["train/skipped_steps"] = self.skipped.total
            if self.clock.ends_epoch(step) and self.epoch_loss.steps:
                values["train/epoch_loss"] = self.epoch_loss.take()
            if extra and step == self._results[-1][0]:
                values |= extra
            for monitor in self.monitors:
                monitor.scalars(step, values)
        self.line.show(self._results[-1][0], values)
        self.forecast.add(count, seconds)
        self._results, self._since, self._waited = [], now, 0.0

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
