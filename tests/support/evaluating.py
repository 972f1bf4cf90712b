"""Inputs for tests of evaluation: the real Inception weights, image folders, small CLIP and DINOv2 models."""

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

_INCEPTION = Path(os.environ.get("MURALIST_INCEPTION") or REPOSITORY / ".cache" / "default_1.pt")


def inception_weights() -> Path:
    """Return the weights of 2015-12-05; `make weights` fetches them."""
    if not _INCEPTION.is_file():
        pytest.skip("the Inception weights are not on this machine: `make weights` fetches them")
    return _INCEPTION


def write_images(folder: Path, images: np.ndarray) -> Path:
    """Write images [N, H, W, 3] as PNG files 000000.png, 000001.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:06d}.png")
    return folder


def scenes(count: int, seed: int, side: int = 24) -> np.ndarray:
    """Return smooth color gradients, all different; uint8 [N, side, side, 3]."""
    generator = np.random.default_rng(seed)
    corners = generator.integers(0, 256, (count, 3, 3, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(image).resize((side, side))) for image in corners])


def small_clip(folder: Path) -> Path:
    """Save a CLIP with random weights, large enough that embeddings of different inputs differ."""
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


def evaluate(output: Path, *arguments: object, expect: int = 0) -> dict[str, Any]:
    """Run `muralist evaluate`, and return the content of report.json."""
    assert main(["evaluate", *map(str, arguments), "--output_dir", str(output)]) == expect
    return {} if expect else json.loads((output / "report.json").read_text())


def small_dinov2(folder: Path, seed: int = 0) -> Path:
    """Save a DINOv2 with random weights: one layer, 5 x 5 position embeddings for images of 4 x 4 patches."""
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
