"""Parquet files with the images inside, as the Hugging Face hub stores data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data.fields import (
    CAPTION_FIELDS,
    LABEL_FIELDS,
    caption_text,
    pick,
    sample_files,
    settle_labels,
    short_hash,
)
from muralist.data.images import BrokenImage, read_square
from muralist.data.item import Item
from muralist.data.recent import Recent
from muralist.errors import UserError

_IMAGE_FIELDS = ("image", "img", "jpg", "png", "bytes")  # which one, where several columns hold bytes
_MOST_OPEN_FILES = 64
_ROW_GROUPS_KEPT = 4


class ParquetSource:
    """The rows of Parquet files; a row group is read whole, so reading in order is fast and reading at random is not."""

    def __init__(self, paths: list[Path], img_size: int, known: list[str] | None = None) -> None:
        self.paths, self.img_size = paths, img_size
        self._files: Recent[Any] = Recent(_MOST_OPEN_FILES)
        self._row_groups: Recent[Any] = Recent(_ROW_GROUPS_KEPT)
        schema = self._file(0).schema_arrow
        self._image_field = _image_field(paths[0], schema)
        self._caption_field = pick(schema.names, CAPTION_FIELDS)
        label_field = pick(schema.names, LABEL_FIELDS)
        self._places: list[
            tuple[int, int, int]
        ] = []  # of each row group: its file, its number there, its first row there
        sizes: list[int] = []
        labels: list[np.ndarray] = []
        for number, path in enumerate(paths):
            file = self._file(number)
            if file.schema_arrow.names != schema.names:
                raise UserError(
                    f"{path} has the columns {', '.join(file.schema_arrow.names)}, but {paths[0]} has "
                    f"{', '.join(schema.names)}."
                )
            first_row = 0
            for group in range(file.num_row_groups):
                self._places.append((number, group, first_row))
                sizes.append(file.metadata.row_group(group).num_rows)
                first_row += sizes[-1]
            if label_field:
                labels.append(_labels(path, file, label_field))
        self._starts = np.cumsum([0, *sizes])
        if len(self) == 0:
            raise UserError(f"{paths[0]} has no rows.")
        self._labels, self.label_names = settle_labels(
            np.concatenate(labels) if labels else None, known, f"{paths[0]}, column {label_field},"
        )
        if known is None and label_field:
            self.label_names = _hub_class_names(schema, label_field, self.label_names)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, index: int) -> Item:
        """Decode the image of row `index`."""
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[place])
        number, _, first_row = self._places[place]
        where = f"row {first_row + row} of {self.paths[number]}"
        table = self._row_groups.get(place, self._read_row_group)
        cell = table[self._image_field][row].as_py()
        data = cell["bytes"] if isinstance(cell, dict) else cell
        if data is None:
            raise BrokenImage(where, "the row holds no bytes")
        caption = caption_text(table[self._caption_field][row].as_py(), where) if self._caption_field else ""
        label = 0 if self._labels is None else int(self._labels[index])
        return Item(read_square(data, self.img_size, where), label, caption)

    def fingerprint(self) -> str:
        """Hash names, row counts and samples of the files."""
        names = [path.name for path in self.paths]
        return short_hash("parquet", *names, self._starts, sample_files(len(self.paths), self.paths.__getitem__))

    def _file(self, number: int) -> Any:
        return self._files.get(number, self._open)

    def _open(self, number: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.paths[number], memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"The Parquet file {self.paths[number]} could not be read: {error}.") from error

    def _read_row_group(self, place: int) -> Any:
        import pyarrow

        number, group, _ = self._places[place]
        columns = [field for field in (self._image_field, self._caption_field) if field]
        try:
            # Threads of the parent process do not exist in a forked loader process, so none are used.
            return self._file(number).read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"The Parquet file {self.paths[number]} is damaged: {error}.") from error


def _image_field(path: Path, schema: Any) -> str:
    """Find the column of encoded images: bytes, or the hub's pair of bytes and path."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return types.is_binary(kind) or types.is_large_binary(kind)

    found = [field.name for field in schema if holds_bytes(field.type)]
    name = found[0] if len(found) == 1 else pick(found, _IMAGE_FIELDS)
    if name is None:
        raise UserError(
            f"The Parquet file {path} has no column of images as bytes.",
            f"Its columns are {', '.join(f'{field.name} ({field.type})' for field in schema)}.",
            "Image files that a table only names are read from a CSV or JSONL table.",
        )
    return name


def _labels(path: Path, file: Any, field: str) -> np.ndarray:
    column = file.read(columns=[field], use_threads=False)[field]
    if column.null_count:
        raise UserError(f"{column.null_count:,} rows of {path} have no {field}.")
    return column.to_numpy()


def _hub_class_names(schema: Any, label_field: str, numbers: list[str]) -> list[str]:
    """Return the class names that the hub keeps beside the columns, or the numbers where it keeps none."""
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    names = features.get(label_field, {}).get("names", [])
    return names if isinstance(names, list) and len(names) >= len(numbers) else numbers
