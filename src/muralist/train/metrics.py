"""Metrics of steps, the forecast of a run's duration, and the matmul rate that MFU refers to.

Loggers take half a millisecond or more per step. Results are therefore read in groups, and on a GPU written a few
steps later, while the GPU computes the next ones: where steps are short, it would idle for a few percent of the time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.formatting import format_duration
from muralist.core.hardware import copy_to_host
from muralist.core.run_dir import atomic_write_json
from muralist.models.spec import ModelSpec
from muralist.train.distributed import World
from muralist.train.loggers import MetricsLogger, ProgressLogger
from muralist.train.schedule import TrainingClock
from muralist.train.step import StepResult

log = logging.getLogger("muralist")
_MIN_STEPS = 40  # of a run that gets a forecast
_SPEED_KNOWN = 0.05  # fraction of the steps after which the speed is known
_LAST_FORECAST = 0.6  # fraction of the steps after which no new forecast is made
_MIN_SECONDS = 1.0  # of steps: less is noise


class _Elapsed(NamedTuple):
    """Steps and time of a run so far."""

    steps: int = 0
    seconds: float = 0.0
    pauses: float = 0.0
    """Seconds between steps, for checkpoints, samples and held-out losses."""


@dataclass
class Forecast:
    """Estimates a run's duration: once its speed is known, after its first pause, and after the first full round.

    A pause is a checkpoint with its samples; a round is the steps from one pause to the next, and one pause. The first
    pause takes longer than the later ones (kernels are loaded), and steps are slower while files are written.
    """

    file: Path | None
    """Output; None in processes that write nothing."""
    first_step: int
    last_step: int
    pause_every: int
    """Steps between checkpoints."""
    clock: Callable[[], float] = time.perf_counter
    expected: float | None = field(default=None, init=False)
    at_step: int = field(default=0, init=False)
    """The step of the estimate."""
    _began: float = field(init=False)
    _elapsed: _Elapsed = field(default=_Elapsed(), init=False)
    _warm: _Elapsed | None = field(default=None, init=False)
    """After the first steps, which load kernels and wait for the first images; they are left out of the speed."""
    _after: list[_Elapsed] = field(default_factory=list, init=False)
    """After the first pause, and after the second."""

    def __post_init__(self) -> None:
        self._began = self.clock()

    def add(self, steps: int, seconds: float, paused: float = 0.0) -> None:
        """Add some steps, the seconds they took, and the seconds of the pause before them."""
        before = self._elapsed._replace(pauses=self._elapsed.pauses + paused)
        self._elapsed = _Elapsed(before.steps + steps, before.seconds + seconds, before.pauses)
        pauses = self._pauses(self.first_step + before.steps)
        due = self.expected is None
        if pauses > len(self._after) and len(self._after) < 2:  # the first steps after a pause
            self._after += [before] * (min(pauses, 2) - len(self._after))
            due = True
        total, done = self.last_step - self.first_step, self._elapsed.steps
        if self._warm is not None:
            known = done >= max(_MIN_STEPS // 4, _SPEED_KNOWN * total)
            known &= self._elapsed.seconds - self._warm.seconds >= _MIN_SECONDS
            if total >= _MIN_STEPS and known and due and done <= _LAST_FORECAST * total:
                self._estimate(pauses)
        else:
            self._warm = self._elapsed

    def _pauses(self, step: int) -> int:
        """Number of pauses up to a step; the last step has one too."""
        regular = step // self.pause_every - self.first_step // self.pause_every
        return regular + (step == self.last_step and step % self.pause_every > 0)

    @property
    def _round(self) -> tuple[_Elapsed, _Elapsed] | None:
        """Begin and end of the first full round."""
        if len(self._after) < 2 or self._after[0].steps == self._after[1].steps:
            return None
        return self._after[0], self._after[1]

    def _pace(self) -> tuple[float, float]:
        """Seconds of a step and of a pause: those of a full round, else of everything so far."""
        assert self._warm is not None
        since, now = self._round or (self._warm, self._elapsed)
        pause = now.pauses - since.pauses if self._round else now.pauses / max(1, len(self._after))
        return (now.seconds - since.seconds) / (now.steps - since.steps), pause

    def _estimate(self, pauses: int) -> None:
        step, pause = self._pace()
        done = self._round[1] if self._round else self._elapsed
        to_come = self._pauses(self.last_step) - pauses if self._after else 0
        left = (self.last_step - self.first_step - done.steps) * step + to_come * pause
        self.expected = done.seconds + done.pauses + left
        self.at_step = self.first_step + self._elapsed.steps
        what = "with its checkpoints and samples" if self._after else "checkpoints and samples not counted"
        log.info("At this pace steps %d to %d take %s, %s.", self.first_step + 1, self.last_step,
                 format_duration(self.expected), what)  # fmt: skip
        self._write({})

    def conclude(self) -> None:
        """Compare the estimate with the time that the run took."""
        if self.expected is None:
            return
        took = self.clock() - self._began
        off = self.expected / took - 1
        log.info("Took %s, estimated %s at step %d: off by %+.1f%%.",
                 format_duration(took), format_duration(self.expected), self.at_step, 100 * off)  # fmt: skip
        self._write({"seconds, taken": round(took, 2), "off": round(off, 4)})

    def _write(self, more: dict[str, Any]) -> None:
        if self.file is None or self.expected is None:
            return
        content = {
            "first step": self.first_step,
            "last step": self.last_step,
            "estimated at step": self.at_step,
            "seconds, estimated": round(self.expected, 2),
            "steps per second": round(1 / self._pace()[0], 4),
            **more,
        }
        try:
            atomic_write_json(self.file, content)
        except OSError as error:
            log.warning("Cannot write %s: %s. Training goes on.", self.file, error.strerror)


_MAX_SKIPPED_IN_A_ROW = 10
_MAX_SILENCE = 1.0  # seconds between updates of the progress bar, however slow a step is
_WRITE_DELAY = 4  # steps that a GPU has in its queue while results are written


class DeviceEvent:
    """A point in a GPU's queue; on other devices, which have none, the current time."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the GPU has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceEvent) -> float:
        """Seconds between two events that the GPU has reached."""
        if self._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._time - earlier._time


@dataclass(frozen=True)
class _Readback:
    """Results of some steps, on their way to the host."""

    results: list[tuple[int, StepResult]]
    values: Tensor
    """Losses and gradient norms, [2, steps]."""
    event: DeviceEvent
    """When the last of these steps is done and its values are on the host."""
    waited: float
    paused: float
    due: int
    """The step after which they are written."""


@dataclass
class MetricsRecorder:
    """Collects the results of steps and writes them to the loggers; values do not depend on when that happens."""

    world: World
    clock: TrainingClock
    spec: ModelSpec
    loggers: Sequence[MetricsLogger]
    progress: ProgressLogger
    forecast: Forecast
    flush_every: int
    peak_flops: float
    loss_is_scaled: bool = False
    """With fp16, a non-finite gradient is expected: the step is skipped and the loss scale lowered."""
    skip_non_finite: bool = False
    epoch_loss: list[float] = field(default_factory=lambda: [0.0, 0])
    """Sum of the losses and number of steps of the current epoch."""
    skipped_steps: list[int] = field(default_factory=lambda: [0, 0])
    """Skipped steps in total and in a row."""
    _results: list[tuple[int, StepResult]] = field(default_factory=list)
    _readback: _Readback | None = None
    _last_event: DeviceEvent = field(init=False)
    _last_read: float = field(init=False)
    _waited: float = 0.0
    _paused: float = 0.0

    def __post_init__(self) -> None:
        self._last_event, self._last_read = DeviceEvent(self.world.device), time.perf_counter()
        self._write_delay = _WRITE_DELAY if self.world.device.type == "cuda" else 0
        self._tokens, self._flops = self.spec.tokens_per_image(), self.spec.flops_per_image()

    def state_dict(self) -> dict[str, list[float] | list[int]]:
        """Fields of a checkpoint's manifest, so that a resumed epoch has the same mean loss."""
        return {"epoch_loss": list(self.epoch_loss), "skipped_steps": list(self.skipped_steps)}

    def load_state_dict(self, manifest: Mapping[str, Any]) -> None:
        """Load what `state_dict` wrote; a new run has none of it."""
        self.epoch_loss = list(manifest.get("epoch_loss", self.epoch_loss))
        self.skipped_steps = list(manifest.get("skipped_steps", self.skipped_steps))

    def add(self, step: int, result: StepResult, waited: float) -> None:
        """Add the result of a step, and the seconds it waited for data."""
        self._results.append((step, result))
        self._waited += waited

    def flush_if_due(self, step: int) -> None:
        """Write every `flush_every` steps, and every second on one process."""
        # With several ranks only the step decides: a flush has a collective, so all ranks must agree without asking,
        # and all of them end at the same step where its loss is not finite.
        slow = self.world.size == 1 and time.perf_counter() - self._last_read > _MAX_SILENCE
        due = step % self.flush_every == 0 or slow
        if self._readback and (due or step >= self._readback.due):
            self._write()
        if due:
            self._read(step + (0 if slow else min(self.flush_every, self._write_delay)))
            if self._readback and step >= self._readback.due:
                self._write()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of something else (held-out loss, checkpoint, samples) out of the speed."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # queued steps belong to the speed
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._paused, self._last_read = self._paused + seconds, self._last_read + seconds

    def flush(self, extra: Mapping[str, float] | None = None) -> None:
        """Write all steps so far; `extra` is added to the last one."""
        self._write()
        self._read(0)
        self._write(extra)

    def _read(self, due: int) -> None:
        """Start copying the results so far to the host."""
        if not self._results:
            return
        losses, norms = (
            torch.stack(values).float()
            for values in zip(*((result.loss, result.grad_norm) for _, result in self._results), strict=True)
        )
        values = copy_to_host(torch.stack((self.world.all_reduce_mean(losses), norms)))
        event = DeviceEvent(self.world.device)
        self._readback = _Readback(self._results, values, event, self._waited, self._paused, due)
        self._results, self._waited, self._paused = [], 0.0, 0.0
        self._last_read = time.perf_counter()

    def _write(self, extra: Mapping[str, float] | None = None) -> None:
        readback, self._readback = self._readback, None
        if readback is None:
            return
        readback.event.wait()
        seconds, count = max(1e-9, readback.event.since(self._last_event) - readback.paused), len(readback.results)
        self._last_event = readback.event
        images_per_second = count * self.clock.total_batch / seconds
        speed = {
            "train/samples_per_second": images_per_second,
            "train/tokens_per_second": images_per_second * self._tokens,
            "train/mfu": images_per_second * self._flops / (self.peak_flops * self.world.size),
            "train/data_wait_fraction": min(1.0, readback.waited / seconds),
        }
        last_step, values = readback.results[-1][0], dict[str, float]()
        for (step, result), loss, norm in zip(readback.results, *readback.values.tolist(), strict=True):
            self._check_finite(step, loss, norm)
            if math.isfinite(loss):
                self.epoch_loss = [self.epoch_loss[0] + loss, self.epoch_loss[1] + 1]
            values = {
                "images": step * self.clock.total_batch,
                "epoch": self.clock.epoch_at(step),
                "time": time.time(),
                "train/loss": loss,
                "train/learning_rate": result.learning_rate,
                "train/grad_norm": norm,
                **speed,
            }
            values = {name: value for name, value in values.items() if math.isfinite(value)}
            if self.skip_non_finite:
                values["train/skipped_steps"] = self.skipped_steps[0]
            if self.clock.ends_epoch(step) and self.epoch_loss[1]:
                values["train/epoch_loss"] = self.epoch_loss[0] / self.epoch_loss[1]
                self.epoch_loss = [0.0, 0]
            if extra and step == last_step:
                values |= extra
            for logger in self.loggers:
                logger.scalars(step, values)
        self.progress.show(last_step, values)
        self.forecast.add(count, seconds, readback.paused)

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        """Count a skipped step; end the run at a non-finite loss or gradient that was not skipped."""
        finite = math.isfinite(norm)
        if self.skip_non_finite:
            total, in_a_row = self.skipped_steps
            self.skipped_steps = [total, 0] if finite else [total + 1, in_a_row + 1]
        if self.skip_non_finite and not finite and self.skipped_steps[1] < _MAX_SKIPPED_IN_A_ROW:
            if self.world.is_main:
                log.warning("Skipped step %d: its gradient is not finite (%d so far).", step, self.skipped_steps[0])
        elif not (finite or self.loss_is_scaled) or not math.isfinite(loss):
            self._results = []
            what = f"The loss became {loss}" if not math.isfinite(loss) else f"The gradient norm became {norm}"
            run_length = f", the last of {_MAX_SKIPPED_IN_A_ROW} skipped in a row" if self.skip_non_finite else ""
            skip = "" if self.skip_non_finite else ", or --non_finite skip if it is rare"
            raise UserError(
                f"{what} at step {step}{run_length}.",
                "The learning rate may be too high, or the data hold broken values. Nothing was saved after this step.",
                "Start a new run (--run_name, and --init_from this one) with a lower --learning_rate, a longer "
                f"--warmup_steps or --max_grad_norm 1{skip}.",
            )


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matmul on random data: the best of a few, half a second at most."""
    side = 8192 if device.type == "cuda" else 768
    generator = torch.Generator(device="cpu").manual_seed(0)
    a, b = (torch.rand(side, side, generator=generator).to(device, dtype) - 0.5 for _ in range(2))
    best, deadline = float("inf"), time.perf_counter() + 0.5
    for round_number in range(12):
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        if round_number > 1:  # the first rounds load kernels and raise the clocks
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() > deadline:
                break
    return 2 * side**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
