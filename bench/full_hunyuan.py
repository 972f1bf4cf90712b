"""A HunyuanDiT of the published size (version 1.2) with random weights: times and memory are those of the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, HunyuanDiT2DModel
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from muralist.models.hunyuan_family import HunyuanFamily
from muralist.models.small_hunyuan import assemble_small_hunyuan

_TRANSFORMER = {
    "num_layers": 40,
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "hidden_size": 1408,
    "mlp_ratio": 4.3637,
    "cross_attention_dim": 1024,
    "cross_attention_dim_t5": 2048,
    "pooled_projection_dim": 1024,
    "sample_size": 128,
    "in_channels": 4,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "learn_sigma": True,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": False,
}
_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}


def operations_of_a_pass(height: int, width: int) -> int:
    """Operations of the network on one picture, counted on shapes alone."""
    parts: Any = None  # VAE and text encoders have no part in it
    family = HunyuanFamily(parts, _TRANSFORMER, {}, (height, width))
    return family.flops_per_image() // 3  # forward alone


def build_full_hunyuan(folder: Path) -> Path:
    """Write the folder in diffusers layout, half precision as published: about 7 GB."""
    pipeline: Any = assemble_small_hunyuan()  # its tokenizers and noise schedule serve here too
    words, pieces = len(pipeline.tokenizer), len(pipeline.tokenizer_2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        parts: dict[str, Any] = {
            "transformer": HunyuanDiT2DModel(**_TRANSFORMER),
            "vae": AutoencoderKL(**_VAE),
            "text_encoder": BertModel(
                BertConfig(
                    vocab_size=words,
                    hidden_size=1024,
                    num_hidden_layers=24,
                    num_attention_heads=16,
                    intermediate_size=4096,
                )
            ),
            "text_encoder_2": T5EncoderModel(
                T5Config(
                    vocab_size=pieces,
                    d_model=2048,
                    d_kv=64,
                    d_ff=5120,
                    num_layers=24,
                    num_heads=32,
                    feed_forward_proj="gated-gelu",
                )
            ),
        }
    for name, part in parts.items():
        setattr(pipeline, name, part.eval().to("cpu", torch.float16))
    pipeline.save_pretrained(folder)
    return folder
