"""Norm and rotation of the queries and keys of Wan's self-attention in one kernel.

The norm goes over all heads of a token. What Inductor makes of it reads a row of 1,536 numbers in parts, twice, and for the
rotation once more with every second number at a time: eight times as long as reading and writing take.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn


@torch.library.custom_op("muralist::norm_and_turn", mutates_args=(), device_types="cuda")
def norm_and_turn(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, tokens, width] normalised over all heads, then turned by pairs: [B, tokens, heads, head_dim].

    Cosines and sines are diffusers': [..., tokens, 1, head_dim], every number twice.
    """
    from muralist.generate import turned_kernels

    return turned_kernels.norm_and_turn(q, k, q_weight, k_weight, epsilon, cos, sin, heads)


@norm_and_turn.register_kernel("cpu")
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        exact = torch.promote_types(x.dtype, torch.float32)
        normed = nn.functional.rms_norm(x.to(exact), x.shape[-1:], weight.to(exact), epsilon)
        even, odd = normed.unflatten(-1, (heads, -1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        made.append(torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype))
    return made[0], made[1]


@norm_and_turn.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], heads, q.shape[-1] // heads)
    return q.new_empty(shape), k.new_empty(shape)


class TurningProcessor(WanAttnProcessor):
    """Self-attention with that kernel; what else a layer may be asked for is diffusers' own."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What the layer says to these tokens."""
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        q, k = norm_and_turn(
            attn.to_q(hidden_states), attn.to_k(hidden_states), attn.norm_q.weight, attn.norm_k.weight,
            attn.norm_q.eps, *rotary_emb, attn.heads,
        )  # fmt: skip
        v = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))
        out = dispatch_attention_fn(q, k, v, backend=self._attention_backend, parallel_config=self._parallel_config)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def turn_in_one_kernel(network: nn.Module) -> int:
    """Use it wherever a network has such a layer; returns in how many places."""
    fitting: list[Any] = [layer for layer in network.modules() if type(layer) is WanAttention and _fits(layer)]
    for layer in fitting:
        layer.set_processor(TurningProcessor())
    return len(fitting)


def _fits(layer: Any) -> bool:
    alone = not layer.is_cross_attention and layer.add_k_proj is None and not getattr(layer, "fused_projections", False)
    return alone and type(layer.processor) is WanAttnProcessor and layer.norm_q.eps == layer.norm_k.eps
