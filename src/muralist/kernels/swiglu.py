"""SwiGLU: silu(gate) * value of the first layer's output [..., 2 * hidden], forward and backward.

The backward pass also sums the gradient of the layer's bias, first over the rows of a program, then (in the caller)
over programs. With `quantize`, both passes also write their output in FP8; a program then holds full rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.kernels.fp8 import FP8
from muralist.kernels.fp8_quantize import scale_from_max, to_fp8
from muralist.kernels.launch import launch, triton_op

_BLOCK = 1024
_ROWS = 32  # per program in the backward pass
_NUM_WARPS = 4
_COLUMNS_PER_WARP = 256  # where a program holds full rows


@triton.jit
def _swiglu_forward(h_ptr, out_ptr, fp8_ptr, scale_ptr, hidden, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < hidden
    gate = tl.load(h_ptr + row * 2 * hidden + column, mask=column_mask, other=0.0).to(tl.float32)
    value = tl.load(h_ptr + row * 2 * hidden + hidden + column, mask=column_mask, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * value).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + column, out, mask=column_mask)
    if QUANTIZE:
        rounded = out.to(tl.float32)
        scale = scale_from_max(tl.max(tl.abs(rounded), axis=0))
        tl.store(fp8_ptr + row * hidden + column, to_fp8(rounded, scale, fp8_ptr), mask=column_mask)
        tl.store(scale_ptr + row, scale)


@triton.jit
def _swiglu_backward(
    h_ptr, dout_ptr, dh_ptr, dbias_ptr, fp8_ptr, scale_ptr, rows, hidden,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < hidden
    gate_sum = tl.zeros((BLOCK,), tl.float32)
    value_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        row = chunk * ROWS + i
        mask = column_mask & (row < rows)
        offset = row * 2 * hidden + column
        gate = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(h_ptr + offset + hidden, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        dgate = (dout * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dh_ptr.dtype.element_ty)
        dvalue = (dout * gate * sigmoid).to(dh_ptr.dtype.element_ty)
        tl.store(dh_ptr + offset, dgate, mask=mask)
        tl.store(dh_ptr + offset + hidden, dvalue, mask=mask)
        dgate, dvalue = dgate.to(tl.float32), dvalue.to(tl.float32)
        gate_sum += dgate
        value_sum += dvalue
        if QUANTIZE:
            scale = scale_from_max(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dvalue)), axis=0))
            tl.store(fp8_ptr + offset, to_fp8(dgate, scale, fp8_ptr), mask=mask)
            tl.store(fp8_ptr + offset + hidden, to_fp8(dvalue, scale, fp8_ptr), mask=mask)
            tl.store(scale_ptr + row, scale, mask=row < rows)
    sums_offset = chunk * 2 * hidden + column
    tl.store(dbias_ptr + sums_offset, gate_sum, mask=column_mask)
    tl.store(dbias_ptr + sums_offset + hidden, value_sum, mask=column_mask)


def forward(h: Tensor, quantize: bool = False) -> tuple[Tensor, ...]:
    """Compute [..., 2 * hidden] to [..., hidden]; with `quantize`, also in FP8 with row-wise scales."""
    h = h.contiguous()
    hidden = h.shape[-1] // 2
    out = h.new_empty((*h.shape[:-1], hidden))
    rows = out.numel() // hidden
    fp8_outputs = _empty_fp8_like(out, rows) if quantize else ()  # else h stands in, which the kernel does not write
    options = _launch_options(hidden, quantize)
    grid = (rows, triton.cdiv(hidden, options["BLOCK"]))
    launch(_swiglu_forward, grid, h, out, *(fp8_outputs or (h, h)), hidden, **options)
    return out, *fp8_outputs


def backward(h: Tensor, dout: Tensor, quantize: bool = False) -> tuple[Tensor, ...]:
    """Return dh and partial sums of the bias gradient [n, 2 hidden]; with `quantize`, also dh in FP8 and its scales."""
    h, dout = h.contiguous(), dout.contiguous()
    hidden = h.shape[-1] // 2
    dh = h.new_empty(h.shape)
    rows = dout.numel() // hidden
    fp8_outputs = _empty_fp8_like(dh, rows) if quantize else ()
    chunks = triton.cdiv(rows, _ROWS)
    sums = h.new_empty((chunks, 2 * hidden), dtype=torch.float32)
    options = _launch_options(hidden, quantize)
    grid = (chunks, triton.cdiv(hidden, options["BLOCK"]))
    launch(_swiglu_backward, grid, h, dout, dh, sums, *(fp8_outputs or (h, h)), rows, hidden, ROWS=_ROWS, **options)
    return dh, sums, *fp8_outputs


def _empty_fp8_like(tensor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return tensor.new_empty(tensor.shape, dtype=FP8), tensor.new_empty((rows, 1), dtype=torch.float32)


def _launch_options(hidden: int, quantize: bool) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    if not quantize:
        return {"BLOCK": min(_BLOCK, block), "QUANTIZE": False, "num_warps": _NUM_WARPS}
    return {"BLOCK": block, "QUANTIZE": True, "num_warps": min(16, max(_NUM_WARPS, block // _COLUMNS_PER_WARP))}


@triton_op("muralist::swiglu")
def swiglu(h: Tensor, bias: Tensor) -> Tensor:
    """Compute silu of the first half of the channels times the second."""
    return forward(h)[0]


@triton_op("muralist::swiglu_backward")
def _swiglu_gradients(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dh, sums = backward(h, dout)
    return dh, sums


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    h, bias = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(h)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dh, sums = _swiglu_gradients(*ctx.saved_tensors, dout)
    return dh, sums.sum(0).to(ctx.bias_dtype)


swiglu.register_autograd(_gradients, setup_context=_setup)


@triton_op("muralist::swiglu_fp8")
def swiglu_fp8(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute SwiGLU, and the same in FP8 with its row-wise scales."""
    out, values, scale = forward(h, quantize=True)
    return out, values, scale


@triton_op("muralist::swiglu_fp8_backward")
def swiglu_fp8_backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dh, partial sums of the bias gradient, and dh in FP8 with its row-wise scales."""
    dh, sums, values, scale = backward(h, dout, quantize=True)
    return dh, sums, values, scale
