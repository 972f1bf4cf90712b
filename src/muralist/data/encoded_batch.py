"""Rows of an encoded data set as tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.data.encoded import EMPTY_CAPTION_ROW, EncodedSource
from muralist.data.manifest import EncodedManifest


class EncodedText(NamedTuple):
    """Both embeddings of captions, in the type in which they were computed, with their masks."""

    bert: Tensor
    bert_mask: Tensor  # uint8
    t5: Tensor
    t5_mask: Tensor  # uint8


class EncodedBatch(NamedTuple):
    """What the frozen parts of a model made of a batch ahead of training, in the type in which they computed."""

    latents: Tensor  # [B, picture or mirror image, mean or deviation, 4, H / 8, W / 8]
    text: EncodedText

    def to(self, device: torch.device) -> EncodedBatch:
        """The same on a device."""
        text = EncodedText(*(part.to(device, non_blocking=True) for part in self.text))
        return EncodedBatch(self.latents.to(device, non_blocking=True), text)

    def pin_memory(self) -> EncodedBatch:
        """The same in page-locked memory."""
        return EncodedBatch(self.latents.pin_memory(), EncodedText(*(part.pin_memory() for part in self.text)))


def read_encoded(source: EncodedSource, indices: np.ndarray) -> tuple[EncodedBatch, np.ndarray, list[str]]:
    """Read pictures by number, with labels and captions."""
    rows = source.gather(indices)
    latents = _typed(source.manifest, "latents", rows.latents)
    return EncodedBatch(latents, _text(source.manifest, rows.texts)), rows.labels, rows.captions


def read_empty_caption(source: EncodedSource) -> EncodedText:
    """The embeddings of the empty caption, one row."""
    return _text(source.manifest, source.texts(np.array([EMPTY_CAPTION_ROW]))[1])


def _text(manifest: EncodedManifest, texts: dict[str, np.ndarray]) -> EncodedText:
    bert, t5 = (_typed(manifest, name, texts[name]) for name in ("bert", "t5"))
    return EncodedText(bert, torch.from_numpy(texts["bert_mask"]), t5, torch.from_numpy(texts["t5_mask"]))


def _typed(manifest: EncodedManifest, name: str, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows).view(getattr(torch, manifest.dtype)).view(len(rows), *manifest.shapes[name])
