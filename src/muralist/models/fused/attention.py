"""Attention among the tokens of short samples: all keys of a head at once, no mask, no dropout.

Queries and keys are [B, tokens, heads, head_dim]. Values are read where the qkv layer left them, the last third of its
output [B, tokens, 3 * heads * head_dim], and their gradients are written into the last third of that output's gradient.

The forward pass keeps a head's keys and values in shared memory and a whole row of scores in registers. In the backward
pass one program does all of a head: it goes through the keys in blocks, and the gradients of queries grow from block to
block in a scratch of its own. Nothing is added by two programs, so the bits are the same every time.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fused.launch import launch

_SMALLEST = 16  # what a matrix unit takes
_GROUP = 64  # rows that Hopper's matrix units take at once
_LOG2E = tl.constexpr(math.log2(math.e))  # powers of two are what the card computes
_ENOUGH = 512  # programs that fill a card


class Forward(NamedTuple):
    """How the forward kernel is laid out."""

    queries: int  # of one tile
    tiles: int  # that one program does one after the other; where there are too few programs, one
    warps: int
    stages: int


class Backward(NamedTuple):
    """How the backward kernel is laid out."""

    keys: int  # of one block: their gradients stay in registers
    queries: int  # of one tile
    warps: int
    stages: int


Layout = TypeVar("Layout", Forward, Backward)

# By the most tokens that a layout is for: bench/attention_speed.py measures them.
FORWARD = {
    256: Forward(queries=64, tiles=8, warps=4, stages=3),
    320: Forward(queries=64, tiles=8, warps=4, stages=3),
}
BACKWARD = {
    256: Backward(keys=128, queries=32, warps=4, stages=3),
    320: Backward(keys=128, queries=32, warps=4, stages=3),
}


@triton.jit
def _rows(head_ptr, first, of_token, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, DIM: tl.constexpr):
    row = first + tl.arange(0, BLOCK)[:, None]
    places = head_ptr + row * of_token + tl.arange(0, DIM)[None, :]
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=row < TOKENS, other=0.0)


@triton.jit
def _store_rows(
    head_ptr, first, of_token, value, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, DIM: tl.constexpr
):
    row = first + tl.arange(0, BLOCK)[:, None]
    places = head_ptr + row * of_token + tl.arange(0, DIM)[None, :]
    if WHOLE:
        tl.store(places, value.to(head_ptr.dtype.element_ty))
    else:
        tl.store(places, value.to(head_ptr.dtype.element_ty), mask=row < TOKENS)


@triton.jit
def _scores(q, k, first, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if not WHOLE:
        scores = tl.where((first + tl.arange(0, BLOCK))[None, :] < TOKENS, scores, float("-inf"))
    return scores


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, qkv_ptr, out_ptr, log_sum_ptr, heads, of_token,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    QUERIES: tl.constexpr, TILES: tl.constexpr, LARGE: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (TOKENS + TILES * QUERIES - 1) // (TILES * QUERIES)
    number = tl.program_id(0) // PARTS  # neighbours read the same keys and values
    sample, head = (number // heads).to(tl.int64), number % heads
    width = heads * DIM
    q_ptr += sample * TOKENS * of_token + head * DIM
    k_ptr += sample * TOKENS * of_token + head * DIM
    v_ptr = qkv_ptr + sample * TOKENS * 3 * width + 2 * width + head * DIM
    out_ptr += sample * TOKENS * width + head * DIM
    log_sum_ptr += number.to(tl.int64) * TOKENS
    # Two powers of two hold all keys: 288 are 256 and 32, not 512.
    ALL: tl.constexpr = LARGE <= TOKENS
    BOTH: tl.constexpr = LARGE + SMALL == TOKENS
    EVEN: tl.constexpr = TOKENS % QUERIES == 0
    k = _rows(k_ptr, 0, of_token, TOKENS, LARGE, ALL, DIM)
    v = _rows(v_ptr, 0, 3 * width, TOKENS, LARGE, ALL, DIM)
    if SMALL > 0:
        more_k = _rows(k_ptr, LARGE, of_token, TOKENS, SMALL, BOTH, DIM)
        more_v = _rows(v_ptr, LARGE, 3 * width, TOKENS, SMALL, BOTH, DIM)
    first = tl.program_id(0) % PARTS * TILES * QUERIES
    for start in tl.range(first, tl.minimum(first + TILES * QUERIES, TOKENS), QUERIES):
        q = _rows(q_ptr, start, of_token, TOKENS, QUERIES, EVEN, DIM)
        scores = _scores(q, k, 0, TOKENS, LARGE, ALL)
        top = tl.max(scores, axis=1)
        if SMALL > 0:
            more = _scores(q, more_k, LARGE, TOKENS, SMALL, BOTH)
            top = tl.maximum(top, tl.max(more, axis=1))
        top *= SCALE * _LOG2E
        weights = tl.exp2(scores * (SCALE * _LOG2E) - top[:, None])
        total = tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v)
        if SMALL > 0:
            more = tl.exp2(more * (SCALE * _LOG2E) - top[:, None])
            total += tl.sum(more, axis=1)
            out = tl.dot(more.to(v.dtype), more_v, out)
        _store_rows(out_ptr, start, width, out * (1.0 / total)[:, None], TOKENS, QUERIES, EVEN, DIM)
        row = start + tl.arange(0, QUERIES)
        tl.store(log_sum_ptr + row, top + tl.log2(total), mask=row < TOKENS)


@triton.jit
def _key_block(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_sum_ptr, dot_ptr, partial_ptr, dq_ptr, dk_ptr, dv_ptr, sums_ptr, width,
    SCALE: tl.constexpr, FIRST: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    QUERIES: tl.constexpr, OPENS: tl.constexpr, CLOSES: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = FIRST + KEYS <= TOKENS
    EVEN: tl.constexpr = TOKENS % QUERIES == 0
    k = _rows(k_ptr, FIRST, width, TOKENS, KEYS, WHOLE, DIM)
    v = _rows(v_ptr, FIRST, 3 * width, TOKENS, KEYS, WHOLE, DIM)
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    column = tl.arange(0, QUERIES)
    for start in tl.range(0, TOKENS, QUERIES):
        q = _rows(q_ptr, start, width, TOKENS, QUERIES, EVEN, DIM)
        dout = _rows(dout_ptr, start, width, TOKENS, QUERIES, EVEN, DIM)
        # Queries beyond the last get no weight; keys beyond the last are not stored, but must stay finite.
        log_sum = tl.load(log_sum_ptr + start + column, mask=start + column < TOKENS, other=float("inf"))
        dot = tl.load(dot_ptr + start + column, mask=start + column < TOKENS, other=0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * (SCALE * _LOG2E) - log_sum[None, :])  # [keys, queries]
        if not WHOLE:
            weights = tl.where((FIRST + tl.arange(0, KEYS))[:, None] < TOKENS, weights, 0.0)
        dscores = (weights * (tl.dot(v, tl.trans(dout)) - dot[None, :])).to(k.dtype)
        dv = tl.dot(weights.to(dout.dtype), dout, dv)
        dk = tl.dot(dscores, q, dk)
        dq = tl.dot(
            tl.trans(k), dscores
        )  # [channels, queries]: rows must be 64, and there are more channels than queries
        here = partial_ptr + start * DIM + tl.arange(0, DIM)[:, None] * QUERIES + column[None, :]
        if not OPENS:
            dq += tl.load(here)
        if CLOSES:
            _store_rows(dq_ptr, start, width, tl.trans(dq) * SCALE, TOKENS, QUERIES, EVEN, DIM)
        else:
            tl.store(here, dq)
    _store_rows(dk_ptr, FIRST, width, dk * SCALE, TOKENS, KEYS, WHOLE, DIM)
    stored = dv.to(dv_ptr.dtype.element_ty)
    _store_rows(dv_ptr, FIRST, 3 * width, stored, TOKENS, KEYS, WHOLE, DIM)
    tl.store(sums_ptr + tl.arange(0, DIM), tl.sum(stored.to(tl.float32), axis=0))


@triton.jit
def _attention_backward(
    q_ptr, k_ptr, qkv_ptr, out_ptr, dout_ptr, log_sum_ptr, dot_ptr, partial_ptr, dq_ptr, dk_ptr, dqkv_ptr, sums_ptr,
    heads, SCALE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr, TAIL: tl.constexpr, QUERIES: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = TOKENS % KEYS == 0
    BLOCKS: tl.constexpr = TOKENS // KEYS
    width = heads * DIM
    number = tl.program_id(0).to(tl.int64)
    sample, head = number // heads, number % heads
    log_sum_ptr += number * TOKENS
    dot_ptr += number * TOKENS
    partial_ptr += number * SCRATCH
    place = sample * TOKENS * width + head * DIM
    v_place = sample * TOKENS * 3 * width + 2 * width + head * DIM
    sums_place = sample * (BLOCKS + (TAIL > 0)) * width + head * DIM
    for start in tl.range(0, TOKENS, KEYS):  # no matrix is in the registers yet: many rows are read at once
        out = _rows(out_ptr + place, start, width, TOKENS, KEYS, EVEN, DIM).to(tl.float32)
        dout = _rows(dout_ptr + place, start, width, TOKENS, KEYS, EVEN, DIM).to(tl.float32)
        row = start + tl.arange(0, KEYS)
        tl.store(dot_ptr + row, tl.sum(out * dout, axis=1), mask=row < TOKENS)
    tl.debug_barrier()  # other threads of this program read what these have written
    for block in tl.static_range(BLOCKS):
        _key_block(
            q_ptr + place, k_ptr + place, qkv_ptr + v_place, dout_ptr + place, log_sum_ptr,
            dot_ptr, partial_ptr, dq_ptr + place, dk_ptr + place, dqkv_ptr + v_place,
            sums_ptr + sums_place + block * width, width, SCALE,
            block * KEYS, TOKENS, DIM, KEYS, QUERIES, block == 0, (TAIL == 0) & (block == BLOCKS - 1),
        )  # fmt: skip
        tl.debug_barrier()
    if TAIL > 0:
        _key_block(
            q_ptr + place, k_ptr + place, qkv_ptr + v_place, dout_ptr + place, log_sum_ptr,
            dot_ptr, partial_ptr, dq_ptr + place, dk_ptr + place, dqkv_ptr + v_place,
            sums_ptr + sums_place + BLOCKS * width, width, SCALE,
            BLOCKS * KEYS, TOKENS, DIM, TAIL, QUERIES, BLOCKS == 0, True,
        )  # fmt: skip


def forward(q: Tensor, k: Tensor, qkv: Tensor, layout: Forward | None = None) -> tuple[Tensor, Tensor]:
    """The result like q, and for every query the logarithm (to base 2) of the sum of its weights, [B, heads, tokens].

    Queries and keys may be thirds of rows, as values are.
    """
    batch, tokens, heads, head_dim = q.shape
    tokens = int(tokens)  # also where torch.compile would rather not know: the kernel is made for this number
    layout = layout or chosen(FORWARD, tokens)
    out = q.new_empty((batch, tokens, heads, head_dim))
    log_sum = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    large = max(_SMALLEST, _power_below(tokens))
    queries = min(layout.queries, _power_above(tokens))
    tiles = layout.tiles
    while tiles > 1 and batch * heads * triton.cdiv(tokens, tiles * queries) < _ENOUGH:
        tiles //= 2
    launch(
        _attention_forward, (batch * heads * triton.cdiv(tokens, tiles * queries),),
        q, k, qkv.contiguous(), out, log_sum, heads, q.stride(1),
        SCALE=1 / math.sqrt(head_dim), TOKENS=tokens, DIM=head_dim, QUERIES=queries, TILES=tiles,
        LARGE=large, SMALL=_power_above(tokens - large) if tokens > large else 0,
        num_warps=layout.warps, num_stages=layout.stages,
    )  # fmt: skip
    return out, log_sum


def backward(
    q: Tensor, k: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor, dout: Tensor, layout: Backward | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and qkv (of its last third only), and that third summed over tokens, but for [n, width]."""
    batch, tokens, heads, head_dim = q.shape
    tokens = int(tokens)
    layout = layout or chosen(BACKWARD, tokens)
    dq, dk, dqkv = q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(qkv.shape)
    queries = min(layout.queries, _power_above(tokens))
    rest = tokens % layout.keys
    tail = min(layout.keys, max(_GROUP, _power_above(rest))) if rest else 0
    blocks = tokens // layout.keys + (tail > 0)
    # The gradients of queries between blocks of keys, a tile after the other.
    scratch = triton.cdiv(tokens, queries) * queries * head_dim if blocks > 1 else 0
    partial = q.new_empty((max(1, batch * heads * scratch),), dtype=torch.float32)
    dot = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    sums = q.new_empty((batch * blocks, heads * head_dim), dtype=torch.float32)
    launch(
        _attention_backward, (batch * heads,),
        q, k, qkv.contiguous(), out, dout.contiguous(), log_sum, dot, partial, dq, dk, dqkv, sums,
        heads, SCALE=1 / math.sqrt(head_dim), TOKENS=tokens, DIM=head_dim,
        KEYS=layout.keys, TAIL=tail, QUERIES=queries, SCRATCH=scratch,
        num_warps=layout.warps, num_stages=layout.stages,
    )  # fmt: skip
    return dq, dk, dqkv, sums


def chosen(layouts: dict[int, Layout], tokens: int) -> Layout:
    """The layout in use for this many tokens."""
    return next(layout for most, layout in layouts.items() if tokens <= most)


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _power_above(count: int) -> int:
    return max(_SMALLEST, triton.next_power_of_2(count))
