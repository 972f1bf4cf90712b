"""The prompt table: validated in one pass that keeps a few numbers per row, then read row by row."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muralist import data
from muralist.core.errors import UserError, closest_match
from muralist.core.formatting import format_list
from muralist.core.run_dir import check_exists
from muralist.data.image_inputs import INPUT_COLUMNS, STRENGTH, ImageInputs, parse_inputs
from muralist.data.source import check_caption, first_present, short_hash
from muralist.data.tables import TEXT_SUFFIXES, Cells, CocoCaptionTable, ParquetTable, Table, TextTable

# Separators, blanks, control characters, surrogates, and characters that other systems do not allow in a file name.
_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff/\\<>:\"|?*]")
_RESERVED = re.compile(r"^(con|prn|aux|nul|com[0-9]|lpt[0-9])\.", re.IGNORECASE)  # device names on Windows
_MAX_ID_BYTES = 150  # a file name has 255 bytes, for the id, the seed and the suffix


def safe_id(text: str) -> str:
    """Make an id safe as part of a file name: one path component, not hidden, not too long; a safe id is unchanged."""
    safe = _UNSAFE.sub("_", text.strip())
    visible = safe.lstrip(".")
    safe = _RESERVED.sub(r"\1_", visible.rjust(len(safe), "_"))
    if len(safe.encode()) <= _MAX_ID_BYTES:
        return safe
    ending = f"-{short_hash(safe)}"
    return safe.encode()[: _MAX_ID_BYTES - len(ending)].decode(errors="ignore") + ending


def image_file_stem(id: str, seed: int) -> str:
    """Return the file name of an image without its suffix, such as 000001_seed42; never a path out of the folder."""
    return f"{safe_id(id)}_seed{seed}"


_PROMPT = ("prompt", "caption")
_ID = ("image_id", "id")
_USED = (*_PROMPT, *_ID, "seed", "negative_prompt", "height", "width", *INPUT_COLUMNS)

_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".json")
_BUILTIN = "muralist"
_BUILTIN_TABLE = Path(data.__file__).parent / "assets" / "prompts.csv"
_SEEDS_BELOW = 2**62  # as --seed_start
_SIDES_BELOW = 2**31
_MAX_NAMES_SHOWN = 12
_INTEGER = re.compile(r"([0-9]+)(\.0*)?")  # pandas writes 7 as 7.0 in a column with empty cells


class PromptRow(NamedTuple):
    """A row of the prompt table, with an id that is safe in a file name; None stands for an empty cell."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    id: str
    prompt: str
    seed: int | None
    negative_prompt: str | None
    height: int | None
    width: int | None
    inputs: ImageInputs | None = None  # None without any of their columns


class PromptTable:
    """The rows of a prompt table; they stay on disk, so a million of them take a few dozen MB. Can be pickled."""

    def __init__(self, path: Path, table: Table, limit: int | None) -> None:
        self.path, self._table, self._version = path, table, _file_version(path)
        self.notes: list[str] = []
        self.sizes: np.ndarray | None = None
        """Heights and widths, int32 [N, 2], 0 for empty cells; None without such columns."""
        self.seeds: np.ndarray | None = None
        """Seeds, int64 [N], -1 for empty cells; None without such a column."""
        self.id_hashes: np.ndarray | None = None
        """Hashes of the ids, int64 [N]; None if ids are row numbers."""
        self.input_columns: tuple[str, ...] = ()
        """The columns of image inputs that the table has."""
        self.strengths: np.ndarray | None = None
        """Strengths of image inputs, float64 [N], NaN for empty cells; None without such a column."""
        self._folder = str(path.absolute().parent)
        if table.columns:
            _check_columns(table.columns, str(path))
        self._scan(limit)

    def __len__(self) -> int:
        return len(self._positions)

    def row(self, index: int) -> PromptRow:
        """Read one row."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[PromptRow]:
        """Read some rows, in any order."""
        indices = [range(len(self))[index] for index in indices]
        if _file_version(self.path) != self._version:
            raise UserError(
                f"The table {self.path} was changed or removed while it was in use.",
                fix="Run the same command again; images of unchanged rows are kept.",
            )
        found = self._table.read(int(self._positions[index]) for index in indices)
        return [self._parse(cells, index, str(self.path)) for cells, index in zip(found, indices, strict=True)]

    def where(self, index: int) -> str:
        """Return the place of a row for error messages; reads the table up to there."""
        row = next(islice(self._table.stream(), index, None))
        return f"{self._table.unit} {row.number}"

    def _parse(self, cells: Cells, index: int, where: str) -> PromptRow:
        row = _parse_row(cells, index, where)
        if cells.keys().isdisjoint(INPUT_COLUMNS):
            return row
        return row._replace(inputs=parse_inputs(cells, where, self._folder))

    def _scan(self, limit: int | None) -> None:
        positions, hashes, seeds, sizes = array("q"), array("q"), array("q"), array("i")
        strengths = array("d")
        columns = set(self._table.columns)
        empty, changed, example = 0, 0, ""
        for position, number, cells in islice(self._table.stream(), limit):
            row = self._parse(cells, len(positions), f"{self._table.unit} {number} of {self.path}")
            positions.append(position)
            # Python's hashes differ between processes, but these are only compared with each other.
            hashes.append(hash(row.id))
            seeds.append(-1 if row.seed is None else row.seed)
            sizes.extend((row.height or 0, row.width or 0))
            strengths.append(row.inputs.strength or math.nan if row.inputs else math.nan)
            if not self._table.columns:
                columns.update(cells)
            if not row.prompt:
                empty += 1
            if row.id != cells.get("image_id") and (written := _written_id(cells, "")) not in ("", row.id):
                changed += 1
                example = example or f"{written[:60]!r} became {row.id[:60]!r}"
        if not positions:
            raise UserError(f"The table {self.path} has no rows.", fix="Give it at least one prompt.")
        self._positions = np.frombuffer(positions, np.int64)
        if first_present(columns, _ID):
            self.id_hashes = np.frombuffer(hashes, np.int64)
        if "seed" in columns:
            self.seeds = np.frombuffer(seeds, np.int64)
        if not columns.isdisjoint(("height", "width")):
            self.sizes = np.frombuffer(sizes, np.int32).reshape(-1, 2)
        self.input_columns = tuple(name for name in INPUT_COLUMNS if name in columns)
        if STRENGTH in columns:
            self.strengths = np.frombuffer(strengths, np.float64)
        count = len(positions)
        if limit is not None and count < limit:
            self.notes.append(f"{self.path} has only {count:,} of the {limit:,} requested rows: all of them are used.")
        if columns.issuperset(_PROMPT):
            self.notes.append(f"{self.path} has both a prompt and a caption: the prompt is used.")
        if columns.issuperset(_ID):
            self.notes.append(f"{self.path} has both an image_id and an id: the image_id is used.")
        if unused := sorted(name for name in columns.difference(_USED) if name):
            self.notes.append(f"Unused columns of {self.path}: {format_list(unused, _MAX_NAMES_SHOWN)}.")
        if empty:
            self.notes.append(f"{empty:,} of {count:,} prompts are empty: their images are made from the empty text.")
        if changed:
            self.notes.append(f"{changed:,} of {count:,} ids were changed to be safe as file names: {example}.")


def open_prompt_table(path: str, limit: int | None = None) -> PromptTable:
    """Open the table at `path`, or the built-in one, and check its first `limit` rows, or all."""
    place = _BUILTIN_TABLE if path == _BUILTIN else Path(path).expanduser()
    kinds = f"Give --prompts_csv a file that ends in {' '.join(_SUFFIXES)}, or {_BUILTIN} for the built-in prompts."
    try:
        check_exists(place, "prompt table", kinds)
        if not place.is_file():
            what = "a folder" if place.is_dir() else "not a plain file"
            raise UserError(f"The prompt table {place} is {what}.", fix=kinds)
        suffix = place.suffix.lower()
        if suffix not in _SUFFIXES:
            raise UserError(f"{place} is not a kind of file that holds prompts.", fix=kinds)
        if place.stat().st_size == 0:
            raise UserError(f"The prompt table {place} is empty.", fix="Check that it was copied completely.")
        if suffix == ".parquet":
            return PromptTable(place, ParquetTable(place, _USED), limit)
        return PromptTable(place, CocoCaptionTable(place) if suffix == ".json" else TextTable(place), limit)
    except OSError as error:
        raise UserError(f"The prompt table {place} could not be read: {error.strerror}.") from error


def refuse_collision(table: PromptTable, seeds: np.ndarray) -> None:
    """Raise a UserError if two rows have the same id and seed, hence the same file.

    `seeds` is [N], or [N, C] for C copies per row.
    """
    if table.id_hashes is None:
        return
    copies = seeds.reshape(len(table), -1)
    rows = np.repeat(np.arange(len(table)), copies.shape[1])
    keys, flat = table.id_hashes[rows], copies.ravel()
    order = np.lexsort((rows, flat, keys))
    same = np.flatnonzero((keys[order][1:] == keys[order][:-1]) & (flat[order][1:] == flat[order][:-1]))
    found = np.stack((rows[order[same]], rows[order[same + 1]], flat[order[same]]), axis=1)
    for first, second, seed in found[np.argsort(found[:, 1], kind="stable")].tolist():
        if first != second and (id := table.row(first).id) == table.row(second).id:  # not only the same hash
            raise UserError(
                f"Two rows of {table.path} would be written to the same file, {image_file_stem(id, seed)}: "
                f"{table.where(first)} and {table.where(second)}.",
                "They have the same id, once it is made safe as a file name, and the same seed.",
                "Give them different ids or seeds.",
            )


def _parse_row(cells: Cells, index: int, where: str) -> PromptRow:
    prompt_field = first_present(cells, _PROMPT)
    if prompt_field is None:
        raise _no_prompt(cells, where)
    written = _written_id(cells, where)
    # There may be a million rows, and most tables lack most columns: absent columns are not parsed.
    height, width = _size(cells, where) if "height" in cells or "width" in cells else (None, None)
    return PromptRow(
        index,
        safe_id(written) if written else f"{index + 1:06d}",
        _text(cells, prompt_field, where),
        _parse_integer(cells, "seed", where, 0, _SEEDS_BELOW) if "seed" in cells else None,
        (_text(cells, "negative_prompt", where) or None) if "negative_prompt" in cells else None,
        height,
        width,
    )


def _size(cells: Cells, where: str) -> tuple[int | None, int | None]:
    height = _parse_integer(cells, "height", where, 1, _SIDES_BELOW)
    width = _parse_integer(cells, "width", where, 1, _SIDES_BELOW)
    if (height is None) != (width is None):
        given, missing = ("width", "height") if height is None else ("height", "width")
        raise UserError(f"There is a {given} but no {missing} in {where}.", fix="Give both or neither.")
    return height, width


def _text(cells: Cells, field: str, where: str) -> str:
    if _is_missing(value := cells.get(field)):
        return ""
    return check_caption(value, where, field).strip()


def _written_id(cells: Cells, where: str) -> str:
    """Return the id as it is written; empty if there is none."""
    field = first_present(cells, _ID)
    value = cells[field] if field else None
    if isinstance(value, str):
        return value.strip()
    if _is_missing(value):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"The {field} in {where} is neither text nor a number but {value!r:.60}.")
    return str(value)


def _parse_integer(cells: Cells, field: str, where: str, least: int, below: int) -> int | None:
    """Return the integer in a cell, or None for an empty cell."""
    if _is_missing(value := cells.get(field)) or (isinstance(value, str) and not value.strip()):
        return None
    number = None
    if isinstance(value, str):
        # No valid number is longer, and Python refuses to parse very long ones.
        if len(value) < 100 and (match := _INTEGER.fullmatch(value.strip())):
            number = int(match[1])
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        number = int(value)
    if number is None or not least <= number < below:
        power = below.bit_length() - 1
        raise UserError(
            f"The {field} {value!r:.60} in {where} is not an integer from {least} to 2^{power} - 1.",
            fix="Leave the cell empty to use the value of the command.",
        )
    return number


def _is_missing(value: object) -> bool:
    return value is None or value != value  # pandas writes missing values as NaN


def _check_columns(columns: list[str], where: str) -> None:
    if first_present(columns, _PROMPT) is None:
        raise _no_prompt(columns, where)
    if double := next((name for name in _USED if columns.count(name) > 1), None):
        raise UserError(f"{where} has {columns.count(double)} columns called {double}.", fix="Rename all but one.")


def _no_prompt(columns: Iterable[str], where: str) -> UserError:
    names = list(columns)
    hints = [f"{name}: {hint}" for name in names if (hint := closest_match(name, _PROMPT))]
    return UserError(
        f"There is no prompt or caption in {where}.",
        f"Its columns are {', '.join(names[:_MAX_NAMES_SHOWN]) or 'none'}. {' '.join(hints[:1])}".strip(),
        "Call the column of prompts prompt; columns are separated by commas in .csv files and by tabs in .tsv files.",
    )


def _file_version(path: Path) -> tuple[int, int] | None:
    """Return size and modification time of a file; None if it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
