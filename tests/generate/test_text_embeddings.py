"""Embeddings of single prompts, joined to those of a batch."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch.utils._pytree import tree_leaves
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from muralist.generate.text_embeddings import PromptEmbeddingCache, TokenCounter
from tests.support.pipelines import wan21
from tests.support.tiny_text import WIDTH, qwen_tokenizer

FIRST_TOKEN = 128_000  # that BriaFiboPipeline gives an empty prompt


def test_hidden_states_of_layers_are_joined_layer_by_layer() -> None:
    """Bria Fibo gives its network a list with the hidden states of every layer, not of every prompt."""
    tokenizer = qwen_tokenizer()
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = SmolLM3Config(vocab_size=FIRST_TOKEN + 1, intermediate_size=32, pad_token_id=0, **sizes)
    transformer = diffusers.BriaFiboTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=2 * WIDTH, text_encoder_dim=WIDTH, pooled_projection_dim=None, axes_dims_rope=[0, 8, 8],
    )  # fmt: skip
    pipe: Any = diffusers.BriaFiboPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=SmolLM3ForCausalLM(config).eval(),
        tokenizer=tokenizer, transformer=transformer, vae=wan21().vae,
    )  # fmt: skip
    given = {"prompt": ["a red car", "a red bus"], "negative_prompt": ["", ""], "guidance_scale": 5.0, "device": "cpu"}
    with torch.no_grad():
        own = pipe.encode_prompt(**given)
        PromptEmbeddingCache(pipe, TokenCounter(pipe))
        joined = pipe.encode_prompt(**given)
    assert len(tree_leaves(joined)) == len(tree_leaves(own)) > 10
    for mine, theirs in zip(tree_leaves(joined), tree_leaves(own), strict=True):
        torch.testing.assert_close(mine, theirs)
