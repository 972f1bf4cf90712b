"""Row-wise FP8 quantization as a Triton kernel; kernels/fp8.py has the same in plain PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.kernels import fp8
from muralist.kernels.fp8 import FP8
from muralist.kernels.launch import launch, triton_op

_TILE = 4096  # values per program: several short rows or one long row
_WARPS = 4
INV_FP8_MAX = tl.constexpr(fp8.INV_FP8_MAX)
MIN_SCALE = tl.constexpr(fp8.MIN_SCALE)


@triton.jit
def scale_from_max(row_max):
    """Return the scale of a row from its largest magnitude; a NaN does not show here, and stays in the values."""
    return tl.maximum(row_max * INV_FP8_MAX, MIN_SCALE)


@triton.jit
def to_fp8(value, scale, out_ptr):
    """Scale float32 values to FP8, so that the largest of a row becomes the largest of FP8."""
    inv_scale = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)  # correctly rounded, as in PyTorch
    return (value * inv_scale).to(out_ptr.dtype.element_ty)


@triton.jit
def _quantize_rowwise(rows_ptr, values_ptr, scale_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    value = tl.load(rows_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    scale = scale_from_max(tl.max(tl.abs(value), axis=1, keep_dims=True))
    tl.store(values_ptr + row * width + column, to_fp8(value, scale, values_ptr), mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton_op("muralist::quantize_rowwise")
def quantize_rowwise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [R, K] in FP8 and the scale [R, 1] of each."""
    rows = rows.contiguous()
    num_rows, width = rows.shape
    values = rows.new_empty(rows.shape, dtype=FP8)
    scale = rows.new_empty((num_rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    options = {"ROWS": max(1, _TILE // block), "BLOCK": block, "num_warps": _WARPS}
    grid = (triton.cdiv(num_rows, options["ROWS"]),)
    launch(_quantize_rowwise, grid, rows, values, scale, num_rows, width, **options)
    return values, scale
