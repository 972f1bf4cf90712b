"""The loss of a family as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muralist.keyed_random import SampleKeys
from muralist.models.family import Encoded, Family


class LossModule(nn.Module):
    """A module whose forward is the loss, so that wrappers (DDP, compile) see the whole step."""

    def __init__(self, family: Family, network: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.family, self.network, self.autocast = family, network, autocast

    def forward(self, encoded: Encoded, seed: int, numbers: Tensor) -> Tensor:
        """The loss of each sample, [B]."""
        with torch.autocast(numbers.device.type, self.autocast, enabled=self.autocast is not None):
            return self.family.loss(self.network, encoded, SampleKeys(seed, numbers))
