"""QK norm and RoPE on the output of the qkv layer, forward and backward.

The layer's output is [B, tokens, 3, heads, head_dim]; Q, K and V come out as [B, tokens, heads, head_dim] each. The
backward pass takes the three gradients in that shape and writes the gradient of the layer's output; it also sums the
gradient of the layer's bias, first over the tokens of a program, then (in the caller) over programs. The attention
kernel reads V in place: both passes then skip V and its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.kernels.launch import launch, triton_op

EPSILON = 1e-6
_NUM_WARPS = {"forward": 2, "backward": 4, "wan": 4}
_CHUNK_SIZES = (32, 16)  # tokens per program in the backward pass: the first that gives enough programs
_MIN_PROGRAMS = 4000


@triton.jit
def rotate_pairs(value, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate pairs of neighboring channels."""
    even, odd = tl.split(tl.reshape(value, (HEADS, HALF, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS, 2 * HALF))


@triton.jit
def _qk_norm_rope_forward(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, tokens, heads, half,
    EPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row % tokens
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    mask = (head < heads) & (channel < 2 * half)
    offset = head * half * 2 + channel
    loaded = tl.load(qkv_ptr + (row * 3 + part) * width + offset, mask=mask, other=0.0)
    if part == 2:
        tl.store(v_ptr + row * width + offset, loaded, mask=mask)
    else:
        weight_ptr = q_weight_ptr if part == 0 else k_weight_ptr
        out_ptr = q_ptr if part == 0 else k_ptr
        weight = tl.load(weight_ptr + channel, mask=channel < 2 * half, other=0.0).to(tl.float32)
        value = loaded.to(tl.float32)
        inv_rms = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / (2 * half) + EPS)
        cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0)
        out = rotate_pairs(value * inv_rms * weight, cos, sin, HEADS, HALF)
        tl.store(out_ptr + row * width + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _qk_norm_rope_backward(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, dweight_ptr, dbias_ptr,
    tokens, heads, half, q_sample_stride, q_token_stride, q_head_stride, k_sample_stride, k_token_stride, k_head_stride,
    v_sample_stride, v_token_stride, v_head_stride,
    EPS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    sample, chunk, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    head_mask = (head < heads) & (channel < 2 * half)
    dout_ptr = dq_ptr if part == 0 else (dk_ptr if part == 1 else dv_ptr)
    sample_stride = q_sample_stride if part == 0 else (k_sample_stride if part == 1 else v_sample_stride)
    token_stride = q_token_stride if part == 0 else (k_token_stride if part == 1 else v_token_stride)
    head_stride = q_head_stride if part == 0 else (k_head_stride if part == 1 else v_head_stride)
    weight_ptr = q_weight_ptr if part == 0 else k_weight_ptr
    weight = tl.load(weight_ptr + channel, mask=channel < 2 * half, other=0.0).to(tl.float32)
    dweight = tl.zeros((HEADS, 2 * HALF), tl.float32)
    dbias = tl.zeros((HEADS, 2 * HALF), tl.float32)
    for i in range(CHUNK):
        token = chunk * CHUNK + i
        mask = head_mask & (token < tokens)
        offset = ((sample * tokens + token) * 3 + part) * width + head * half * 2 + channel
        grads = tl.load(
            dout_ptr + sample * sample_stride + token * token_stride + head * head_stride + channel,
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        if part == 2:
            dvalue = grads
        else:
            pair_mask = (pair < half) & (token < tokens)
            cos = tl.load(cos_ptr + token * half + pair, mask=pair_mask, other=0.0)
            sin = tl.load(sin_ptr + token * half + pair, mask=pair_mask, other=0.0)
            dout = rotate_pairs(grads, cos, -sin, HEADS, HALF)
            value = tl.load(qkv_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            inv_rms = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / (2 * half) + EPS)
            normed = value * inv_rms
            dnormed = dout * weight
            mean = tl.sum(dnormed * normed, axis=1, keep_dims=True) / (2 * half)
            dvalue = inv_rms * (dnormed - normed * mean)
            dweight += dout * normed
        loaded = dvalue.to(dqkv_ptr.dtype.element_ty)
        tl.store(dqkv_ptr + offset, loaded, mask=mask)
        dbias += loaded.to(tl.float32)
    program = sample * tl.num_programs(1) + chunk
    tl.store(
        dbias_ptr + (program * tl.num_programs(2) + part) * width + head * half * 2 + channel, dbias, mask=head_mask
    )
    if part != 2:
        channels = tl.arange(0, 2 * HALF)
        tl.store(
            dweight_ptr + (program * 2 + part) * half * 2 + channels, tl.sum(dweight, axis=0), mask=channels < 2 * half
        )


def forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, with_values: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and, with `with_values`, V, [B, tokens, heads, head_dim] each."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, tokens, three = qkv.shape
    head_dim = three // 3 // heads
    q, k = (qkv.new_empty((batch, tokens, heads, head_dim)) for _ in range(2))
    v = qkv.new_empty(q.shape if with_values else (1,))
    launch(
        _qk_norm_rope_forward, (batch * tokens, 3 if with_values else 2),
        qkv, q_weight, k_weight, cos, sin, q, k, v, tokens, heads, head_dim // 2,
        EPS=EPSILON, num_warps=_NUM_WARPS["forward"], **_block_sizes(heads, head_dim),
    )  # fmt: skip
    return q, k, v


def backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    dq: Tensor, dk: Tensor, dv: Tensor | None, dqkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dqkv and partial sums of the gradients of the two norms' weights [n, 2, head_dim] and of the layer's bias.

    Without dv, dqkv already holds dV, and the bias gradient leaves V out.
    """
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, tokens, three = qkv.shape
    head_dim = three // 3 // heads
    dqkv = qkv.new_empty(qkv.shape) if dqkv is None else dqkv
    num_parts = 2 if dv is None else 3
    chunk = next(
        (size for size in _CHUNK_SIZES if num_parts * batch * triton.cdiv(tokens, size) >= _MIN_PROGRAMS),
        _CHUNK_SIZES[-1],
    )
    chunks = triton.cdiv(tokens, chunk)
    dweight = qkv.new_empty((batch * chunks, 2, head_dim), dtype=torch.float32)
    dbias = qkv.new_empty((batch * chunks, num_parts * heads * head_dim), dtype=torch.float32)
    grads = [
        gradient if gradient.stride(3) == 1 else gradient.contiguous()
        for gradient in (dq, dk, dk if dv is None else dv)
    ]
    launch(
        _qk_norm_rope_backward, (batch, chunks, num_parts),
        qkv, q_weight, k_weight, cos, sin, *grads, dqkv, dweight, dbias, tokens, heads, head_dim // 2,
        *(stride for gradient in grads for stride in gradient.stride()[:3]),
        EPS=EPSILON, CHUNK=chunk, num_warps=_NUM_WARPS["backward"], **_block_sizes(heads, head_dim),
    )  # fmt: skip
    return dqkv, dweight, dbias


def _block_sizes(heads: int, head_dim: int) -> dict[str, int]:
    return {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(head_dim // 2)}


@triton_op("muralist::qk_norm_rope")
def _qk_norm_rope(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(qkv, q_weight, k_weight, cos, sin, heads)


@triton_op("muralist::qk_norm_rope_backward")
def _qk_norm_rope_gradients(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(qkv, q_weight, k_weight, cos, sin, heads, dq, dk, dv)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(qkv, *tensors)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    dqkv, dweight, dbias = _qk_norm_rope_gradients(*ctx.saved_tensors, ctx.heads, dq, dk, dv)
    return qkv_gradients(ctx, dqkv, dweight, dbias.sum(0))


def qkv_gradients(ctx: Any, dqkv: Tensor, dweight: Tensor, dbias: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs, from partial sums of those of the norms' weights."""
    _, q_weight, k_weight, *_ = ctx.saved_tensors
    dq_weight, dk_weight = dweight.sum(0).unbind(0)
    dbias = dbias.to(ctx.bias_dtype)
    return dqkv, dbias, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None


_qk_norm_rope.register_autograd(_gradients, setup_context=_setup)


def qk_norm_rope(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and K with QK norm and RoPE, and V, [B, heads, tokens, head_dim] each."""
    q, k, v = _qk_norm_rope(qkv, bias, q_weight, k_weight, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@triton.jit
def _qk_norm_rope_wan(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens, heads, half,
    EPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    mask = (head < heads) & (channel < 2 * half)
    offset = head * half * 2 + channel
    x_ptr = q_ptr if part == 0 else k_ptr
    weight_ptr = q_weight_ptr if part == 0 else k_weight_ptr
    out_ptr = q_out_ptr if part == 0 else k_out_ptr
    value = tl.load(x_ptr + row * width + offset, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    inv_rms = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / width + EPS)
    angle = row % tokens * half * 2 + 2 * pair
    cos = tl.load(cos_ptr + angle, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + 1, mask=pair < half, other=0.0).to(tl.float32)
    out = rotate_pairs(value * inv_rms * weight, cos, sin, HEADS, HALF)
    tl.store(out_ptr + row * width + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


def qk_norm_rope_wan(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """RMSNorm over all heads of a token, then RoPE with interleaved cos and sin, as Wan's attention processor does."""
    batch, tokens, width = q.shape
    head_dim = width // heads
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    q_out, k_out = (x.new_empty((batch, tokens, heads, head_dim)) for x in (q, k))
    _qk_norm_rope_wan[(batch * tokens, 2)](
        q, k, q_weight, k_weight, cos, sin, q_out, k_out, tokens, heads, head_dim // 2,
        EPS=epsilon, num_warps=_NUM_WARPS["wan"], **_block_sizes(heads, head_dim),
    )  # fmt: skip
    return q_out, k_out
