"""ImageReward: BLIP's text encoder looks at the image by cross-attention, and linear layers turn its first token into a
reward (Xu et al. 2023)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import Encoder, LoadedEncoder, crop_as_torchvision, truncation_warnings
from muralist.evaluate.features import pair_items
from muralist.evaluate.scores import ImageScore, build_model, unusable
from muralist.models.weights import read_file
from muralist.settings import EvaluateSettings

if TYPE_CHECKING:
    from muralist.evaluate.scores import ComputeFeatures

WEIGHTS, CONFIG, VOCABULARY = "ImageReward.pt", "med_config.json", "vocab.txt"
_TEXT_LENGTH = 35  # tokens of a prompt that are read
_VISION_HEAD = 64  # channels of an attention head of BLIP's ViT-L/16
_LAYERS = (0, 2, 4, 6, 7)  # linear layers of an nn.Sequential in which the others are dropout
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # of the rewards on the authors' data
_VISION, _TEXT = "blip.visual_encoder.", "blip.text_encoder."
_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
_PARTS = {
    "blocks.": "encoder.layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.qkv.": ".self_attn.qkv.",
    ".attn.proj.": ".self_attn.projection.",
}


class ImageRewardEncoder(Encoder):
    """The reward of an image and its prompt; `source` is the file of the weights."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        tensors = {name: value.float() for name, value in read_file(self.source).items()}
        vision, text = (model.to(device) for model in _build(tensors, self.source.parent))
        layers = [[tensors[f"mlp.layers.{n}.{part}"].to(device) for part in ("weight", "bias")] for n in _LAYERS]
        side, tokenizer = vision.config.image_size, _tokenizer(self.source.parent)

        def prepare(pair: tuple[bytes, str]) -> tuple[Tensor, Tensor]:
            data, prompt = pair
            tokens = tokenizer(
                prompt, padding="max_length", truncation=True, max_length=_TEXT_LENGTH, return_tensors="pt"
            )
            return crop_as_torchvision(data, side), torch.cat((tokens["input_ids"], tokens["attention_mask"]))

        def compute(batch: tuple[Tensor, Tensor]) -> Tensor:
            pixels, (tokens, mask) = batch[0].to(device), batch[1].to(device).unbind(1)
            seen = vision(pixel_values=pixels).last_hidden_state
            everything = torch.ones(seen.shape[:2], dtype=torch.long, device=device)
            output = text(
                input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen, encoder_attention_mask=everything,
                is_decoder=False,
            )  # fmt: skip
            reward = output.last_hidden_state[:, 0]
            for weight, bias in layers:
                reward = F.linear(reward, weight, bias)
            return (reward - _MEAN) / _STD

        return LoadedEncoder(prepare, compute, lambda rows: tuple(map(torch.stack, zip(*rows, strict=True))))


def _tokenizer(folder: Path) -> Any:
    from transformers import BertTokenizer

    pieces = (folder / VOCABULARY).read_text(encoding="utf-8").splitlines()
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, do_lower_case=True)


def _build(tensors: Mapping[str, Tensor], folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return BLIP's vision and text encoders with ImageReward's weights."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    vision = {name.removeprefix(_VISION): value for name, value in tensors.items() if name.startswith(_VISION)}
    width, _, patch, _ = vision["patch_embed.proj.weight"].shape
    vision_config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=len(vision["blocks.0.mlp.fc1.weight"]),
        num_hidden_layers=sum(name.endswith(".norm1.weight") for name in vision),
        num_attention_heads=width // _VISION_HEAD,
        image_size=round((vision["pos_embed"].shape[1] - 1) ** 0.5) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
    )
    text = {name.removeprefix(_TEXT): value for name, value in tensors.items() if name.startswith(_TEXT)}
    text.pop("embeddings.position_ids", None)  # numbers that transformers makes itself
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    text_config = BlipTextConfig(
        vocab_size=len(text["embeddings.word_embeddings.weight"]),
        encoder_hidden_size=width,
        layer_norm_eps=config["layer_norm_eps"],
        hidden_act=config["hidden_act"],
        is_decoder=True,  # with cross-attention
        **{name: config[name] for name in sizes},
    )
    text_model = build_model(BlipTextModel, text_config, text, add_pooling_layer=False, **options)
    return build_model(BlipVisionModel, vision_config, _rename(vision), **options), text_model


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of BLIP's vision encoder to those of transformers."""
    renamed = {}
    for name, value in tensors.items():
        new = _NAMES.get(name, name)
        for old, part in _PARTS.items():
            new = new.replace(old, part)
        renamed[new] = value
    return renamed


@dataclass(frozen=True)
class ImageReward(ImageScore):
    """The reward, of mean 0 and deviation 1 on its authors' data."""

    encoder: ImageRewardEncoder

    @property
    def note(self) -> str:
        """How it is computed."""
        return "ImageReward-v1.0, mean 0 and deviation 1 on its authors' data"

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the reward of each image."""
        return compute(self.encoder, pair_items(images, prompts), "images with prompts").aligned(len(images))[:, 0]

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the weights."""
        return _tokenizer(self.folder)

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Count the prompts that are truncated."""
        count = sum(len(self.tokenizer(prompt)["input_ids"]) > _TEXT_LENGTH for prompt in set(prompts))
        return truncation_warnings(count, _TEXT_LENGTH, "ImageReward")


def _open(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    try:
        tensors = read_file(folder / WEIGHTS, shapes_only=True)
        _build(tensors, folder, device_map="meta")
        if missing := [number for number in _LAYERS if f"mlp.layers.{number}.weight" not in tensors]:
            raise ValueError(f"the tensor mlp.layers.{missing[0]}.weight is missing")
        if "[SEP]" not in _tokenizer(folder).get_vocab():
            raise ValueError(f"{VOCABULARY} is not BERT's")
    except Exception as error:  # of a foreign file
        raise unusable("imagereward", folder, error) from None
    return ImageReward(folder, sha256, ImageRewardEncoder(folder / WEIGHTS, sha256, 1, "imagereward"))


OPENERS = {"imagereward": _open}
