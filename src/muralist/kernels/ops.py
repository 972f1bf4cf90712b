"""The operations of a JiT block: the definition in plain PyTorch, and on a GPU the fused kernels that replace it.

A linear layer before a fused op adds its bias without a gradient; the op returns the bias gradient
(kernels/launch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muralist.core.hardware import can_compile, nvidia_capability
from muralist.kernels import fp8
from muralist.kernels.fp8 import Fp8Activation, pad_chunks

_EPSILON = 1e-6
_MIN_CAPABILITY = (8, 0)  # Ampere: the first GPUs with bf16
# The attention kernel is written for Hopper's shared memory and WGMMA, and for few tokens, where other kernels waste a
# third of their work.
_HOPPER = 9
_MAX_ATTENTION_TOKENS = 320
_ATTENTION_HEAD_DIMS = (64,)
_HALF = (torch.bfloat16, torch.float16)
# Channels per 128 bytes in half precision: fast GEMMs need rows aligned to 16 bytes, and Inductor copies tensors whose
# rows are not aligned to 128. The hidden width of JiT-L is 2730: both halves of w12's output are padded with zeros,
# SwiGLU of zeros is zero, and w3's weight gets columns for the padding.
_ALIGNMENT = 64

RopeTable = tuple[Tensor, Tensor]  # cos and sin, [tokens, head_dim / 2] each


class Linear(nn.Linear):
    """A large linear layer of a block, which may use FP8 matmuls in training."""

    fp8 = False

    @property
    def uses_fp8(self) -> bool:
        """Return whether this call uses FP8: only with gradients."""
        return self.fp8 and torch.is_grad_enabled()

    def forward(self, x: Tensor | Fp8Activation) -> Tensor:
        """Compute x W^T + b."""
        return self.with_bias(x, self.bias)

    def with_bias(self, x: Tensor | Fp8Activation, bias: Tensor) -> Tensor:
        """Compute the same with another bias, such as a detached one."""
        if isinstance(x, Fp8Activation) or self.uses_fp8:
            return fp8.fp8_linear(x, self.weight, bias, use_kernels(x))
        return F.linear(x, self.weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of the last dimension, computed in float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps=_EPSILON).to(x.dtype)


def modulate(x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """RMSNorm of tokens [B, tokens, width], then the adaLN modulation of their sample, [B, width]."""
    return rms_norm(x, weight) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def output_projection(layer: Linear, inner: Tensor | Fp8Activation) -> tuple[Tensor, Tensor | None]:
    """Compute the last layer of a branch; a returned bias is already added, and the consumer returns its gradient."""
    if use_kernels(inner):
        # A clone of the bias: with sharded weights the layer's own is freed before the next block runs.
        if isinstance(inner, Fp8Activation) or inner.shape[-1] == layer.in_features:
            return _without_bias_gradient(layer, inner), layer.bias.clone()
        padded = F.pad(layer.weight, (0, -layer.in_features % _ALIGNMENT))
        return F.linear(inner, padded, layer.bias.detach()), layer.bias.clone()
    return layer(inner), None


def gated_residual(x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor) -> Tensor:
    """Add a gated branch to the residual stream."""
    if bias is not None:
        branch = branch + (bias - bias.detach()).to(branch.dtype)  # zero, but carries the bias gradient
    return x + gate.unsqueeze(1) * branch


def adaln_rmsnorm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor,
    consumer: nn.Linear,
) -> tuple[Tensor, Tensor | Fp8Activation]:  # fmt: skip
    """Return the residual stream with a gated branch added, and the same modulated, in FP8 if its consumer uses FP8."""
    if use_kernels(x):
        from muralist.kernels import adaln_rmsnorm as kernel

        if isinstance(consumer, Linear) and consumer.uses_fp8:
            residual, y, _, values, rows = kernel.adaln_rmsnorm_fp8(x, branch, bias, gate, weight, shift, scale)
            return residual, Fp8Activation(y, values, rows)
        residual, y, _ = kernel.adaln_rmsnorm(x, branch, bias, gate, weight, shift, scale)
        return residual, y
    residual = gated_residual(x, branch, bias, gate)
    return residual, modulate(residual, weight, shift, scale)


def qk_norm_rope(
    qkv: Linear, x: Tensor | Fp8Activation, q_weight: Tensor, k_weight: Tensor, rope: RopeTable, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the qkv layer with QK norm and RoPE: Q, K and V, [B, heads, tokens, head_dim] each."""
    if use_kernels(x):
        from muralist.kernels import qk_norm_rope as kernel

        return kernel.qk_norm_rope(_without_bias_gradient(qkv, x), qkv.bias, q_weight, k_weight, *rope, heads)
    q, k, v = qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q = apply_rope(rms_norm(q, q_weight), rope).to(v.dtype)
    k = apply_rope(rms_norm(k, k_weight), rope).to(v.dtype)
    return q, k, v


def attention(
    qkv: Linear, x: Tensor | Fp8Activation, q_weight: Tensor, k_weight: Tensor, rope: RopeTable, heads: int
) -> Tensor:
    """Compute the qkv layer and self-attention with QK norm and RoPE, [B, tokens, heads * head_dim]."""
    head_dim = qkv.in_features // heads
    if use_kernels(x):
        from muralist.kernels import attention as kernel
        from muralist.kernels import qk_norm_rope as qk_kernel

        if isinstance(x, Tensor) and _can_fuse_epilogue(x) and _has_attention_kernel(x, head_dim):
            weight = qkv.weight.to(x.dtype)
            return kernel.linear_qkv_attention(x, weight, qkv.bias, q_weight, k_weight, *rope, heads)
        y = _without_bias_gradient(qkv, x)
        if _has_attention_kernel(y, head_dim):
            return kernel.attention(y, qkv.bias, q_weight, k_weight, *rope, heads)
        q, k, v = qk_kernel.qk_norm_rope(y, qkv.bias, q_weight, k_weight, *rope, heads)
    else:
        q, k, v = qk_norm_rope(qkv, x, q_weight, k_weight, rope, heads)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def swiglu(w12: Linear, x: Tensor | Fp8Activation) -> Tensor | Fp8Activation:
    """Compute silu of the first half of the layer's channels times the second; kernels may pad the result."""
    if use_kernels(x):
        if w12.uses_fp8:
            return fp8.fp8_linear_swiglu(x, w12.weight, w12.bias)
        from muralist.kernels import gemm_epilogue
        from muralist.kernels import swiglu as kernel

        assert isinstance(x, Tensor)
        # Not in float32, where padding gains nothing and the padded weight would be saved for the backward pass.
        alignment = _ALIGNMENT if x.dtype in _HALF else 1
        bias = pad_chunks(w12.bias[:, None], 2, 1, alignment)[:, 0]
        weight = pad_chunks(w12.weight, 2, w12.in_features, alignment)
        if _can_fuse_epilogue(x):
            return gemm_epilogue.linear_swiglu(x, weight.to(x.dtype), bias)
        return kernel.swiglu(F.linear(x, weight, bias.detach()), bias)
    gate, value = w12(x).chunk(2, dim=-1)
    return F.silu(gate) * value


def apply_rope(x: Tensor, rope: RopeTable) -> Tensor:
    """Rotate neighboring channels (2i, 2i + 1) of [B, heads, tokens, head_dim], in float32."""
    cos, sin = rope
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def use_kernels(x: Tensor | Fp8Activation) -> bool:
    """Return whether the Triton kernels run: on NVIDIA GPUs since Ampere, with a working compiler."""
    return (x.original if isinstance(x, Fp8Activation) else x).is_cuda and _have_kernels()


def _constant(answer: Callable[[], bool]) -> Callable[[], bool]:
    """Let torch.compile take the result as a constant; a torch without CUDA never asks, and the mark costs it 2 s."""
    return torch.compiler.assume_constant_result(answer) if torch.backends.cuda.is_built() else answer


@_constant
def _have_kernels() -> bool:
    return _find_kernels()


@cache
def _find_kernels() -> bool:
    return can_compile() and nvidia_capability() >= _MIN_CAPABILITY


@_constant
def _have_hopper_kernels() -> bool:
    return _is_hopper()


@cache
def _is_hopper() -> bool:
    return nvidia_capability()[0] == _HOPPER


def _has_attention_kernel(tokens: Tensor, head_dim: int) -> bool:
    fits = tokens.shape[1] <= _MAX_ATTENTION_TOKENS and head_dim in _ATTENTION_HEAD_DIMS
    return fits and tokens.dtype in _HALF and _have_hopper_kernels()


def _can_fuse_epilogue(x: Tensor) -> bool:
    """Return whether a GEMM and its epilogue run as one kernel; with gradients, the intermediate is needed."""
    aligned = x.shape[-1] % _ALIGNMENT == 0
    return aligned and not torch.is_grad_enabled() and x.dtype in _HALF and _have_hopper_kernels()


def _without_bias_gradient(layer: Linear, x: Tensor | Fp8Activation) -> Tensor:
    """Compute a layer whose bias gradient the next op returns."""
    return layer.with_bias(x, layer.bias.detach())
