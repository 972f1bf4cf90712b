"""silu(gate) * value in one pass over the first layer's output [..., 2 * hidden], and its gradients in another.

The backward pass also sums what the layer's bias gets, first over the rows of a program, then over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fused.launch import launcher

_BLOCK = 1024
_ROWS = 32  # of one program in the backward pass
_WARPS = 4


@triton.jit
def _swiglu_forward(h_ptr, out_ptr, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    gate = tl.load(h_ptr + row * 2 * hidden + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(h_ptr + row * 2 * hidden + hidden + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(out_ptr + row * hidden + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(h_ptr, dout_ptr, dh_ptr, dbias_ptr, rows, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
        gate_sum += dgate.to(tl.float32)
        value_sum += dvalue.to(tl.float32)
    partial = chunk * 2 * hidden + column
    tl.store(dbias_ptr + partial, gate_sum, mask=inside)
    tl.store(dbias_ptr + partial + hidden, value_sum, mask=inside)


def forward(h: Tensor) -> Tensor:
    """[..., 2 * hidden] to [..., hidden]."""
    h = h.contiguous()
    hidden = h.shape[-1] // 2
    out = h.new_empty((*h.shape[:-1], hidden))
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    grid = (out.numel() // hidden, triton.cdiv(hidden, block))
    launcher(_swiglu_forward)[grid](h, out, hidden, BLOCK=block, num_warps=_WARPS)
    return out


def backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h, and of a bias that was added to it."""
    h, dout = h.contiguous(), dout.contiguous()
    hidden = h.shape[-1] // 2
    dh = h.new_empty(h.shape)
    rows = dout.numel() // hidden
    chunks = triton.cdiv(rows, _ROWS)
    sums = h.new_empty((chunks, 2 * hidden), dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    launcher(_swiglu_backward)[(chunks, triton.cdiv(hidden, block))](
        h, dout, dh, sums, rows, hidden, ROWS=_ROWS, BLOCK=block, num_warps=_WARPS
    )
    return dh, sums.sum(0)
