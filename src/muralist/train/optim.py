"""AdamW, and EMA (exponential moving average) weights with half-lives in images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muralist.settings import OptimSettings
from muralist.train.schedule import ema_decay


def build_optimizer(network: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """Build AdamW; vectors (biases, norms) have no weight decay, as in the official JiT code."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # LoRA has no vectors
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)


def optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name; created before the first step, so that a checkpoint can be read into it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


class EMA:
    """Exponential moving average of a network's trained weights, in float32 and sharded as they are."""

    def __init__(self, trained: Mapping[str, Tensor], half_life: float) -> None:
        self.half_life = half_life
        self.names = list(trained)
        self.values = [value.detach().float().clone() for value in trained.values()]

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor], images: int, step_images: int) -> None:
        """Include the weights after the step that started at `images` images."""
        weights = [_local(value) for value in trained.values()]
        torch._foreach_lerp_([_local(value) for value in self.values], weights, self.lerp_weight(images, step_images))

    def lerp_weight(self, images: int, step_images: int) -> float:
        """Weight of the new weights in the step that starts at `images` images: 1 - decay."""
        return 1.0 - ema_decay(images, step_images, self.half_life)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and averaged tensors."""
        return zip(self.names, self.values, strict=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SwappedWeights(nn.Module):
    """A network called with other weights, such as EMA weights, without copying or changing it."""

    def __init__(self, network: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.network, self.weights = network, weights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with the replaced weights."""
        return torch.func.functional_call(self.network, self.weights, args, kwargs)
