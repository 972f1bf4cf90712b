"""PickScore, HPSv2.1 and the LAION aesthetic score: all are small functions of CLIP embeddings.

PickScore and HPSv2.1 are CLIP ViT-H/14 models tuned on human choices, and score by the cosine of image and prompt; the
aesthetic score is a chain of linear layers on the embeddings of OpenAI's ViT-L/14.
"""

from __future__ import annotations

import hashlib
import html
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from muralist.core.errors import UserError
from muralist.data.decode import decode_image
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import (
    AESTHETIC_REPORTED,
    CLIP_MEAN,
    CLIP_STD,
    TEXT_LENGTH,
    ClipEncoder,
    LoadedEncoder,
    crop_as_torchvision,
    truncation_warnings,
)
from muralist.evaluate.features import hash_texts
from muralist.evaluate.scores import SCORES, ImageScore, build_model, load_checkpoint, unusable
from muralist.models.hub import find_model
from muralist.models.weights import read_file
from muralist.settings import EvaluateSettings

if TYPE_CHECKING:
    from muralist.evaluate.scores import ComputeFeatures

_VISION_HEAD, _TEXT_HEAD = 80, 64  # channels of an attention head of open_clip's ViT-H-14
_AESTHETIC_LAYERS = (0, 2, 4, 6, 7)  # of an nn.Sequential in which the others are dropout


@dataclass(frozen=True)
class CosineScore(ImageScore):
    """A multiple of the cosine of an image's and its prompt's embedding."""

    encoders: tuple[ClipEncoder, ClipEncoder]
    """Of images and of prompts."""
    scale: float
    about: str
    clean: Callable[[str], str] = str
    """What the authors do to a prompt before they split it into tokens."""

    @property
    def note(self) -> str:
        """How it is computed."""
        return self.about

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image."""
        rows = compute(self.encoders[0], images, "images").aligned(len(images))
        cleaned = hash_texts([self.clean(prompt) for prompt in prompts])
        texts = compute(self.encoders[1], cleaned, "prompts").aligned(len(images))
        return self.scale * np.einsum("nd,nd->n", rows, texts)

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Count the prompts that are truncated."""
        count = self.encoders[1].count_truncated([self.clean(prompt) for prompt in prompts])
        return truncation_warnings(count, TEXT_LENGTH, SCORES[self.encoders[0].name].title)


class PickScoreEncoder(ClipEncoder):
    """The embeddings of PickScore's CLIP."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        from transformers import CLIPModel

        model = load_checkpoint("pickscore", self.source, CLIPModel, dtype=torch.float32).to(device)
        return self._text_encoder(model, device) if self.name.endswith("-text") else self._image_encoder(model, device)


def _open_pickscore(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    from safetensors import safe_open
    from transformers import CLIPModel

    model = load_checkpoint("pickscore", folder, CLIPModel, device_map="meta")
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        scale = float(tensors.get_tensor("logit_scale"))
    images, texts = (
        PickScoreEncoder(folder, sha256, model.config.projection_dim, name) for name in _names("pickscore")
    )
    about = f"the factor {np.exp(scale):.4g} of the model x cosine, as its authors compute it"
    return CosineScore(folder, sha256, (images, texts), float(np.exp(scale)), about)


def _names(key: str) -> tuple[str, str]:
    return key, f"{key}-text"


_STRAIGHT = {ord(sign): "'" for sign in "\u02bc\u2018\u2019\u201a\u201b"}  # ftfy turns these quotes straight,
_STRAIGHT |= {ord(sign): '"' for sign in "\u201c\u201d\u201e\u201f"}
_PLAIN = (0x3000, *range(0xFB00, 0xFB07), *range(0xFF01, 0xFFF0))  # and ligatures and full-width signs plain
_STRAIGHT |= {code: unicodedata.normalize("NFKC", chr(code)) for code in _PLAIN}


def _clean_as_open_clip(prompt: str) -> str:
    """Do what open_clip's tokenizer, which HPSv2 uses, does before it lowers the case: ftfy, and HTML's entities.

    Text in a wrong encoding stays as it is, which ftfy would guess and repair.
    """
    straight = html.unescape(prompt).translate(_STRAIGHT)
    return html.unescape(html.unescape(straight)).strip()


class HpsEncoder(ClipEncoder):
    """The embeddings of HPSv2.1, whose weights are named as in open_clip; `source` is their file."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        from transformers import CLIPModel

        tensors = {name: value.float() for name, value in _open_clip_tensors(self.source).items()}
        model = build_model(CLIPModel, _clip_config(tensors), _transformers_names(tensors)).to(device)
        if self.name.endswith("-text"):
            return self._text_encoder(model, device)
        side = model.config.vision_config.image_size

        def compute(batch: Tensor) -> Tensor:
            output = model.vision_model(pixel_values=batch.to(device)).pooler_output
            return F.normalize(model.visual_projection(output), dim=-1)

        return LoadedEncoder(lambda data: _letterbox(data, side), compute)

    def tokenizer(self) -> Any:
        """Load the tokenizer beside the weights."""
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(self.source.parent, local_files_only=True)


def _letterbox(data: bytes, side: int) -> Tensor:
    """Resize the longer side as HPSv2 does, on pixels in 0 to 1, and pad the shorter one with black."""
    pixels = torch.from_numpy(np.array(decode_image(data))).permute(2, 0, 1).float().div(255)
    height, width = pixels.shape[1:]
    scale = side / max(height, width)
    if scale != 1:
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
        pixels = F.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
        rows, columns = side - size[0], side - size[1]
        pixels = F.pad(pixels, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return (pixels - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]


def _open_clip_tensors(file: Path, shapes_only: bool = False) -> dict[str, Tensor]:
    content = read_file(file, shapes_only)
    return content.get("state_dict", content)


def _clip_config(tensors: Mapping[str, Tensor]) -> Any:
    """Return the sizes of an open_clip model with the head sizes of ViT-H-14."""
    from transformers import CLIPConfig

    width, _, patch, _ = tensors["visual.conv1.weight"].shape
    vocabulary, text_width = tensors["token_embedding.weight"].shape
    grid = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)

    def tower(prefix: str, width: int, head: int) -> dict[str, Any]:
        layers = [name for name in tensors if name.startswith(f"{prefix}resblocks.") and name.endswith("ln_1.weight")]
        return {
            "hidden_size": width,
            "intermediate_size": len(tensors[f"{prefix}resblocks.0.mlp.c_fc.weight"]),
            "num_hidden_layers": len(layers),
            "num_attention_heads": width // head,
            "hidden_act": "gelu",
        }

    text: dict[str, Any] = {"vocab_size": vocabulary, "max_position_embeddings": len(tensors["positional_embedding"])}
    # 2 makes transformers take the features at the highest token, as open_clip does.
    text |= {
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 2,
        **tower("transformer.", text_width, _TEXT_HEAD),
    }
    vision = {"image_size": grid * patch, "patch_size": patch, **tower("visual.transformer.", width, _VISION_HEAD)}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=tensors["text_projection"].shape[1])


_NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
_PREFIXES = {
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}
_PARTS = {
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


def _transformers_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename open_clip's tensors to those of transformers' CLIPModel, and split its fused attention projections."""
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in _NAMES:
            renamed[_NAMES[name]] = value.T.contiguous() if name in ("visual.proj", "text_projection") else value
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            continue  # such as the causal mask, which some files hold
        new = _PREFIXES[prefix] + name.removeprefix(prefix)
        for old, part in _PARTS.items():
            new = new.replace(old, part)
        if ".attn.in_proj_" in new:
            layer, kind = new.split(".attn.in_proj_")
            for which, part_of in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{which}_proj.{kind}"] = part_of.contiguous()
        else:
            renamed[new] = value
    return renamed


def _open_hpsv2(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    from transformers import CLIPModel

    file = folder / SCORES["hpsv2"].downloads[0].files[0]
    try:
        tensors = _open_clip_tensors(file, shapes_only=True)
        model = build_model(CLIPModel, _clip_config(tensors), _transformers_names(tensors), device_map="meta")
    except Exception as error:  # of a foreign file
        raise unusable("hpsv2", folder, error) from None
    images, texts = (HpsEncoder(file, sha256, model.config.projection_dim, name) for name in _names("hpsv2"))
    about = "100 x cosine; longer side resized to 224, black borders"
    return CosineScore(folder, sha256, (images, texts), 100.0, about, _clean_as_open_clip)


class OpenAiClipEncoder(ClipEncoder):
    """The embeddings of images that OpenAI's code, as torchvision, crops one pixel beside transformers' crop."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        side = self.side
        return replace(super().load(device), prepare=lambda data: crop_as_torchvision(data, side))

    @cached_property
    def side(self) -> int:
        """The side of the crop."""
        return int(self.processor().crop_size["height"])

    def differs(self, shape: tuple[int, int] | None) -> bool:
        """Whether the crop of an image of this shape is another one than transformers'."""
        return shape is not None and (int(self.side * max(shape) / min(shape)) - self.side) % 4 == 3


@dataclass(frozen=True)
class AestheticScore(ImageScore):
    """Linear layers without activations on a CLIP's normalized image embeddings."""

    clip: ClipEncoder
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    """Weight and bias of each layer."""

    @property
    def note(self) -> str:
        """How it is computed."""
        return f"on the embeddings of CLIP {self.clip.source.name}; published values use openai/clip-vit-large-patch14"

    def warnings(self, images: Sequence[FeatureItem], prompts: Sequence[str]) -> list[str]:
        """Say so where another CLIP of the same width is given."""
        text = (
            f"The LAION aesthetic score is computed with CLIP {self.clip.size}: it was trained on {AESTHETIC_REPORTED} "
            "(openai/clip-vit-large-patch14), and its values are not comparable."
        )
        return [text] if self.clip.size != AESTHETIC_REPORTED else []

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image."""
        exact = OpenAiClipEncoder(self.clip.source, self.clip.sha256, self.clip.width, "clip-openai")
        differs = [exact.differs(image.shape) for image in images]
        rows = np.zeros((len(images), self.clip.width))
        for encoder, is_exact in ((self.clip, False), (exact, True)):
            places = [place for place, differing in enumerate(differs) if differing is is_exact]
            if places:
                rows[places] = compute(encoder, [images[place] for place in places], "images").aligned(len(places))
        for weight, bias in self.layers:
            rows = rows @ weight.T + bias
        return rows[:, 0]


def _open_aesthetic(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    file = folder / SCORES["aesthetic"].downloads[0].files[0]
    try:
        tensors = read_file(file)
        layers = tuple(
            (tensors[f"layers.{number}.weight"].double().numpy(), tensors[f"layers.{number}.bias"].double().numpy())
            for number in _AESTHETIC_LAYERS
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise unusable("aesthetic", folder, error) from None
    clip, _ = ClipEncoder.from_checkpoint(find_model(settings.clip_path or "", "--clip_path"))
    if layers[0][0].shape[1] != clip.width:
        raise UserError(
            f"The aesthetic score in {folder} reads {layers[0][0].shape[1]} features, and the CLIP in {clip.source} has "
            f"{clip.width}.",
            "It was trained on the embeddings of OpenAI's ViT-L/14.",
            "Give a copy of openai/clip-vit-large-patch14 as --clip_path.",
        )
    both = hashlib.sha256(f"{sha256}{clip.sha256}".encode()).hexdigest()
    return AestheticScore(folder, both, clip, layers)


OPENERS = {"pickscore": _open_pickscore, "hpsv2": _open_hpsv2, "aesthetic": _open_aesthetic}
