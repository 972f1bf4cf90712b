"""`--profile N`: a trace of some steps, kernel by kernel, for a person to look at; nothing else of the run changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from muralist.runfolder import write_atomically
from muralist.scale.kernels import times_by_kind, times_by_name

log = logging.getLogger("muralist")
_WAIT = 3  # steps before the first that is recorded: memory is laid out and caches are filled by then


class StepProfile:
    """Records `count` of a run's `steps`, and writes a trace and a summary into a folder, for each process its own."""

    def __init__(self, count: int, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        wait = min(_WAIT, len(steps) - 1)
        self.asked, self.folder, self.rank, self.device = count, folder, rank, device
        self.first = steps.start + wait
        self.last = self.first + min(count, len(steps) - wait) - 1
        self.recorded = 0
        self._profiler: profile | None = None
        self._mark: record_function | None = None
        self._started = 0.0
        self._over = False

    def begin(self, step: int) -> None:
        """A step is about to begin."""
        if step == self.first:
            self._finish_work()
            cards = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *cards])
            self._profiler.start()
            self._started = time.perf_counter()
        if self._profiler:
            self._mark = record_function(f"training step {step}")
            self._mark.__enter__()

    def end(self, step: int, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """A step is done; after the last one all is written, which is no part of the run's speed."""
        if self._profiler:
            self._end_mark()
            self.recorded += 1
        if step == self.last:
            with pause():
                self._write()

    def close(self) -> None:
        """The run is over, maybe before all was recorded."""
        if self._over:
            return
        if self._profiler:
            self._end_mark()
            self._write()
        else:
            log.warning("--profile: the run ended before step %d, the first to be recorded.", self.first + 1)

    def _finish_work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _end_mark(self) -> None:
        if self._mark:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _write(self) -> None:
        """What cannot be written or read from the card is said and left: a trace is not worth a run."""
        profiler, self._profiler, self._over = self._profiler, None, True
        if profiler is None:
            return
        try:
            self._finish_work()
            seconds = time.perf_counter() - self._started
            profiler.stop()
            if self.recorded:
                path = self._write_trace(profiler)
                text = self._summary(profiler, seconds, path)
                write_atomically(self.folder / f"summary_rank{self.rank}.txt", text + "\n")
                if self.rank == 0:
                    for line in text.splitlines():
                        log.info(line)
        except (OSError, RuntimeError) as error:
            log.warning("The profile could not be written: %s.", str(error).rstrip("."))

    def _write_trace(self, profiler: profile) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"trace_rank{self.rank}.json.gz"
        aside = self.folder / f".{os.getpid()}.{path.name}"
        try:
            profiler.export_chrome_trace(str(aside))  # packed, because of the name's end
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return path

    def _summary(self, profiler: profile, seconds: float, path: Path) -> str:
        on_card, whole = self.device.type == "cuda", 1e3 * seconds / self.recorded
        kinds = times_by_kind(times_by_name(profiler.key_averages(), self.recorded, on_card))
        idle = "the card waits" if on_card else "Python, and waiting for data"
        kinds[idle] = max(0.0, whole - sum(kinds.values()))
        few = "" if self.recorded == self.asked else f" (of {self.asked} asked for: the run has no more)"
        lines = [
            f"profile    {self.recorded} steps from step {self.first + 1}{few}, {whole:,.2f} ms each under the profiler:"
        ]
        lines += [f"           {kind:<30}{time:>12,.2f} ms {time / whole:>7.1%}" for kind, time in kinds.items()]
        return "\n".join([*lines, f"           the trace is {path}; https://ui.perfetto.dev opens it"])
