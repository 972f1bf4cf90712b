"""What a profiler saw, by kind of work: kernels on a card, operations on the CPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd import DeviceType

KINDS = {
    "compiled": r"^triton_",  # first: they are named after all that was fused in them
    "exchange between GPUs": r"nccl|gloo|c10d::",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated|cudnn::fusion",
    "norm, gate, modulation": r"^_norm_(for|back)ward|^aten::\w*(rms|layer)_norm",
    "heads: norm and rotation": r"^_heads_(for|back)ward",
    "SwiGLU": r"^_swiglu_(for|back)ward",
    "rounding to 8 bits": r"^_round_rows",
    "optimizer and averages": r"multi_tensor|adam|lerp|foreach",
    "convolutions": r"conv|fprop|dgrad|wgrad|implicit|im2col|nchw|nhwc",
    "matrix products": r"_product$|gemm|nvjet|cutlass|xmma|cublas|splitk|gemv|scaled_mm|^aten::\w*mm$",
    "copies": r"memcpy|memset|direct_copy|catarray|^aten::(copy_|cat)$",
    "other elementwise work": r"elementwise|reduce|norm|softmax|vectorized|index|gather|scatter|upsample|fill|arange",
}
"""Names of kernels and operations by kind; the first pattern that is found counts."""


def kind_of(name: str) -> str:
    """The kind of a kernel or operation by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def times_by_name(averages: Iterable[Any], steps: int, on_card: bool) -> dict[str, float]:
    """Milliseconds of a step by name, from a profiler's `key_averages()`: of the card's kernels, or of the CPU alone."""
    wanted = DeviceType.CUDA if on_card else DeviceType.CPU
    times: dict[str, float] = defaultdict(float)
    for event in averages:
        # A named span is drawn on the card's line too, over the kernels that are counted already.
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            times[event.key] += (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1e3 / steps
    return {name: time for name, time in times.items() if time > 0}


def times_by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """The same by kind, the largest first."""
    kinds: dict[str, float] = defaultdict(float)
    for name, time in times.items():
        kinds[kind_of(name)] += time
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
