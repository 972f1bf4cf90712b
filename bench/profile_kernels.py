"""Profile a training step by kernel and by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from muralist.train.metrics import times_by_kind, times_by_name


def time_by_kind(step: Callable[[], Any], steps: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Return milliseconds per step by kind (with idle time) and by the largest kernels, and the number of kernels."""
    step()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        start.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
    whole = start.elapsed_time(end) / steps
    averages = trace.key_averages()
    count = sum(event.count for event in averages if event.device_type == DeviceType.CUDA) / steps
    kernels = times_by_name(averages, steps, on_gpu=True)
    kinds = times_by_kind(kernels)
    kinds["GPU idle"] = whole - sum(kinds.values())
    kinds["step under the profiler"] = whole
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:60]
    return {k: round(v, 3) for k, v in kinds.items()}, {k[:160]: round(v, 3) for k, v in largest}, count
