"""Linear layers whose products with tokens are in 8 bits in training, forward and backward.

    y = x W^T + b      x and W rounded by rows
    dx = dy W          dy rounded by rows, W by columns
    dW = dy^T x        in bf16: tokens are what is summed over there, and 8 bits would need a scale for each channel

Weights stay as they are, in float32, and are rounded in every pass. Nothing is kept from step to step, so that a resumed run
computes what an uninterrupted one does. Where our kernels run, the one that makes tokens or their gradients writes them in 8
bits as well, if it has whole rows in hand; else a kernel that does nothing else rounds them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from muralist.models.fp8_products import Rounded, product, rounded


class Both(NamedTuple):
    """Tokens [..., K] in bf16, and the same in 8 bits with the scales of their rows."""

    exact: Tensor
    values: Tensor
    scale: Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, kernels: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.kernels = bias.dtype, kernels
        return product(Rounded(values, scale), rounded(weight), bias.to(torch.bfloat16))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx, dweight = _gradients(dy, _rounded(dy, ctx.kernels), x, weight)
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias) if ctx.needs_input_grad[4] else None
        return dx, None, None, dweight, dbias, None


class _GatedLinearUnit(torch.autograd.Function):
    """The layer, and the kernel that follows it: their gradients meet in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from muralist.models.fused import ops_8_bits

        h = product(Rounded(values, scale), rounded(weight), bias.to(torch.bfloat16))
        out, out_values, out_scale = ops_8_bits.gated_linear_unit(h)
        ctx.save_for_backward(x, h, weight)
        ctx.bias = bias.dtype
        ctx.mark_non_differentiable(out_values, out_scale)
        return out, out_values, out_scale

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from muralist.models.fused import ops_8_bits

        x, h, weight = ctx.saved_tensors
        dh, dbias, values, scale = ops_8_bits.gated_linear_unit_backward(h, dout)
        dx, dweight = _gradients(dh, Rounded(values, scale), x, weight)
        return dx, None, None, dweight, dbias.to(ctx.bias)


def linear(x: Tensor | Both, weight: Tensor, bias: Tensor, kernels: bool) -> Tensor:
    """x W^T + b in bf16; `kernels`: whether Triton rounds."""
    rows = _both(x, kernels)
    out: Tensor = _Linear.apply(*rows, weight, bias, kernels)  # type: ignore[no-untyped-call]
    return out.reshape(*_exact(x).shape[:-1], weight.shape[0])


def gated_linear_unit(x: Tensor | Both, weight: Tensor, bias: Tensor) -> Both:
    """silu of the first half of the layer's channels times the second, by our kernels."""
    out, values, scale = _GatedLinearUnit.apply(*_both(x, True), weight, bias)  # type: ignore[no-untyped-call]
    return Both(out.reshape(*_exact(x).shape[:-1], weight.shape[0] // 2), values, scale)


def _gradients(dy: Tensor, in_8_bits: Rounded, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a layer's input and weight."""
    return product(in_8_bits, _columns(weight), fast=False), (dy.t() @ x).to(weight.dtype)


def _both(x: Tensor | Both, kernels: bool) -> Both:
    """Tokens as rows of a matrix."""
    if isinstance(x, Both):
        return Both(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in x))
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return Both(rows, *_rounded(rows.detach(), kernels))


def _exact(x: Tensor | Both) -> Tensor:
    return x.exact if isinstance(x, Both) else x


def _rounded(rows: Tensor, kernels: bool) -> Rounded:
    if not kernels:
        return rounded(rows)
    from muralist.models.fused import ops_8_bits

    return Rounded(*ops_8_bits.rounded(rows))


def _columns(weight: Tensor) -> Rounded:
    """The columns of a matrix as rows."""
    values, scale = rounded(weight.t())
    return Rounded(values.contiguous(), scale)
