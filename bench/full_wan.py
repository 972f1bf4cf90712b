"""A Wan 2.1 text-to-video model of the published small size (1.3B) with random weights: times are those of the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import UMT5Config, UMT5EncoderModel

from muralist.models.small_hunyuan import assemble_small_hunyuan

_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "num_layers": 30,
    "ffn_dim": 8960,
    "text_dim": 4096,
}
_WORDS = 512


def operations_of_a_pass(height: int, width: int) -> int:
    """Operations of the network on one frame, counted on shapes alone."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        latents = torch.zeros(1, 16, 1, height // 8, width // 8)
        network: Any = WanTransformer3DModel(**_TRANSFORMER)
        network(latents, torch.zeros(1), torch.zeros(1, _WORDS, _TRANSFORMER["text_dim"]))
    return int(counter.get_total_flops())


def build_full_wan(folder: Path) -> Path:
    """Write the folder in diffusers layout, in bfloat16: about 15 GB."""
    tokenizer: Any = assemble_small_hunyuan().tokenizer_2  # what the words are does not matter here
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            transformer = WanTransformer3DModel(**_TRANSFORMER)
            encoder = UMT5EncoderModel(
                UMT5Config(
                    vocab_size=len(tokenizer),
                    d_model=4096,
                    d_kv=64,
                    d_ff=10240,
                    num_layers=24,
                    num_heads=64,
                    feed_forward_proj="gated-gelu",
                )
            )
            vae = AutoencoderKLWan()
    finally:
        torch.set_default_dtype(before)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    parts: dict[str, Any] = {"transformer": transformer, "text_encoder": encoder, "vae": vae}
    parts = {name: part.eval().to("cpu") for name, part in parts.items()}
    pipeline: Any = WanPipeline(tokenizer=tokenizer, scheduler=scheduler, **parts)
    pipeline.save_pretrained(folder)
    return folder
