"""A Stable Diffusion XL of the published size with random weights: same time as the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench.full_hunyuan import FULL_VAE, TINY_VAE, operations_of_decoding
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

_UNET: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_TINY_UNET = _UNET | {
    "sample_size": 8,
    "block_out_channels": (32, 32, 64),
    "transformer_layers_per_block": (1, 1, 1),
    "attention_head_dim": (2, 2, 4),
    "norm_num_groups": 8,
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 6 * 32 + 32,
}
_TEXT = ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
         {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 5120})  # fmt: skip
_TINY_TEXT = ({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},) * 2


def operations(height: int, width: int) -> dict[str, int]:
    """Return the FLOPs for one image, from shapes: a network pass, decoding, encoding a prompt."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        added = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
        network: Any = UNet2DConditionModel(**_UNET)
        latents = torch.zeros(1, 4, height // 8, width // 8)
        network(latents, torch.zeros(1), torch.zeros(1, 77, 2048), added_cond_kwargs=added)
    text = 0
    for layers in _TEXT:
        wide, inner = layers["hidden_size"], layers["intermediate_size"]
        text += 2 * 77 * layers["num_hidden_layers"] * (4 * wide**2 + 2 * wide * inner)
    return {
        "pass": int(counter.get_total_flops()),
        "decoding": operations_of_decoding(height, width),
        "text": text,
    }


def build_full_sdxl(folder: Path, tiny: bool = False) -> Path:
    """Write the folder in diffusers layout, half precision: about 7 GB."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{sign}</w>" for sign in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts: dict[str, Any] = {}
    with device:
        for name, layers, kind in zip(
            ("text_encoder", "text_encoder_2"),
            _TINY_TEXT if tiny else _TEXT,
            (CLIPTextModel, CLIPTextModelWithProjection),
            strict=True,
        ):
            config: Any = CLIPTextConfig(
                vocab_size=len(vocabulary),
                projection_dim=layers["hidden_size"],
                max_position_embeddings=77,
                bos_token_id=len(vocabulary) - 2,
                eos_token_id=len(vocabulary) - 1,
                pad_token_id=len(vocabulary) - 1,
                **layers,
            )
            parts[name] = kind(config)
        parts["unet"] = UNet2DConditionModel(**(_TINY_UNET if tiny else _UNET))
        parts["vae"] = AutoencoderKL(**(TINY_VAE if tiny else FULL_VAE))
    parts = {name: part.eval().to("cpu", torch.float32 if tiny else torch.float16) for name, part in parts.items()}
    for name in ("tokenizer", "tokenizer_2"):
        parts[name] = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    pipeline: Any = StableDiffusionXLPipeline(scheduler=scheduler, add_watermarker=False, **parts)
    pipeline.save_pretrained(folder)
    return folder
