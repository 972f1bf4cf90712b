"""The kernels as operations that autograd and torch.compile know.

Each takes the bias of the matrix product before it, which that product has already added and whose gradient it left out:
the backward kernel has the sum in hand, and another pass over all tokens is spared. What its programs have summed up is
added here, outside the operations: compiled, that takes half the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muralist.models.fused import attention as attention_kernels
from muralist.models.fused import heads as head_kernels
from muralist.models.fused import norm, products, swiglu
from muralist.models.fused.launch import operation


@operation("muralist::gated_norm")
def _gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    residual, y, inverse = norm.forward(x, branch, gate, weight, shift, scale)
    return residual, y, inverse


@operation("muralist::gated_norm_backward")
def _gated_norm_backward(
    residual: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, inverse: Tensor,
    dy: Tensor, dresidual: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return norm.backward(residual, branch, gate, weight, scale, inverse, dy, dresidual)


def keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What the gradients need, with and without 8 bits."""
    _, branch, ctx.bias, gate, weight, _, scale = inputs
    residual, _, inverse, *_ = output
    ctx.bias = None if ctx.bias is None else ctx.bias.dtype
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(residual, branch, gate, weight, scale, inverse)


def norm_gradients(ctx: Any, dresidual: Tensor, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """Of everything that goes in."""
    residual, branch, gate, weight, scale, inverse = ctx.saved_tensors
    dx, dbranch, sums = _gated_norm_backward(residual, branch, gate, weight, scale, inverse, dy, dresidual)
    dgate, dshift, dscale = sums[:3].sum(2).to(gate.dtype).unbind(0)  # they come out of layers of one type
    of_weight, of_bias = sums[3:].sum((1, 2)).unbind(0)
    dbias = None if ctx.bias is None else of_bias.to(ctx.bias)
    return dx, dbranch, dbias, dgate, of_weight.to(weight.dtype), dshift, dscale


_gated_norm.register_autograd(norm_gradients, setup_context=keep_norm)


@operation("muralist::heads")
def _heads(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return head_kernels.forward(qkv, q_weight, k_weight, cos, sin, heads)


@operation("muralist::heads_backward")
def _heads_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return head_kernels.backward(qkv, q_weight, k_weight, cos, sin, heads, dq, dk, dv)


def _keep_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias = bias.dtype
    ctx.save_for_backward(qkv, *tensors)


def _heads_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
    dqkv, dweight, dbias = _heads_backward(qkv, q_weight, k_weight, cos, sin, ctx.heads, dq, dk, dv)
    dq_weight, dk_weight = dweight.sum(0).unbind(0)
    return dqkv, dbias.sum(0).to(ctx.bias), dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None


_heads.register_autograd(_heads_gradients, setup_context=_keep_heads)


@operation("muralist::attention")
def _attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _ = head_kernels.forward(qkv, q_weight, k_weight, cos, sin, heads, values=False)
    return *attention_kernels.forward(q, k, qkv), q, k


@operation("muralist::attention_backward")
def _attention_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    out: Tensor, log_sum: Tensor, q: Tensor, k: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dqkv, dbias_of_values = attention_kernels.backward(q, k, qkv, out, log_sum, dout)
    dqkv, dweight, dbias = head_kernels.backward(qkv, q_weight, k_weight, cos, sin, heads, dq, dk, None, dqkv)
    return dqkv, dweight, dbias, dbias_of_values


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias = bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(qkv, *tensors, *output)


def _attention_gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin, *made = ctx.saved_tensors
    dqkv, dweight, *dbias = _attention_backward(qkv, q_weight, k_weight, cos, sin, ctx.heads, *made, dout)
    dq_weight, dk_weight = dweight.sum(0).unbind(0)
    of_bias = torch.cat([sums.sum(0) for sums in dbias]).to(ctx.bias)
    return dqkv, of_bias, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None


_attention.register_autograd(_attention_gradients, setup_context=_keep_attention)


@operation("muralist::swiglu")
def _swiglu(h: Tensor, bias: Tensor) -> Tensor:
    return swiglu.forward(h)[0]


@operation("muralist::swiglu_backward")
def _swiglu_backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dh, sums = swiglu.backward(h, dout)
    return dh, sums


def _keep_swiglu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    h, bias = inputs
    ctx.bias = bias.dtype
    ctx.save_for_backward(h)


def _swiglu_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    (h,) = ctx.saved_tensors
    dh, sums = _swiglu_backward(h, dout)
    return dh, sums.sum(0).to(ctx.bias)


_swiglu.register_autograd(_swiglu_gradients, setup_context=_keep_swiglu)


@operation("muralist::attention_of_layer")
def _attention_of_layer(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    qkv = products.heads(x, weight, bias, q_weight, k_weight, cos, sin, weight.shape[0] // 3 // heads)
    q, k, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    return attention_kernels.forward(q, k, qkv)[0].flatten(2)


@operation("muralist::swiglu_of_layer")
def _swiglu_of_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return products.swiglu(x, weight, bias)


def gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """x + gate * branch, and that normalised and modulated."""
    residual, y, _ = _gated_norm(x, branch, bias, gate, weight, shift, scale)
    return residual, y


def rotated_heads(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normalised and rotated, and values, [B, heads, tokens, head_dim] each."""
    q, k, v = _heads(qkv, bias, q_weight, k_weight, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Attention with queries and keys normalised and rotated, [B, tokens, heads * head_dim]."""
    return _attention(qkv, bias, q_weight, k_weight, cos, sin, heads)[0].flatten(2)


def gated_linear_unit(h: Tensor, bias: Tensor) -> Tensor:
    """silu of the first half times the second."""
    return _swiglu(h, bias)


def attention_of_layer(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """The same from the layer's input on, without gradients."""
    return _attention_of_layer(x, weight, bias, q_weight, k_weight, cos, sin, heads)


def gated_linear_unit_of_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """silu(gate) * value from the layer's input on, without gradients."""
    return _swiglu_of_layer(x, weight, bias)
