"""The table of prompts: checked in one pass that keeps a few numbers per row, then read row by row."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muralist import data
from muralist.data.coco_captions import CaptionRecords
from muralist.data.fields import caption_text, pick
from muralist.data.paths import check_exists
from muralist.data.picture_names import file_stem, safe_id
from muralist.data.prompt_records import TEXT_SUFFIXES, Cells, ParquetRecords, Records, TextRecords
from muralist.errors import UserError, nearest

_PROMPT = ("prompt", "caption")
_ID = ("image_id", "id")
_USED = (*_PROMPT, *_ID, "seed", "negative_prompt", "height", "width")

_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".json")
_OWN = "muralist"
_OWN_TABLE = Path(data.__file__).parent / "assets" / "prompts.csv"
_SEEDS_BELOW = 2**62  # as --seed_start
_SIDES_BELOW = 2**31
_ROWS_AT_ONCE = 1024
_NAMES_SHOWN = 12

_WHOLE = re.compile(r"([0-9]+)(\.0*)?")  # pandas writes 7 as 7.0 in a column with empty cells


class Row(NamedTuple):
    """One row of the table; the id is already safe in a file name, and None stands where the table does not say."""

    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs here
    id: str
    prompt: str
    seed: int | None
    negative_prompt: str | None
    height: int | None
    width: int | None


class PromptTable:
    """The rows of a table; they stay on disk, so a million of them take a few dozen MB. A pickled copy works elsewhere."""

    def __init__(self, path: Path, records: Records, limit: int | None) -> None:
        self.path = path
        self.notes: list[str] = []
        self._records = records
        self._state = _state(path)
        if records.columns:
            _check_columns(records.columns, str(path))
        self._scan(limit)

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> Row:
        """Read one row."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Read some rows, in any order."""
        numbers = [range(len(self))[index] for index in indices]
        if _state(self.path) != self._state:
            raise UserError(
                f"The table {self.path} was changed or removed while it was in use.",
                fix="Run the same command again; pictures of rows that stayed the same are kept.",
            )
        found = self._records.read(int(self._places[number]) for number in numbers)
        return [_row(cells, number, str(self.path)) for cells, number in zip(found, numbers, strict=True)]

    def sizes(self) -> np.ndarray | None:
        """Heights and widths, int32 [N, 2], 0 where a row does not say; None if no row can."""
        return self._sizes

    def seeds(self) -> np.ndarray | None:
        """Seeds, int64 [N], -1 where a row does not say; None if no row can."""
        return self._seeds

    def id_hashes(self) -> np.ndarray | None:
        """Hashes of the ids, int64 [N]; None where ids are mere row numbers."""
        return self._id_hashes

    def where(self, index: int) -> str:
        """Say where a row is, for people; the table is read up to there, so this is for errors."""
        record = next(islice(self._records.stream(), index, None))
        return f"{self._records.unit} {record.line}"

    def _scan(self, limit: int | None) -> None:
        places, hashes, seeds, sizes = array("q"), array("q"), array("q"), array("i")
        columns: set[str] = set(self._records.columns)
        empty, changed = 0, _Changes()
        unit, path = self._records.unit, str(self.path)
        records = islice(self._records.stream(), limit)
        while block := list(islice(records, _ROWS_AT_ONCE)):
            columns.update(*(cells for _, _, cells in block))
            rows = [
                _row(cells, index, f"{unit} {line} of {path}")
                for index, (_, line, cells) in enumerate(block, start=len(places))
            ]
            places.extend([place for place, _, _ in block])
            seeds.extend([-1 if row.seed is None else row.seed for row in rows])
            sizes.extend([side or 0 for row in rows for side in (row.height, row.width)])
            # Every process hashes in its own way, but these are only compared with each other.
            hashes.extend([hash(row.id) for row in rows])
            empty += sum(not row.prompt for row in rows)
            changed.count(rows, [cells for _, _, cells in block])
        if not places:
            raise UserError(f"The table {self.path} has no rows.", fix="Give it at least one prompt.")
        self._places = np.frombuffer(places, np.int64)
        self._id_hashes = np.frombuffer(hashes, np.int64) if pick(columns, _ID) else None
        self._seeds = np.frombuffer(seeds, np.int64) if "seed" in columns else None
        has_sizes = not columns.isdisjoint(("height", "width"))
        self._sizes = np.frombuffer(sizes, np.int32).reshape(-1, 2) if has_sizes else None
        self._note(columns, limit, empty, changed)

    def _note(self, columns: set[str], limit: int | None, empty: int, changed: _Changes) -> None:
        count = len(self)
        if limit is not None and count < limit:
            self.notes.append(f"{self.path} has only {count:,} of the {limit:,} rows asked for: all of them are used.")
        if columns.issuperset(_PROMPT):
            self.notes.append(f"{self.path} has both a prompt and a caption: the prompt is used.")
        if columns.issuperset(_ID):
            self.notes.append(f"{self.path} has both an image_id and an id: the image_id is used.")
        if unused := sorted(name for name in columns.difference(_USED) if name):
            more = f" and {len(unused) - _NAMES_SHOWN:,} more" if len(unused) > _NAMES_SHOWN else ""
            self.notes.append(f"Columns of {self.path} without a use: {', '.join(unused[:_NAMES_SHOWN])}{more}.")
        if empty:
            self.notes.append(
                f"{empty:,} of {count:,} prompts are empty: their pictures are drawn from the empty text."
            )
        if changed.number:
            self.notes.append(
                f"{changed.number:,} of {count:,} ids were changed to be safe as file names: {changed.example}."
            )


class _Changes:
    """How many ids could not stay as they are written, and the first of them."""

    def __init__(self) -> None:
        self.number, self.example = 0, ""

    def count(self, rows: list[Row], cells: list[Cells]) -> None:
        """Take in some rows and what they were made from."""
        for row, written_cells in zip(rows, cells, strict=True):
            if row.id == written_cells.get("image_id"):
                continue  # at once, since nearly all are
            written = _written_id(written_cells, "")
            if written not in ("", row.id):
                self.number += 1
                self.example = self.example or f"{written[:60]!r} became {row.id[:60]!r}"


def open_table(path: str, limit: int | None = None) -> PromptTable:
    """Open the table at `path`, or the project's own, and check its first `limit` rows, or all."""
    place = _OWN_TABLE if path == _OWN else Path(path).expanduser()
    kinds = (
        f"Give --prompts_csv a file that ends in {' '.join(_SUFFIXES)}, or {_OWN} for a hundred prompts that are here."
    )
    try:
        check_exists(place, "prompt table", kinds)
        if not place.is_file():
            what = "a folder" if place.is_dir() else "not a plain file"
            raise UserError(f"The prompt table {place} is {what}.", fix=kinds)
        suffix = place.suffix.lower()
        if suffix not in _SUFFIXES:
            raise UserError(f"{place} is not a kind of file that holds prompts.", fix=kinds)
        if place.stat().st_size == 0:
            raise UserError(f"The prompt table {place} is empty.", fix="Was it copied completely?")
        return PromptTable(place, _records(place, suffix), limit)
    except OSError as error:
        raise UserError(f"The prompt table {place} could not be read: {error.strerror}.") from error


def _records(place: Path, suffix: str) -> Records:
    if suffix == ".parquet":
        return ParquetRecords(place, _USED)
    return CaptionRecords(place) if suffix == ".json" else TextRecords(place)


def find_collision(table: PromptTable, seeds: np.ndarray) -> tuple[int, int] | None:
    """Return two rows of one id and one seed, which would get one file; `seeds` are [N], or [N, C] for C copies of each."""
    hashes = table.id_hashes()
    if hashes is None:
        return None
    copies = seeds.reshape(len(table), -1)
    rows = np.repeat(np.arange(len(table)), copies.shape[1])
    keys, flat = hashes[rows], copies.ravel()
    order = np.lexsort((rows, flat, keys))
    same = np.flatnonzero((keys[order][1:] == keys[order][:-1]) & (flat[order][1:] == flat[order][:-1]))
    pairs = np.stack((rows[order[same]], rows[order[same + 1]]), axis=1)
    for first, second in pairs[np.argsort(pairs[:, 1], kind="stable")].tolist():
        if first != second and table.row(first).id == table.row(second).id:  # not merely two ids of one hash
            return first, second
    return None


def refuse_collision(table: PromptTable, seeds: np.ndarray) -> None:
    """Refuse a table of which two rows would be written to one file."""
    if (found := find_collision(table, seeds)) is None:
        return
    first, second = found
    id = table.row(first).id
    shared = np.intersect1d(seeds.reshape(len(table), -1)[first], seeds.reshape(len(table), -1)[second])
    raise UserError(
        f"Two rows of {table.path} would be written to one file, {file_stem(id, int(shared[0]))}: "
        f"those in {table.where(first)} and {table.where(second)}.",
        "They have the same id, in the form that is safe in a file name, and the same seed.",
        "Give them different ids or seeds.",
    )


def _row(cells: Cells, index: int, where: str) -> Row:
    prompt_field = pick(cells, _PROMPT)
    if prompt_field is None:
        raise _no_prompt(cells, where)
    written = _written_id(cells, where)
    # Most tables lack most columns, and there may be a million rows: what is not there is not looked into.
    height, width = _size(cells, where) if "height" in cells or "width" in cells else (None, None)
    return Row(
        index,
        safe_id(written) if written else f"{index + 1:06d}",
        _text(cells, prompt_field, where),
        _whole(cells, "seed", where, 0, _SEEDS_BELOW) if "seed" in cells else None,
        (_text(cells, "negative_prompt", where) or None) if "negative_prompt" in cells else None,
        height,
        width,
    )


def _size(cells: Cells, where: str) -> tuple[int | None, int | None]:
    height = _whole(cells, "height", where, 1, _SIDES_BELOW)
    width = _whole(cells, "width", where, 1, _SIDES_BELOW)
    if (height is None) != (width is None):
        given, missing = ("width", "height") if height is None else ("height", "width")
        raise UserError(f"There is a {given} but no {missing} in {where}.", fix="Give both or neither.")
    return height, width


def _text(cells: Cells, field: str, where: str) -> str:
    if _is_missing(value := cells.get(field)):
        return ""
    return caption_text(value, where, field).strip()


def _written_id(cells: Cells, where: str) -> str:
    """Return the id as it is written, or nothing."""
    field = pick(cells, _ID)
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


def _whole(cells: Cells, field: str, where: str, least: int, below: int) -> int | None:
    """Return the whole number of a cell, or None for an empty one."""
    if _is_missing(value := cells.get(field)) or (isinstance(value, str) and not value.strip()):
        return None
    number = None
    if isinstance(value, str):
        # No number in range is longer, and Python refuses to read very long ones.
        if len(value) < 100 and (match := _WHOLE.fullmatch(value.strip())):
            number = int(match[1])
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        number = int(value)
    if number is None or not least <= number < below:
        power = below.bit_length() - 1
        raise UserError(
            f"The {field} {value!r:.60} in {where} is not a whole number from {least} to 2^{power} - 1.",
            fix="Leave the cell empty to use the value of the command.",
        )
    return number


def _is_missing(value: object) -> bool:
    return value is None or value != value  # pandas writes missing values as NaN


def _check_columns(columns: list[str], where: str) -> None:
    if pick(columns, _PROMPT) is None:
        raise _no_prompt(columns, where)
    if double := next((name for name in _USED if columns.count(name) > 1), None):
        raise UserError(f"{where} has {columns.count(double)} columns called {double}.", fix="Rename all but one.")


def _no_prompt(columns: Iterable[str], where: str) -> UserError:
    names = list(columns)
    hints = [f"{name}: {hint}" for name in names if (hint := nearest(name, _PROMPT))]
    return UserError(
        f"There is no prompt or caption in {where}.",
        f"Its columns are {', '.join(names[:_NAMES_SHOWN]) or 'none'}. {' '.join(hints[:1])}".strip(),
        "Call the column of prompts prompt; columns are separated by commas in .csv files and by tabs in .tsv files.",
    )


def _state(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written to; None if it is gone."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns
