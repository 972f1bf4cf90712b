"""Packed data sets: the Arrow files that `muralist pack` writes, their manifest, and the sources that read them.

A packed folder holds Arrow files of fixed-size rows (00000.arrow, ...), `manifest.json` with a hash of each,
`broken.txt` if images were left out, and `held_out/`, packed alike, if the data set has such a part.

With `--encode`, rows hold latents instead of pixels: mean and standard deviation of the VAE's posterior (a deterministic
VAE has no deviation) for each image and, if requested, for the flipped image. `captions-00000.arrow`, ... hold the text
tensors of each distinct caption once, the empty one first; a row of latents refers to its caption by row number. The
manifest names every tensor with its dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from muralist.core.errors import UserError
from muralist.core.image_size import Size, format_size, height_width
from muralist.data.source import CaptionTemplate, LruCache, Sample, short_hash

if TYPE_CHECKING:  # opening a data set does not import torch
    from torch import Tensor

HELD_OUT_FOLDER = "held_out"
CAPTION_FILES = "captions-"
PACK_AGAIN = "Pack the data set again with `muralist pack`."

_MANIFEST = "manifest.json"
_MAX_FILE_BYTES = 10**9
_FOOTER_BYTES = 10**6  # an Arrow file ends with its schema and a list of its batches
_BATCH_BYTES = 16 * 2**20
_MAX_BATCH_ROWS = 2**16
_MAX_MAPPED_FILES = 4096
_EMPTY_CAPTION_ROW = 0
_LATENTS, _TEXT = "latents", "text"  # columns

_STRICT = ConfigDict(strict=True, extra="forbid")
_Count = Annotated[int, Field(ge=1, lt=2**62)]


@dataclass(frozen=True)
class PackedFile:
    """One Arrow file of a packed folder."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.arrow$")]  # never a path that leads out of the folder
    rows: _Count
    bytes: _Count
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a packed folder; written last, so that only a finished pack has one."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    format: ClassVar[str] = "muralist packed images"
    version: ClassVar[int] = 1

    img_size: Size
    rows_per_batch: _Count  # in every record batch but the last, so that a row is found by arithmetic
    label_names: list[str]
    files: Annotated[list[PackedFile], Field(min_length=1)]
    broken: NonNegativeInt
    source: str
    source_fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a packed folder."""
        try:
            content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            version = content.pop("version")
            if content.pop("format") == cls.format and version in range(1, cls.version + 1):
                return TypeAdapter(cls).validate_json(json.dumps(cls._upgraded(content, version)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what: object = error
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"The manifest of the packed folder {folder} is damaged: {what}.", fix=PACK_AGAIN) from None
        raise UserError(
            f"The packed folder {folder} has format version {version!s:.20}, but only version {cls.version} can be read.",
            fix=PACK_AGAIN,
        )

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Return the content of a manifest of an earlier version as this version writes it."""
        return content

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, which completes the pack."""
        content = {"format": self.format, "version": self.version, **asdict(self)}
        (folder / _MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def images(self) -> int:
        """The number of images."""
        return sum(file.rows for file in self.files)

    @property
    def captions(self) -> int | None:
        """The number of distinct captions that are embedded; None where captions are stored as text."""
        return None

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that every row has: its dtype and shape; sizes that differ between rows are 0, and stored with the row."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    shape: Annotated[list[NonNegativeInt], Field(max_length=8)]
    is_number: bool = False  # a Python number, stored as a tensor

    @property
    def varies(self) -> bool:
        """Whether the shape differs between rows."""
        return 0 in self.shape

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.dtype == "bool" else int("".join(filter(str.isdigit, self.dtype))) // 8

    def columns(self, name: str) -> dict[str, int | None]:
        """Return the binary columns that hold the tensor, with the bytes of their rows; None if these differ."""
        if self.varies:
            return {name: None, _shape_column(name): 8 * len(self.shape)}
        return {name: math.prod(self.shape) * self.itemsize}


def _shape_column(name: str) -> str:
    return f"{name} shape"


@dataclass(frozen=True)
class EncodedManifest(Manifest):
    """The description of a folder of latents and text tensors, and of the encoders that made them."""

    format: ClassVar[str] = "muralist encoded images"
    version: ClassVar[int] = 2

    caption_files: Annotated[list[PackedFile], Field(min_length=1)]
    captions_per_batch: _Count
    model: str
    family: str  # the key of the model family whose encoders these are
    frozen_parts: dict[str, str]  # fingerprints of the frozen encoders
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]  # in which the encoders computed
    mirrored: bool  # whether each image is also stored flipped
    tensors: dict[str, StoredTensor]  # latents [original or flipped, mean or deviation, ...], and the texts by name

    def __post_init__(self) -> None:
        views, moments = self.tensors[_LATENTS].shape[:2] if _LATENTS in self.tensors else (0, 0)
        if (views, moments) not in ((1 + self.mirrored, 1), (1 + self.mirrored, 2)) or self.tensors[_LATENTS].varies:
            raise ValueError("tensors must name latents of one or two views and moments, of one shape")
        if _TEXT in self.tensors:
            raise ValueError(f"a tensor must not be called {_TEXT}")

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        if version == 1:  # of HunyuanDiT, whose masks have a byte per token
            shapes, dtype = content.pop("shapes"), content["dtype"]
            tensors = {name: {"dtype": dtype, "shape": shapes[name]} for name in (_LATENTS, "bert", "t5")}
            masks = {f"{name}_mask": {"dtype": "uint8", "shape": shapes[name][:1]} for name in ("bert", "t5")}
            content |= {"family": "hunyuandit", "tensors": tensors | masks}
        return content

    @property
    def texts(self) -> dict[str, StoredTensor]:
        """The tensors of a caption."""
        return {name: tensor for name, tensor in self.tensors.items() if name != _LATENTS}

    @property
    def captions(self) -> int:
        """The number of distinct captions that are embedded, not counting the empty one, which always is."""
        return sum(file.rows for file in self.caption_files) - 1

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return super().bytes + sum(file.bytes for file in self.caption_files)


def manifest_type(folder: Path) -> type[Manifest] | None:
    """Return the type of manifest of a folder; None if `muralist pack` did not write the folder.

    A packed folder whose manifest is damaged is still recognized, so that opening it explains the damage.
    """
    try:
        format = json.loads((folder / _MANIFEST).read_text(encoding="utf-8")).get("format")
        return next((kind for kind in (Manifest, EncodedManifest) if kind.format == format), None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError):
        return Manifest if any(folder.glob("[0-9]*.arrow")) else None


def is_packed(folder: Path) -> bool:
    """Return whether a folder was written by `muralist pack`."""
    return manifest_type(folder) is not None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a packed folder of either type."""
    return (manifest_type(folder) or Manifest).read(folder)


class RowWriter:
    """Writes rows to Arrow files in record batches of one length."""

    def __init__(self, folder: Path, columns: Mapping[str, Any], prefix: str = "", row_bytes: int = 0) -> None:
        """`columns` maps names to Arrow types; rows of a fixed-size binary column are added as uint8 [rows, bytes].

        `row_bytes` is the usual size of a row with other binary columns.
        """
        import pyarrow

        self._folder, self._prefix = folder, prefix
        self._schema = pyarrow.schema(columns)
        widths = [kind.byte_width for kind in self._schema.types if pyarrow.types.is_fixed_size_binary(kind)]
        self.row_bytes = row_bytes or sum(widths)
        self.rows_per_batch = min(max(1, _BATCH_BYTES // (row_bytes or max(widths))), _MAX_BATCH_ROWS)
        self._buffers: list[Any] = [
            np.empty((self.rows_per_batch, kind.byte_width), np.uint8)
            if pyarrow.types.is_fixed_size_binary(kind)
            else []
            for kind in self._schema.types
        ]
        self._filled = 0
        self._files: list[PackedFile] = []
        self._stream: Any = None
        self._rows = 0  # in the file being written

    def add(self, *columns: Sequence[Any] | np.ndarray) -> None:
        """Append rows, column by column."""
        while len(columns[0]):
            room = self.rows_per_batch - self._filled
            for buffer, column in zip(self._buffers, columns, strict=True):
                if isinstance(buffer, np.ndarray):
                    buffer[self._filled : self._filled + len(column[:room])] = column[:room]
                else:
                    buffer.extend(column[:room])
            self._filled += len(columns[0][:room])
            columns = tuple(column[room:] for column in columns)
            if self._filled == self.rows_per_batch:
                self._write_batch()

    def close(self) -> list[PackedFile]:
        """Write the remaining rows and return the files."""
        if self._filled:
            self._write_batch()
        if self._stream is not None:
            self._close_file()
        return self._files

    def _write_batch(self) -> None:
        import pyarrow

        columns = []
        for field, buffer in zip(self._schema, self._buffers, strict=True):
            if isinstance(buffer, np.ndarray):
                content = [None, pyarrow.py_buffer(buffer[: self._filled])]
                columns.append(pyarrow.FixedSizeBinaryArray.from_buffers(field.type, self._filled, content))
            else:
                columns.append(pyarrow.array(buffer, field.type))
                buffer.clear()
        batch = pyarrow.record_batch(columns, schema=self._schema)
        if self._stream is not None and self._stream.tell() + batch.nbytes + _FOOTER_BYTES > _MAX_FILE_BYTES:
            self._close_file()
        if self._stream is None:
            self._stream = pyarrow.OSFile(str(self._path()), "wb")
            self._arrow = pyarrow.ipc.new_file(self._stream, self._schema)
        self._arrow.write_batch(batch)
        self._rows += self._filled
        self._filled = 0

    def _close_file(self) -> None:
        self._arrow.close()
        self._stream.close()
        path = self._path()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._files.append(PackedFile(path.name, self._rows, path.stat().st_size, digest))
        self._stream, self._rows = None, 0

    def _path(self) -> Path:
        return self._folder / f"{self._prefix}{len(self._files):05}.arrow"


class RowReader:
    """Reads rows of packed files as views of mapped memory."""

    def __init__(
        self,
        folder: Path,
        files: list[PackedFile],
        rows_per_batch: int,
        columns: Mapping[str, str],
        below: Mapping[str, int],
    ) -> None:
        """`columns` maps names to the names of Arrow types; integers are from 0 to below the number in `below`."""
        self.folder, self.files, self.rows_per_batch = folder, files, rows_per_batch
        self.columns, self.below = columns, below
        for file in files:
            path = folder / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {file.bytes:,}"
                raise UserError(f"The packed file {path} {found}.", "The copy may be incomplete.", PACK_AGAIN)
        self._starts = np.cumsum([0, *(file.rows for file in files)])
        self._mapped: LruCache[list[dict[str, Any]]] = LruCache(_MAX_MAPPED_FILES)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, indices: np.ndarray) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield, for each row, the columns of its record batch and its index there."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"there are {len(self)} rows, but rows {indices.min()} to {indices.max()} were requested")
        files = np.searchsorted(self._starts, indices, side="right") - 1
        batches, rows = np.divmod(indices - self._starts[files], self.rows_per_batch)
        for file, batch, row in zip(files.tolist(), batches.tolist(), rows.tolist(), strict=True):
            yield self._mapped.get(file, self._map)[batch], row

    def _map(self, number: int) -> list[dict[str, Any]]:
        import pyarrow

        path = self.folder / self.files[number].name
        try:
            # Closing the file frees its descriptor; the memory stays mapped while a view of it exists.
            with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_file(memory) as reader:
                batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
                # `locate` computes the place of a row from the lengths of batches.
                full, rest = divmod(self.files[number].rows, self.rows_per_batch)
                if [batch.num_rows for batch in batches] != [self.rows_per_batch] * full + [rest] * bool(rest):
                    raise ValueError(f"the rows of its {len(batches):,} batches are not those of the manifest")
                return [{name: self._view(batch, name) for name in self.columns} for batch in batches]
        # KeyError: there is no such column, or there are two.
        except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
            raise UserError(f"The packed file {path} is damaged: {error}.", fix=PACK_AGAIN) from error

    def _view(self, batch: Any, name: str) -> Any:
        """Return a view of a column: uint8 [rows, bytes], integers as a NumPy array, others as an Arrow array."""
        from pyarrow import types

        column, wanted = batch.column(name), self.columns[name]
        column.validate(full=True)  # a damaged offset would make Arrow read beyond the file and crash
        if str(column.type) != wanted:
            raise ValueError(f"its column {name} is {column.type}, not {wanted}")
        if column.null_count or column.offset:
            raise ValueError(f"rows of its column {name} are empty")
        if types.is_fixed_size_binary(column.type):
            width = column.type.byte_width
            return np.frombuffer(column.buffers()[1], np.uint8, count=len(column) * width).reshape(-1, width)
        if wanted in ("string", "large_binary"):
            return column
        values = column.to_numpy()
        if len(values) and not 0 <= values.min() <= values.max() < self.below[name]:
            raise ValueError(f"its column {name} holds values that are not from 0 to {self.below[name] - 1:,}")
        return values


def _rows_of(size: int | None) -> str:
    return "large_binary" if size is None else f"fixed_size_binary[{size}]"


class _PackedFolder:
    """A folder that `muralist pack` wrote at one size, and the rows of its samples."""

    memory_mapped = True

    def __init__(self, folder: Path, img_size: Size, manifest: Manifest) -> None:
        self.folder, self.img_size, self.label_names = folder, img_size, manifest.label_names
        if height_width(manifest.img_size) != height_width(img_size):
            packed, wanted = format_size(manifest.img_size), format_size(img_size)
            raise UserError(
                f"{folder} was packed at {packed} pixels, but --img_size is {wanted}.",
                fix=f"Train at {packed} pixels (--img_size), or pack the data set again at {wanted}.",
            )

    def _open_rows(self, manifest: Manifest, columns: Mapping[str, str], below: Mapping[str, int]) -> None:
        columns, below = {**columns, "label": "int32"}, {**below, "label": max(1, len(self.label_names))}
        self._rows = RowReader(self.folder, manifest.files, manifest.rows_per_batch, columns, below)

    def __len__(self) -> int:
        return len(self._rows)


class PackedSource(_PackedFolder):
    """The images of a packed folder."""

    def __init__(self, folder: Path, img_size: Size, caption: str | None = None) -> None:
        self.manifest = Manifest.read(folder)
        super().__init__(folder, img_size, self.manifest)
        self._shape = (*height_width(img_size), 3)
        self._open_rows(self.manifest, {"image": _rows_of(math.prod(self._shape)), "caption": "string"}, {})
        self._caption = CaptionTemplate.resolve_plain(caption, self.label_names, str(folder))

    def read(self, index: int) -> Sample:
        """Return a copy of image `index`."""
        images, labels, captions = self.read_batch(np.array([index]))
        return Sample(images[0], int(labels[0]), captions[0])

    def read_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Gather images by index: uint8 [B, H, W, 3], labels int64 [B], captions."""
        images = np.empty((len(indices), *self._shape), dtype=np.uint8)
        labels = np.empty(len(indices), dtype=np.int64)
        captions: list[str] = []
        for slot, (columns, row) in enumerate(self._rows.locate(indices)):
            images[slot] = columns["image"][row].reshape(self._shape)
            labels[slot] = columns["label"][row]
            caption, where = columns["caption"][row].as_py(), f"image {indices[slot]} of {self.folder}"
            captions.append(self._caption.format_plain(caption, self.label_names, int(labels[slot]), where))
        return images, labels, captions

    def fingerprint(self) -> str:
        """Hash the hashes of the files, the classes and the caption template."""
        hashes = [file.sha256 for file in self.manifest.files]
        return short_hash("packed", *hashes, *self.label_names, *self._caption.fingerprint_parts)


TextTensors: TypeAlias = "dict[str, Tensor | list[Any]]"
"""Text tensors by name: stacked, [B, ...], or a list with an entry per caption where shapes differ, or numbers."""


class LatentBatch(NamedTuple):
    """The output of the frozen encoders for a batch, as it is stored."""

    latents: Tensor  # [B, original or flipped, mean or deviation, ...]
    text: TextTensors

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentBatch:
        """Apply a function to every tensor."""
        import torch
        from torch.utils._pytree import tree_map_only

        return LatentBatch(function(self.latents), tree_map_only(torch.Tensor, function, self.text))


class LatentSource(_PackedFolder):
    """The samples of an encoded folder, which has no pixels."""

    def __init__(self, folder: Path, img_size: Size, caption: str | None = None) -> None:
        self.manifest = manifest = EncodedManifest.read(folder)
        super().__init__(folder, img_size, manifest)
        if caption is not None:
            raise UserError(
                f"The captions of {folder} are encoded already, so --caption cannot change them.",
                fix="Leave --caption out, or give it to `muralist pack ... --encode`.",
            )
        columns = {_TEXT: "string"}
        for name, stored in manifest.texts.items():
            columns |= {column: _rows_of(size) for column, size in stored.columns(name).items()}
        self._captions = RowReader(folder, manifest.caption_files, manifest.captions_per_batch, columns, {})
        columns = {_LATENTS: _rows_of(manifest.tensors[_LATENTS].columns(_LATENTS)[_LATENTS]), "caption": "int64"}
        self._open_rows(manifest, columns, {"caption": len(self._captions)})

    def read(self, index: int) -> Sample:
        """Refuse: there are no pixels."""
        raise UserError(
            f"{self.folder} holds latents of the model {self.manifest.model} and no pixels.",
            fix="Give the data set from which it was encoded.",
        )

    def read_latents(self, indices: np.ndarray) -> tuple[LatentBatch, np.ndarray, list[str]]:
        """Read latents and text tensors by index, with labels int64 [B] and captions."""
        rows = list(self._rows.locate(indices))
        labels, caption_rows = (
            np.array([columns[name][row] for columns, row in rows], dtype=np.int64) for name in ("label", "caption")
        )
        latents: Any = self._stack(_LATENTS, rows)
        text, captions = self._read_captions(caption_rows)
        return LatentBatch(latents, text), labels, captions

    def read_empty_caption(self) -> TextTensors:
        """Read the text tensors of the empty caption, one row."""
        return self._read_captions(np.array([_EMPTY_CAPTION_ROW]))[0]

    def fingerprint(self) -> str:
        """Hash the hashes of the files and the classes."""
        files = (*self.manifest.files, *self.manifest.caption_files)
        return short_hash("encoded", *(file.sha256 for file in files), *self.label_names)

    def _read_captions(self, indices: np.ndarray) -> tuple[TextTensors, list[str]]:
        rows = list(self._captions.locate(indices))
        captions = [columns[_TEXT][row].as_py() for columns, row in rows]
        return {name: self._stack(name, rows) for name in self.manifest.texts}, captions

    def _stack(self, name: str, rows: list[tuple[dict[str, Any], int]]) -> Tensor | list[Any]:
        import torch

        stored = self.manifest.tensors[name]
        if stored.varies:
            return [self._tensor(name, columns, row) for columns, row in rows]
        content = torch.from_numpy(np.stack([columns[name][row] for columns, row in rows]))
        tensor = content.view(getattr(torch, stored.dtype)).view(len(rows), *stored.shape)
        return tensor.tolist() if stored.is_number else tensor

    def _tensor(self, name: str, columns: dict[str, Any], row: int) -> Tensor:
        """Read a tensor whose shape is stored with it."""
        import torch

        stored, content = self.manifest.tensors[name], bytearray(columns[name][row].as_py())
        shape = np.frombuffer(columns[_shape_column(name)][row].tobytes(), "<i8").tolist()
        fits = all(size >= 0 and size == (known or size) for size, known in zip(shape, stored.shape, strict=True))
        if not fits or math.prod(shape) * stored.itemsize != len(content):
            raise UserError(
                f"The packed folder {self.folder} is damaged: {len(content):,} bytes of {name} do not have the shape "
                f"{shape}.",
                fix=PACK_AGAIN,
            )
        dtype = getattr(torch, stored.dtype)
        return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def open_packed(folder: Path, img_size: Size, caption: str | None = None) -> PackedSource | LatentSource:
    """Open a folder that `muralist pack` wrote."""
    return (LatentSource if manifest_type(folder) is EncodedManifest else PackedSource)(folder, img_size, caption)
