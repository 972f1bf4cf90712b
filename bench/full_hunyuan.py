"""A HunyuanDiT of the published size (version 1.2) with random weights: same time and memory as the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, HunyuanDiT2DModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from muralist.demo.small_hunyuan_dit import assemble_small_hunyuan
from muralist.models.hunyuan_dit import HunyuanDiTSpec

_TRANSFORMER: dict[str, Any] = {
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
FULL_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
_BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_T5 = {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32}
_TINY_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
_TINY = _TRANSFORMER | {
    "num_layers": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 32,
    "sample_size": 8,
}
TINY_VAE = FULL_VAE | {
    "block_out_channels": (8, 8, 8, 8),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "sample_size": 64,
}


def operations_of_decoding(height: int, width: int) -> int:
    """Return the FLOPs of the VAE decoder for one image."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        vae: Any = AutoencoderKL(**FULL_VAE)
        vae.decode(torch.zeros(1, 4, height // 8, width // 8))
    return int(counter.get_total_flops())


def operations(height: int, width: int) -> dict[str, int]:
    """Return the FLOPs for one image, from shapes: a network pass, decoding, encoding a prompt."""
    parts: Any = None  # VAE and text encoders are not needed
    spec = HunyuanDiTSpec(parts, _TRANSFORMER, {}, (height, width))
    bert, t5 = 24 * (4 * 1024**2 + 2 * 1024 * 4096), 24 * (4 * 2048**2 + 3 * 2048 * 5120)
    return {
        "pass": spec.flops_per_image() // 3,  # forward alone
        "decoding": operations_of_decoding(height, width),
        "text": 2 * (77 * bert + 256 * t5),
    }


def build_full_hunyuan(folder: Path, tiny: bool = False) -> Path:
    """Write the folder in diffusers layout, half precision as published: about 7 GB."""
    pipeline: Any = assemble_small_hunyuan()  # its tokenizers and noise schedule serve here too
    bert: Any = BertConfig(vocab_size=len(pipeline.tokenizer), **(_TINY_BERT if tiny else _BERT))
    t5: Any = T5Config(
        vocab_size=len(pipeline.tokenizer_2), feed_forward_proj="gated-gelu", **(_TINY_T5 if tiny else _T5)
    )
    with torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu"):
        parts: dict[str, Any] = {
            "transformer": HunyuanDiT2DModel(**(_TINY if tiny else _TRANSFORMER)),
            "vae": AutoencoderKL(**(TINY_VAE if tiny else FULL_VAE)),
            "text_encoder": BertModel(bert),
            "text_encoder_2": T5EncoderModel(t5),
        }
    for name, part in parts.items():
        setattr(pipeline, name, part.eval().to("cpu", torch.float32 if tiny else torch.float16))
    pipeline.save_pretrained(folder)
    return folder
