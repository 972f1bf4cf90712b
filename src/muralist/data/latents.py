"""Encoded data sets: the VAE latents and text embeddings that `muralist pack --encode` wrote, read from mapped memory.

An encoded folder is a packed folder (packed.py) with latents instead of pixels: mean and standard deviation of the
VAE's posterior for each image and, if requested, for the flipped image. `captions-00000.arrow`, ... hold the text
embeddings of each distinct caption once, the empty one first; a row of latents refers to its caption by row number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.data.decode import Size
from muralist.data.packed import Column, EncodedManifest, PackedSource, RowReader, check_size, manifest_type
from muralist.data.source import Sample, short_hash

if TYPE_CHECKING:  # opening a data set does not import torch
    from torch import Tensor

CAPTION_FILES = "captions-"
_EMPTY_CAPTION_ROW = 0


class EncodedText(NamedTuple):
    """The embeddings of captions by both text encoders, in the dtype of the encoders, with their masks."""

    bert: Tensor
    bert_mask: Tensor  # uint8
    t5: Tensor
    t5_mask: Tensor  # uint8


class LatentBatch(NamedTuple):
    """The output of the frozen encoders for a batch, in the dtype of the encoders."""

    latents: Tensor  # [B, original or flipped, mean or deviation, 4, H / 8, W / 8]
    text: EncodedText

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentBatch:
        """Apply a function to every tensor."""
        return LatentBatch(function(self.latents), EncodedText(*map(function, self.text)))


class LatentSource:
    """The samples of an encoded folder, which has no pixels."""

    memory_mapped = True

    def __init__(self, folder: Path, img_size: Size, caption: str | None = None) -> None:
        self.folder, self.img_size = folder, img_size
        self.manifest = EncodedManifest.read(folder)
        check_size(folder, self.manifest, img_size)
        if caption is not None:
            raise UserError(
                f"The captions of {folder} are encoded already, so --caption cannot change them.",
                fix="Leave --caption out, or give it to `muralist pack ... --encode`.",
            )
        manifest = self.manifest
        columns = {
            "bert": Column(bytes=manifest.row_bytes("bert")),
            "bert_mask": Column(bytes=manifest.shapes["bert"][0]),
            "t5": Column(bytes=manifest.row_bytes("t5")),
            "t5_mask": Column(bytes=manifest.shapes["t5"][0]),
            "text": Column(),
        }
        self._captions = RowReader(folder, manifest.caption_files, manifest.captions_per_batch, columns)
        columns = {
            "latents": Column(bytes=manifest.row_bytes("latents")),
            "label": Column(below=max(1, len(manifest.label_names))),
            "caption": Column(below=len(self._captions)),
        }
        self._rows = RowReader(folder, manifest.files, manifest.rows_per_batch, columns)
        self.label_names = manifest.label_names

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Sample:
        """Refuse: there are no pixels."""
        raise UserError(
            f"{self.folder} holds latents of the model {self.manifest.model} and no pixels.",
            fix="Give the data set from which it was encoded.",
        )

    def read_latents(self, indices: np.ndarray) -> tuple[LatentBatch, np.ndarray, list[str]]:
        """Read latents and text embeddings by index, with labels int64 [B] and captions."""
        rows = list(self._rows.locate(indices))
        latents = np.stack([columns["latents"][row] for columns, row in rows])
        labels, caption_rows = (
            np.array([columns[name][row] for columns, row in rows], dtype=np.int64) for name in ("label", "caption")
        )
        text, captions = self._read_captions(caption_rows)
        return LatentBatch(self._tensor("latents", latents), text), labels, captions

    def read_empty_caption(self) -> EncodedText:
        """Read the embeddings of the empty caption, one row."""
        return self._read_captions(np.array([_EMPTY_CAPTION_ROW]))[0]

    def fingerprint(self) -> str:
        """Hash the hashes of the files and the classes."""
        files = (*self.manifest.files, *self.manifest.caption_files)
        return short_hash("encoded", *(file.sha256 for file in files), *self.label_names)

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest."""
        self._rows.verify()
        self._captions.verify()

    def _read_captions(self, rows: np.ndarray) -> tuple[EncodedText, list[str]]:
        found = list(self._captions.locate(rows))
        text = {name: np.stack([columns[name][row] for columns, row in found]) for name in EncodedText._fields}
        captions = [columns["text"][row].as_py() for columns, row in found]
        return EncodedText(*(self._tensor(name, rows) for name, rows in text.items())), captions

    def _tensor(self, name: str, rows: np.ndarray) -> Tensor:
        import torch

        tensor = torch.from_numpy(rows)
        if name not in self.manifest.shapes:  # a mask
            return tensor
        return tensor.view(getattr(torch, self.manifest.dtype)).view(len(rows), *self.manifest.shapes[name])


def open_packed(folder: Path, img_size: Size, caption: str | None = None) -> PackedSource | LatentSource:
    """Open a folder that `muralist pack` wrote."""
    return (LatentSource if manifest_type(folder) is EncodedManifest else PackedSource)(folder, img_size, caption)
