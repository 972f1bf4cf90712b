"""Norm and rotation of queries and keys in one pass over the output of the qkv layer, and their gradients in another.

The layer's output is [B, tokens, 3, heads, head_dim]. Queries and keys come out normalised and rotated, values as they
are, [B, tokens, heads, head_dim] each. The backward pass takes the three gradients in that shape and writes the layer's
gradient in one piece; it also sums what the layer's bias gets, first over the tokens of a program, then over programs.
Where values are read in place, both passes leave them and their gradient alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fused.launch import launch

EPSILON = 1e-6
_WARPS = {"forward": 2, "backward": 4}
_CHUNKS = (32, 16)  # tokens of one program in the backward pass: the first with which there are enough programs
_ENOUGH = 4000


@triton.jit
def turned(value, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Pairs of channels, turned."""
    even, odd = tl.split(tl.reshape(value, (HEADS, HALF, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS, 2 * HALF))


@triton.jit
def _heads_forward(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, tokens, heads, half,
    EPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row % tokens
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    here = (head < heads) & (channel < 2 * half)
    place = head * half * 2 + channel
    stored = tl.load(qkv_ptr + (row * 3 + which) * width + place, mask=here, other=0.0)
    if which == 2:
        tl.store(v_ptr + row * width + place, stored, mask=here)
    else:
        weight_ptr = q_weight_ptr if which == 0 else k_weight_ptr
        out_ptr = q_ptr if which == 0 else k_ptr
        weight = tl.load(weight_ptr + channel, mask=channel < 2 * half, other=0.0).to(tl.float32)
        value = stored.to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / (2 * half) + EPS)
        cos = tl.load(cos_ptr + token * half + pair, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + token * half + pair, mask=pair < half, other=0.0)
        out = turned(value * inverse * weight, cos, sin, HEADS, HALF)
        tl.store(out_ptr + row * width + place, out.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _heads_backward(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, dweight_ptr, dbias_ptr,
    tokens, heads, half, q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    EPS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    sample, chunk, which = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    inside = (head < heads) & (channel < 2 * half)
    given_ptr = dq_ptr if which == 0 else (dk_ptr if which == 1 else dv_ptr)
    of_sample = q_sample if which == 0 else (k_sample if which == 1 else v_sample)
    of_token = q_token if which == 0 else (k_token if which == 1 else v_token)
    of_head = q_head if which == 0 else (k_head if which == 1 else v_head)
    weight_ptr = q_weight_ptr if which == 0 else k_weight_ptr
    weight = tl.load(weight_ptr + channel, mask=channel < 2 * half, other=0.0).to(tl.float32)
    dweight = tl.zeros((HEADS, 2 * HALF), tl.float32)
    dbias = tl.zeros((HEADS, 2 * HALF), tl.float32)
    for number in range(CHUNK):
        token = chunk * CHUNK + number
        here = inside & (token < tokens)
        place = ((sample * tokens + token) * 3 + which) * width + head * half * 2 + channel
        given = tl.load(
            given_ptr + sample * of_sample + token * of_token + head * of_head + channel, mask=here, other=0.0
        ).to(tl.float32)
        if which == 2:
            dvalue = given
        else:
            turning = (pair < half) & (token < tokens)
            cos = tl.load(cos_ptr + token * half + pair, mask=turning, other=0.0)
            sin = tl.load(sin_ptr + token * half + pair, mask=turning, other=0.0)
            dout = turned(given, cos, -sin, HEADS, HALF)
            value = tl.load(qkv_ptr + place, mask=here, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / (2 * half) + EPS)
            normed = value * inverse
            inner = dout * weight
            mean = tl.sum(inner * normed, axis=1, keep_dims=True) / (2 * half)
            dvalue = inverse * (inner - normed * mean)
            dweight += dout * normed
        stored = dvalue.to(dqkv_ptr.dtype.element_ty)
        tl.store(dqkv_ptr + place, stored, mask=here)
        dbias += stored.to(tl.float32)
    program = sample * tl.num_programs(1) + chunk
    tl.store(dbias_ptr + (program * tl.num_programs(2) + which) * width + head * half * 2 + channel, dbias, mask=inside)
    if which != 2:
        flat = tl.arange(0, 2 * HALF)
        tl.store(dweight_ptr + (program * 2 + which) * half * 2 + flat, tl.sum(dweight, axis=0), mask=flat < 2 * half)


def forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, values: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, tokens, heads, head_dim] each; values only where they are asked for."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, tokens, three = qkv.shape
    head_dim = three // 3 // heads
    q, k = (qkv.new_empty((batch, tokens, heads, head_dim)) for _ in range(2))
    v = qkv.new_empty(q.shape if values else (1,))
    launch(
        _heads_forward, (batch * tokens, 3 if values else 2),
        qkv, q_weight, k_weight, cos, sin, q, k, v, tokens, heads, head_dim // 2,
        EPS=EPSILON, num_warps=_WARPS["forward"], **_blocks(heads, head_dim),
    )  # fmt: skip
    return q, k, v


def backward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    dq: Tensor, dk: Tensor, dv: Tensor | None, dqkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the layer's output; and, to be added up, of the two norms' weights [n, 2, head_dim] and of its bias.

    Without dv, those of the values are in dqkv already, and the bias's part of them is left out.
    """
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, tokens, three = qkv.shape
    head_dim = three // 3 // heads
    dqkv = qkv.new_empty(qkv.shape) if dqkv is None else dqkv
    parts = 2 if dv is None else 3
    chunk = next((size for size in _CHUNKS if parts * batch * triton.cdiv(tokens, size) >= _ENOUGH), _CHUNKS[-1])
    chunks = triton.cdiv(tokens, chunk)
    dweight = qkv.new_empty((batch * chunks, 2, head_dim), dtype=torch.float32)
    dbias = qkv.new_empty((batch * chunks, parts * heads * head_dim), dtype=torch.float32)
    given = [
        gradient if gradient.stride(3) == 1 else gradient.contiguous()
        for gradient in (dq, dk, dk if dv is None else dv)
    ]
    launch(
        _heads_backward, (batch, chunks, parts),
        qkv, q_weight, k_weight, cos, sin, *given, dqkv, dweight, dbias, tokens, heads, head_dim // 2,
        *(stride for gradient in given for stride in gradient.stride()[:3]),
        EPS=EPSILON, CHUNK=chunk, num_warps=_WARPS["backward"], **_blocks(heads, head_dim),
    )  # fmt: skip
    return dqkv, dweight, dbias


def _blocks(heads: int, head_dim: int) -> dict[str, int]:
    return {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(head_dim // 2)}
