"""Everything the training loop knows about a model: one protocol, and the registry of families behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from muralist.data.loader import Batch
from muralist.keyed_random import SampleKeys
from muralist.settings import SampleSettings, TrainSettings


class Encoded(NamedTuple):
    """What the network is trained on, after the frozen parts."""

    images: Tensor  # [B, C, H, W]
    labels: Tensor  # [B] int64


class Family(Protocol):
    """A kind of model."""

    @property
    def label_names(self) -> list[str]:
        """The classes, by number; empty when there are none."""

    def network(self) -> nn.Module:
        """The trainable network with keyed initial weights, on the CPU."""

    def skeleton(self) -> nn.Module:
        """The same on the meta device: whole once a state dict is assigned to it."""

    def encode(self, batch: Batch, keys: SampleKeys) -> Encoded:
        """Run the frozen parts."""

    def loss(self, network: nn.Module, encoded: Encoded, keys: SampleKeys) -> Tensor:
        """The loss of each sample, [B]; pure and compilable."""

    def default_prompts(self) -> list[str]:
        """What to draw when nobody says."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts this model cannot draw."""

    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Pictures in [-1, 1], [B, 3, H, W]; a picture depends on its prompt and seed alone."""

    def adopt(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Start from weights of another run."""

    def flops_per_image(self) -> int:
        """Operations of one training pass (forward and backward) on one image."""

    def tokens_per_image(self) -> int:
        """Image tokens per picture."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must say so that the model can be rebuilt without the run's settings."""


def build_family(settings: TrainSettings, label_names: list[str]) -> Family:
    """The family that a model name belongs to."""
    from muralist.models.jit_family import JiTFamily

    return JiTFamily.from_settings(settings, label_names)
