"""Rows rounded to 8 bits with a scale each, in one pass: models/fp8_products.py says in plain PyTorch what this is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models import fp8_products
from muralist.models.fp8_products import FP8
from muralist.models.fused.launch import launch

_TILE = 4096  # values of one program: several short rows, or one long one
_WARPS = 4
OF_LARGEST = tl.constexpr(fp8_products.OF_LARGEST)
LEAST_SCALE = tl.constexpr(fp8_products.LEAST_SCALE)


@triton.jit
def scale_of(largest):
    """The scale of rows by their largest magnitude; a NaN is not seen here, and stays one in the values."""
    return tl.maximum(largest * OF_LARGEST, LEAST_SCALE)


@triton.jit
def eight_bits(value, scale, out_ptr):
    """Float32 values as they are stored, the largest as the largest there is."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)  # exactly rounded, as PyTorch divides
    return (value * inverse).to(out_ptr.dtype.element_ty)


@triton.jit
def _round_rows(rows_ptr, values_ptr, scale_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows) & (column < width)
    value = tl.load(rows_ptr + row * width + column, mask=here, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), axis=1, keep_dims=True))
    tl.store(values_ptr + row * width + column, eight_bits(value, scale, values_ptr), mask=here)
    tl.store(scale_ptr + row, scale, mask=row < rows)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, K] in 8 bits, and the scale [R, 1] of each."""
    rows = rows.contiguous()
    count, width = rows.shape
    values = rows.new_empty(rows.shape, dtype=FP8)
    scale = rows.new_empty((count, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    at_once = max(1, _TILE // block)
    launch(
        _round_rows,
        (triton.cdiv(count, at_once),),
        rows,
        values,
        scale,
        count,
        width,
        ROWS=at_once,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return values, scale
