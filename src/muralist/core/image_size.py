"""Image sizes as settings write them, which is before numpy and Pillow are imported."""

from __future__ import annotations

from collections.abc import Sequence

Size = int | tuple[int, int]
"""An image size in pixels: the side of a square, or (height, width)."""


def height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width; one number stands for both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def as_size(size: int | Sequence[int]) -> Size:
    """Return a size as settings write it: one number for a square."""
    height, width = height_width(size)
    return height if height == width else (height, width)


def format_size(size: Size) -> str:
    """Format a size: `64`, or `512 x 768` (height first)."""
    height, width = height_width(size)
    return str(height) if height == width else f"{height} x {width}"
