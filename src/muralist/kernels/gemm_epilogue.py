"""GEMMs with a fused epilogue, for inference: SwiGLU, or QK norm and RoPE.

The epilogue runs on the float32 accumulator of a tile, so the intermediate is neither written to memory nor rounded.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.kernels.launch import TmaDescriptor, launch, triton_op
from muralist.kernels.qk_norm_rope import EPSILON


class GemmConfig(NamedTuple):
    """Tile sizes and launch parameters of a GEMM."""

    block_m: int
    block_n: int  # for SwiGLU, gate and value columns together
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int  # persistent programs, which prefetch across tiles; 0: one program per tile


@triton.jit
def _gemm_swiglu(
    x_desc, w_desc, bias_ptr, out_desc, rows, hidden, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(hidden, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * columns, tl.num_programs(0), flatten=PERSISTENT):
        row, column = tile // columns * BLOCK_M, tile % columns * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K):
            x = x_desc.load([row, start])
            gate = tl.dot(x, w_desc.load([column, start]).T, gate)
            value = tl.dot(x, w_desc.load([hidden + column, start]).T, value)
        offset = column + tl.arange(0, BLOCK_N)
        gate += tl.load(bias_ptr + offset, mask=offset < hidden, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias_ptr + hidden + offset, mask=offset < hidden, other=0.0).to(tl.float32)[None, :]
        out_desc.store([row, column], (gate * tl.sigmoid(gate) * value).to(out_desc.dtype))


@triton.jit
def _gemm_qk_norm_rope(
    x_desc, w_desc, bias_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, out_desc, rows, tokens,
    EPS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    HEADS: tl.constexpr = BLOCK_N // DIM
    columns = 3 * WIDTH // BLOCK_N
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * columns, tl.num_programs(0), flatten=PERSISTENT):
        row, column = tile // columns * BLOCK_M, tile % columns * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K):
            acc = tl.dot(x_desc.load([row, start]), w_desc.load([column, start]).T, acc)
        acc += tl.load(bias_ptr + column + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        if column < 2 * WIDTH:  # Q and K, not V
            weight_ptr = q_weight_ptr if column < WIDTH else k_weight_ptr
            weight = tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)
            heads = tl.reshape(acc, (BLOCK_M, HEADS, DIM))
            inv_rms = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=2, keep_dims=True) / DIM + EPS)
            even, odd = tl.split(tl.reshape(heads * inv_rms * weight[None, None, :], (BLOCK_M, HEADS, HALF, 2)))
            token = ((row + tl.arange(0, BLOCK_M)) % tokens)[:, None]
            angle = token * HALF + tl.arange(0, HALF)[None, :]
            cos = tl.load(cos_ptr + angle)[:, None, :]
            sin = tl.load(sin_ptr + angle)[:, None, :]
            acc = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK_M, BLOCK_N))
        out_desc.store([row, column], acc.to(out_desc.dtype))


# Measured by bench/kernel_speed.py. Two programs share an SM: one's epilogue overlaps the other's main loop.
SWIGLU_CONFIG = GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3, programs_per_sm=0)
QKV_CONFIG = GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3, programs_per_sm=1)


def swiglu(x: Tensor, weight: Tensor, bias: Tensor, config: GemmConfig = SWIGLU_CONFIG) -> Tensor:
    """Compute silu(x Wg + bg) * (x Wv + bv), Wg and Wv being the halves of one layer, [..., hidden]."""
    flat, hidden = _flatten_tokens(x), weight.shape[0] // 2
    out = flat.new_empty((flat.shape[0], hidden))
    columns = config.block_n // 2
    _launch_tiles(
        _gemm_swiglu, config, flat.shape[0], triton.cdiv(hidden, columns),
        TmaDescriptor(flat, (config.block_m, config.block_k)), TmaDescriptor(weight, (columns, config.block_k)), bias,
        TmaDescriptor(out, (config.block_m, columns)), flat.shape[0], hidden,
        WIDTH=flat.shape[1], BLOCK_N=columns,
    )  # fmt: skip
    return out.unflatten(0, x.shape[:-1])


@triton_op("muralist::linear_swiglu")
def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a linear layer and SwiGLU of its output, without gradients."""
    return swiglu(x, weight, bias)


def qkv_norm_rope(
    x: Tensor, weight: Tensor, bias: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    head_dim: int, config: GemmConfig = QKV_CONFIG,
) -> Tensor:  # fmt: skip
    """Compute the qkv layer with QK norm and RoPE applied, [B, tokens, 3 * width]."""
    flat = _flatten_tokens(x)
    out = flat.new_empty((flat.shape[0], weight.shape[0]))
    # Each tile holds complete heads, all of them Q, K or V.
    config = config._replace(block_n=math.gcd(config.block_n, flat.shape[1]))
    _launch_tiles(
        _gemm_qk_norm_rope, config, flat.shape[0], weight.shape[0] // config.block_n,
        TmaDescriptor(flat, (config.block_m, config.block_k)),
        TmaDescriptor(weight, (config.block_n, config.block_k)), bias,
        q_weight, k_weight, cos.contiguous(), sin.contiguous(),
        TmaDescriptor(out, (config.block_m, config.block_n)), flat.shape[0], x.shape[1],
        EPS=EPSILON, WIDTH=flat.shape[1], DIM=head_dim, BLOCK_N=config.block_n,
    )  # fmt: skip
    return out.unflatten(0, x.shape[:-1])


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.contiguous().flatten(0, -2)


def _launch_tiles(kernel: Any, config: GemmConfig, rows: int, columns: int, *arguments: Any, **options: Any) -> None:
    tiles = triton.cdiv(rows, config.block_m) * columns
    programs = min(tiles, config.programs_per_sm * _num_sms()) if config.programs_per_sm else tiles
    launch(
        kernel, (programs,), *arguments, **options,
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, PERSISTENT=config.programs_per_sm > 0,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@cache
def _num_sms() -> int:
    # All GPUs of a machine are alike. Without one, Triton's interpreter still runs the persistent loop.
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4
