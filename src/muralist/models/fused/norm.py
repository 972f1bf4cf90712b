"""Gate, residual, norm and modulation in one pass over the tokens, and their gradients in another.

    residual = x + gate * branch
    y = residual / rms(residual) * weight * (1 + scale) + shift

A row is a token; gate, scale and shift belong to its sample. The backward pass also sums what gate, scale and shift get over
the tokens of each sample, and what the weight and the branch's bias get over all tokens: first over the rows of a program,
then (left to the caller) over programs, always in the same order. On request the forward pass writes y in 8 bits too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fp8_products import FP8
from muralist.models.fused.launch import launch
from muralist.models.fused.rounding import eight_bits, scale_of

EPSILON = 1e-6
# Rows and warps of one program, forward and backward: what an H200 was fastest with.
_FORWARD = {"ROWS": 16, "num_warps": 4}
_BACKWARD = {"ROWS": 48, "num_warps": 8}
_SUMS = 5  # per program: gate, shift, scale; weight, bias


@triton.jit
def _norm_forward(
    x_ptr, branch_ptr, gate_ptr, weight_ptr, shift_ptr, scale_ptr, residual_ptr, y_ptr, inverse_ptr,
    values_ptr, row_scale_ptr, tokens, width, x_stride, branch_stride, gate_stride, scale_stride,
    EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + sample * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = weight * scale
    for number in range(ROWS):
        token = chunk * ROWS + number
        here = inside & (token < tokens)
        row = sample * tokens + token
        place = row * width + column
        value = tl.load(x_ptr + sample * x_stride + token * width + column, mask=here, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + sample * branch_stride + token * width + column, mask=here, other=0.0)
        value += gate * branch.to(tl.float32)
        stored = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, stored, mask=here)
        value = stored.to(tl.float32)  # what the backward pass will see
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + EPS)
        tl.store(inverse_ptr + row, inverse, mask=token < tokens)
        y = (value * inverse * factor + shift).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + place, y, mask=here)
        if EIGHT:
            y = y.to(tl.float32)
            row_scale = scale_of(tl.max(tl.abs(y), axis=0))
            tl.store(values_ptr + place, eight_bits(y, row_scale, values_ptr), mask=here)
            tl.store(row_scale_ptr + row, row_scale, mask=token < tokens)


@triton.jit
def _norm_backward(
    residual_ptr, branch_ptr, gate_ptr, weight_ptr, scale_ptr, inverse_ptr, dy_ptr, dresidual_ptr,
    dx_ptr, dbranch_ptr, sums_ptr, tokens, width, branch_stride, gate_stride, scale_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(scale_ptr + sample * scale_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + sample * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = weight * scale
    dshift = tl.zeros((BLOCK,), tl.float32)
    dnormed = tl.zeros((BLOCK,), tl.float32)  # sum of dy * normed: both scale's and weight's gradients follow
    dgate = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROWS):
        token = chunk * ROWS + number
        here = inside & (token < tokens)
        row = sample * tokens + token
        place = row * width + column
        value = tl.load(residual_ptr + place, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + place, mask=here, other=0.0).to(tl.float32)
        dresidual = tl.load(dresidual_ptr + place, mask=here, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + sample * branch_stride + token * width + column, mask=here, other=0.0)
        inverse = tl.load(inverse_ptr + row, mask=token < tokens, other=0.0)
        normed = value * inverse
        dshift += dy
        dnormed += dy * normed
        inner = dy * factor
        dvalue = inverse * (inner - normed * (tl.sum(inner * normed, axis=0) / width)) + dresidual
        tl.store(dx_ptr + place, dvalue.to(dx_ptr.dtype.element_ty), mask=here)
        dgate += dvalue * branch.to(tl.float32)
        dbranch = (dvalue * gate).to(dbranch_ptr.dtype.element_ty)
        tl.store(dbranch_ptr + place, dbranch, mask=here)
        dbias += dbranch.to(tl.float32)
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * width
    partial = sums_ptr + (sample * tl.num_programs(1) + chunk) * width + column
    tl.store(partial, dgate, mask=inside)
    tl.store(partial + plane, dshift, mask=inside)
    tl.store(partial + 2 * plane, dnormed * weight, mask=inside)
    tl.store(partial + 3 * plane, dnormed * scale, mask=inside)
    tl.store(partial + 4 * plane, dbias, mask=inside)


def forward(
    x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, rounded: bool = False
) -> tuple[Tensor, ...]:
    """The residual, y and each row's inverse root mean square; shift and scale are chunks of one [B, n * width].

    If `rounded`, also y in 8 bits, and the scales of its rows.
    """
    batch, tokens, width = x.shape
    x, branch = _rows(x), _rows(branch)
    residual, y = x.new_empty(x.shape), x.new_empty(x.shape)
    inverse = x.new_empty((batch, tokens), dtype=torch.float32)
    more: tuple[Tensor, ...] = ()  # without, an input stands in, which the kernel leaves alone
    if rounded:
        more = x.new_empty(x.shape, dtype=FP8), x.new_empty((batch * tokens, 1), dtype=torch.float32)
    launch(
        _norm_forward, (batch, triton.cdiv(tokens, _FORWARD["ROWS"])),
        x, branch, gate, weight, shift, scale, residual, y, inverse, *(more or (x, x)),
        tokens, width, x.stride(0), branch.stride(0), gate.stride(0), scale.stride(0),
        EPS=EPSILON, BLOCK=triton.next_power_of_2(width), EIGHT=rounded, **_FORWARD,
    )  # fmt: skip
    return residual, y, inverse, *more


def backward(
    residual: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, inverse: Tensor,
    dy: Tensor, dresidual: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and branch; and, to be added up, of gate, shift, scale, weight and branch's bias, [5, B, n, width]."""
    batch, tokens, width = residual.shape
    chunks = triton.cdiv(tokens, _BACKWARD["ROWS"])
    branch = _rows(branch)
    dx, dbranch = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    sums = residual.new_empty((_SUMS, batch, chunks, width), dtype=torch.float32)
    launch(
        _norm_backward, (batch, chunks),
        residual, branch, gate, weight, scale, inverse, dy.contiguous(), dresidual.contiguous(),
        dx, dbranch, sums, tokens, width, branch.stride(0), gate.stride(0), scale.stride(0),
        BLOCK=triton.next_power_of_2(width), **_BACKWARD,
    )  # fmt: skip
    return dx, dbranch, sums


def _rows(x: Tensor) -> Tensor:
    """Tokens whose rows follow each other; samples may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
