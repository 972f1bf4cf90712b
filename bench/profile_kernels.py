"""Profile GPU work: time by kernel and by kind of kernel, share of busy time, host synchronizations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from muralist.train.metrics import kind_of, times_by_kind, times_by_name

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


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


def profiled(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return milliseconds by kind of kernel, and the share of the time in which any kernel ran."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    spans: list[tuple[float, float]] = []
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    waits = 0
    for event in profiler.events() or ():
        waits += event.name in _WAITS
        on_device = event.device_type == DeviceType.CUDA
        if on_device != on_gpu or (not on_gpu and event.cpu_children) or event.name.startswith("ProfilerStep"):
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        kinds[kind_of(event.name)] += (end - start) / 1000
        names[event.name] += (end - start) / 1000
    total = sum(kinds.values())
    most = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "milliseconds by class": {name: round(time, 2) for name, time in sorted(kinds.items(), key=lambda x: -x[1])},
        "named classes' part": round(1 - kinds.get("other", 0.0) / total, 4) if total else None,
        "part of the time in which a kernel ran": round(_covered(spans), 4),
        "waits of the host": waits,
        "kernels": len(spans),
        "longest kernels, milliseconds": {name[:90]: round(time, 2) for name, time in most},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that the spans cover."""
    if not spans:
        return 0.0
    covered, reached = 0.0, min(spans)[0]
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - min(spans)[0]
    return covered / whole if whole else 1.0
