"""Measurements of a run: metrics of steps, the forecast of its duration, `--profile`, and the matmul rate of the MFU.

Loggers take half a millisecond or more per step. Results are therefore read in groups, and on a GPU written a few
steps later, while the GPU computes the next ones: where steps are short, it would idle for a few percent of the time.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from muralist.core.errors import UserError
from muralist.core.formatting import format_duration
from muralist.core.hardware import copy_to_host
from muralist.core.run_dir import atomic_write, atomic_write_json
from muralist.train.loggers import MetricsLogger, ProgressLogger
from muralist.train.schedule import TrainingClock
from muralist.train.step import StepResult, TrainState

log = logging.getLogger("muralist")
_MIN_STEPS = 40  # of a run that gets a forecast
_SPEED_KNOWN = 0.05  # fraction of the steps after which the speed is known
_LAST_FORECAST = 0.6  # fraction of the steps after which no new forecast is made
_MIN_SECONDS = 1.0  # of steps: less is noise
_PROFILE_WAIT = 3  # steps before the first profiled one, in which memory is allocated and caches are filled
_MAX_SKIPPED_IN_A_ROW = 10
_MAX_SILENCE = 1.0  # seconds between updates of the progress bar, however slow a step is
_WRITE_DELAY = 4  # steps that a GPU has in its queue while results are written
_SHORT = 5  # a step is short where the longest silence holds this many times the delay


class _Elapsed(NamedTuple):
    """Steps of a run so far, their seconds, and the seconds of checkpoints, samples and held-out losses."""

    steps: int = 0
    step_seconds: float = 0.0
    pause_seconds: float = 0.0


class Forecast:
    """Estimates a run's duration: once its speed is known, after the first checkpoint, and after the second.

    The last estimate uses the time from the first checkpoint to the second: the first one is slower than all others
    (kernels are loaded), and steps are slower while files are written.
    """

    def __init__(
        self, file: Path | None, steps: range, checkpoints: Set[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Write to `file`, if given; `checkpoints` are the steps that end with one."""
        self.file, self.steps, self.clock = file, steps, clock
        self.checkpoints = sorted(step for step in checkpoints if steps.start < step <= steps.stop)
        self.expected: float | None = None
        self.at_step = 0
        self._began, self._now = clock(), _Elapsed()
        # After the first group of steps, which loads kernels and waits for images, and after the first two checkpoints.
        self._marks: list[_Elapsed] = []

    def add(self, steps: int, seconds: float, paused: float = 0.0) -> None:
        """Add some steps, the seconds they took, and the seconds of the pause before them."""
        before = self._now._replace(pause_seconds=self._now.pause_seconds + paused)
        self._now = before._replace(steps=before.steps + steps, step_seconds=before.step_seconds + seconds)
        if not self._marks:
            self._marks.append(self._now)
            return
        is_due = self.expected is None
        if len(self._marks) <= min(self._checkpoints_until(before), 2):
            self._marks.append(before)
            is_due = True
        total, done = len(self.steps), self._now.steps
        known = done >= max(_MIN_STEPS // 4, _SPEED_KNOWN * total)
        known &= self._now.step_seconds - self._marks[0].step_seconds >= _MIN_SECONDS
        if is_due and known and total >= _MIN_STEPS and done <= _LAST_FORECAST * total:
            self._estimate()

    def _checkpoints_until(self, elapsed: _Elapsed) -> int:
        return bisect_right(self.checkpoints, self.steps.start + elapsed.steps)

    def _estimate(self) -> None:
        since, now = (self._marks[0], self._now) if len(self._marks) < 3 else (self._marks[1], self._marks[2])
        per_step = (now.step_seconds - since.step_seconds) / (now.steps - since.steps)
        per_checkpoint = now.pause_seconds - since.pause_seconds if len(self._marks) > 1 else 0.0
        steps_left = len(self.steps) - now.steps
        checkpoints_left = len(self.checkpoints) - self._checkpoints_until(now)
        left = steps_left * per_step + checkpoints_left * per_checkpoint
        self.expected = now.step_seconds + now.pause_seconds + left
        self.at_step = self.steps.start + self._now.steps
        what = "with its checkpoints and samples" if len(self._marks) > 1 else "checkpoints and samples not counted"
        first, last, duration = self.steps.start + 1, self.steps.stop, format_duration(self.expected)
        log.info("At this pace steps %d to %d take %s, %s.", first, last, duration, what)
        self._content = {
            "first step": self.steps.start,
            "last step": self.steps.stop,
            "estimated at step": self.at_step,
            "seconds, estimated": round(self.expected, 2),
            "steps per second": round(1 / per_step, 4),
        }
        self._write()

    def conclude(self) -> None:
        """Compare the estimate with the time that the run took."""
        if self.expected is None:
            return
        took = self.clock() - self._began
        off = self.expected / took - 1
        log.info("Took %s, estimated %s at step %d: off by %+.1f%%.",
                 format_duration(took), format_duration(self.expected), self.at_step, 100 * off)  # fmt: skip
        self._content |= {"seconds, taken": round(took, 2), "off": round(off, 4)}
        self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            atomic_write_json(self.file, self._content)
        except OSError as error:
            log.warning("Cannot write %s: %s. Training goes on.", self.file, error.strerror)


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


class _Readback(NamedTuple):
    """Results of some steps, on their way to the host."""

    results: list[tuple[int, StepResult]]
    values: Tensor  # losses and gradient norms, [2, steps]
    event: DeviceEvent  # when the last of these steps is done and its values are on the host
    waited: float
    paused: float
    due: int  # the step after which they are written


class MetricsRecorder:
    """Collects the results of steps and writes them to the loggers; values do not depend on when that happens."""

    def __init__(
        self,
        state: TrainState,
        clock: TrainingClock,
        loggers: Sequence[MetricsLogger],
        progress: ProgressLogger,
        forecast: Forecast,
        flush_every: int,
        peak_flops: float,
    ) -> None:
        self.world, self.clock, self.loggers = state.world, clock, loggers
        self.progress, self.forecast = progress, forecast
        self.flush_every, self.peak_flops, self.skip_non_finite = flush_every, peak_flops, state.skip_non_finite
        # With fp16, a non-finite gradient is expected: the step is skipped and the loss scale lowered.
        self.loss_is_scaled = state.scaler.is_enabled()
        self.epoch_loss = [0.0, 0]  # sum of the losses and number of steps of the current epoch
        self.skipped_steps = [0, 0]  # in total and in a row
        self._results: list[tuple[int, StepResult]] = []
        self._readback: _Readback | None = None
        self._last_event, self._last_read = DeviceEvent(self.world.device), time.perf_counter()
        self._waited = self._paused = 0.0
        self._write_delay = _WRITE_DELAY if self.world.device.type == "cuda" else 0
        self._tokens, self._flops = state.spec.tokens_per_image(), state.spec.flops_per_image()

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
            # Slow steps are shown at once. Where many steps are short, waiting for the last one would idle the GPU.
            at_once = slow and len(self._results) < _SHORT * self._write_delay
            self._read(step + (0 if at_once else min(self.flush_every, self._write_delay)))
            if self._readback and step >= self._readback.due:
                self._write()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of something else (held-out loss, checkpoint, samples) out of the speed."""
        _synchronize(self.world.device)  # queued steps belong to the speed
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
        losses = torch.stack([result.loss for _, result in self._results]).float()
        norms = torch.stack([result.grad_norm for _, result in self._results]).float()
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


KINDS = {
    "compiled": r"^triton_",  # first: they are named after everything that was fused into them
    "communication": r"nccl|gloo|c10d::",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated|cudnn::fusion",
    "adaLN and norms": r"^_adaln_rmsnorm|^aten::\w*(rms|layer)_norm",
    "QK norm and RoPE": r"^_qk_norm_rope",
    "SwiGLU": r"^_swiglu_(for|back)ward",
    "FP8 quantization": r"^_quantize_rowwise",
    "optimizer and EMA": r"multi_tensor|adam|lerp|foreach",
    "convolutions": r"conv|fprop|dgrad|wgrad|implicit|im2col|nchw|nhwc",
    "GEMMs": r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv|scaled_mm|^aten::\w*mm$",
    "copies": r"memcpy|memset|direct_copy|catarray|^aten::(copy_|cat)$",
    "other elementwise": r"elementwise|reduce|norm|softmax|vectorized|index|gather|scatter|upsample|fill|arange",
}
"""Kernels and operations by kind; the first pattern that matches the name counts."""


def kind_of(name: str) -> str:
    """Kind of a kernel or operation, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def times_by_name(averages: Iterable[Any], steps: int, on_gpu: bool) -> dict[str, float]:
    """Milliseconds per step by name, from a profiler's `key_averages()`: of GPU kernels, or of CPU operations."""
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times: dict[str, float] = defaultdict(float)
    for event in averages:
        # record_function spans appear on the GPU too, over kernels that are counted already.
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            times[event.key] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps
    return {name: time for name, time in times.items() if time > 0}


def times_by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Sum times by kind, the largest first."""
    kinds: dict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        kinds[kind_of(name)] += seconds
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


class StepProfiler:
    """`--profile N`: profiles N of a run's steps (none if 0), and writes a trace and a summary per process."""

    def __init__(self, count: int, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        wait = min(_PROFILE_WAIT, len(steps) - 1)
        self.count, self.folder, self.rank, self.device = count, folder, rank, device
        self.first = steps.start + wait
        self.last = self.first + min(count, len(steps) - wait) - 1
        self.recorded, self.is_done = 0, not count
        self._profiler: profile | None = None

    def begin(self, step: int) -> None:
        """Start profiling if the first step to profile begins."""
        if step == self.first and not self.is_done:
            _synchronize(self.device)
            gpus = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpus])
            self._profiler.start()
            self._started = time.perf_counter()
        if self._profiler:
            self._mark = record_function(f"training step {step}")
            self._mark.__enter__()

    def end(self, step: int, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Count a step; after the last one write everything, which does not count into the run's speed."""
        if self._profiler:
            self._mark.__exit__(None, None, None)
            self.recorded += 1
            if step == self.last:
                with pause():
                    self.close()

    def close(self) -> None:
        """Write what was profiled; an error is logged and does not stop the run."""
        profiler, self._profiler = self._profiler, None
        if profiler is None and not self.is_done:
            log.warning("--profile: the run ended before step %d, the first to be profiled.", self.first + 1)
        self.is_done = True
        if profiler is None:
            return
        try:
            _synchronize(self.device)
            seconds = time.perf_counter() - self._started
            profiler.stop()
            if self.recorded:
                self._write(profiler, seconds)
        except (OSError, RuntimeError) as error:
            log.warning("The profile could not be written: %s.", str(error).rstrip("."))

    def _write(self, profiler: profile, seconds: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"trace_rank{self.rank}.json.gz"
        aside = path.with_name(f".{path.name}")
        try:
            profiler.export_chrome_trace(str(aside))  # compressed because of the .gz suffix
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        on_gpu, total = self.device.type == "cuda", 1e3 * seconds / self.recorded
        kinds = times_by_kind(times_by_name(profiler.key_averages(), self.recorded, on_gpu))
        kinds["GPU idle" if on_gpu else "Python, and waiting for data"] = max(0.0, total - sum(kinds.values()))
        fewer = "" if self.recorded == self.count else f" (of {self.count} requested: the run has no more)"
        first = self.first + 1
        lines = [f"profile    {self.recorded} steps from step {first}{fewer}, {total:,.2f} ms each with the profiler:"]
        lines += [f"           {kind:<30}{time:>12,.2f} ms {time / total:>7.1%}" for kind, time in kinds.items()]
        lines += [f"           the trace is {path}; https://ui.perfetto.dev opens it"]
        atomic_write(self.folder / f"summary_rank{self.rank}.txt", "\n".join(lines) + "\n")
        for line in lines if self.rank == 0 else ():
            log.info(line)


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matmul on random data: the best of a few, half a second at most."""
    side = 8192 if device.type == "cuda" else 768
    generator = torch.Generator(device="cpu").manual_seed(0)
    a, b = (torch.rand(side, side, generator=generator).to(device, dtype) - 0.5 for _ in range(2))
    seconds: list[float] = []
    deadline = time.perf_counter() + 0.5
    while len(seconds) < 3 or (len(seconds) < 12 and time.perf_counter() < deadline):
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds[2:])  # the first two load kernels and raise the clocks


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
