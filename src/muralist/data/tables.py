"""Read tables from disk: CSV, TSV, JSONL, plain lines, Parquet and MS-COCO captions.

Prompt tables, image tables and the metadata of image folders all go through here. A table is streamed once, in order, so
that a million rows never lie in memory together.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from muralist.core.errors import UserError

Cells = dict[str, object]
"""The cells of a row by column name in lower case."""

_JSON_OBJECT = re.compile(r'\{\s*"')
_MAX_CELL = 2**24  # characters: far above any caption, and an unclosed quote cannot fill the memory
_PARQUET_ROWS = 1024  # converted to Python objects at once, which take ten times the memory


class TableRow(NamedTuple):
    """A row of a table."""

    number: int  # line of the file (where the row ends), or number of the row, from 1
    cells: Cells


class TextTable:
    """CSV, TSV, JSONL or plain lines in UTF-8.

    `strict` refuses stray and unclosed quotes, where csv would guess, and accepts blanks before a quote. Of a table
    that is not a file, `content` is the bytes, `path` is what messages call it, and `suffix` tells its format.
    """

    unit = "line"  # what the number of a row counts

    def __init__(self, path: Path | str, strict: bool = True, content: bytes | None = None, suffix: str = "") -> None:
        self.path, self.strict, self._content = path, strict, content
        self.columns: list[str] = []  # of the header, in lower case; empty where each row names its own columns
        self.comments = self.blank_lines = 0
        """Lines of plain text that `stream` has skipped."""
        suffix = suffix or Path(path).suffix.lower()
        self._parse, self._delimiter = _PARSERS[suffix], "\t" if suffix == ".tsv" else ","
        if self._parse is _parse_csv:
            self.columns = [name.strip().lower() for name in next(self.read_csv(_Lines(self)), [])]

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order."""
        lines = _Lines(self)
        for cells in self._parse(self, lines):
            yield TableRow(lines.number, cells)

    def read_csv(self, lines: _Lines) -> Iterator[list[str]]:
        """Yield the cells of the header and of all rows."""
        csv.field_size_limit(_MAX_CELL)
        text = _quote_unquoted(lines) if self.strict and self._delimiter == "\t" else lines
        reader = csv.reader(text, delimiter=self._delimiter, strict=self.strict, skipinitialspace=self.strict)
        begins = 1
        try:
            for cells in reader:
                if cells:  # not a blank line
                    yield cells
                begins = lines.number + 1
        except csv.Error as error:
            raise UserError(
                f"The row that begins in line {begins} of {self.path} could not be read: {error}.",
                "Often a quote is not closed, or a cell begins with a quote that is not doubled.",
                'Write a cell that holds quotes as "He said ""hello"" to her".',
            ) from error

    def open(self) -> BinaryIO:
        """Open the file, or the bytes."""
        return Path(self.path).open("rb") if self._content is None else io.BytesIO(self._content)


class _Lines:
    """The lines of a table in UTF-8; counts those taken."""

    def __init__(self, table: TextTable) -> None:
        self.table, self.number = table, 0

    def __iter__(self) -> Iterator[str]:
        offset = 0
        # Undecodable bytes pass here and fail below, in the line that holds them.
        with io.TextIOWrapper(self.table.open(), "utf-8", "surrogateescape", newline="") as file:
            for line in file:
                self.number += 1
                try:
                    size = len(line.encode())
                except UnicodeError as error:
                    raise UserError(
                        f"Line {self.number} of {self.table.path}, from byte {offset:,} on, is not UTF-8 text.",
                        fix="Save the file as UTF-8.",
                    ) from error
                yield line if offset else line.removeprefix("\ufeff")  # a byte order mark
                offset += size


def _parse_csv(table: TextTable, lines: _Lines) -> Iterator[Cells]:
    header, rows = table.columns, table.read_csv(lines)
    next(rows, None)
    for cells in rows:
        if len(cells) != len(header):
            raise UserError(
                f"Line {lines.number} of {table.path} has {len(cells)} field{'s' if len(cells) > 1 else ''}, "
                f"but the header has {len(header)}.",
                fix="Put quotes around fields that hold the separator or a line break."
                if len(cells) > len(header)
                else "Is it truncated? A row has as many separators as the header, also where fields are empty.",
            )
        yield dict(zip(header, cells, strict=True))


def _quote_unquoted(lines: Iterable[str]) -> Iterator[str]:
    """Quote the cells of TSV lines that were written without quoting, such as `"STOP" on a sign` in PartiPrompts."""
    inside = False  # a quoted cell that continues in the next line
    for line in lines:
        if inside or '"' in line:
            continues, inside = inside, False
            text = ['"' + line if continues else line]
            try:
                next(csv.reader(text, delimiter="\t", strict=True, skipinitialspace=True))
            except csv.Error as error:
                inside = "unexpected end of data" in str(error)
                if not inside and not continues:  # text follows a closing quote
                    body = line.rstrip("\r\n")
                    line = '"' + body.replace('"', '""').replace("\t", '"\t"') + '"' + line[len(body) :]
        yield line


def _parse_json_lines(table: TextTable, lines: _Lines) -> Iterator[Cells]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            at = f"{error.msg}, at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"Line {lines.number} of {table.path} is not JSON: {at}.") from error
        if not isinstance(row, dict):
            raise UserError(f"Line {lines.number} of {table.path} is not a JSON object with named fields.")
        yield _lower_case_names(row)


def _parse_plain_lines(table: TextTable, lines: _Lines) -> Iterator[Cells]:
    """Yield a prompt per line; blank lines and comments, which begin with #, are skipped, and \\# stands for #."""
    for line in lines:
        prompt = line.strip()
        if not prompt:
            table.blank_lines += 1
        elif prompt.startswith("#"):
            table.comments += 1
        else:
            yield {"prompt": prompt.removeprefix("\\") if prompt.startswith("\\#") else prompt}


_PARSERS: dict[str, Callable[[TextTable, _Lines], Iterator[Cells]]] = {
    ".csv": _parse_csv,
    ".tsv": _parse_csv,
    ".jsonl": _parse_json_lines,
    ".txt": _parse_plain_lines,
}
TEXT_SUFFIXES = tuple(_PARSERS)


class ParquetTable:
    """The rows of a Parquet file: the wanted columns, or all that hold neither bytes nor nested values."""

    unit = "row"

    def __init__(self, path: Path, wanted: Iterable[str] | None = None) -> None:
        import pyarrow.types as kinds

        self.path = path
        with self._explain_damage():
            schema = self._open().schema_arrow
        self.columns = [name.strip().lower() for name in schema.names]
        if wanted is None:
            large = [
                kinds.is_nested(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind) for kind in schema.types
            ]
            self._names = [name for name, skipped in zip(schema.names, large, strict=True) if not skipped]
        else:
            chosen = set(wanted)
            self._names = [name for name, column in zip(schema.names, self.columns, strict=True) if column in chosen]

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order."""
        number = 0
        with self._explain_damage():
            for block in self._open().iter_batches(_PARQUET_ROWS, columns=self._names, use_threads=False):
                for cells in block.to_pylist():
                    number += 1
                    yield TableRow(number, _lower_case_names(cells))

    def _open(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.path, memory_map=True)

    @contextmanager
    def _explain_damage(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        # ValueError: names or texts that are not UTF-8; OverflowError: a date beyond the calendar.
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise UserError(f"The Parquet file {self.path} could not be read: {error}.") from error


class ListTable:
    """Rows that are given in memory; `unit` is what messages call them."""

    def __init__(self, rows: Sequence[Cells], unit: str = "row") -> None:
        self._rows, self.unit = rows, unit
        self.columns: list[str] = []

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order."""
        for number, cells in enumerate(self._rows, start=1):
            yield TableRow(number, _lower_case_names(cells))


def read_coco_captions(path: Path) -> ListTable:
    """Read the annotations of a file such as captions_val2014.json, in its order: JSON is parsed as one document."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}.", fix="Check that it was copied completely.") from error
    annotations = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(annotations, list) or not all(isinstance(row, dict) for row in annotations):
        raise UserError(
            f"{path} is not a file of MS-COCO captions.",
            "Such a file is an object with a list of annotations, each with an image_id and a caption.",
            "Save other prompts as .jsonl, one object with a prompt per line.",
        )
    # An annotation's own id would name images that nobody can find again.
    rows = [{name: row[name] for name in ("image_id", "caption") if name in row} for row in annotations]
    return ListTable(rows, "annotation")


Table = TextTable | ParquetTable | ListTable


def sniff_text_format(content: bytes, prompt_columns: Iterable[str]) -> str:
    """Return the suffix of the format in which text without a file name is read, by its first line that is not blank.

    .jsonl if it begins with {", .csv or .tsv if it is a header with one of `prompt_columns`, otherwise .txt.
    """
    lines = (line.decode(errors="replace") for line in io.BytesIO(content.removeprefix(codecs.BOM_UTF8)))
    first = next((line.strip() for line in lines if line.strip()), "")
    if _JSON_OBJECT.match(first):
        return ".jsonl"
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        names = [name.strip().strip('"').strip().lower() for name in first.split(delimiter)]
        if not set(names).isdisjoint(prompt_columns):
            return suffix
    return ".txt"


def table_rows(path: Path) -> Iterator[tuple[int, Cells]]:
    """Yield line numbers and rows of a CSV, TSV or JSONL table of images."""
    try:
        for row in TextTable(path, strict=False).stream():
            yield row.number, row.cells
    except OSError as error:
        raise UserError(f"The table {path} could not be read: {error}.") from error


def _lower_case_names(cells: dict[str, Any]) -> Cells:
    return {name.strip().lower(): value for name, value in cells.items()}
