"""Z-Image and Qwen-Image with the shapes of their published networks and random weights; text as long as its prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from bench.full_hunyuan import FULL_VAE, TINY_VAE
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
)

QWEN_IMAGE_LAYERS = 20  # of 60: its 41 GB would not fit on the disk beside other models; all layers are alike
_CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words of QwenImagePipeline's prompt template, of which it drops the first 34 tokens: letter by letter the rest of the
# template would be longer than a prompt.
_TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:\nuser\nassistant"
)
_QWEN3 = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
          "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
_TINY_QWEN3 = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
_QWEN25 = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 4, "num_attention_heads": 28,
           "num_key_value_heads": 4}  # fmt: skip
_TINY_QWEN25 = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1}  # fmt: skip
_TINY_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
_TINY_ZIMAGE = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
                "cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [1024, 64, 64]}  # fmt: skip
_TINY_QWEN_IMAGE = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
                    "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}  # fmt: skip


def _tokenizer() -> Any:
    """One token for each byte, so that a prompt of n letters has n tokens."""
    pieces = [*sorted(ByteLevel.alphabet()), *_SPECIAL]
    tokenizer = Qwen2Tokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL[1:]})
    tokenizer.chat_template = _CHAT
    tokenizer.add_tokens(re.findall(r"\s?\w+|[^\w\s]", _TEMPLATE))
    return tokenizer


def _save(pipeline: Any, folder: Path) -> Path:
    pipeline.save_pretrained(folder)
    return folder


def _built(tiny: bool, *builders: Any) -> list[Any]:
    """Build networks on the GPU, where their random weights take no time, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return [build().eval().to("cpu") for build in builders]
    finally:
        torch.set_default_dtype(before)


def build_full_zimage(folder: Path, tiny: bool = False) -> Path:
    """Write Z-Image (6B, with a text encoder of Qwen3-4B's shape) in diffusers layout: about 20 GB."""
    tokenizer = _tokenizer()
    sizes: dict[str, Any] = _TINY_QWEN3 if tiny else _QWEN3
    latents = {"latent_channels": 4 if tiny else 16, "shift_factor": 0.1159}
    vae_sizes: dict[str, Any] = (TINY_VAE if tiny else FULL_VAE) | latents
    transformer, encoder, vae = _built(
        tiny,
        lambda: ZImageTransformer2DModel(**(_TINY_ZIMAGE if tiny else {})),
        lambda: Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **sizes)),
        lambda: AutoencoderKL(**vae_sizes),
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # diffusers leaves them as the memory was
        torch.nn.init.normal_(token.data)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer, "transformer": transformer}
    return _save(ZImagePipeline(scheduler=scheduler, **parts), folder)


def build_full_qwen_image(folder: Path, tiny: bool = False) -> Path:
    """Write Qwen-Image with a third of its 60 layers, and 4 of 28 in the text encoder: about 18 GB."""
    tokenizer = _tokenizer()
    sizes: dict[str, Any] = _TINY_QWEN25 if tiny else _QWEN25
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    rope = {"rope_type": "default", "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16]}
    text = sizes | {"vocab_size": len(tokenizer), "rope_parameters": rope | {"rope_theta": 1e6}}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=_TINY_VISION | {"out_hidden_size": sizes["hidden_size"]})
    tiny_vae = {"base_dim": 4, "z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    transformer, encoder, vae = _built(
        tiny,
        lambda: QwenImageTransformer2DModel(**(_TINY_QWEN_IMAGE if tiny else {"num_layers": QWEN_IMAGE_LAYERS})),
        lambda: Qwen2_5_VLForConditionalGeneration(config),
        lambda: AutoencoderKLQwenImage(**(tiny_vae if tiny else {})),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer, "transformer": transformer}
    return _save(QwenImagePipeline(scheduler=scheduler, **parts), folder)
