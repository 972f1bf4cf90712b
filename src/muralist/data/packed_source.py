"""Reading packed data sets: rows of pixels in memory-mapped Arrow files, gathered without decoding anything.

A packed folder holds Arrow files of fixed-size rows (00000.arrow, ...), `manifest.json` with a hash of each, `broken.txt`
where images had to be left out, and `held_out/`, packed alike, where the data set has such a part.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muralist.data.captions import Caption
from muralist.data.fields import short_hash
from muralist.data.images import Size, height_width, size_words
from muralist.data.item import Item
from muralist.data.recent import Recent
from muralist.errors import UserError

HELD_OUT_FOLDER = "held_out"

_MANIFEST = "manifest.json"
_FORMAT = "muralist packed images"
_VERSION = 1
_MOST_MAPPED_FILES = 4096
_PACK_AGAIN = "Pack the data set again with `muralist pack`."


@dataclass(frozen=True)
class PackedFile:
    """One Arrow file of a packed folder."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a packed folder says about itself; written last, so that only a finished pack has one."""

    img_size: Size
    rows_per_batch: int  # of every record batch but the last, so that the place of a row is arithmetic
    label_names: list[str]
    files: list[PackedFile]
    broken: int
    source: str
    source_fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a packed folder."""
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            version = content.pop("version")
            if content.pop("format") == _FORMAT and version == _VERSION:
                content["files"] = [PackedFile(**file) for file in content["files"]]
                if isinstance(content["img_size"], list):
                    content["img_size"] = tuple(content["img_size"])
                return cls(**content)
        except FileNotFoundError as error:
            raise UserError(
                f"{folder} holds Arrow files but no {_MANIFEST}.",
                "Its copy is incomplete, or `muralist pack` did not write it.",
                _PACK_AGAIN,
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"The manifest of the packed folder {folder} is damaged: {error}.", fix=_PACK_AGAIN
            ) from error
        raise UserError(
            f"The packed folder {folder} has format version {version}, and this muralist reads version {_VERSION}.",
            fix=_PACK_AGAIN,
        )

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, which makes it a packed one."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        (folder / _MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def is_packed(folder: Path) -> bool:
    """Say whether a folder is a packed data set."""
    try:
        return json.loads((folder / _MANIFEST).read_text(encoding="utf-8")).get("format") == _FORMAT
    except FileNotFoundError:
        return any(
            map(_holds_pixels, sorted(folder.glob("[0-9]*.arrow"))[:1])
        )  # a packed folder that lost its manifest
    except (OSError, ValueError, AttributeError):
        return bool(list(folder.glob("[0-9]*.arrow")))  # a damaged manifest is not "a folder without images"


def _holds_pixels(path: Path) -> bool:
    """Say whether an Arrow file holds pixels, as packed ones do, and not encoded images."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_file(memory) as reader:
            return pyarrow.types.is_fixed_size_binary(reader.schema.field("image").type)
    except (OSError, KeyError, pyarrow.ArrowException):
        return False


class _Mapped(NamedTuple):
    """The record batches of one file, as views of the mapped memory."""

    images: list[np.ndarray]  # uint8 [rows, H, W, 3] each
    labels: list[np.ndarray]
    captions: list[Any]


class PackedSource:
    """The images of a packed folder."""

    def __init__(self, folder: Path, img_size: Size, caption: str | None = None) -> None:
        self.folder, self.img_size = folder, img_size
        self.manifest = Manifest.read(folder)
        self._shape = (*height_width(img_size), 3)
        if height_width(self.manifest.img_size) != height_width(img_size):
            packed, asked = size_words(self.manifest.img_size), size_words(img_size)
            raise UserError(
                f"{folder} was packed at {packed} pixels, but {asked} are asked for.",
                fix=f"Train at {packed} pixels (--img_size), or pack the data set again at {asked}.",
            )
        for file in self.manifest.files:
            path = folder / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {file.bytes:,}"
                raise UserError(f"The packed file {path} {found}.", "The copy may be incomplete.", _PACK_AGAIN)
        self.label_names = self.manifest.label_names
        self._caption = Caption.settle_own(caption, self.label_names, str(folder))
        self._starts = np.cumsum([0, *(file.rows for file in self.manifest.files)])
        self._mapped: Recent[_Mapped] = Recent(_MOST_MAPPED_FILES)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, index: int) -> Item:
        """Return a copy of image `index`."""
        images, labels, captions = self.read_batch(np.array([index]))
        return Item(images[0], int(labels[0]), captions[0])

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Gather images by number: uint8 [B, H, W, 3], labels int64 [B], captions."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"there are {len(self)} images, but {indices.min()} to {indices.max()} were asked for")
        images = np.empty((len(indices), *self._shape), dtype=np.uint8)
        labels = np.empty(len(indices), dtype=np.int64)
        captions: list[str] = []
        files = np.searchsorted(self._starts, indices, side="right") - 1
        batches, rows = np.divmod(indices - self._starts[files], self.manifest.rows_per_batch)
        for slot, (file, batch, row) in enumerate(zip(files.tolist(), batches.tolist(), rows.tolist(), strict=True)):
            mapped = self._mapped.get(file, self._map)
            images[slot] = mapped.images[batch][row]
            labels[slot] = mapped.labels[batch][row]
            caption, where = mapped.captions[batch][row].as_py(), f"image {indices[slot]} of {self.folder}"
            captions.append(self._caption.own_text(caption, self.label_names, int(labels[slot]), where))
        return images, labels, captions

    def fingerprint(self) -> str:
        """Hash the hashes of the files."""
        hashes = [file.sha256 for file in self.manifest.files]
        return short_hash("packed", *hashes, *self.label_names, *self._caption.hashed)

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest."""
        for file in self.manifest.files:
            with (self.folder / file.name).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    raise UserError(f"The packed file {self.folder / file.name} is damaged.", fix=_PACK_AGAIN)

    def _map(self, number: int) -> _Mapped:
        import pyarrow

        path = self.folder / self.manifest.files[number].name
        mapped = _Mapped([], [], [])
        try:
            # Closing the file at once saves its descriptor; the memory stays mapped as long as a view of it lives.
            with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_file(memory) as reader:
                for batch in (reader.get_batch(number) for number in range(reader.num_record_batches)):
                    pixels, labels, captions = batch.columns
                    size = batch.num_rows * math.prod(self._shape)
                    flat = np.frombuffer(pixels.buffers()[1], dtype=np.uint8, count=size)
                    mapped.images.append(flat.reshape(batch.num_rows, *self._shape))
                    mapped.labels.append(labels.to_numpy())
                    mapped.captions.append(captions)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"The packed file {path} is damaged: {error}.", fix=_PACK_AGAIN) from error
        return mapped
