"""Reading packed data sets: rows of pixels in memory-mapped Arrow files, gathered without decoding anything.

A packed folder holds Arrow files of fixed-size rows (00000.arrow, ...), `manifest.json` with a hash of each, `broken.txt`
where images had to be left out, and `held_out/`, packed alike, where the data set has such a part.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from muralist.data.captions import Caption
from muralist.data.fields import short_hash
from muralist.data.images import Size, height_width, size_words
from muralist.data.item import Item
from muralist.data.manifest import Manifest
from muralist.data.packed_rows import Column, RowReader
from muralist.errors import UserError


class PackedSource:
    """The images of a packed folder."""

    def __init__(self, folder: Path, img_size: Size, caption: str | None = None) -> None:
        self.folder, self.img_size = folder, img_size
        self.manifest = Manifest.read(folder)
        self._shape = (*height_width(img_size), 3)
        check_size(folder, self.manifest, img_size)
        self.label_names = self.manifest.label_names
        columns = {
            "image": Column(bytes=math.prod(self._shape)),
            "label": Column(below=max(1, len(self.label_names))),
            "caption": Column(),
        }
        self._rows = RowReader(folder, self.manifest.files, self.manifest.rows_per_batch, columns)
        self._caption = Caption.settle_own(caption, self.label_names, str(folder))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Item:
        """Return a copy of image `index`."""
        images, labels, captions = self.read_batch(np.array([index]))
        return Item(images[0], int(labels[0]), captions[0])

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Gather images by number: uint8 [B, H, W, 3], labels int64 [B], captions."""
        images = np.empty((len(indices), *self._shape), dtype=np.uint8)
        labels = np.empty(len(indices), dtype=np.int64)
        captions: list[str] = []
        for slot, (columns, row) in enumerate(self._rows.places(indices)):
            images[slot] = columns["image"][row].reshape(self._shape)
            labels[slot] = columns["label"][row]
            caption, where = columns["caption"][row].as_py(), f"image {indices[slot]} of {self.folder}"
            captions.append(self._caption.own_text(caption, self.label_names, int(labels[slot]), where))
        return images, labels, captions

    def fingerprint(self) -> str:
        """Hash the hashes of the files."""
        hashes = [file.sha256 for file in self.manifest.files]
        return short_hash("packed", *hashes, *self.label_names, *self._caption.hashed)

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest."""
        self._rows.verify()


def check_size(folder: Path, manifest: Manifest, img_size: Size) -> None:
    """Refuse another size than that of a packed folder."""
    if height_width(manifest.img_size) != height_width(img_size):
        packed, asked = size_words(manifest.img_size), size_words(img_size)
        raise UserError(
            f"{folder} was packed at {packed} pixels, but {asked} are asked for.",
            fix=f"Train at {packed} pixels (--img_size), or pack the data set again at {asked}.",
        )
