"""Matrix products that finish what follows them while it is still in registers, for passes without gradients.

A tile of the product goes on to SwiGLU, or to the norm and rotation of its heads, and is written once: what would lie
between two kernels is neither written nor read, and it is not rounded.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fused.heads import EPSILON
from muralist.models.fused.launch import launch
from muralist.models.fused.tiles import Tiles


class Layout(NamedTuple):
    """How a kernel is laid out."""

    rows: int  # of a tile
    columns: int  # of a tile, both halves of SwiGLU together
    depth: int  # channels that are multiplied at once
    warps: int
    stages: int
    lasting: int  # programs for each processor, which read ahead from tile to tile; 0: one program for each tile


@triton.jit
def _swiglu_product(
    x_tiles, w_tiles, bias_ptr, out_tiles, rows, hidden, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LASTING: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(hidden, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * columns, tl.num_programs(0), flatten=LASTING):
        row, column = tile // columns * ROWS, tile % columns * COLUMNS
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        value = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.range(0, WIDTH, DEPTH):
            x = x_tiles.load([row, start])
            gate = tl.dot(x, w_tiles.load([column, start]).T, gate)
            value = tl.dot(x, w_tiles.load([hidden + column, start]).T, value)
        place = column + tl.arange(0, COLUMNS)
        gate += tl.load(bias_ptr + place, mask=place < hidden, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias_ptr + hidden + place, mask=place < hidden, other=0.0).to(tl.float32)[None, :]
        out_tiles.store([row, column], (gate * tl.sigmoid(gate) * value).to(out_tiles.dtype))


@triton.jit
def _heads_product(
    x_tiles, w_tiles, bias_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, out_tiles, rows, tokens,
    EPS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LASTING: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    HEADS: tl.constexpr = COLUMNS // DIM
    columns = 3 * WIDTH // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * columns, tl.num_programs(0), flatten=LASTING):
        row, column = tile // columns * ROWS, tile % columns * COLUMNS
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.range(0, WIDTH, DEPTH):
            product = tl.dot(x_tiles.load([row, start]), w_tiles.load([column, start]).T, product)
        product += tl.load(bias_ptr + column + tl.arange(0, COLUMNS)).to(tl.float32)[None, :]
        if column < 2 * WIDTH:  # queries and keys
            weight_ptr = q_weight_ptr if column < WIDTH else k_weight_ptr
            weight = tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)
            heads = tl.reshape(product, (ROWS, HEADS, DIM))
            inverse = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=2, keep_dims=True) / DIM + EPS)
            even, odd = tl.split(tl.reshape(heads * inverse * weight[None, None, :], (ROWS, HEADS, HALF, 2)))
            token = ((row + tl.arange(0, ROWS)) % tokens)[:, None]
            angle = token * HALF + tl.arange(0, HALF)[None, :]
            cos = tl.load(cos_ptr + angle)[:, None, :]
            sin = tl.load(sin_ptr + angle)[:, None, :]
            product = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, COLUMNS))
        out_tiles.store([row, column], product.to(out_tiles.dtype))


# bench/product_speed.py measures them. Two programs share a processor: while one finishes its tile, the other multiplies.
SWIGLU = Layout(rows=128, columns=128, depth=64, warps=4, stages=3, lasting=0)
HEADS = Layout(rows=128, columns=256, depth=64, warps=8, stages=3, lasting=1)


def swiglu(x: Tensor, weight: Tensor, bias: Tensor, layout: Layout = SWIGLU) -> Tensor:
    """silu(x Wg + bg) * (x Wv + bv), the halves of one layer, [..., hidden]."""
    flat, hidden = _flat(x), weight.shape[0] // 2
    out = flat.new_empty((flat.shape[0], hidden))
    columns = layout.columns // 2
    _launch(
        _swiglu_product, layout, flat.shape[0], triton.cdiv(hidden, columns),
        Tiles(flat, (layout.rows, layout.depth)), Tiles(weight, (columns, layout.depth)), bias,
        Tiles(out, (layout.rows, columns)), flat.shape[0], hidden,
        WIDTH=flat.shape[1], COLUMNS=columns,
    )  # fmt: skip
    return out.unflatten(0, x.shape[:-1])


def heads(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, head_dim: int,
    layout: Layout = HEADS,
) -> Tensor:  # fmt: skip
    """The qkv layer's output, queries and keys normalised and rotated, [B, tokens, 3 * width]."""
    flat = _flat(x)
    out = flat.new_empty((flat.shape[0], weight.shape[0]))
    # A tile has whole heads, all of them queries, keys or values.
    layout = layout._replace(columns=math.gcd(layout.columns, flat.shape[1]))
    _launch(
        _heads_product, layout, flat.shape[0], weight.shape[0] // layout.columns,
        Tiles(flat, (layout.rows, layout.depth)), Tiles(weight, (layout.columns, layout.depth)), bias,
        q_weight, k_weight, cos.contiguous(), sin.contiguous(),
        Tiles(out, (layout.rows, layout.columns)), flat.shape[0], x.shape[1],
        EPS=EPSILON, WIDTH=flat.shape[1], DIM=head_dim, COLUMNS=layout.columns,
    )  # fmt: skip
    return out.unflatten(0, x.shape[:-1])


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().flatten(0, -2)


def _launch(kernel: Any, layout: Layout, rows: int, columns: int, *arguments: Any, **options: Any) -> None:
    tiles = triton.cdiv(rows, layout.rows) * columns
    programs = min(tiles, layout.lasting * _processors()) if layout.lasting else tiles
    launch(
        kernel, (programs,), *arguments, **options,
        ROWS=layout.rows, DEPTH=layout.depth, LASTING=layout.lasting > 0,
        num_warps=layout.warps, num_stages=layout.stages,
    )  # fmt: skip


@cache
def _processors() -> int:
    # All of a machine's cards are alike. Without one, an interpreter has the kernel's loop to try.
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4
