"""`--profile N`: a kernel trace and a summary of some steps; nothing else of the run changes."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from muralist.core.run_dir import atomic_write

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


log = logging.getLogger("muralist")
_WAIT = 3  # steps before the first profiled one, in which memory is allocated and caches are filled


class StepProfiler:
    """Profiles `count` of a run's `steps` (none if 0) and writes a trace and a summary per process into a folder."""

    def __init__(self, count: int, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        wait = min(_WAIT, len(steps) - 1)
        self.count, self.folder, self.rank, self.device = count, folder, rank, device
        self.first = steps.start + wait
        self.last = self.first + min(count, len(steps) - wait) - 1
        self.recorded = 0
        self._profiler: profile | None = None
        self._mark: record_function | None = None
        self._started = 0.0
        self._done = not count

    def begin(self, step: int) -> None:
        """Start profiling if the first step to profile begins."""
        if step == self.first and not self._done:
            self._synchronize()
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
            self._end_mark()
            self.recorded += 1
        if step == self.last and not self._done:
            with pause():
                self._write()

    def close(self) -> None:
        """Write what was profiled, if the run ended early."""
        if self._done:
            return
        if self._profiler:
            self._end_mark()
            self._write()
        else:
            log.warning("--profile: the run ended before step %d, the first to be profiled.", self.first + 1)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _end_mark(self) -> None:
        if self._mark:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _write(self) -> None:
        """Write trace and summary; an error is logged and does not stop the run."""
        profiler, self._profiler, self._done = self._profiler, None, True
        if profiler is None:
            return
        try:
            self._synchronize()
            seconds = time.perf_counter() - self._started
            profiler.stop()
            if self.recorded:
                path = self._write_trace(profiler)
                text = self._summary(profiler, seconds, path)
                atomic_write(self.folder / f"summary_rank{self.rank}.txt", text + "\n")
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
            profiler.export_chrome_trace(str(aside))  # compressed because of the .gz suffix
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return path

    def _summary(self, profiler: profile, seconds: float, path: Path) -> str:
        on_gpu, total = self.device.type == "cuda", 1e3 * seconds / self.recorded
        kinds = times_by_kind(times_by_name(profiler.key_averages(), self.recorded, on_gpu))
        idle = "GPU idle" if on_gpu else "Python, and waiting for data"
        kinds[idle] = max(0.0, total - sum(kinds.values()))
        fewer = "" if self.recorded == self.count else f" (of {self.count} requested: the run has no more)"
        first = self.first + 1
        lines = [f"profile    {self.recorded} steps from step {first}{fewer}, {total:,.2f} ms each with the profiler:"]
        lines += [f"           {kind:<30}{time:>12,.2f} ms {time / total:>7.1%}" for kind, time in kinds.items()]
        return "\n".join([*lines, f"           the trace is {path}; https://ui.perfetto.dev opens it"])
