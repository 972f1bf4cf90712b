"""Pictures made small, for pages."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def small_picture(path: Path, side: int) -> Image.Image | None:
    """A picture that fits into a square of this side, in RGB; None where it cannot be read."""
    try:
        with Image.open(path) as image:
            image.thumbnail((side, side))
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
