"""Running averages of the weights with half-lives in images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muralist.train.schedule import ema_decay


class WeightAverage:
    """One exponential average of a network's trained weights, in float32, lying over the processes as they do."""

    def __init__(self, trained: Mapping[str, Tensor], half_life: float) -> None:
        self.half_life = half_life
        self.names = list(trained)
        self.values = [value.detach().float().clone() for value in trained.values()]

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor], images: int, step_images: int) -> None:
        """Take in the weights after the step that started at `images` images."""
        weights = [_here(value) for value in trained.values()]
        torch._foreach_lerp_([_here(value) for value in self.values], weights, self.toward(images, step_images))

    def toward(self, images: int, step_images: int) -> float:
        """How far it goes toward the weights after the step that started at `images` images."""
        return 1.0 - ema_decay(images, step_images, self.half_life)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and averaged tensors."""
        return zip(self.names, self.values, strict=True)


def _here(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WithWeights(nn.Module):
    """A network seen with other weights, without copying or changing it."""

    def __init__(self, network: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.network, self.weights = network, weights

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the network with the replaced weights."""
        return torch.func.functional_call(self.network, self.weights, inputs, named)
