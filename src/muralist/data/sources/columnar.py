"""Parquet and Arrow files with the images inside, among them those of the Waymo Open Dataset, version 2.

A component of that data set is a folder of Parquet files, one per drive:
{training,validation,testing}/{component}/{segment}.parquet. Images are in the component camera_image, as JPEG files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from muralist.core.errors import UserError, closest_match
from muralist.core.image_size import Size
from muralist.data.decode import ImageDecodeError, decode_cropped, read_image_shape
from muralist.data.source import (
    LABEL_FIELDS,
    CaptionTemplate,
    LruCache,
    Sample,
    Source,
    first_present,
    resolve_labels,
    sample_files,
    short_hash,
)

WAYMO_COMPONENT = "camera_image"
_WAYMO_IMAGE = "[CameraImageComponent].image"
_WAYMO_CAMERA = "key.camera_name"
_WAYMO_SEGMENT = "key.segment_context_name"  # in every component
_WAYMO_CAPTION = "A driving scene seen by the {camera} camera"
_WAYMO_CAMERAS = {1: "front", 2: "front left", 3: "front right", 4: "side left", 5: "side right"}

_IMAGE_FIELDS = ("image", "img", "jpg", "png", "bytes")  # by preference, where several columns hold bytes
_SHAPE_FIELDS = ["height", "width"]
_MAX_OPEN_FILES = 64
_MAX_ROW_GROUPS = 4
_MAX_CACHED_BYTES = 256 * 2**20  # in every DataLoader worker
_MAX_RECORD_BATCHES = 4096  # views of mapped memory, which cost next to nothing


class _ParquetReader:
    """A Parquet file; a row group is decoded at once, so reading in order is fast and random access is slow."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        self.schema = self._file.schema_arrow
        groups = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        largest = max((group.total_byte_size for group in groups), default=0)
        self.max_cached_groups = max(1, min(_MAX_ROW_GROUPS, _MAX_CACHED_BYTES // max(1, largest)))

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Decode some columns of a row group."""
        # Threads of the parent process do not exist in a forked DataLoader worker, so none are used.
        return self._file.read_row_group(group, columns=columns, use_threads=False)


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
        self.group_rows = [self._file.get_batch(group).num_rows for group in range(self._file.num_record_batches)]

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Return views of some columns of a record batch."""
        return self._file.get_batch(group).select(columns)


class ColumnSource:
    """The rows of several files; `rows` selects some of them, in any order and with repetition."""

    kind: ClassVar[str]
    reader: ClassVar[type[_ParquetReader | _ArrowReader]]

    def __init__(
        self,
        paths: list[Path],
        img_size: Size,
        known: list[str] | None = None,
        caption: str | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        self.paths, self.img_size, self.rows = paths, img_size, rows
        self._files: LruCache[_ParquetReader | _ArrowReader] = LruCache(_MAX_OPEN_FILES)
        names = self._file(0).schema.names
        if double := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"{paths[0]} has {names.count(double)} columns called {double!r}.", fix="Rename all but one."
            )
        self.file_rows: list[int] = []
        group_rows: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # of each group: its file, its index and its first row there
        max_cached_groups = _MAX_RECORD_BATCHES
        schema = None
        for number, path in enumerate(paths):
            file = self._file(number)
            if schema is None and any(file.group_rows):
                # pandas writes untyped columns for a table without rows, so the schema comes from a file with rows.
                schema = file.schema
                self._image_field = _image_field(self.kind, path, schema)
            if file.schema.names != names:
                raise UserError(
                    f"{path} has the columns {', '.join(file.schema.names)}, but {paths[0]} has {', '.join(names)}."
                )
            *first_rows, count = np.cumsum([0, *file.group_rows]).tolist()
            self._places += [(number, group, first_row) for group, first_row in enumerate(first_rows)]
            self.file_rows.append(count)
            group_rows += file.group_rows
            max_cached_groups = min(max_cached_groups, file.max_cached_groups)
        if schema is None:
            raise UserError(f"{paths[0]} has no rows.")
        self._starts = np.cumsum([0, *group_rows])
        self._groups: LruCache[Any] = LruCache(max_cached_groups)
        self._shapes: LruCache[Any] = LruCache(max_cached_groups)
        self.is_waymo = self._image_field == _WAYMO_IMAGE
        self._resolve_labels(schema, known)
        self._resolve_captions(schema, caption)
        self._has_shapes = all(_is_integer(schema, name) for name in _SHAPE_FIELDS)

    def _resolve_labels(self, schema: Any, known: list[str] | None) -> None:
        field = first_present(schema.names, LABEL_FIELDS)
        labels = self.column(field) if field else None
        self._labels, self.label_names = resolve_labels(labels, known, f"{self.paths[0]}, column {field},")
        if known is None and field:
            self.label_names = _hub_class_names(schema, field, self.label_names)

    def _resolve_captions(self, schema: Any, caption: str | None) -> None:
        derived = ["label"] if self.label_names and "label" not in schema.names else []
        derived += ["camera"] if self.is_waymo else []
        plain = [field.name for field in schema if _is_plain(field.type)]
        # A column that is called caption but does not hold text is reported, not skipped.
        columns = schema.names if caption is None else plain + derived
        default = _WAYMO_CAPTION if self.is_waymo else ""
        self._caption = CaptionTemplate.resolve(caption, columns, str(self.paths[0]), default)
        needed = [self._image_field, *self._caption.columns, *([_WAYMO_CAMERA] if self.is_waymo else [])]
        self._columns = list(dict.fromkeys(name for name in needed if name in schema.names))

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.rows is None else len(self.rows)

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
        if self.is_waymo:
            cells["camera"] = _camera_name(cells[_WAYMO_CAMERA], where)
        return Sample(decode_cropped(data, self.img_size, where), label, self._caption.format(cells, where))

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of row `index`, from the columns of that name if there are any."""
        _, place, row, where = self._find(index)
        if self._has_shapes:
            group = self._shapes.get(place, lambda place: self._read_columns(place, _SHAPE_FIELDS))
            height, width = (group[name][row].as_py() for name in _SHAPE_FIELDS)
            if height and width:
                return height, width
        group = self._groups.get(place, self._read_group)
        return read_image_shape(_image_bytes(group[self._image_field][row].as_py(), where), where)

    def fingerprint(self) -> str:
        """Hash names, row counts and excerpts of the files, and the selected rows."""
        names = [path.name for path in self.paths]
        samples = sample_files(len(self.paths), self.paths.__getitem__)
        selected = [] if self.rows is None else [self.rows]
        return short_hash(self.kind.lower(), *names, self._starts, samples, *selected, *self._caption.fingerprint_parts)

    def column(self, field: str) -> np.ndarray:
        """Read one column of all files."""
        values = []
        for place, (number, _, _) in enumerate(self._places):
            column = self._read_columns(place, [field])[field]
            if column.null_count:
                raise UserError(f"Some rows of {self.paths[number]} have no {field}.")
            if len(column):
                values.append(column.to_numpy(zero_copy_only=False))
        return np.concatenate(values)

    def _find(self, index: int) -> tuple[int, int, int, str]:
        """Return the row counted through all files, its group, its row there, and a description for errors."""
        row = index if self.rows is None else int(self.rows[index])
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        row_in_group = row - int(self._starts[place])
        file, _, first_row = self._places[place]
        return row, place, row_in_group, f"row {first_row + row_in_group} of {self.paths[file]}"

    def _file(self, number: int) -> _ParquetReader | _ArrowReader:
        return self._files.get(number, self._open)

    def _open(self, number: int) -> _ParquetReader | _ArrowReader:
        import pyarrow

        path = self.paths[number]
        try:
            file = self.reader(path)
            _ = file.schema.names  # raises ValueError where they are not text
            return file
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"The {self.kind} file {path} could not be read: {error}.") from error

    def _read_group(self, place: int) -> Any:
        return self._read_columns(place, self._columns)

    def _read_columns(self, place: int, columns: list[str]) -> Any:
        import pyarrow

        number, group, _ = self._places[place]
        try:
            rows = self._file(number).read_group(group, columns)
            rows.validate(full=True)  # a damaged offset would make Arrow read beyond the file and crash
            return rows
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"The {self.kind} file {self.paths[number]} is damaged: {error}.") from error


class ParquetSource(ColumnSource):
    """The rows of Parquet files."""

    kind, reader = "Parquet", _ParquetReader


class ArrowSource(ColumnSource):
    """The rows of Arrow files."""

    kind, reader = "Arrow", _ArrowReader


def _image_field(kind: str, path: Path, schema: Any) -> str:
    """Find the column of encoded images: bytes, or the Hugging Face hub's struct of bytes and path."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return (place := kind.get_field_index("bytes")) >= 0 and holds_bytes(kind.field(place).type)
        return types.is_binary(kind) or types.is_large_binary(kind)

    columns = f"Its columns are {', '.join(f'{field.name} ({field.type})' for field in schema)}."
    if _WAYMO_SEGMENT in schema.names or _WAYMO_IMAGE in schema.names:
        for needed in (_WAYMO_IMAGE, _WAYMO_CAMERA):
            if needed not in schema.names:
                raise UserError(
                    f"The file {path} belongs to the Waymo Open Dataset, but has no column {needed}.",
                    columns,
                    f"Give the files of the component {WAYMO_COMPONENT}, which holds the camera images.",
                )
        return _WAYMO_IMAGE
    if any(field.name in ("image", "latents") and types.is_fixed_size_binary(field.type) for field in schema):
        raise UserError(
            f"{path} was written by `muralist pack`, but its folder has no manifest.json.",
            "The copy of the folder is incomplete, or one of its files was given instead of the folder.",
            "Give the folder, copy it again, or pack the data set again.",
        )
    found = [field.name for field in schema if holds_bytes(field.type)]
    name = found[0] if len(found) == 1 else first_present(found, _IMAGE_FIELDS)
    if name is None:
        raise UserError(
            f"The {kind} file {path} has no column of images as bytes.",
            columns,
            "Image files that a table only names are read from a CSV or JSONL table.",
        )
    return name


def _image_bytes(cell: Any, where: str) -> bytes:
    data = cell["bytes"] if isinstance(cell, dict) else cell
    if not isinstance(data, bytes):
        found = "no" if data is None else f"{type(data).__name__} instead of"
        raise ImageDecodeError(where, f"the row holds {found} bytes")
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


# -- the Waymo Open Dataset


def _camera_name(camera: object, where: str) -> str:
    # The published schema says int8; a file of keypoints in Waymo's own repository has the number as text.
    name = _WAYMO_CAMERAS.get(int(str(camera))) if str(camera).isdecimal() else None
    if name is None:
        raise UserError(
            f"The {_WAYMO_CAMERA} in {where} is {camera!r:.60}.",
            f"Known are {', '.join(f'{number} ({known})' for number, known in _WAYMO_CAMERAS.items())}.",
        )
    return name


def select_cameras(source: Source, cameras: Sequence[str], path: str) -> Source:
    """Keep the rows of some cameras, given by Waymo's names such as FRONT_LEFT; of all, if there are no names."""
    if not cameras:
        return source
    if not isinstance(source, ColumnSource) or not source.is_waymo:
        raise UserError(
            f"--cameras selects cameras of the Waymo Open Dataset, and {path} does not belong to it.",
            "A packed folder does not store cameras.",
            "Leave --cameras out, or give it to `muralist pack`.",
        )
    known = {name.upper().replace(" ", "_"): str(number) for number, name in _WAYMO_CAMERAS.items()}
    written = [name.upper().replace("-", "_").replace(" ", "_") for name in cameras]
    for camera, name in zip(cameras, written, strict=True):
        if name not in known:
            raise UserError(
                f"There is no camera {camera}.", f"There are {', '.join(known)}.", closest_match(name, known)
            )
    numbers = source.column(_WAYMO_CAMERA).astype(str)
    rows = np.arange(len(numbers)) if source.rows is None else source.rows
    source.rows = rows[np.isin(numbers[rows], [known[name] for name in written])]
    if not len(source.rows):
        raise UserError(f"{source.paths[0].parent} has no image of the cameras {' '.join(cameras)}.")
    return source


def waymo_validation_folder(folder: Path) -> Path | None:
    """Return the validation folder that belongs to a training folder."""
    sibling = folder.parent.parent / "validation" / folder.name
    is_training = folder.name == WAYMO_COMPONENT and folder.parent.name == "training"
    return sibling if is_training and sibling.is_dir() else None
