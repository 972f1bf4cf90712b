"""Everything the training loop knows about a model: one protocol, and the registry of families behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muralist.data.encoded import EncodedSource
from muralist.data.loader import Batch
from muralist.keyed_random import Purpose, SampleKeys
from muralist.models.variants import is_hunyuan
from muralist.settings import SampleSettings, TrainSettings

Encoded = tuple[Tensor, ...]
"""What the network is trained on, after the frozen parts: a named tuple of the family's own."""


def to_unit(images_u8: Tensor, flips: SampleKeys | None) -> Tensor:
    """Stored bytes [B, H, W, 3] to [-1, 1], [B, 3, H, W]; with keys, each mirrored or not as its key says."""
    images = images_u8.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    if flips is None:
        return images
    return torch.where(is_mirrored(flips)[:, None, None, None], images.flip(-1), images)


def is_mirrored(keys: SampleKeys) -> Tensor:
    """Which pictures of a batch are mirrored, [B]."""
    return keys.uniform(Purpose.FLIP) < 0.5


class Family(Protocol):
    """A kind of model."""

    @property
    def label_names(self) -> list[str]:
        """The classes, by number; empty when there are none."""

    def network(self) -> nn.Module:
        """The trainable network with keyed initial weights, on the CPU."""

    def skeleton(self) -> nn.Module:
        """The same on the meta device: whole once a state dict is assigned to it."""

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring the frozen parts to a device."""

    def encode(self, batch: Batch, keys: SampleKeys) -> Encoded:
        """Run the frozen parts: a named tuple of tensors, each of as many rows as the batch."""

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """The loss of each sample, [B]; pure and compilable."""

    def default_prompts(self) -> list[str]:
        """What to draw when nobody says."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts this model cannot draw."""

    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Pictures in [-1, 1], [B, 3, H, W]; a picture depends on its prompt and seed alone."""

    def stores(self, name: str) -> bool:
        """Whether a checkpoint holds this weight; one that is not trained and comes with network() need not be there."""

    def adopt(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Start from weights of another run."""

    def flops_per_image(self) -> int:
        """Operations of one training pass (forward and backward) on one image."""

    def tokens_per_image(self) -> int:
        """Image tokens per picture."""

    def summary(self) -> str:
        """The model in a few words, for people."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must say so that the model can be rebuilt without the run's settings."""


def prepare_family(settings: TrainSettings) -> None:
    """Make what is made once for all processes: the folder of a small HunyuanDiT, where no other is named."""
    if is_hunyuan(settings.model.name) and settings.model.path is None:
        from muralist.models.hunyuan_family import small_folder
        from muralist.models.small_hunyuan import build_small_hunyuan

        build_small_hunyuan(small_folder(settings))


def build_family(settings: TrainSettings, label_names: list[str], encoded: EncodedSource | None = None) -> Family:
    """The family that a model name belongs to; `encoded` is the data set where it is encoded ahead."""
    if is_hunyuan(settings.model.name):
        from muralist.models.hunyuan_family import HunyuanFamily

        return HunyuanFamily.from_settings(settings, encoded)
    from muralist.models.jit_family import JiTFamily

    return JiTFamily.from_settings(settings, label_names)
