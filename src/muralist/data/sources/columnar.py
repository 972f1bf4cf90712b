"""Parquet and Arrow files with the images inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, Size, decode_cropped, read_image_shape
from muralist.data.source import (
    LABEL_FIELDS,
    CaptionTemplate,
    LruCache,
    Sample,
    first_present,
    resolve_labels,
    sample_files,
    short_hash,
)
from muralist.data.sources import waymo

_IMAGE_FIELDS = ("image", "img", "jpg", "png", "bytes")  # by preference, where several columns hold bytes
_SHAPE_FIELDS = ("height", "width")
_MAX_OPEN_FILES = 64


class Reader(Protocol):
    """An open file, whose rows come in groups (row groups or record batches)."""

    schema: Any
    group_rows: list[int]
    max_cached_groups: int

    def __init__(self, path: Path) -> None: ...

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Return some columns of a group of rows."""
        ...


class ColumnSource:
    """The rows of several files; `rows` selects some of them, in any order and with repetition."""

    kind: ClassVar[str]
    reader: ClassVar[type[Reader]]

    def __init__(
        self,
        paths: list[Path],
        img_size: Size,
        known: list[str] | None = None,
        caption: str | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        self.paths, self.img_size, self._rows = paths, img_size, rows
        self._files: LruCache[Reader] = LruCache(_MAX_OPEN_FILES)
        names = self._file(0).schema.names
        if double := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"{paths[0]} has {names.count(double)} columns called {double!r}.", fix="Rename all but one."
            )
        self._places: list[tuple[int, int, int]] = []  # of each group: its file, its index and its first row there
        sizes: list[int] = []
        max_cached_groups: list[int] = []
        for number, path in enumerate(paths):
            file = self._file(number)
            if file.schema.names != names:
                raise UserError(
                    f"{path} has the columns {', '.join(file.schema.names)}, but {paths[0]} has {', '.join(names)}."
                )
            first_row = 0
            for group, size in enumerate(file.group_rows):
                self._places.append((number, group, first_row))
                sizes.append(size)
                first_row += size
            max_cached_groups.append(file.max_cached_groups)
        self._starts = np.cumsum([0, *sizes])
        self._groups: LruCache[Any] = LruCache(min(max_cached_groups))
        if self._starts[-1] == 0:
            raise UserError(f"{paths[0]} has no rows.")
        # pandas writes untyped columns for a table without rows, so the schema comes from a file with rows.
        first = next(number for (number, _, _), size in zip(self._places, sizes, strict=True) if size)
        schema = self._file(first).schema
        self._image_field = _image_field(self.kind, paths[first], schema)
        self._resolve_labels(schema, known)
        self._resolve_captions(schema, caption)
        self._shapes: LruCache[Any] = LruCache(min(max_cached_groups))
        self._has_shapes = all(_is_integer(schema, name) for name in _SHAPE_FIELDS)

    def _resolve_labels(self, schema: Any, known: list[str] | None) -> None:
        field = first_present(schema.names, LABEL_FIELDS)
        labels = [self._column(number, field) for number in range(len(self.paths))] if field else []
        self._labels, self.label_names = resolve_labels(
            np.concatenate(labels) if labels else None, known, f"{self.paths[0]}, column {field},"
        )
        if known is None and field:
            self.label_names = _hub_class_names(schema, field, self.label_names)

    def _resolve_captions(self, schema: Any, caption: str | None) -> None:
        derived = ["label"] if self.label_names and "label" not in schema.names else []
        default = ""
        if self._image_field == waymo.IMAGE_COLUMN:
            derived.append("camera")
            default = waymo.DEFAULT_CAPTION
        plain = [field.name for field in schema if _is_plain(field.type)]
        # A column that is called caption but does not hold text is reported, not skipped.
        columns = schema.names if caption is None else plain + derived
        self._caption = CaptionTemplate.resolve(caption, columns, str(self.paths[0]), default)
        needed = [*self._caption.columns, *([waymo.CAMERA_COLUMN] if "camera" in derived else [])]
        self._columns = list(dict.fromkeys([self._image_field, *(name for name in needed if name in schema.names)]))

    def select_cameras(self, names: Sequence[str]) -> None:
        """Keep the rows of some cameras of the Waymo Open Dataset."""
        numbers = [str(number) for number in waymo.camera_numbers(names)]
        if self._image_field != waymo.IMAGE_COLUMN:
            raise waymo.no_cameras(str(self.paths[0]))
        cameras = np.concatenate([self._column(file, waymo.CAMERA_COLUMN) for file in range(len(self.paths))])
        rows = np.arange(len(cameras)) if self._rows is None else self._rows
        self._rows = rows[np.isin(cameras[rows].astype(str), numbers)]
        if not len(self._rows):
            raise UserError(f"{self.paths[0].parent} has no image of the cameras {' '.join(names)}.")

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._rows is None else len(self._rows)

    @property
    def file_rows(self) -> list[int]:
        """The number of rows of each file."""
        counts = np.zeros(len(self.paths), dtype=np.int64)
        np.add.at(counts, [number for number, _, _ in self._places], np.diff(self._starts))
        return counts.tolist()

    def read(self, index: int) -> Sample:
        """Decode the image of row `index`."""
        row, place, row_in_group, where = self._find(index)
        group = self._groups.get(place, self._read_group)
        try:
            cells = {name: group[name][row_in_group].as_py() for name in self._columns}
        except (ValueError, OverflowError) as error:  # a date beyond the calendar, say
            raise UserError(f"{where[0].upper()}{where[1:]} is damaged: {error}.") from error
        data = _image_bytes(cells[self._image_field], where)
        label = 0 if self._labels is None else int(self._labels[row])
        if self.label_names:
            cells["label"] = self.label_names[label]
        if self._image_field == waymo.IMAGE_COLUMN:
            cells["camera"] = waymo.camera_name(cells[waymo.CAMERA_COLUMN], where)
        return Sample(decode_cropped(data, self.img_size, where), label, self._caption.format(cells, where))

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of row `index`, from the columns of that name if there are any."""
        _, place, row, where = self._find(index)
        if self._has_shapes:
            group = self._shapes.get(place, self._read_shapes)
            height, width = (group[name][row].as_py() for name in _SHAPE_FIELDS)
            if height and width:
                return height, width
        group = self._groups.get(place, self._read_group)
        return read_image_shape(_image_bytes(group[self._image_field][row].as_py(), where), where)

    def fingerprint(self) -> str:
        """Hash names, row counts and excerpts of the files, and the selected rows."""
        names = [path.name for path in self.paths]
        samples = sample_files(len(self.paths), self.paths.__getitem__)
        selected = [] if self._rows is None else [self._rows]
        return short_hash(self.kind.lower(), *names, self._starts, samples, *selected, *self._caption.fingerprint_parts)

    def _find(self, index: int) -> tuple[int, int, int, str]:
        """Return the row counted through all files, its group, its row there, and a description for errors."""
        row = index if self._rows is None else int(self._rows[index])
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        row_in_group = row - int(self._starts[place])
        file, _, first_row = self._places[place]
        return row, place, row_in_group, f"row {first_row + row_in_group} of {self.paths[file]}"

    def _file(self, number: int) -> Reader:
        return self._files.get(number, self._open)

    def _open(self, number: int) -> Reader:
        import pyarrow

        path = self.paths[number]
        try:
            return self.reader(path)
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: names that are not text
            raise UserError(f"The {self.kind} file {path} could not be read: {error}.") from error

    def _read_group(self, place: int) -> Any:
        number, group, _ = self._places[place]
        return self._read_columns(number, group, self._columns)

    def _read_shapes(self, place: int) -> Any:
        number, group, _ = self._places[place]
        return self._read_columns(number, group, list(_SHAPE_FIELDS))

    def _read_columns(self, number: int, group: int, columns: list[str]) -> Any:
        import pyarrow

        try:
            rows = self._file(number).read_group(group, columns)
            rows.validate(full=True)  # a damaged offset would make Arrow read beyond the file and crash
            return rows
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"The {self.kind} file {self.paths[number]} is damaged: {error}.") from error

    def _column(self, number: int, field: str) -> np.ndarray:
        groups = range(len(self._file(number).group_rows))
        columns = [self._read_columns(number, group, [field])[field] for group in groups]
        if missing := sum(column.null_count for column in columns):
            raise UserError(f"{missing:,} rows of {self.paths[number]} have no {field}.")
        values = [column.to_numpy(zero_copy_only=False) for column in columns if len(column)]
        return np.concatenate(values or [np.empty(0, np.int64)])


def _image_field(kind: str, path: Path, schema: Any) -> str:
    """Find the column of encoded images: bytes, or the Hugging Face hub's struct of bytes and path."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return (place := kind.get_field_index("bytes")) >= 0 and holds_bytes(kind.field(place).type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    if waymo.is_waymo(schema.names):
        return waymo.image_column(path, schema.names)
    found = [field.name for field in schema if holds_bytes(field.type)]
    name = found[0] if len(found) == 1 else first_present(found, _IMAGE_FIELDS)
    if name is None:
        raise UserError(
            f"The {kind} file {path} has no column of images as bytes.",
            f"Its columns are {', '.join(f'{field.name} ({field.type})' for field in schema)}.",
            "Image files that a table only names are read from a CSV or JSONL table.",
        )
    return name


def _image_bytes(cell: Any, where: str) -> bytes:
    data = cell["bytes"] if isinstance(cell, dict) else cell
    if data is None:
        raise ImageDecodeError(where, "the row holds no bytes")
    if not isinstance(data, bytes):
        raise ImageDecodeError(where, f"the row holds {type(data).__name__} instead of bytes")
    return data


def _is_integer(schema: Any, name: str) -> bool:
    """Return whether there is a column of this name that holds integers."""
    from pyarrow import types

    return name in schema.names and types.is_integer(schema.field(name).type)


def _is_plain(kind: Any) -> bool:
    """Return whether a column can be put into a caption: text or numbers."""
    from pyarrow import types

    return not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def _hub_class_names(schema: Any, label_field: str, numbers: list[str]) -> list[str]:
    """Return the class names in the hub's metadata, or the numbers where there are none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = metadata["info"]["features"][label_field]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):  # names are optional
        return numbers
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if are_names and len(names) >= len(numbers) else numbers


_MAX_ROW_GROUPS = 4
_MAX_CACHED_BYTES = 256 * 2**20  # in every DataLoader worker


class _ParquetReader:
    """A Parquet file; a row group is decoded at once, so reading in order is fast and random access is slow."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        self.schema = self._file.schema_arrow
        _ = self.schema.names  # raises where they are not text
        groups = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        largest = max((group.total_byte_size for group in groups), default=0)
        self.max_cached_groups = max(1, min(_MAX_ROW_GROUPS, _MAX_CACHED_BYTES // max(1, largest)))

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Decode some columns of a row group."""
        # Threads of the parent process do not exist in a forked DataLoader worker, so none are used.
        return self._file.read_row_group(group, columns=columns, use_threads=False)


class ParquetSource(ColumnSource):
    """The rows of Parquet files."""

    kind, reader = "Parquet", _ParquetReader


_MAX_RECORD_BATCHES = 4096  # views of mapped memory, which cost next to nothing


class _ArrowReader:
    """A memory-mapped Arrow file: random access costs no more than reading in order."""

    max_cached_groups = _MAX_RECORD_BATCHES

    def __init__(self, path: Path) -> None:
        import pyarrow

        try:
            # Threads of the parent process do not exist in a forked DataLoader worker, so none are used.
            options = pyarrow.ipc.IpcReadOptions(use_threads=False)
            self._file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)), options=options)
        except pyarrow.ArrowInvalid as error:
            raise pyarrow.ArrowInvalid(
                f"{error} (it is truncated, or a stream of Hugging Face datasets, which to_parquet converts to Parquet)"
            ) from error
        self.schema = self._file.schema
        _ = self.schema.names  # raises where they are not text
        self.group_rows = [self._file.get_batch(group).num_rows for group in range(self._file.num_record_batches)]

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Return views of some columns of a record batch."""
        return self._file.get_batch(group).select(columns)


class ArrowSource(ColumnSource):
    """The rows of Arrow files."""

    kind, reader = "Arrow", _ArrowReader
