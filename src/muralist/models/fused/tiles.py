"""Matrices that a kernel reads or writes tile by tile, through the engine that Hopper has for that (TMA)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """A matrix and the shape of a tile; what lies beyond its edges is read as zeros and not written."""

    matrix: Tensor
    tile: tuple[int, int]

    def described(self) -> Any:
        """As Triton takes it."""
        return TensorDescriptor.from_tensor(self.matrix, list(self.tile))

    def kind(self) -> Kind:
        """What a kernel is compiled for."""
        return Kind(self.matrix.dtype, tuple(self.matrix.shape), self.matrix.stride(), self.tile)


class Kind(NamedTuple):
    """The same without values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, int]

    def described(self) -> Any:
        """As Triton takes it, with nothing behind it."""
        matrix = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return Tiles(matrix, self.tile).described()
