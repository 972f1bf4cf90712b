"""Pipelines that need a package which the tests do without, watched as objects in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import Tensor

from muralist.core.errors import UserError
from muralist.models.pipeline_probe import PipelineProbe
from tests.support.tiny_text import WIDTH, qwen3_vl, qwen_tokenizer

SIZE = (64, 64)


class TextProcessor:
    """The text of a Qwen3VLProcessor, whose images need torchvision."""

    def __init__(self) -> None:
        self.tokenizer = qwen_tokenizer()
        self.tokenizer.add_tokens(["<|image_pad|>"])

    def __call__(self, text: list[str], padding_side: str, **settings: Any) -> Any:
        return self.tokenizer(text, **settings)

    def apply_chat_template(self, messages: list[Any], **settings: Any) -> list[list[int]]:
        [message] = messages
        text = f"<|im_start|>{message['role']}\n{message['content'][0]['text']}<|im_end|>\n"
        return [self.tokenizer(text)["input_ids"]]


def qwenimage21() -> tuple[Any, Any]:
    processor = TextProcessor()
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=8, dim_mult=[1] * 5, num_res_blocks=1, latents_mean=[0.1] * 8,
        latents_std=[1.2] * 8,
    )  # fmt: skip
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2, context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    text_encoder = transformers.Qwen3VLForConditionalGeneration(qwen3_vl(len(processor.tokenizer)))
    pipe = diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae.eval(),
        text_encoder=text_encoder.eval(), processor=processor, transformer=transformer.eval(),
    )  # fmt: skip
    return pipe, transformer


def test_network_that_returns_the_text_too() -> None:
    """Qwen-Image 2.1: no shape is known before the network runs, and its output begins with the text's tokens."""
    pipe, transformer = qwenimage21()
    with torch.device("meta"):
        stand_in = type(transformer).from_config(transformer.config)
    pipe.transformer = stand_in
    probe = PipelineProbe(pipe, stand_in, (600.0, 200.0, 400.0))
    call = probe.network_call(SIZE)
    x, t = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([300.0])
    found: list[Tensor] = []
    for caption in ("a car", "two cars in the rain"):
        with torch.no_grad():
            text, _, image_pads = pipe.encode_prompt(caption, device=torch.device("cpu"))
            slots = torch.cat([image_pads, torch.ones(1, 4, dtype=torch.bool)], dim=1)
            expected = transformer(x, text, t / 1000, [[(1, 4, 4)]], slots)[0][:, text.shape[1] :]
            found.append(
                call.predict(transformer, x, t, [[value] for value in probe.text_arguments(call, caption, SIZE)])
            )
        torch.testing.assert_close(found[-1], expected)
    assert not torch.allclose(*found, atol=1e-3)
    unaware = replace(call, output_at_end=False)
    texts = [[value] for value in probe.text_arguments(call, "a car", SIZE)]
    with pytest.raises(UserError, match="QwenImage21Transformer2DModel cannot be trained yet: it returns .* 128 were"):
        unaware.predict(transformer, x, t, texts)
    z = torch.randn(1, 8, 1, 4, 4)
    torch.testing.assert_close(call.latents.normalize(z), ((z - 0.1) / 1.2).flatten(2).mT)
