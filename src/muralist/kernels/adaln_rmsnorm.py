"""Gated residual, RMSNorm and adaLN modulation fused into one kernel, forward and backward.

    residual = x + gate * branch
    y = residual / rms(residual) * weight * (1 + scale) + shift

A row is a token; gate, scale and shift belong to its sample. The backward pass also sums the gradients of gate, scale
and shift over the tokens of each sample, and those of the norm's weight and the branch's bias over all tokens: first
over the rows of a program, then (in the caller) over programs, always in the same order. With `quantize`, the forward
pass also writes y in FP8.
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

EPSILON = 1e-6
# Rows and warps per program, tuned on an H200.
_FORWARD = {"ROWS": 16, "num_warps": 4}
_BACKWARD = {"ROWS": 48, "num_warps": 8}
_NUM_SUMS = 5  # gradients summed per program: gate, shift, scale, weight, bias


@triton.jit
def _adaln_rmsnorm_forward(
    x_ptr, branch_ptr, gate_ptr, weight_ptr, shift_ptr, scale_ptr, residual_ptr, y_ptr, inv_rms_ptr,
    fp8_ptr, fp8_scale_ptr, tokens, width, x_stride, branch_stride, gate_stride, scale_stride,
    EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + sample * scale_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    factor = weight * scale
    for i in range(ROWS):
        token = chunk * ROWS + i
        mask = column_mask & (token < tokens)
        row = sample * tokens + token
        offset = row * width + column
        value = tl.load(x_ptr + sample * x_stride + token * width + column, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + sample * branch_stride + token * width + column, mask=mask, other=0.0)
        value += gate * branch.to(tl.float32)
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)  # the value that the backward pass reads
        inv_rms = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + EPS)
        tl.store(inv_rms_ptr + row, inv_rms, mask=token < tokens)
        y = (value * inv_rms * factor + shift).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offset, y, mask=mask)
        if QUANTIZE:
            y = y.to(tl.float32)
            fp8_scale = scale_from_max(tl.max(tl.abs(y), axis=0))
            tl.store(fp8_ptr + offset, to_fp8(y, fp8_scale, fp8_ptr), mask=mask)
            tl.store(fp8_scale_ptr + row, fp8_scale, mask=token < tokens)


@triton.jit
def _adaln_rmsnorm_backward(
    residual_ptr, branch_ptr, gate_ptr, weight_ptr, scale_ptr, inv_rms_ptr, dy_ptr, dresidual_ptr,
    dx_ptr, dbranch_ptr, sums_ptr, tokens, width, branch_stride, gate_stride, scale_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    column_mask = column < width
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=column_mask, other=0.0).to(tl.float32)
    factor = weight * scale
    dshift = tl.zeros((BLOCK,), tl.float32)
    dnormed = tl.zeros((BLOCK,), tl.float32)  # sum of dy * normed, from which dscale and dweight follow
    dgate = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        token = chunk * ROWS + i
        mask = column_mask & (token < tokens)
        row = sample * tokens + token
        offset = row * width + column
        value = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dresidual = tl.load(dresidual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + sample * branch_stride + token * width + column, mask=mask, other=0.0)
        inv_rms = tl.load(inv_rms_ptr + row, mask=token < tokens, other=0.0)
        normed = value * inv_rms
        dshift += dy
        dnormed += dy * normed
        dnormed_row = dy * factor
        dvalue = inv_rms * (dnormed_row - normed * (tl.sum(dnormed_row * normed, axis=0) / width)) + dresidual
        tl.store(dx_ptr + offset, dvalue.to(dx_ptr.dtype.element_ty), mask=mask)
        dgate += dvalue * branch.to(tl.float32)
        dbranch = (dvalue * gate).to(dbranch_ptr.dtype.element_ty)
        tl.store(dbranch_ptr + offset, dbranch, mask=mask)
        dbias += dbranch.to(tl.float32)
    sums_stride = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * width
    sums_row = sums_ptr + (sample * tl.num_programs(1) + chunk) * width + column
    tl.store(sums_row, dgate, mask=column_mask)
    tl.store(sums_row + sums_stride, dshift, mask=column_mask)
    tl.store(sums_row + 2 * sums_stride, dnormed * weight, mask=column_mask)
    tl.store(sums_row + 3 * sums_stride, dnormed * scale, mask=column_mask)
    tl.store(sums_row + 4 * sums_stride, dbias, mask=column_mask)


def forward(
    x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, quantize: bool = False
) -> tuple[Tensor, ...]:
    """Return the residual, y and each row's inverse RMS; shift and scale are chunks of one [B, n * width].

    With `quantize`, also y in FP8 and its row-wise scales.
    """
    batch, tokens, width = x.shape
    x, branch = _contiguous_rows(x), _contiguous_rows(branch)
    residual, y = x.new_empty(x.shape), x.new_empty(x.shape)
    inv_rms = x.new_empty((batch, tokens), dtype=torch.float32)
    fp8_outputs: tuple[Tensor, ...] = ()  # otherwise x stands in, which the kernel does not write
    if quantize:
        fp8_outputs = x.new_empty(x.shape, dtype=FP8), x.new_empty((batch * tokens, 1), dtype=torch.float32)
    launch(
        _adaln_rmsnorm_forward, (batch, triton.cdiv(tokens, _FORWARD["ROWS"])),
        x, branch, gate, weight, shift, scale, residual, y, inv_rms, *(fp8_outputs or (x, x)),
        tokens, width, x.stride(0), branch.stride(0), gate.stride(0), scale.stride(0),
        EPS=EPSILON, BLOCK=triton.next_power_of_2(width), QUANTIZE=quantize, **_FORWARD,
    )  # fmt: skip
    return residual, y, inv_rms, *fp8_outputs


@triton_op("muralist::adaln_rmsnorm_backward")
def _backward(
    residual: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, inv_rms: Tensor,
    dy: Tensor, dresidual: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dbranch and partial sums of the gradients of gate, shift, scale, weight and bias, [5, B, n, width]."""
    batch, tokens, width = residual.shape
    chunks = triton.cdiv(tokens, _BACKWARD["ROWS"])
    branch = _contiguous_rows(branch)
    dx, dbranch = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    sums = residual.new_empty((_NUM_SUMS, batch, chunks, width), dtype=torch.float32)
    launch(
        _adaln_rmsnorm_backward, (batch, chunks),
        residual, branch, gate, weight, scale, inv_rms, dy.contiguous(), dresidual.contiguous(),
        dx, dbranch, sums, tokens, width, branch.stride(0), gate.stride(0), scale.stride(0),
        BLOCK=triton.next_power_of_2(width), **_BACKWARD,
    )  # fmt: skip
    return dx, dbranch, sums


def _contiguous_rows(x: Tensor) -> Tensor:
    """Make the rows of a sample contiguous; samples may have any stride."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton_op("muralist::adaln_rmsnorm")
def adaln_rmsnorm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual, y and the inverse RMS of each row; the bias is already in the branch."""
    residual, y, inv_rms = forward(x, branch, gate, weight, shift, scale)
    return residual, y, inv_rms


@triton_op("muralist::adaln_rmsnorm_fp8")
def adaln_rmsnorm_fp8(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the residual, y, the inverse RMS of each row, and y in FP8 with its row-wise scales."""
    residual, y, inv_rms, values, row_scale = forward(x, branch, gate, weight, shift, scale, quantize=True)
    return residual, y, inv_rms, values, row_scale


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, branch, bias, gate, weight, _, scale = inputs
    residual, _, inv_rms, *_ = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(residual, branch, gate, weight, scale, inv_rms)


def _gradients(ctx: Any, dresidual: Tensor, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    _, _, gate, weight, _, _ = ctx.saved_tensors
    dx, dbranch, sums = _backward(*ctx.saved_tensors, dy, dresidual)
    dgate, dshift, dscale = sums[:3].sum(2).to(gate.dtype).unbind(0)  # outputs of one layer, so of one dtype
    dweight, dbias = sums[3:].sum((1, 2)).unbind(0)
    dbias = None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
    return dx, dbranch, dbias, dgate, dweight.to(weight.dtype), dshift, dscale


adaln_rmsnorm.register_autograd(_gradients, setup_context=_setup)
adaln_rmsnorm_fp8.register_autograd(_gradients, setup_context=_setup)
