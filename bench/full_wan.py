"""Wan 2.1 in its published small size (1.3B) with random weights: as fast as the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import UMT5Config, UMT5EncoderModel

from muralist.demo.small_hunyuan_dit import assemble_small_hunyuan

_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "num_layers": 30,
    "ffn_dim": 8960,
    "text_dim": 4096,
}
_TEXT = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
_TINY = _TRANSFORMER | {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "ffn_dim": 64,
    "text_dim": 32,
    "freq_dim": 32,
}
_TINY_TEXT = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
_WORDS = 512


def operations(height: int, width: int) -> dict[str, int]:
    """Return the FLOPs for one image, from shapes: a network pass, decoding, encoding a prompt."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        latents = torch.zeros(1, 16, 1, height // 8, width // 8)
        network: Any = WanTransformer3DModel(**_TRANSFORMER)
        network(latents, torch.zeros(1), torch.zeros(1, _WORDS, _TRANSFORMER["text_dim"]))
    with torch.device("meta"), FlopCounterMode(display=False) as decoding:
        vae: Any = AutoencoderKLWan()
        vae.decode(latents)
    wide, inner = _TEXT["d_model"], _TEXT["d_ff"]
    return {
        "pass": int(counter.get_total_flops()),
        "decoding": int(decoding.get_total_flops()),
        "text": 2 * _WORDS * _TEXT["num_layers"] * (4 * wide**2 + 3 * wide * inner),
    }


def build_wan_for_training(folder: Path, tiny: bool = False) -> Path:
    """Write the folder with a text encoder of one layer: fine-tuning is measured on text that is encoded already."""
    return build_full_wan(folder, tiny, text_layers=1)


def build_full_wan(folder: Path, tiny: bool = False, text_layers: int | None = None) -> Path:
    """Write the folder in diffusers layout, in bfloat16: about 15 GB."""
    tokenizer: Any = assemble_small_hunyuan().tokenizer_2  # the vocabulary does not matter here
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with device:
            transformer = WanTransformer3DModel(**(_TINY if tiny else _TRANSFORMER))
            sizes: dict[str, Any] = _TINY_TEXT if tiny else _TEXT
            sizes = sizes | ({"num_layers": text_layers} if text_layers else {})
            config = UMT5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **sizes)
            encoder = UMT5EncoderModel(config)
            vae = AutoencoderKLWan(base_dim=8) if tiny else AutoencoderKLWan()
    finally:
        torch.set_default_dtype(before)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    parts: dict[str, Any] = {"transformer": transformer, "text_encoder": encoder, "vae": vae}
    parts = {name: part.eval().to("cpu") for name, part in parts.items()}
    pipeline: Any = WanPipeline(tokenizer=tokenizer, scheduler=scheduler, **parts)
    pipeline.save_pretrained(folder)
    return folder
