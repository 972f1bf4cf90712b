"""silu(gate) * value in one pass over the first layer's output [..., 2 * hidden], and its gradients in another.

The backward pass also sums what the layer's bias gets, first over the rows of a program, then over programs. On request
both write their rows in 8 bits too; then a program has whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fp8_products import FP8
from muralist.models.fused.launch import launch
from muralist.models.fused.rounding import eight_bits, scale_of

_BLOCK = 1024
_ROWS = 32  # of one program in the backward pass
_WARPS = 4
_OF_A_WARP = 256  # columns, where a program has whole rows


@triton.jit
def _swiglu_forward(h_ptr, out_ptr, values_ptr, scale_ptr, hidden, BLOCK: tl.constexpr, EIGHT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    gate = tl.load(h_ptr + row * 2 * hidden + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(h_ptr + row * 2 * hidden + hidden + column, mask=inside, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * value).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + column, out, mask=inside)
    if EIGHT:
        stored = out.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(stored), axis=0))
        tl.store(values_ptr + row * hidden + column, eight_bits(stored, scale, values_ptr), mask=inside)
        tl.store(scale_ptr + row, scale)


@triton.jit
def _swiglu_backward(
    h_ptr, dout_ptr, dh_ptr, dbias_ptr, values_ptr, scale_ptr, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    gate_sum = tl.zeros((BLOCK,), tl.float32)
    value_sum = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROWS):
        row = chunk * ROWS + number
        here = inside & (row < rows)
        place = row * 2 * hidden + column
        gate = tl.load(h_ptr + place, mask=here, other=0.0).to(tl.float32)
        value = tl.load(h_ptr + place + hidden, mask=here, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * hidden + column, mask=here, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        dgate = (dout * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dh_ptr.dtype.element_ty)
        dvalue = (dout * gate * sigmoid).to(dh_ptr.dtype.element_ty)
        tl.store(dh_ptr + place, dgate, mask=here)
        tl.store(dh_ptr + place + hidden, dvalue, mask=here)
        dgate, dvalue = dgate.to(tl.float32), dvalue.to(tl.float32)
        gate_sum += dgate
        value_sum += dvalue
        if EIGHT:
            scale = scale_of(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dvalue)), axis=0))
            tl.store(values_ptr + place, eight_bits(dgate, scale, values_ptr), mask=here)
            tl.store(values_ptr + place + hidden, eight_bits(dvalue, scale, values_ptr), mask=here)
            tl.store(scale_ptr + row, scale, mask=row < rows)
    partial = chunk * 2 * hidden + column
    tl.store(dbias_ptr + partial, gate_sum, mask=inside)
    tl.store(dbias_ptr + partial + hidden, value_sum, mask=inside)


def forward(h: Tensor, rounded: bool = False) -> tuple[Tensor, ...]:
    """[..., 2 * hidden] to [..., hidden]; if `rounded`, also in 8 bits, and the scales of its rows."""
    h = h.contiguous()
    hidden = h.shape[-1] // 2
    out = h.new_empty((*h.shape[:-1], hidden))
    rows = out.numel() // hidden
    more = _eight_bits_like(out, rows) if rounded else ()  # else an input stands in, which the kernel leaves alone
    block, warps = _block(hidden, rounded)
    launch(
        _swiglu_forward,
        (rows, triton.cdiv(hidden, block)),
        h,
        out,
        *(more or (h, h)),
        hidden,
        BLOCK=block,
        EIGHT=rounded,
        num_warps=warps,
    )
    return out, *more


def backward(h: Tensor, dout: Tensor, rounded: bool = False) -> tuple[Tensor, ...]:
    """Gradients of h and, to be added up, of its bias [n, 2 hidden]; if `rounded`, the first in 8 bits, and its scales."""
    h, dout = h.contiguous(), dout.contiguous()
    hidden = h.shape[-1] // 2
    dh = h.new_empty(h.shape)
    rows = dout.numel() // hidden
    more = _eight_bits_like(dh, rows) if rounded else ()  # as above
    chunks = triton.cdiv(rows, _ROWS)
    sums = h.new_empty((chunks, 2 * hidden), dtype=torch.float32)
    block, warps = _block(hidden, rounded)
    launch(
        _swiglu_backward,
        (chunks, triton.cdiv(hidden, block)),
        h,
        dout,
        dh,
        sums,
        *(more or (h, h)),
        rows,
        hidden,
        ROWS=_ROWS,
        BLOCK=block,
        EIGHT=rounded,
        num_warps=warps,
    )
    return dh, sums, *more


def _eight_bits_like(exact: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return exact.new_empty(exact.shape, dtype=FP8), exact.new_empty((rows, 1), dtype=torch.float32)


def _block(hidden: int, whole: bool) -> tuple[int, int]:
    """Columns and warps of a program."""
    block = triton.next_power_of_2(hidden)
    return (block, min(16, max(_WARPS, block // _OF_A_WARP))) if whole else (min(_BLOCK, block), _WARPS)
