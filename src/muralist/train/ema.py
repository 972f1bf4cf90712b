"""Running averages of the weights with half-lives in images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from muralist.train.schedule import ema_decay


class WeightAverage:
    """One exponential average of a network's trainable weights, in float32."""

    def __init__(self, network: nn.Module, half_life: float) -> None:
        self.half_life = half_life
        self.names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        self.values = [p.detach().float().clone() for p in network.parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self, network: nn.Module, images: int, step_images: int) -> None:
        """Take in the weights after the step that started at `images` images."""
        weights = [parameter.detach() for parameter in network.parameters() if parameter.requires_grad]
        torch._foreach_lerp_(self.values, weights, 1.0 - ema_decay(images, step_images, self.half_life))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and averaged tensors."""
        return zip(self.names, self.values, strict=True)

    def state(self, network: nn.Module) -> dict[str, Tensor]:
        """A full state dict: averages, and what is not trained as the network has it."""
        return {name: value.detach() for name, value in network.state_dict().items()} | dict(self.items())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a full state dict."""
        for name, value in self.items():
            value.copy_(state[name])
