"""Layers of a pipeline in 8 bits, for fast generation: a picture's numbers depend on itself alone, as they must."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from muralist.models.fp8_products import Rounded, fits, product, rounded

_LEAST_SIDE = 1024  # below it the rounding costs more than the product saves


class Fp8Linear(nn.Module):
    """A linear layer in 8 bits that keeps its exact weights, for comparison."""

    weight: Tensor
    scale: Tensor

    def __init__(self, exact: nn.Linear) -> None:
        super().__init__()
        self.exact = exact
        self.exactly = False
        weight, scale = rounded(exact.weight.detach())
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.in_features, self.out_features, self.bias = exact.in_features, exact.out_features, exact.bias

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self.exactly:
            return self.exact(x)
        rows = rounded(x.reshape(-1, x.shape[-1]))
        out = product(rows, Rounded(self.weight, self.scale), fast=False).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


def use_fp8(blocks: Iterable[nn.Module], least_side: int = _LEAST_SIDE) -> list[Fp8Linear]:
    """Put 8-bit layers in the place of the large linear layers within these blocks."""
    made: list[Fp8Linear] = []
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is not nn.Linear or isinstance(parent, Fp8Linear):
                    continue
                sides = (layer.in_features, layer.out_features)
                if min(sides) >= least_side and fits(*sides):
                    made.append(Fp8Linear(layer))
                    setattr(parent, name, made[-1])
    return made


@contextmanager
def exactly(layers: Iterable[Fp8Linear]) -> Iterator[None]:
    """Within it, these layers compute as before."""
    layers = list(layers)
    for layer in layers:
        layer.exactly = True
    try:
        yield
    finally:
        for layer in layers:
            layer.exactly = False
