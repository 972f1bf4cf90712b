"""The Triton kernels as custom ops with autograd, for eager mode and torch.compile.

An op takes the bias of the GEMM before it. That GEMM adds the bias without a gradient (`bias.detach()`), and the op's
backward kernel, which reads the same values anyway, also sums the bias gradient: one pass over all tokens less. The
partial sums of the kernels' programs are reduced here, outside the ops, because compiled reductions take half the
time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muralist.kernels import adaln_rmsnorm as adaln_rmsnorm_kernels
from muralist.kernels import attention as attention_kernels
from muralist.kernels import fp8_quantize, gemm_epilogue
from muralist.kernels import qk_norm_rope as qk_norm_rope_kernels
from muralist.kernels import swiglu as swiglu_kernels
from muralist.kernels.launch import triton_op

# Gated residual, RMSNorm, adaLN modulation


@triton_op("muralist::adaln_rmsnorm")
def _adaln_rmsnorm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    residual, y, inv_rms = adaln_rmsnorm_kernels.forward(x, branch, gate, weight, shift, scale)
    return residual, y, inv_rms


@triton_op("muralist::adaln_rmsnorm_fp8")
def adaln_rmsnorm_fp8(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the residual, y, the inverse RMS of each row, and y in FP8 with its row-wise scales."""
    residual, y, inv_rms, values, row_scale = adaln_rmsnorm_kernels.forward(
        x, branch, gate, weight, shift, scale, quantize=True
    )
    return residual, y, inv_rms, values, row_scale


@triton_op("muralist::adaln_rmsnorm_backward")
def _adaln_rmsnorm_backward(
    residual: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, inv_rms: Tensor,
    dy: Tensor, dresidual: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return adaln_rmsnorm_kernels.backward(residual, branch, gate, weight, scale, inv_rms, dy, dresidual)


def _adaln_rmsnorm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, branch, bias, gate, weight, _, scale = inputs
    residual, _, inv_rms, *_ = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(residual, branch, gate, weight, scale, inv_rms)


def _adaln_rmsnorm_gradients(ctx: Any, dresidual: Tensor, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    residual, branch, gate, weight, scale, inv_rms = ctx.saved_tensors
    dx, dbranch, sums = _adaln_rmsnorm_backward(residual, branch, gate, weight, scale, inv_rms, dy, dresidual)
    dgate, dshift, dscale = sums[:3].sum(2).to(gate.dtype).unbind(0)  # outputs of one layer, so of one dtype
    dweight, dbias = sums[3:].sum((1, 2)).unbind(0)
    dbias = None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
    return dx, dbranch, dbias, dgate, dweight.to(weight.dtype), dshift, dscale


_adaln_rmsnorm.register_autograd(_adaln_rmsnorm_gradients, setup_context=_adaln_rmsnorm_setup)
adaln_rmsnorm_fp8.register_autograd(_adaln_rmsnorm_gradients, setup_context=_adaln_rmsnorm_setup)


def adaln_rmsnorm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return x + gate * branch, and the same normalized and modulated."""
    residual, y, _ = _adaln_rmsnorm(x, branch, bias, gate, weight, shift, scale)
    return residual, y


# QK norm and RoPE


@triton_op("muralist::qk_norm_rope")
def _qk_norm_rope(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return qk_norm_rope_kernels.forward(qkv, q_weight, k_weight, cos, sin, heads)


@triton_op("muralist::qk_norm_rope_backward")
def _qk_norm_rope_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return qk_norm_rope_kernels.backward(qkv, q_weight, k_weight, cos, sin, heads, dq, dk, dv)


def _qk_norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(qkv, *tensors)


def _qk_norm_rope_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
    dqkv, dweight, dbias = _qk_norm_rope_backward(qkv, q_weight, k_weight, cos, sin, ctx.heads, dq, dk, dv)
    dq_weight, dk_weight = dweight.sum(0).unbind(0)
    dbias = dbias.sum(0).to(ctx.bias_dtype)
    return dqkv, dbias, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None


_qk_norm_rope.register_autograd(_qk_norm_rope_gradients, setup_context=_qk_norm_rope_setup)


def qk_norm_rope(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and K with QK norm and RoPE, and V, [B, heads, tokens, head_dim] each."""
    q, k, v = _qk_norm_rope(qkv, bias, q_weight, k_weight, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


# Attention of short sequences, from the output of the qkv layer


@triton_op("muralist::attention")
def _attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _ = qk_norm_rope_kernels.forward(qkv, q_weight, k_weight, cos, sin, heads, with_values=False)
    return *attention_kernels.forward(q, k, qkv), q, k


@triton_op("muralist::attention_backward")
def _attention_backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dqkv, dbias_v = attention_kernels.backward(q, k, qkv, out, lse, dout)
    dqkv, dweight, dbias_qk = qk_norm_rope_kernels.backward(
        qkv, q_weight, k_weight, cos, sin, heads, dq, dk, None, dqkv
    )
    return dqkv, dweight, dbias_qk, dbias_v


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(qkv, *tensors, *output)


def _attention_gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin, *outputs = ctx.saved_tensors
    dqkv, dweight, *dbias_sums = _attention_backward(qkv, q_weight, k_weight, cos, sin, ctx.heads, *outputs, dout)
    dq_weight, dk_weight = dweight.sum(0).unbind(0)
    dbias = torch.cat([sums.sum(0) for sums in dbias_sums]).to(ctx.bias_dtype)
    return dqkv, dbias, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None


_attention.register_autograd(_attention_gradients, setup_context=_attention_setup)


def attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Compute attention with QK norm and RoPE, [B, tokens, heads * head_dim]."""
    return _attention(qkv, bias, q_weight, k_weight, cos, sin, heads)[0].flatten(2)


@triton_op("muralist::linear_qkv_attention")
def linear_qkv_attention(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Compute the qkv layer and its attention, without gradients."""
    qkv = gemm_epilogue.qkv_norm_rope(x, weight, bias, q_weight, k_weight, cos, sin, weight.shape[0] // 3 // heads)
    q, k, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    return attention_kernels.forward(q, k, qkv)[0].flatten(2)


# SwiGLU


@triton_op("muralist::swiglu")
def swiglu(h: Tensor, bias: Tensor) -> Tensor:
    """Compute silu of the first half of the channels times the second."""
    return swiglu_kernels.forward(h)[0]


@triton_op("muralist::swiglu_backward")
def _swiglu_backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dh, sums = swiglu_kernels.backward(h, dout)
    return dh, sums


def _swiglu_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    h, bias = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(h)


def _swiglu_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    (h,) = ctx.saved_tensors
    dh, sums = _swiglu_backward(h, dout)
    return dh, sums.sum(0).to(ctx.bias_dtype)


swiglu.register_autograd(_swiglu_gradients, setup_context=_swiglu_setup)


@triton_op("muralist::linear_swiglu")
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a linear layer and SwiGLU of its output, without gradients."""
    return gemm_epilogue.swiglu(x, weight, bias)


@triton_op("muralist::swiglu_fp8")
def swiglu_fp8(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute SwiGLU, and the same in FP8 with its row-wise scales."""
    out, values, scale = swiglu_kernels.forward(h, quantize=True)
    return out, values, scale


@triton_op("muralist::swiglu_fp8_backward")
def swiglu_fp8_backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dh, partial sums of the bias gradient, and dh in FP8 with its row-wise scales."""
    dh, sums, values, scale = swiglu_kernels.backward(h, dout, quantize=True)
    return dh, sums, values, scale


@triton_op("muralist::quantize_rowwise")
def quantize_rowwise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [R, K] to FP8 with a scale [R, 1] each."""
    return fp8_quantize.quantize_rowwise(rows)
