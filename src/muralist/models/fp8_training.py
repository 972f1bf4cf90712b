"""A linear layer whose products with tokens are in 8 bits in training, forward and backward.

    y = x W^T + b      x and W rounded by rows
    dx = dy W          dy rounded by rows, W by columns
    dW = dy^T x        in bf16: tokens are what is summed over there, and 8 bits would need a scale for each channel

Weights stay as they are, in float32, and are rounded in every pass. Nothing is kept from step to step, so that a resumed run
computes what an uninterrupted one does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muralist.models.fp8_products import Rounded, product, rounded


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kernels: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.kernels = bias.dtype, kernels
        return product(_rounded(x, kernels), rounded(weight), bias.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx = product(_rounded(dy, ctx.kernels), _columns(weight), fast=False)
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias) if ctx.needs_input_grad[2] else None
        return dx, (dy.t() @ x).to(weight.dtype), dbias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor, kernels: bool) -> Tensor:
    """x W^T + b for tokens [..., K], in bf16; `kernels`: whether Triton rounds."""
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    out: Tensor = _Linear.apply(rows, weight, bias, kernels)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _rounded(rows: Tensor, kernels: bool) -> Rounded:
    if not kernels:
        return rounded(rows)
    from muralist.models.fused import rounding

    return Rounded(*rounding.rounded(rows))


def _columns(weight: Tensor) -> Rounded:
    """The columns of a matrix as rows."""
    values, scale = rounded(weight.t())
    return Rounded(values.contiguous(), scale)
