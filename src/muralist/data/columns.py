"""Files of rows and columns with the images inside: what Parquet and Arrow files have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from muralist.data import waymo
from muralist.data.captions import Caption
from muralist.data.fields import LABEL_FIELDS, pick, sample_files, settle_labels, short_hash
from muralist.data.images import BrokenImage, Size, read_cropped, stored_shape
from muralist.data.item import Item
from muralist.data.recent import Recent
from muralist.errors import UserError

_IMAGE_FIELDS = ("image", "img", "jpg", "png", "bytes")  # which one, where several columns hold bytes
_SHAPE_FIELDS = ("height", "width")
_MOST_OPEN_FILES = 64


class Reader(Protocol):
    """One open file, whose rows come in groups."""

    schema: Any
    group_rows: list[int]
    groups_kept: int  # how many groups of this size may stay in memory

    def __init__(self, path: Path) -> None: ...

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Return some columns of a group of rows."""
        ...


class ColumnSource:
    """The rows of such files, in the order of the files; `rows` picks some of them, in any order and any number of times."""

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
        self._files: Recent[Reader] = Recent(_MOST_OPEN_FILES)
        names = self._file(0).schema.names
        if double := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"{paths[0]} has {names.count(double)} columns called {double!r}.", fix="Rename all but one."
            )
        self._places: list[tuple[int, int, int]] = []  # of each group: its file, its number there, its first row there
        sizes: list[int] = []
        groups_kept: list[int] = []
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
            groups_kept.append(file.groups_kept)
        self._starts = np.cumsum([0, *sizes])
        self._groups: Recent[Any] = Recent(min(groups_kept))
        if self._starts[-1] == 0:
            raise UserError(f"{paths[0]} has no rows.")
        # pandas writes a table without rows with columns of no type, so only a file with rows tells.
        first = next(number for (number, _, _), size in zip(self._places, sizes, strict=True) if size)
        schema = self._file(first).schema
        self._image_field = _image_field(self.kind, paths[first], schema)
        self._settle_labels(schema, known)
        self._settle_captions(schema, caption)
        self._shapes: Recent[Any] = Recent(min(groups_kept))
        self._tells_shapes = all(_is_whole(schema, name) for name in _SHAPE_FIELDS)

    def _settle_labels(self, schema: Any, known: list[str] | None) -> None:
        field = pick(schema.names, LABEL_FIELDS)
        labels = [self._column(number, field) for number in range(len(self.paths))] if field else []
        self._labels, self.label_names = settle_labels(
            np.concatenate(labels) if labels else None, known, f"{self.paths[0]}, column {field},"
        )
        if known is None and field:
            self.label_names = _hub_class_names(schema, field, self.label_names)

    def _settle_captions(self, schema: Any, caption: str | None) -> None:
        derived = ["label"] if self.label_names and "label" not in schema.names else []
        default = ""
        if self._image_field == waymo.IMAGE_COLUMN:
            derived.append("camera")
            default = waymo.DEFAULT_CAPTION
        plain = [field.name for field in schema if _is_plain(field.type)]
        # A column that is called caption and holds none is a mistake to report, not one to pass over.
        columns = schema.names if caption is None else plain + derived
        self._caption = Caption.settle(caption, columns, str(self.paths[0]), default)
        needed = [*self._caption.columns, *([waymo.CAMERA_COLUMN] if "camera" in derived else [])]
        self._columns = list(dict.fromkeys([self._image_field, *(name for name in needed if name in schema.names)]))

    def keep_cameras(self, names: Sequence[str]) -> None:
        """Pick the rows of some cameras; only Waymo's files tell."""
        numbers = [str(number) for number in waymo.camera_numbers(names)]
        if self._image_field != waymo.IMAGE_COLUMN:
            raise waymo.no_cameras(str(self.paths[0]))
        cameras = np.concatenate([self._column(file, waymo.CAMERA_COLUMN) for file in range(len(self.paths))])
        rows = np.arange(len(cameras)) if self._rows is None else self._rows
        self._rows = rows[np.isin(cameras[rows].astype(str), numbers)]
        if not len(self._rows):
            raise UserError(f"No image of {self.paths[0].parent} is by the cameras {' '.join(names)}.")

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._rows is None else len(self._rows)

    @property
    def file_rows(self) -> list[int]:
        """How many rows each file has."""
        counts = np.zeros(len(self.paths), dtype=np.int64)
        np.add.at(counts, [number for number, _, _ in self._places], np.diff(self._starts))
        return counts.tolist()

    def read(self, index: int) -> Item:
        """Decode the image of row `index`."""
        number, place, row, where = self._find(index)
        group = self._groups.get(place, self._read_group)
        try:
            cells = {name: group[name][row].as_py() for name in self._columns}
        except (ValueError, OverflowError) as error:  # a date beyond the calendar, say
            raise UserError(f"{where[0].upper()}{where[1:]} is damaged: {error}.") from error
        data = _image_bytes(cells[self._image_field], where)
        label = 0 if self._labels is None else int(self._labels[number])
        if self.label_names:
            cells["label"] = self.label_names[label]
        if self._image_field == waymo.IMAGE_COLUMN:
            cells["camera"] = waymo.camera_words(cells[waymo.CAMERA_COLUMN], where)
        return Item(read_cropped(data, self.img_size, where), label, self._caption.text(cells, where))

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of row `index`, from the columns that tell them if there are any."""
        _, place, row, where = self._find(index)
        if self._tells_shapes:
            group = self._shapes.get(place, self._read_shapes)
            height, width = (group[name][row].as_py() for name in _SHAPE_FIELDS)
            if height and width:
                return height, width
        group = self._groups.get(place, self._read_group)
        return stored_shape(_image_bytes(group[self._image_field][row].as_py(), where), where)

    def fingerprint(self) -> str:
        """Hash names, row counts and samples of the files, and which rows are picked."""
        names = [path.name for path in self.paths]
        samples = sample_files(len(self.paths), self.paths.__getitem__)
        picked = [] if self._rows is None else [self._rows]
        return short_hash(self.kind.lower(), *names, self._starts, samples, *picked, *self._caption.hashed)

    def _find(self, index: int) -> tuple[int, int, int, str]:
        """Return the row's number through all files, its group, its number there, and words for where that is."""
        number = index if self._rows is None else int(self._rows[index])
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = number - int(self._starts[place])
        file, _, first_row = self._places[place]
        return number, place, row, f"row {first_row + row} of {self.paths[file]}"

    def _file(self, number: int) -> Reader:
        return self._files.get(number, self._open)

    def _open(self, number: int) -> Reader:
        import pyarrow

        path = self.paths[number]
        try:
            return self.reader(path)
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: names that are no text
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
            rows.validate(full=True)  # a damaged offset would make Arrow read beyond the file, which ends the process
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
    """Find the column of encoded images: bytes, or the hub's pair of bytes and path."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return (place := kind.get_field_index("bytes")) >= 0 and holds_bytes(kind.field(place).type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    if waymo.is_waymo(schema.names):
        return waymo.image_column(path, schema.names)
    found = [field.name for field in schema if holds_bytes(field.type)]
    name = found[0] if len(found) == 1 else pick(found, _IMAGE_FIELDS)
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
        raise BrokenImage(where, "the row holds no bytes")
    if not isinstance(data, bytes):
        raise BrokenImage(where, f"the row holds {type(data).__name__} instead of bytes")
    return data


def _is_whole(schema: Any, name: str) -> bool:
    """Say whether there is a column of this name that holds whole numbers."""
    from pyarrow import types

    return name in schema.names and types.is_integer(schema.field(name).type)


def _is_plain(kind: Any) -> bool:
    """Say whether a column can be put into a caption: text or numbers."""
    from pyarrow import types

    return not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def _hub_class_names(schema: Any, label_field: str, numbers: list[str]) -> list[str]:
    """Return the class names that the hub keeps beside the columns, or the numbers where it keeps none."""
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = said["info"]["features"][label_field]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):  # names are a courtesy: without them, numbers do
        return numbers
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if are_names and len(names) >= len(numbers) else numbers
