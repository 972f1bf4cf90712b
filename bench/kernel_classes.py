"""Profile GPU work: kernels by class, share of busy time, host synchronizations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from muralist.train.metrics import kind_of

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profiled(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return milliseconds by class of kernel, and the share of the time in which any kernel ran."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    spans: list[tuple[float, float]] = []
    classes: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    waits = 0
    for event in profiler.events() or ():
        if event.name in _WAITS:
            waits += 1
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != on_gpu or (not on_gpu and event.cpu_children) or event.name.startswith("ProfilerStep"):
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        classes[kind_of(event.name)] += (end - start) / 1000
        names[event.name] += (end - start) / 1000
    total = sum(classes.values())
    most = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "milliseconds by class": {name: round(time, 2) for name, time in sorted(classes.items(), key=lambda x: -x[1])},
        "named classes' part": round(1 - classes.get("other", 0.0) / total, 4) if total else None,
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
