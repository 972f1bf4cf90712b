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
import torch.nn.functional as F
from torch import Tensor

from muralist.models.fp8_products import MULTIPLE, Rounded, product, rounded


class Both(NamedTuple):
    """Tokens [..., K] in bf16, and the same in 8 bits with the scales of their rows; K is one that products take."""

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
        return _product(Rounded(values, scale), weight, bias, parts=1)[:, : weight.shape[0]]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias) if ctx.needs_input_grad[4] else None
        dy = _wide(dy)
        dx, dweight = _gradients(dy, _rounded(dy, ctx.kernels), x, weight, parts=1)
        return dx, None, None, dweight, dbias, None


class _GatedLinearUnit(torch.autograd.Function):
    """The layer, and the kernel that follows it: their gradients meet in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from muralist.models.fused import ops_8_bits

        h = _product(Rounded(values, scale), weight, bias, parts=2)
        out, out_values, out_scale = ops_8_bits.gated_linear_unit(h)
        ctx.save_for_backward(x, h, weight)
        ctx.bias = bias.dtype
        ctx.mark_non_differentiable(out_values, out_scale)
        return out, out_values, out_scale

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from muralist.models.fused import ops_8_bits

        x, h, weight = ctx.saved_tensors
        dh, sums, values, scale = ops_8_bits.gated_linear_unit_backward(h, dout)
        dx, dweight = _gradients(dh, Rounded(values, scale), x, weight, parts=2)
        return dx, None, None, dweight, _narrowed(sums.sum(0)[:, None], weight[:, :1], parts=2)[:, 0].to(ctx.bias)


def linear(x: Tensor | Both, weight: Tensor, bias: Tensor, kernels: bool) -> Tensor:
    """x W^T + b in bf16; `kernels`: whether Triton rounds."""
    out: Tensor = _Linear.apply(*_rows(x, kernels), weight, bias, kernels)  # type: ignore[no-untyped-call]
    return out.reshape(*_exact(x).shape[:-1], weight.shape[0])


def gated_linear_unit(x: Tensor | Both, weight: Tensor, bias: Tensor) -> Both:
    """silu of the first half of the layer's channels times the second, by our kernels.

    It has as many channels as a product takes: where the layer has fewer, those that follow are zeros.
    """
    out, values, scale = _GatedLinearUnit.apply(*_rows(x, True), weight, bias)  # type: ignore[no-untyped-call]
    return Both(out.reshape(*_exact(x).shape[:-1], -1), values, scale)


def _product(x: Rounded, weight: Tensor, bias: Tensor, parts: int) -> Tensor:
    """x W^T + b, where each of the weight's parts is followed by zeros up to a side that products take."""
    wide = widened(weight, parts, x.values.shape[1])
    return product(x, rounded(wide), widened(bias[:, None], parts, 1)[:, 0].to(torch.bfloat16))


def _gradients(dy: Tensor, in_8_bits: Rounded, x: Tensor, weight: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Of a layer's input and weight."""
    values, scale = rounded(widened(weight, parts, x.shape[1]).t())
    dx = product(in_8_bits, Rounded(values.contiguous(), scale), fast=False)
    return dx, _narrowed(dy.t() @ x, weight, parts).to(weight.dtype)


def widened(matrix: Tensor, parts: int, columns: int, multiple: int = MULTIPLE) -> Tensor:
    """A matrix [parts * R, C] with rows of zeros after each of its parts, and columns of zeros after its own."""
    rows = matrix.shape[0] // parts
    more_rows, more_columns = -rows % multiple, columns - matrix.shape[1]
    if not (more_rows or more_columns):
        return matrix
    return F.pad(matrix.unflatten(0, (parts, rows)), (0, more_columns, 0, more_rows)).flatten(0, 1)


def _narrowed(matrix: Tensor, pattern: Tensor, parts: int) -> Tensor:
    """The same without these zeros."""
    rows, columns = pattern.shape[0] // parts, pattern.shape[1]
    return matrix.unflatten(0, (parts, -1))[:, :rows, :columns].flatten(0, 1)


def _wide(x: Tensor) -> Tensor:
    """Tokens with as many channels as a product takes, the last of them zeros."""
    more = -x.shape[-1] % MULTIPLE
    return F.pad(x, (0, more)) if more else x


def _rows(x: Tensor | Both, kernels: bool) -> Both:
    """Tokens as rows of a matrix."""
    if isinstance(x, Both):
        x = x._replace(exact=x.exact.to(torch.bfloat16))
        return Both(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in x))
    rows = _wide(x.to(torch.bfloat16).reshape(-1, x.shape[-1]))
    return Both(rows, *_rounded(rows.detach(), kernels))


def _exact(x: Tensor | Both) -> Tensor:
    return x.exact if isinstance(x, Both) else x


def _rounded(rows: Tensor, kernels: bool) -> Rounded:
    if not kernels:
        return rounded(rows)
    from muralist.models.fused import ops_8_bits

    return Rounded(*ops_8_bits.rounded(rows))
