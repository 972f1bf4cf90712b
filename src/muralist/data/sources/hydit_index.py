"""HunyuanDiT's index files (Index V2 of IndexKits): a JSON file that selects rows of Arrow files.

    arrow_files    paths of Arrow files, in order
    cum_length     rows of these files, counted up to the end of each
    indices        the selected rows, counted through all files, with repetition
    indices_file   an .npz file beside the index with the rows (array x), where they are many
    group_length   for IndexKits' shuffling; in a multi-resolution index a dict by size ("512x768"), as are the indices

All rows of a multi-resolution index are read, in the order of the shapes: cropped to --img_size, or with --multireso
to the size of their group.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from muralist.core.errors import UserError
from muralist.core.image_size import Size
from muralist.core.run_dir import base_dir_of, is_file
from muralist.data.sources.arrays import open_archive
from muralist.data.sources.columnar import ArrowSource

_MAKE_AGAIN = "Make the index again with `idk`."


class IndexSource(ArrowSource):
    """The rows that an index selects."""

    groups: list[tuple[tuple[int, int], int]]
    """Height and width of each group of a multi-resolution index, and its number of rows, in order."""


def open_index(path: Path, img_size: Size, known: list[str] | None = None, caption: str | None = None) -> IndexSource:
    """Open the rows that an index file selects."""
    index = _read(path)
    files = _arrow_files(path, index["arrow_files"])
    lengths = _integers(index["cum_length"], "cum_length", path)
    if len(lengths) != len(files):
        raise UserError(
            f"The index {path} names {len(files):,} Arrow files, but counts the rows of {len(lengths):,}.",
            fix=_MAKE_AGAIN,
        )
    groups = _groups(path, index)
    rows = np.concatenate([rows for _, rows in groups]) if groups else np.empty(0, dtype=np.int64)
    if not len(rows):
        raise UserError(f"The index {path} selects no rows.", "Its filters may have left none.", _MAKE_AGAIN)
    if (outside := rows[(rows < 0) | (rows >= lengths[-1])]).size:
        raise UserError(
            f"The index {path} points past the end: to row {outside[0]:,}, but its files have {lengths[-1]:,} rows.",
            f"{outside.size:,} of its {len(rows):,} rows do so.",
            _MAKE_AGAIN,
        )
    source = IndexSource(files, img_size, known, caption, rows)
    source.groups = [(shape, len(rows)) for shape, rows in groups if shape]
    for file, found, counted in zip(files, source.file_rows, np.diff(lengths, prepend=0).tolist(), strict=True):
        if found != counted:
            raise UserError(
                f"The Arrow file {file} has {found:,} rows, but the index {path} counts {counted:,}.",
                "The file has changed since the index was made.",
                _MAKE_AGAIN,
            )
    return source


def _read(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The index {path} could not be read: {error}.") from error
    wanted = ("arrow_files", "cum_length", "indices")
    fields = index if isinstance(index, dict) else {}
    if missing := [name for name in wanted if name not in fields]:
        raise UserError(
            f"{path} is not a HunyuanDiT index: it has no {missing[0]}.",
            f"Its fields are {', '.join(fields) or 'none'}.",
            "Other data sets in JSON are read as .jsonl, one object per line.",
        )
    return fields


def _arrow_files(path: Path, names: Any) -> list[Path]:
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"The index {path} names no Arrow files.", fix=_MAKE_AGAIN)
    start = base_dir_of(path, names[0])
    files = [start / name for name in names]
    if missing := [file for file in files if not is_file(file)]:
        raise UserError(
            f"The index {path} names {missing[0]}, but there is no such file.",
            f"{len(missing):,} of its {len(files):,} Arrow files are missing.",
            "Start from the folder in which the index was made, or make it again.",
        )
    return files


def _groups(path: Path, index: dict[str, Any]) -> list[tuple[tuple[int, int] | None, np.ndarray]]:
    """Return the selected rows, from the index or from the file beside it: divided by shape, or all in one group."""
    indices = index["indices"]
    if name := index.get("indices_file"):
        beside = path.parent / str(name)
        if not is_file(beside):
            raise UserError(
                f"The index {path} keeps its rows in {name}, which is missing.", fix=f"Put it into {path.parent}."
            )
        with open_archive(beside) as archive:
            indices = {key: archive[key] for key in archive.files}
        if not isinstance(index.get("group_length"), dict):
            if "x" not in indices:
                raise UserError(f"{beside} has no array x, which holds the rows of {path}.", fix=_MAKE_AGAIN)
            indices = indices["x"]
    if not isinstance(indices, dict):
        return [(None, _integers(indices, "indices", path))]
    shapes = {key: _shape(key, path) for key in indices}
    by_ratio = sorted(shapes, key=lambda key: (shapes[key][0] / shapes[key][1], key))
    return [(shapes[key], _integers(indices[key], "indices", path)) for key in by_ratio]


def _shape(group: str, path: Path) -> tuple[int, int]:
    try:
        height, width = map(int, group.split("x"))
        if min(height, width) < 1 or max(height, width) >= 2**31:
            raise ValueError(group)
        return height, width
    except ValueError as error:
        raise UserError(f"The index {path} has a group {group!r:.60}, which is not a size.", fix=_MAKE_AGAIN) from error


def _integers(values: Any, name: str, path: Path) -> np.ndarray:
    with suppress(ValueError, OverflowError):  # rows of different lengths, numbers beyond 64 bits
        array = np.asarray(values)
        if array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            return array.astype(np.int64)
    raise UserError(f"The {name} of the index {path} are not integers.", fix=_MAKE_AGAIN)
