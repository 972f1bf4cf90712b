"""Reading encoded data sets: what a model's frozen parts made of pictures and captions, gathered from mapped memory.

An encoded folder is a packed one (manifest.py) with latents instead of pixels: the mean and the deviation of the VAE's
posterior for each picture and, if wanted, for its mirror image. `captions-00000.arrow`, ... hold the text embeddings of each
distinct caption once, the empty one first; a row of latents has the number of its caption's row.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from muralist.data.fields import short_hash
from muralist.data.images import Size
from muralist.data.item import Item
from muralist.data.manifest import EncodedManifest, is_encoded
from muralist.data.packed_rows import Column, RowReader
from muralist.data.packed_source import PackedSource, check_size
from muralist.errors import UserError

CAPTION_FILES = "captions-"
EMPTY_CAPTION_ROW = 0
TEXT_COLUMNS = ("bert", "bert_mask", "t5", "t5_mask")


class EncodedRows(NamedTuple):
    """Rows as they are stored: bytes, whose type and shape the manifest tells."""

    latents: np.ndarray  # uint8 [B, bytes]
    labels: np.ndarray  # int64 [B]
    captions: list[str]
    texts: dict[str, np.ndarray]  # uint8 [B, bytes] of each of TEXT_COLUMNS


class EncodedSource:
    """The pictures of an encoded folder; their pixels are not there."""

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
        self._texts = RowReader(
            folder,
            manifest.caption_files,
            manifest.captions_per_batch,
            {
                "bert": Column(bytes=manifest.row_bytes("bert")),
                "bert_mask": Column(bytes=manifest.shapes["bert"][0]),
                "t5": Column(bytes=manifest.row_bytes("t5")),
                "t5_mask": Column(bytes=manifest.shapes["t5"][0]),
                "text": Column(),
            },
        )
        columns = {
            "latents": Column(bytes=manifest.row_bytes("latents")),
            "label": Column(below=max(1, len(manifest.label_names))),
            "caption": Column(below=len(self._texts)),
        }
        self._rows = RowReader(folder, manifest.files, manifest.rows_per_batch, columns)
        self.label_names = manifest.label_names

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Item:
        """Refuse: there are no pixels."""
        raise self._no_pixels()

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Refuse likewise."""
        raise self._no_pixels()

    def _no_pixels(self) -> UserError:
        what = f"{self.folder} holds latents of the model {self.manifest.model} and no pixels."
        return UserError(what, fix="Give the data set it was made from.")

    def gather(self, indices: np.ndarray) -> EncodedRows:
        """Read pictures by number."""
        found = list(self._rows.places(indices))
        latents = np.stack([columns["latents"][row] for columns, row in found])
        labels, captions = (
            np.array([columns[name][row] for columns, row in found], dtype=np.int64) for name in ("label", "caption")
        )
        return EncodedRows(latents, labels, *self.texts(captions))

    def texts(self, rows: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
        """Captions by the number of their row, and their embeddings."""
        found = list(self._texts.places(rows))
        words = [columns["text"][row].as_py() for columns, row in found]
        return words, {name: np.stack([columns[name][row] for columns, row in found]) for name in TEXT_COLUMNS}

    def fingerprint(self) -> str:
        """Hash the hashes of the files."""
        files = (*self.manifest.files, *self.manifest.caption_files)
        return short_hash("encoded", *(file.sha256 for file in files), *self.label_names)

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest."""
        self._rows.verify()
        self._texts.verify()


def open_packed(folder: Path, img_size: Size, caption: str | None = None) -> PackedSource | EncodedSource:
    """Open a folder that `muralist pack` wrote."""
    return (EncodedSource if is_encoded(folder) else PackedSource)(folder, img_size, caption)
