"""Matrix products in 8 bits: every row of the input and of the weights has a scale of its own.

So a picture's numbers depend on itself alone, as they must: a scale for a whole batch would tie pictures together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_MULTIPLE = 16  # sides that the product takes
_LEAST_SIDE = 1024  # below it the rounding costs more than the product saves
_CAPABILITY = (8, 9)


def can_fp8(device: torch.device) -> bool:
    """Whether the device has such products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, K] in 8 bits, and the scale [R, 1] of each."""
    scale = (rows.abs().amax(dim=-1, keepdim=True).float() / _LARGEST).clamp(min=1e-12)
    return (rows.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8), scale


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
        self.register_buffer("scale", scale.t().contiguous(), persistent=False)
        self.in_features, self.out_features, self.bias = exact.in_features, exact.out_features, exact.bias

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self.exactly:
            return self.exact(x)
        rows, scale = rounded(x.reshape(-1, x.shape[-1]))
        product = torch._scaled_mm(rows, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16).to(x.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*x.shape[:-1], self.out_features)


def use_fp8(blocks: Iterable[nn.Module], least_side: int = _LEAST_SIDE) -> list[Fp8Linear]:
    """Put 8-bit layers in the place of the large linear layers within these blocks."""
    made: list[Fp8Linear] = []
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is not nn.Linear or isinstance(parent, Fp8Linear):
                    continue
                sides = (layer.in_features, layer.out_features)
                if min(sides) >= least_side and not any(side % _MULTIPLE for side in sides):
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
