"""What lies between a JiT's matrix products, in plain PyTorch; on a GPU it comes from kernels that touch each byte once."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muralist.machine import can_compile
from muralist.models import fp8_training
from muralist.models.fp8_training import Both, widened

_EPSILON = 1e-6
_CAPABILITY = (8, 0)  # the first cards with bf16
# What our own attention is for: other kernels waste a third of their work on so few tokens.
_HOPPER = 9  # its shared memory and matrix units
_SHORT = 320
_SHORT_HEADS = (64,)
_HALF = (torch.bfloat16, torch.float16)
# Channels of rows that begin at multiples of 128 bytes in half precision: fast products want 16 bytes, and Inductor lays out
# anew what has less than these. Between w12 and w3 JiT-L has 2730: zeros follow in both halves of w12's output, what comes
# of them are zeros too, and w3's weights get columns for them.
_EVEN = 64

Rotation = tuple[Tensor, Tensor]  # cos and sin, [tokens, head_dim / 2] each


class Linear(nn.Linear):
    """A large linear layer of a block; its products are in 8 bits where it is trained, if that is asked for."""

    eight_bits = False

    @property
    def in_8_bits(self) -> bool:
        """Whether they are in 8 bits now."""
        return self.eight_bits and torch.is_grad_enabled()

    def forward(self, x: Tensor | Both) -> Tensor:
        """x W^T + b."""
        return self.with_bias(x, self.bias)

    def with_bias(self, x: Tensor | Both, bias: Tensor) -> Tensor:
        """The same with another bias, or one that gets no gradient here."""
        if isinstance(x, Both) or self.in_8_bits:
            return fp8_training.linear(x, self.weight, bias, fused(x))
        return F.linear(x, self.weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm of the last dimension with a learned scale, in float32 whatever the input."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps=_EPSILON).to(x.dtype)


def modulated(x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalised tokens [B, tokens, width], scaled and shifted by what belongs to their sample [B, width]."""
    return rms_norm(x, weight) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def projection(layer: Linear, inner: Tensor | Both) -> tuple[Tensor, Tensor | None]:
    """A branch that a layer makes of its inner values, and the bias whose gradient the one who adds it is to pass on."""
    if fused(inner):
        # A copy of the bias: where weights lie in parts, the layer's own is gone when the next block is at work.
        if isinstance(inner, Both) or inner.shape[-1] == layer.in_features:
            return _without_bias_gradient(layer, inner), layer.bias.clone()
        even = F.pad(layer.weight, (0, -layer.in_features % _EVEN))
        return F.linear(inner, even, layer.bias.detach()), layer.bias.clone()
    return layer(inner), None


def gated_sum(x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor) -> Tensor:
    """A branch added to the residual stream, through the sample's gate."""
    if bias is not None:
        branch = branch + (bias - bias.detach()).to(branch.dtype)  # nothing, but it has the bias's gradient
    return x + gate.unsqueeze(1) * branch


def gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor,
    reader: nn.Linear,
) -> tuple[Tensor, Tensor | Both]:  # fmt: skip
    """The residual stream with a branch added, and that modulated, for the layer that reads it."""
    if fused(x):
        from muralist.models.fused import ops, ops_8_bits

        if isinstance(reader, Linear) and reader.in_8_bits:
            residual, y, _, values, rows = ops_8_bits.gated_norm(x, branch, bias, gate, weight, shift, scale)
            return residual, Both(y, values, rows)
        return ops.gated_norm(x, branch, bias, gate, weight, shift, scale)
    residual = gated_sum(x, branch, bias, gate)
    return residual, modulated(residual, weight, shift, scale)


def rotated_heads(
    layer: Linear, x: Tensor | Both, q_weight: Tensor, k_weight: Tensor, rotation: Rotation, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normalised and rotated, and values, [B, heads, tokens, head_dim] each."""
    if fused(x):
        from muralist.models.fused import ops

        qkv = _without_bias_gradient(layer, x)
        return ops.rotated_heads(qkv, layer.bias, q_weight, k_weight, *rotation, heads)
    q, k, v = layer(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q = rotate(rms_norm(q, q_weight), rotation).to(v.dtype)
    k = rotate(rms_norm(k, k_weight), rotation).to(v.dtype)
    return q, k, v


def attention(
    layer: Linear, x: Tensor | Both, q_weight: Tensor, k_weight: Tensor, rotation: Rotation, heads: int
) -> Tensor:
    """Attention among all tokens of each sample with such queries, keys and values, [B, tokens, heads * head_dim]."""
    if fused(x):
        from muralist.models.fused import ops

        if isinstance(x, Tensor) and _has_whole_layers(x) and _has_short_attention(x, layer.in_features // heads):
            weight = layer.weight.to(x.dtype)
            return ops.attention_of_layer(x, weight, layer.bias, q_weight, k_weight, *rotation, heads)
        qkv = _without_bias_gradient(layer, x)
        if _has_short_attention(qkv, layer.in_features // heads):
            return ops.attention(qkv, layer.bias, q_weight, k_weight, *rotation, heads)
        q, k, v = ops.rotated_heads(qkv, layer.bias, q_weight, k_weight, *rotation, heads)
    else:
        q, k, v = rotated_heads(layer, x, q_weight, k_weight, rotation, heads)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def gated_linear_unit(layer: Linear, x: Tensor | Both) -> Tensor | Both:
    """silu of the first half of the layer's channels times the second; from kernels, zeros may follow."""
    if fused(x):
        if layer.in_8_bits:
            return fp8_training.gated_linear_unit(x, layer.weight, layer.bias)
        from muralist.models.fused import ops

        assert isinstance(x, Tensor)
        # Not in float32, where nothing is gained: the copy of the weights would be kept for the backward pass.
        multiple = _EVEN if x.dtype in _HALF else 1
        bias = widened(layer.bias[:, None], 2, 1, multiple)[:, 0]
        weight = widened(layer.weight, 2, layer.in_features, multiple)
        if _has_whole_layers(x):
            return ops.gated_linear_unit_of_layer(x, weight.to(x.dtype), bias)
        h = F.linear(x, weight, bias.detach())
        return ops.gated_linear_unit(h, bias)
    gate, value = layer(x).chunk(2, dim=-1)
    return F.silu(gate) * value


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn neighbouring channels (2i, 2i + 1) of [B, heads, tokens, head_dim] as points of a plane, in float32."""
    cos, sin = rotation
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def fused(x: Tensor | Both) -> bool:
    """Whether the kernels do the work: on NVIDIA cards since 2020, where there is what compiles them."""
    return (x.exact if isinstance(x, Both) else x).is_cuda and _kernels_run()


@torch.compiler.assume_constant_result
def _kernels_run() -> bool:
    return _have_kernels()


@cache
def _have_kernels() -> bool:
    return can_compile() and torch.cuda.get_device_capability() >= _CAPABILITY


def _has_short_attention(tokens: Tensor, head_dim: int) -> bool:
    short = tokens.shape[1] <= _SHORT and head_dim in _SHORT_HEADS
    return short and tokens.dtype in _HALF and _hoppers_kernels_run()


def _has_whole_layers(x: Tensor) -> bool:
    """Whether a product and what follows it are one kernel: gradients would need what lies between them."""
    even = x.shape[-1] % _EVEN == 0
    return even and not torch.is_grad_enabled() and x.dtype in _HALF and _hoppers_kernels_run()


@torch.compiler.assume_constant_result
def _hoppers_kernels_run() -> bool:
    return _on_hopper()


@cache
def _on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == _HOPPER


def _without_bias_gradient(layer: Linear, x: Tensor | Both) -> Tensor:
    """The layer's output; the kernel that follows has the bias's gradient in hand and passes it on."""
    return layer.with_bias(x, layer.bias.detach())
