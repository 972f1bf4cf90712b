"""What the trainer knows about a model: one protocol, fulfilled by one class per family (models/families.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muralist.core.rng import Purpose, SampleKeys
from muralist.data.latents import LatentSource
from muralist.data.loader import Batch
from muralist.models.families import find_family
from muralist.settings import SampleSettings, TrainSettings

Encoded = tuple[Tensor, ...]
"""The network's training inputs after the frozen components: a named tuple of the family's own."""


class ModelSpec(Protocol):
    """A model: how it is built, trained, sampled, saved and exported."""

    @property
    def label_names(self) -> list[str]:
        """Class names by label; empty without classes."""

    def network(self) -> nn.Module:
        """Build the trainable network on the CPU; its initial weights depend on the seed alone."""

    def meta_model(self) -> nn.Module:
        """Build the network on the meta device, for a state dict to be assigned."""

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the frozen components to a device."""

    def encode(self, batch: Batch, keys: SampleKeys) -> Encoded:
        """Run the frozen components; every tensor has one row per sample."""

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """Compute the loss of each sample, [B]; pure and compilable."""

    def default_prompts(self) -> list[str]:
        """Return the prompts of samples when none are given."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that the model cannot generate."""

    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Generate images in [-1, 1], [B, 3, H, W]; each depends on its prompt and seed alone."""

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold this weight; frozen weights that network() loads need not be saved."""

    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Initialize the network from the weights of another run."""

    def flops_per_image(self) -> int:
        """FLOPs of one training pass (forward and backward) on one image."""

    def tokens_per_image(self) -> int:
        """Image tokens per image."""

    def summary(self) -> str:
        """Describe the model in one line, for the run summary."""

    def describe(self) -> dict[str, Any]:
        """Return the field `model` of a checkpoint's manifest, which rebuilds the model without the run's settings."""

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        """Write weights as a folder that `muralist generate` loads, and describe what was written."""


def build_spec(settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None) -> ModelSpec:
    """Build the spec of a training run; `latents` is the data set if it was encoded ahead of training."""
    spec: ModelSpec = find_family(settings.model.name).spec_class().from_settings(settings, label_names, latents)
    return spec


def to_unit_range(images_u8: Tensor, flips: SampleKeys | None) -> Tensor:
    """Convert uint8 [B, H, W, 3] to [-1, 1], [B, 3, H, W]; with keys, mirror the images that `flip_mask` selects."""
    images = images_u8.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    if flips is None:
        return images
    return torch.where(flip_mask(flips)[:, None, None, None], images.flip(-1), images)


def flip_mask(keys: SampleKeys) -> Tensor:
    """Select the images of a batch to mirror, half of them on average, [B]."""
    return keys.uniform(Purpose.FLIP) < 0.5
