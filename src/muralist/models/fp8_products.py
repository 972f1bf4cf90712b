"""Matrix products in 8 bits (e4m3): every row of both sides has a scale of its own.

So a row's numbers depend on itself alone: a scale for a whole batch would tie its pictures together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
OF_LARGEST = 1.0 / LARGEST  # a factor: what divides by a constant rounds differently on CPUs, on GPUs and in kernels
LEAST_SCALE = 2.0**-100  # of rows of zeros; gradients have rows that are hardly larger
MULTIPLE = 16  # of the sides that a product takes; rows may be as many as there are
_CAPABILITY = (8, 9)


class Rounded(NamedTuple):
    """A matrix in 8 bits: values [R, K] times the scale [R, 1] of each row."""

    values: Tensor
    scale: Tensor


def can_fp8(device: torch.device) -> bool:
    """Whether the device has such products, and this torch for it: tried, since some versions have none for new cards."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return False
    trial = rounded(torch.ones(MULTIPLE, MULTIPLE, device=device))
    try:
        return bool(torch.isfinite(product(trial, trial)).all())
    except RuntimeError:
        return False


def why_not_fp8(device: torch.device) -> str:
    """What there is instead, for people."""
    if device.type != "cuda":
        return "There is no GPU here."
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    return f"{found}." if (major, minor) < _CAPABILITY else f"{found}, but torch {torch.__version__} has none for it."


def fits(inputs: int, outputs: int) -> bool:
    """Whether a layer with these sides can be computed so."""
    return inputs % MULTIPLE == 0 and outputs % MULTIPLE == 0


def rounded(rows: Tensor) -> Rounded:
    """Rows [R, K] in 8 bits; a row with anything that is not finite has something that is not a number."""
    rows = rows.float()
    scale = (rows.abs().amax(dim=-1, keepdim=True) * OF_LARGEST).clamp(min=LEAST_SCALE)
    return Rounded((rows * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8), scale)


def product(left: Rounded, right: Rounded, bias: Tensor | None = None, fast: bool = True) -> Tensor:
    """left right^T + bias, [M, N] in bf16.

    `fast` sums as the card does by itself, with fewer bits than float32: no harm over a few thousand terms.
    """
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale,
        right.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
