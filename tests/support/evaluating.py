"""What tests of evaluation share: the real Inception weights where they are, folders of pictures, a small CLIP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from muralist.cli import main
from tests.conftest import REPOSITORY

_FETCHED = REPOSITORY / ".cache" / "default_1.pt"


def inception_weights() -> Path:
    """The weights of 2015-12-05; `make weights` fetches them."""
    path = Path(os.environ.get("MURALIST_INCEPTION") or _FETCHED)
    if path.is_file():
        return path
    if os.environ.get("CI"):
        pytest.fail("the Inception weights are not there: `make weights` fetches them")
    pytest.skip("the Inception weights are not on this machine: `make weights` fetches them")


def write_pictures(folder: Path, pictures: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{number:06d}.png")
    return folder


def scenes(count: int, seed: int, side: int = 24) -> np.ndarray:
    """Smooth coloured pictures, all different; uint8 [N, side, side, 3]."""
    generator = np.random.default_rng(seed)
    corners = generator.integers(0, 256, (count, 3, 3, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(picture).resize((side, side))) for picture in corners])


def small_clip(folder: Path) -> Path:
    """A CLIP with random weights, strong enough that its embeddings tell pictures and prompts apart."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from tests.support.tiny_text import clip

    torch.manual_seed(0)
    tokenizer, text = clip()
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    words = CLIPTextConfig(**text.config.to_dict())
    model = CLIPModel(CLIPConfig(text_config=words.to_dict(), vision_config=vision.to_dict(), projection_dim=12))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def evaluate(*arguments: object, expect: int = 0) -> None:
    assert main(["evaluate", *map(str, arguments)]) == expect


def report(output: Path) -> dict[str, Any]:
    return json.loads((output / "report.json").read_text())


def small_dinov2(folder: Path, seed: int = 0) -> Path:
    """A DINOv2 with random weights: one layer, a table of 5 x 5 places, 4 x 4 of which a picture has."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(seed)
    config = Dinov2Config(
        hidden_size=6, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=280, patch_size=56
    )
    model = Dinov2Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    torch.nn.init.normal_(model.embeddings.patch_embeddings.projection.weight, std=0.02)
    model.save_pretrained(folder)
    return folder
