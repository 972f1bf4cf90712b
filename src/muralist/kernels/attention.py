"""Attention for short sequences (up to 320 tokens), without mask or dropout.

Q and K are [B, tokens, heads, head_dim]. V is read in place from the qkv layer's output [B, tokens, 3 * heads *
head_dim], and dV is written into the last third of that output's gradient.

The forward pass keeps all keys and values of a head in shared memory and a full row of scores in registers. In the
backward pass one program handles one head: it iterates over blocks of keys and accumulates dQ in a scratch buffer of
its own. There are no atomics, so results are deterministic.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.kernels import gemm_epilogue, qk_norm_rope
from muralist.kernels.launch import launch, triton_op

_MIN_BLOCK = 16  # the smallest side that tl.dot takes
_WGMMA_ROWS = 64  # rows of one Hopper WGMMA instruction
_LOG2E = tl.constexpr(math.log2(math.e))  # the hardware computes exp2
_MIN_PROGRAMS = 512  # fills a GPU


class ForwardConfig(NamedTuple):
    """Tile sizes and launch parameters of the forward kernel."""

    block_q: int  # queries per tile
    tiles: int  # per program; fewer where there would be too few programs
    num_warps: int
    num_stages: int


class BackwardConfig(NamedTuple):
    """Tile sizes and launch parameters of the backward kernel."""

    block_k: int  # keys per block: dK and dV stay in registers
    block_q: int  # queries per tile
    num_warps: int
    num_stages: int


# The fastest of bench/kernel_speed.py at 256 and at 288 tokens.
FORWARD_CONFIG = ForwardConfig(block_q=64, tiles=8, num_warps=4, num_stages=3)
BACKWARD_CONFIG = BackwardConfig(block_k=128, block_q=32, num_warps=4, num_stages=3)


@triton.jit
def _load_rows(
    head_ptr, start_row, token_stride,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNMASKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = start_row + tl.arange(0, BLOCK)[:, None]
    pointers = head_ptr + row * token_stride + tl.arange(0, DIM)[None, :]
    if UNMASKED:
        return tl.load(pointers)
    return tl.load(pointers, mask=row < TOKENS, other=0.0)


@triton.jit
def _store_rows(
    head_ptr, start_row, token_stride, value,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNMASKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = start_row + tl.arange(0, BLOCK)[:, None]
    pointers = head_ptr + row * token_stride + tl.arange(0, DIM)[None, :]
    if UNMASKED:
        tl.store(pointers, value.to(head_ptr.dtype.element_ty))
    else:
        tl.store(pointers, value.to(head_ptr.dtype.element_ty), mask=row < TOKENS)


@triton.jit
def _scores(q, k, start_row, TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNMASKED: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if not UNMASKED:
        scores = tl.where((start_row + tl.arange(0, BLOCK))[None, :] < TOKENS, scores, float("-inf"))
    return scores


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, qkv_ptr, out_ptr, lse_ptr, heads, token_stride,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, TILES: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    PROGRAMS_PER_HEAD: tl.constexpr = (TOKENS + TILES * BLOCK_Q - 1) // (TILES * BLOCK_Q)
    batch_head = tl.program_id(0) // PROGRAMS_PER_HEAD  # neighboring programs read the same keys and values
    sample, head = (batch_head // heads).to(tl.int64), batch_head % heads
    width = heads * DIM
    q_ptr += sample * TOKENS * token_stride + head * DIM
    k_ptr += sample * TOKENS * token_stride + head * DIM
    v_ptr = qkv_ptr + sample * TOKENS * 3 * width + 2 * width + head * DIM
    out_ptr += sample * TOKENS * width + head * DIM
    lse_ptr += batch_head.to(tl.int64) * TOKENS
    # Blocks are powers of two: 288 keys are a block of 256 and one of 32, not one of 512.
    UNMASKED_LARGE: tl.constexpr = LARGE <= TOKENS
    UNMASKED_SMALL: tl.constexpr = LARGE + SMALL == TOKENS
    UNMASKED_Q: tl.constexpr = TOKENS % BLOCK_Q == 0
    k = _load_rows(k_ptr, 0, token_stride, TOKENS, LARGE, UNMASKED_LARGE, DIM)
    v = _load_rows(v_ptr, 0, 3 * width, TOKENS, LARGE, UNMASKED_LARGE, DIM)
    if SMALL > 0:
        k_small = _load_rows(k_ptr, LARGE, token_stride, TOKENS, SMALL, UNMASKED_SMALL, DIM)
        v_small = _load_rows(v_ptr, LARGE, 3 * width, TOKENS, SMALL, UNMASKED_SMALL, DIM)
    start_row = tl.program_id(0) % PROGRAMS_PER_HEAD * TILES * BLOCK_Q
    for start in tl.range(start_row, tl.minimum(start_row + TILES * BLOCK_Q, TOKENS), BLOCK_Q):
        q = _load_rows(q_ptr, start, token_stride, TOKENS, BLOCK_Q, UNMASKED_Q, DIM)
        scores = _scores(q, k, 0, TOKENS, LARGE, UNMASKED_LARGE)
        row_max = tl.max(scores, axis=1)
        if SMALL > 0:
            scores_small = _scores(q, k_small, LARGE, TOKENS, SMALL, UNMASKED_SMALL)
            row_max = tl.maximum(row_max, tl.max(scores_small, axis=1))
        row_max *= SCALE * _LOG2E
        weights = tl.exp2(scores * (SCALE * _LOG2E) - row_max[:, None])
        row_sum = tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v)
        if SMALL > 0:
            scores_small = tl.exp2(scores_small * (SCALE * _LOG2E) - row_max[:, None])
            row_sum += tl.sum(scores_small, axis=1)
            out = tl.dot(scores_small.to(v.dtype), v_small, out)
        _store_rows(out_ptr, start, width, out * (1.0 / row_sum)[:, None], TOKENS, BLOCK_Q, UNMASKED_Q, DIM)
        row = start + tl.arange(0, BLOCK_Q)
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum), mask=row < TOKENS)


@triton.jit
def _backward_block(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_scratch_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr, width,
    SCALE: tl.constexpr, START: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr, FIRST_BLOCK: tl.constexpr, LAST_BLOCK: tl.constexpr,
):  # fmt: skip
    UNMASKED: tl.constexpr = START + BLOCK_K <= TOKENS
    UNMASKED_Q: tl.constexpr = TOKENS % BLOCK_Q == 0
    k = _load_rows(k_ptr, START, width, TOKENS, BLOCK_K, UNMASKED, DIM)
    v = _load_rows(v_ptr, START, 3 * width, TOKENS, BLOCK_K, UNMASKED, DIM)
    dk = tl.zeros((BLOCK_K, DIM), tl.float32)
    dv = tl.zeros((BLOCK_K, DIM), tl.float32)
    column = tl.arange(0, BLOCK_Q)
    for start in tl.range(0, TOKENS, BLOCK_Q):
        q = _load_rows(q_ptr, start, width, TOKENS, BLOCK_Q, UNMASKED_Q, DIM)
        dout = _load_rows(dout_ptr, start, width, TOKENS, BLOCK_Q, UNMASKED_Q, DIM)
        # Queries beyond the last get weight 0; keys beyond the last are not stored, but must stay finite.
        lse = tl.load(lse_ptr + start + column, mask=start + column < TOKENS, other=float("inf"))
        delta = tl.load(delta_ptr + start + column, mask=start + column < TOKENS, other=0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * (SCALE * _LOG2E) - lse[None, :])  # [keys, queries]
        if not UNMASKED:
            weights = tl.where((START + tl.arange(0, BLOCK_K))[:, None] < TOKENS, weights, 0.0)
        dscores = (weights * (tl.dot(v, tl.trans(dout)) - delta[None, :])).to(k.dtype)
        dv = tl.dot(weights.to(dout.dtype), dout, dv)
        dk = tl.dot(dscores, q, dk)
        dq = tl.dot(
            tl.trans(k), dscores
        )  # [channels, queries]: WGMMA takes 64 rows, and there are more channels than queries
        scratch = dq_scratch_ptr + start * DIM + tl.arange(0, DIM)[:, None] * BLOCK_Q + column[None, :]
        if not FIRST_BLOCK:
            dq += tl.load(scratch)
        if LAST_BLOCK:
            _store_rows(dq_ptr, start, width, tl.trans(dq) * SCALE, TOKENS, BLOCK_Q, UNMASKED_Q, DIM)
        else:
            tl.store(scratch, dq)
    _store_rows(dk_ptr, START, width, dk * SCALE, TOKENS, BLOCK_K, UNMASKED, DIM)
    dv_rounded = dv.to(dv_ptr.dtype.element_ty)
    _store_rows(dv_ptr, START, 3 * width, dv_rounded, TOKENS, BLOCK_K, UNMASKED, DIM)
    tl.store(dbias_ptr + tl.arange(0, DIM), tl.sum(dv_rounded.to(tl.float32), axis=0))


@triton.jit
def _attention_backward(
    q_ptr, k_ptr, qkv_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_scratch_ptr, dq_ptr, dk_ptr, dqkv_ptr, dbias_ptr,
    heads, SCALE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, TAIL: tl.constexpr, BLOCK_Q: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    UNMASKED_Q: tl.constexpr = TOKENS % BLOCK_K == 0
    BLOCKS: tl.constexpr = TOKENS // BLOCK_K
    width = heads * DIM
    batch_head = tl.program_id(0).to(tl.int64)
    sample, head = batch_head // heads, batch_head % heads
    lse_ptr += batch_head * TOKENS
    delta_ptr += batch_head * TOKENS
    dq_scratch_ptr += batch_head * SCRATCH
    offset = sample * TOKENS * width + head * DIM
    v_offset = sample * TOKENS * 3 * width + 2 * width + head * DIM
    dbias_offset = sample * (BLOCKS + (TAIL > 0)) * width + head * DIM
    for start in tl.range(0, TOKENS, BLOCK_K):  # before any matrix is in registers, so large blocks fit
        out = _load_rows(out_ptr + offset, start, width, TOKENS, BLOCK_K, UNMASKED_Q, DIM).to(tl.float32)
        dout = _load_rows(dout_ptr + offset, start, width, TOKENS, BLOCK_K, UNMASKED_Q, DIM).to(tl.float32)
        row = start + tl.arange(0, BLOCK_K)
        tl.store(delta_ptr + row, tl.sum(out * dout, axis=1), mask=row < TOKENS)
    tl.debug_barrier()  # other threads of this program read these results
    for block in tl.static_range(BLOCKS):
        _backward_block(
            q_ptr + offset, k_ptr + offset, qkv_ptr + v_offset, dout_ptr + offset, lse_ptr,
            delta_ptr, dq_scratch_ptr, dq_ptr + offset, dk_ptr + offset, dqkv_ptr + v_offset,
            dbias_ptr + dbias_offset + block * width, width, SCALE,
            block * BLOCK_K, TOKENS, DIM, BLOCK_K, BLOCK_Q, block == 0, (TAIL == 0) & (block == BLOCKS - 1),
        )  # fmt: skip
        tl.debug_barrier()
    if TAIL > 0:
        _backward_block(
            q_ptr + offset, k_ptr + offset, qkv_ptr + v_offset, dout_ptr + offset, lse_ptr,
            delta_ptr, dq_scratch_ptr, dq_ptr + offset, dk_ptr + offset, dqkv_ptr + v_offset,
            dbias_ptr + dbias_offset + BLOCKS * width, width, SCALE,
            BLOCKS * BLOCK_K, TOKENS, DIM, TAIL, BLOCK_Q, BLOCKS == 0, True,
        )  # fmt: skip


def forward(q: Tensor, k: Tensor, qkv: Tensor, config: ForwardConfig = FORWARD_CONFIG) -> tuple[Tensor, Tensor]:
    """Return the output, shaped like q, and the base-2 logsumexp of every query's scores, [B, heads, tokens].

    Q and K may be views of the qkv tensor.
    """
    batch, tokens, heads, head_dim = q.shape
    tokens = int(tokens)  # a constexpr of the kernel, so also concrete under torch.compile
    out = q.new_empty((batch, tokens, heads, head_dim))
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    large = max(_MIN_BLOCK, _floor_power_of_2(tokens))
    block_q = min(config.block_q, _block_for(tokens))
    tiles = config.tiles
    while tiles > 1 and batch * heads * triton.cdiv(tokens, tiles * block_q) < _MIN_PROGRAMS:
        tiles //= 2
    launch(
        _attention_forward, (batch * heads * triton.cdiv(tokens, tiles * block_q),),
        q, k, qkv.contiguous(), out, lse, heads, q.stride(1),
        SCALE=1 / math.sqrt(head_dim), TOKENS=tokens, DIM=head_dim, BLOCK_Q=block_q, TILES=tiles,
        LARGE=large, SMALL=_block_for(tokens - large) if tokens > large else 0,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, config: BackwardConfig = BACKWARD_CONFIG
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dQ, dK, dqkv with only its last third (dV) written, and partial sums of dV over tokens, [n, width]."""
    batch, tokens, heads, head_dim = q.shape
    tokens = int(tokens)
    dq, dk, dqkv = q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(qkv.shape)
    block_q = min(config.block_q, _block_for(tokens))
    remainder = tokens % config.block_k
    tail = min(config.block_k, max(_WGMMA_ROWS, _block_for(remainder))) if remainder else 0
    blocks = tokens // config.block_k + (tail > 0)
    # dQ between blocks of keys, tile after tile.
    scratch = triton.cdiv(tokens, block_q) * block_q * head_dim if blocks > 1 else 0
    dq_scratch = q.new_empty((max(1, batch * heads * scratch),), dtype=torch.float32)
    delta = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    dbias = q.new_empty((batch * blocks, heads * head_dim), dtype=torch.float32)
    launch(
        _attention_backward, (batch * heads,),
        q, k, qkv.contiguous(), out, dout.contiguous(), lse, delta, dq_scratch, dq, dk, dqkv, dbias,
        heads, SCALE=1 / math.sqrt(head_dim), TOKENS=tokens, DIM=head_dim,
        BLOCK_K=config.block_k, TAIL=tail, BLOCK_Q=block_q, SCRATCH=scratch,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return dq, dk, dqkv, dbias


def _floor_power_of_2(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _block_for(count: int) -> int:
    return max(_MIN_BLOCK, triton.next_power_of_2(count))


@triton_op("muralist::attention")
def _attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _ = qk_norm_rope.forward(qkv, q_weight, k_weight, cos, sin, heads, with_values=False)
    return *forward(q, k, qkv), q, k


@triton_op("muralist::attention_backward")
def _attention_gradients(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int,
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dqkv, dbias_v = backward(q, k, qkv, out, lse, dout)
    dqkv, dweight, dbias_qk = qk_norm_rope.backward(qkv, q_weight, k_weight, cos, sin, heads, dq, dk, None, dqkv)
    return dqkv, dweight, dbias_qk, dbias_v


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, *tensors, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(qkv, *tensors, *output)


def _gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin, *outputs = ctx.saved_tensors
    dqkv, dweight, *dbias = _attention_gradients(qkv, q_weight, k_weight, cos, sin, ctx.heads, *outputs, dout)
    return qk_norm_rope.qkv_gradients(ctx, dqkv, dweight, torch.cat([sums.sum(0) for sums in dbias]))


_attention.register_autograd(_gradients, setup_context=_setup)


def attention(
    qkv: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Compute attention with QK norm and RoPE from the output of the qkv layer, [B, tokens, heads * head_dim]."""
    return _attention(qkv, bias, q_weight, k_weight, cos, sin, heads)[0].flatten(2)


@triton_op("muralist::linear_qkv_attention")
def linear_qkv_attention(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """Compute the qkv layer and its attention, without gradients."""
    qkv = gemm_epilogue.qkv_norm_rope(x, weight, bias, q_weight, k_weight, cos, sin, weight.shape[0] // 3 // heads)
    q, k, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    return forward(q, k, qkv)[0].flatten(2)
