"""Where the time of a step goes on the card, kernel by kernel and by kind."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": r"flash|fmha|cudnn.*sdpa|attention|cudnn_generated",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "norm, gate, modulation": r"^_norm_(for|back)ward",
    "heads: norm and rotation": r"^_heads_(for|back)ward",
    "SwiGLU": r"^_swiglu_(for|back)ward",
    "optimizer and averages": r"multi_tensor|adam|lerp|foreach",
    "copies": r"Memcpy|Memset|memcpy|memset",
    "compiled": r"^triton_",
}


def time_by_kind(step: Callable[[], Any], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step by kind, with the time in which the card did nothing, and by the largest kernels."""
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
    kernels: dict[str, float] = defaultdict(float)
    for event in trace.key_averages():
        kernels[event.key] += event.self_device_time_total / 1e3 / steps
    kinds: dict[str, float] = defaultdict(float)
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds
    kinds["the card waits"] = whole - sum(kinds.values())
    kinds["step under the profiler"] = whole
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:60]
    return {k: round(v, 3) for k, v in kinds.items()}, {k[:160]: round(v, 3) for k, v in largest}


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
