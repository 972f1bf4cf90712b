"""The prompt table: validated in one pass that keeps a few numbers per row in memory, and the rows in a temporary file."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import sys
import tempfile
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from muralist import data
from muralist.core.errors import UserError, closest_match
from muralist.core.formatting import format_list
from muralist.core.run_dir import check_exists
from muralist.data.image_inputs import INPUT_COLUMNS, STRENGTH, ImageInputs, parse_inputs
from muralist.data.source import check_caption, first_present, short_hash
from muralist.data.tables import (
    TEXT_SUFFIXES,
    Cells,
    ListTable,
    ParquetTable,
    Table,
    TextTable,
    read_coco_captions,
    sniff_text_format,
)
from muralist.settings import GenerateSettings

log = logging.getLogger("muralist")

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


class ColumnNames(NamedTuple):
    """The columns that a table is read by, in lower case and in order of preference."""

    prompt: tuple[str, ...] = ("prompt", "caption")
    id: tuple[str, ...] = ("image_id", "id")
    seed: tuple[str, ...] = ("seed",)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of image inputs, without those that the user gave another role."""
        return tuple(name for name in INPUT_COLUMNS if name not in (*self.prompt, *self.id, *self.seed))

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.prompt, *self.id, *self.seed, "negative_prompt", "height", "width", *self.inputs)


_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".json")
_BUILTIN = "muralist"
_STDIN = "-"
_STDIN_FORMATS = {".txt": "lines", ".jsonl": "JSONL", ".csv": "CSV", ".tsv": "TSV"}
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


class _RowFile:
    """Rows in a temporary file, each with its number in the table: in memory, a million would take hundreds of MB."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the table)
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, row: PromptRow, number: int) -> None:
        """Write a row."""
        with self._explained():
            self._offsets.append(self._offsets[-1] + self._file.write(json.dumps((number, *row)).encode()))

    def flush(self) -> None:
        """End writing."""
        with self._explained():
            self._file.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = tempfile.gettempdir()
            raise UserError(
                f"The prompts could not be kept in the temporary folder {place}: {error.strerror}.",
                "They wait there until their images are made.",
                "Free space there, or set TMPDIR to another folder.",
            ) from None

    def read(self, index: int) -> tuple[PromptRow, int]:
        """Return a row and its number."""
        start, end = self._offsets[index : index + 2]
        number, *cells, inputs = json.loads(os.pread(self._file.fileno(), end - start, start))
        return PromptRow._make((*cells, inputs and ImageInputs(*inputs))), number


class PromptTable:
    """The rows of a prompt table.

    `name` is what messages call the table; `columns` are names that the user gave, by role (prompt, id or seed).
    """

    def __init__(
        self,
        name: str,
        table: Table,
        limit: int | None = None,
        columns: Mapping[str, str] | None = None,
        path: Path | None = None,
    ) -> None:
        self.name, self._table = name, table
        self._given = {role: column.strip().lower() for role, column in (columns or {}).items()}
        self._names = ColumnNames(**{role: (column,) for role, column in self._given.items()})
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
        self._folder = str(path.absolute().parent if path else Path.cwd())
        if table.columns:
            self._check_columns(table.columns)
        self._scan(limit)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> PromptRow:
        """Read one row."""
        return self._rows.read(range(len(self))[index])[0]

    def rows(self, indices: Sequence[int]) -> list[PromptRow]:
        """Read some rows, in any order."""
        return [self.row(index) for index in indices]

    def other_columns(self, indices: Container[int]) -> dict[str, dict[int, str | int | float | bool]]:
        """Read the table again: cells of some rows, by column and row, in columns of text, numbers or truth values
        that generation does not read, such as a category."""
        table = ParquetTable(self._table.path) if isinstance(self._table, ParquetTable) else self._table
        found: dict[str, dict[int, str | int | float | bool]] = {}
        for index, (_, cells) in enumerate(islice(table.stream(), len(self))):
            for name in cells.keys() - self._names.used if index in indices else ():
                value = cells[name]
                if name and isinstance(value, str | int | float) and not _is_missing(value):
                    found.setdefault(name, {})[index] = value
        return dict(sorted(found.items()))

    def where(self, index: int) -> str:
        """Return the place of a row for error messages."""
        return f"{self._table.unit} {self._rows.read(index)[1]}"

    def _parse(self, cells: Cells, index: int, where: str) -> PromptRow:
        row = _parse_row(cells, index, where, self._names)
        if cells.keys().isdisjoint(self._names.inputs):
            return row
        inputs = {name: cells[name] for name in self._names.inputs if name in cells}
        return row._replace(inputs=parse_inputs(inputs, where, self._folder))

    def _scan(self, limit: int | None) -> None:
        self._rows = _RowFile()
        hashes, seeds, sizes, strengths = array("q"), array("q"), array("i"), array("d")
        columns, names = set(self._table.columns), self._names
        empty, changed, example = 0, 0, ""
        for number, cells in islice(self._table.stream(), limit):
            row = self._parse(cells, len(self._rows), f"{self._table.unit} {number} of {self.name}")
            self._rows.append(row, number)
            # Python's hashes differ between processes, but these are only compared with each other.
            hashes.append(hash(row.id))
            seeds.append(-1 if row.seed is None else row.seed)
            sizes.extend((row.height or 0, row.width or 0))
            strengths.append(row.inputs.strength or math.nan if row.inputs else math.nan)
            if not self._table.columns:
                columns.update(cells)
            if not row.prompt:
                empty += 1
            if row.id != cells.get(names.id[0]) and (written := _written_id(cells, "", names)) not in ("", row.id):
                changed += 1
                example = example or f"{written[:60]!r} became {row.id[:60]!r}"
        self._rows.flush()
        count = len(self)
        if not count:
            raise UserError(f"The table {self.name} has no rows.", fix="Give it at least one prompt.")
        if not self._table.columns:
            self._check_given(sorted(columns))
        if first_present(columns, names.id):
            self.id_hashes = np.frombuffer(hashes, np.int64)
        if first_present(columns, names.seed):
            self.seeds = np.frombuffer(seeds, np.int64)
        if not columns.isdisjoint(("height", "width")):
            self.sizes = np.frombuffer(sizes, np.int32).reshape(-1, 2)
        self.input_columns = tuple(name for name in names.inputs if name in columns)
        if STRENGTH in self.input_columns:
            self.strengths = np.frombuffer(strengths, np.float64)
        if limit is not None and count < limit:
            self.notes.append(f"{self.name} has only {count:,} of the {limit:,} requested rows: all of them are used.")
        if len(names.prompt) > 1 and columns.issuperset(names.prompt):
            self.notes.append(f"{self.name} has both a prompt and a caption: the prompt is used.")
        if len(names.id) > 1 and columns.issuperset(names.id):
            self.notes.append(f"{self.name} has both an image_id and an id: the image_id is used.")
        if unused := sorted(name for name in columns.difference(names.used) if name):
            self.notes.append(f"Unused columns of {self.name}: {format_list(unused, _MAX_NAMES_SHOWN)}.")
        if isinstance(self._table, TextTable) and (skipped := _describe_skipped(self._table)):
            self.notes.append(f"{self.name}: {skipped}")
        if empty:
            self.notes.append(f"{empty:,} of {count:,} prompts are empty: their images are made from the empty text.")
        if changed:
            self.notes.append(f"{changed:,} of {count:,} ids were changed to be safe as file names: {example}.")

    def _check_columns(self, columns: list[str]) -> None:
        self._check_given(columns)
        if first_present(columns, self._names.prompt) is None:
            raise _no_prompt(columns, self.name, self._names)
        if double := next((name for name in self._names.used if columns.count(name) > 1), None):
            count = columns.count(double)
            raise UserError(f"{self.name} has {count} columns called {double}.", fix="Rename all but one.")

    def _check_given(self, columns: Iterable[str]) -> None:
        for role, column in self._given.items():
            if column not in columns:
                raise _no_column(column, f"--{role}_column", columns, self.name)


def open_prompts(settings: GenerateSettings) -> PromptTable:
    """Open the prompts of a generation: those of --prompt, standard input, or a table."""
    roles = {role: getattr(settings, f"{role}_column") for role in ColumnNames._fields}
    limit, columns = settings.num_samples, {role: column for role, column in roles.items() if column is not None}
    if settings.prompts_csv is None:
        return PromptTable("--prompt", ListTable([{"prompt": text} for text in settings.prompt]), limit, columns)
    if settings.prompts_csv != _STDIN:
        return open_prompt_table(settings.prompts_csv, limit, columns)
    content = _read_stdin(sys.stdin)
    suffix = sniff_text_format(content, {"prompt", "caption", columns.get("prompt", "prompt").strip().lower()})
    name = f"standard input ({_STDIN_FORMATS[suffix]})"
    return PromptTable(name, TextTable(name, content=content, suffix=suffix), limit, columns)


def reads_stdin(settings: GenerateSettings) -> bool:
    """Return whether the prompts come from standard input, which only one process has."""
    return settings.prompts_csv == _STDIN


@functools.cache  # it can be read once, and doctor opens the prompts twice
def _read_stdin(stream: TextIO | None) -> bytes:
    if stream is None:
        raise UserError(f"--prompts_csv {_STDIN} reads prompts from standard input, which is closed.")
    if stream.isatty():
        log.info("Reading prompts from the terminal, one per line; Ctrl+D ends them.")
    content = stream.buffer.read()
    if not content.strip():
        raise UserError(
            "Standard input is empty: there is no prompt.",
            f"--prompts_csv {_STDIN} reads prompts from it until its end.",
            f"Check the command before the pipe, as in `cat prompts.txt | muralist generate --prompts_csv {_STDIN} ...`.",
        )
    return content


def is_table_name(text: str) -> bool:
    """Whether a text is the name of a table rather than a prompt: it ends like one, or is that of the built-in table."""
    return text == _BUILTIN or Path(text).suffix.lower() in _SUFFIXES


def open_prompt_table(path: str, limit: int | None = None, columns: Mapping[str, str] | None = None) -> PromptTable:
    """Open the table at `path`, or the built-in one, and check its first `limit` rows, or all."""
    place = _BUILTIN_TABLE if path == _BUILTIN else Path(path).expanduser()
    kinds = f"Give --prompts_csv a file that ends in {' '.join(_SUFFIXES)}, or {_BUILTIN} for the built-in prompts."
    table: Table
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
            wanted = {column.strip().lower() for column in (columns or {}).values()}
            table = ParquetTable(place, wanted.union(ColumnNames().used))
        else:
            table = read_coco_captions(place) if suffix == ".json" else TextTable(place)
        name = "the built-in prompts" if path == _BUILTIN else str(place)
        return PromptTable(name, table, limit, columns, place)
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
                f"Two rows of {table.name} would be written to the same file, {image_file_stem(id, seed)}: "
                f"{table.where(first)} and {table.where(second)}.",
                "They have the same id, once it is made safe as a file name, and the same seed.",
                "Give them different ids or seeds.",
            )


def _parse_row(cells: Cells, index: int, where: str, names: ColumnNames) -> PromptRow:
    prompt_field = first_present(cells, names.prompt)
    if prompt_field is None:
        raise _no_prompt(cells, where, names)
    written = _written_id(cells, where, names)
    seed_field = names.seed[0]
    # There may be a million rows, and most tables lack most columns: absent columns are not parsed.
    height, width = _size(cells, where) if "height" in cells or "width" in cells else (None, None)
    return PromptRow(
        index,
        safe_id(written) if written else f"{index + 1:06d}",
        _text(cells, prompt_field, where),
        _parse_integer(cells, seed_field, where, 0, _SEEDS_BELOW) if seed_field in cells else None,
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


def _written_id(cells: Cells, where: str, names: ColumnNames) -> str:
    """Return the id as it is written; empty if there is none."""
    field = first_present(cells, names.id)
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


def _no_prompt(columns: Iterable[str], where: str, names: ColumnNames) -> UserError:
    if len(names.prompt) == 1:
        return _no_column(names.prompt[0], "--prompt_column", columns, where)
    hints = [f"{name}: {hint}" for name in columns if (hint := closest_match(name, names.prompt))]
    return UserError(
        f"There is no prompt or caption in {where}.",
        f"Its columns are {_shown(columns)}. {' '.join(hints[:1])}".strip(),
        "Call the column of prompts prompt, or give generate its name with --prompt_column; columns are separated by "
        "commas in .csv files and by tabs in .tsv files.",
    )


def _no_column(wanted: str, flag: str, columns: Iterable[str], where: str) -> UserError:
    return UserError(
        f"There is no column {wanted} in {where}.",
        f"Its columns are {_shown(columns)}. {closest_match(wanted, columns)}".strip(),
        f"Give {flag} the name of a column.",
    )


def _shown(columns: Iterable[str]) -> str:
    return ", ".join(islice(columns, _MAX_NAMES_SHOWN)) or "none"


def _describe_skipped(table: TextTable) -> str:
    """Say how many comments and blank lines were skipped; empty for none."""
    counts = {"comment": table.comments, "blank line": table.blank_lines}
    parts = [f"{count:,} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items() if count]
    if not parts:
        return ""
    escape = " Write \\# for a prompt that begins with #." if table.comments else ""
    return f"{' and '.join(parts)} {'was' if sum(counts.values()) == 1 else 'were'} skipped.{escape}"
