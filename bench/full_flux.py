"""FLUX.1-dev in its published size (12B) with random weights: a training step takes as long as that of the published model.

Text encoders have one layer of the published width: fine-tuning is measured on text that is encoded already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bench.full_hunyuan import FULL_VAE, TINY_VAE
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from muralist.demo.small_hunyuan_dit import assemble_small_hunyuan

_TRANSFORMER: dict[str, Any] = {"guidance_embeds": True}  # the defaults are those of the published model
_VAE = {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
_TINY: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
    "guidance_embeds": True,
}


def build_full_flux(folder: Path, tiny: bool = False) -> Path:
    """Write the folder in diffusers layout, in bfloat16: about 24 GB."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{sign}</w>" for sign in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    t5_tokenizer: Any = assemble_small_hunyuan().tokenizer_2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wide, pooled = (32, 32) if tiny else (4096, 768)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with device:
            transformer = FluxTransformer2DModel(**(_TINY if tiny else _TRANSFORMER))
            vae = AutoencoderKL(**((TINY_VAE if tiny else FULL_VAE) | _VAE))
            clip = CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=len(vocabulary), hidden_size=pooled, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=pooled, max_position_embeddings=77, projection_dim=pooled,
                    bos_token_id=len(vocabulary) - 2, eos_token_id=len(vocabulary) - 1,
                )
            )  # fmt: skip
            t5 = T5EncoderModel(
                T5Config(
                    vocab_size=len(t5_tokenizer), d_model=wide, d_kv=16, d_ff=wide, num_layers=1, num_heads=2,
                    feed_forward_proj="gated-gelu",
                )
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    networks: dict[str, Any] = {"transformer": transformer, "vae": vae, "text_encoder": clip, "text_encoder_2": t5}
    pipeline: Any = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        tokenizer_2=t5_tokenizer,
        **{name: part.eval().to("cpu") for name, part in networks.items()},
    )
    pipeline.save_pretrained(folder)
    return folder
