"""From a model's output to a picture file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

if TYPE_CHECKING:
    import torch


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """[-1, 1], [B, 3, H, W] to uint8 [B, H, W, 3], rounded."""
    import torch  # seconds, which the command that starts workers would spend before it starts them

    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def to_u8(images: torch.Tensor) -> np.ndarray:
    """The same on the host."""
    return to_pixels(images).cpu().numpy()


def encode_png(picture: np.ndarray, facts: dict[str, str]) -> bytes:
    """A PNG that carries how it was made."""
    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()
