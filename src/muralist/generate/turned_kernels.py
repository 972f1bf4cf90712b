"""The kernel of turned.py: one program does all heads of a token's queries, another those of its keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muralist.models.fused.heads import turned

_WARPS = 4


@triton.jit
def _norm_and_turn(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens, heads, half,
    EPS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, 2 * HALF)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    width = heads * half * 2
    here = (head < heads) & (channel < 2 * half)
    place = head * half * 2 + channel
    x_ptr = q_ptr if which == 0 else k_ptr
    weight_ptr = q_weight_ptr if which == 0 else k_weight_ptr
    out_ptr = q_out_ptr if which == 0 else k_out_ptr
    value = tl.load(x_ptr + row * width + place, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place, mask=here, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / width + EPS)
    angle = row % tokens * half * 2 + 2 * pair
    cos = tl.load(cos_ptr + angle, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + 1, mask=pair < half, other=0.0).to(tl.float32)
    out = turned(value * inverse * weight, cos, sin, HEADS, HALF)
    tl.store(out_ptr + row * width + place, out.to(out_ptr.dtype.element_ty), mask=here)


def norm_and_turn(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """As `turned.norm_and_turn` says."""
    batch, tokens, width = q.shape
    head_dim = width // heads
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    q_out, k_out = (x.new_empty((batch, tokens, heads, head_dim)) for x in (q, k))
    _norm_and_turn[(batch * tokens, 2)](
        q, k, q_weight, k_weight, cos, sin, q_out, k_out, tokens, heads, head_dim // 2,
        EPS=epsilon, HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(head_dim // 2), num_warps=_WARPS,
    )  # fmt: skip
    return q_out, k_out
