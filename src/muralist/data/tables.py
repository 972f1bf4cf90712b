"""Read tables from disk: CSV, TSV, JSONL, plain lines, Parquet and MS-COCO captions.

Prompt tables, image tables and the metadata of image folders all go through here. A table is streamed once in order,
then read row by row from the file, so that a million rows never lie in memory together. A pickled table opens the file
again.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from muralist.core.errors import UserError
from muralist.data.source import LruCache

Cells = dict[str, object]
"""The cells of a row by column name in lower case."""
Row = TypeVar("Row")

_JSON_OBJECT = re.compile(r'\{\s*"')
_MAX_CELL = 2**24  # characters: far above any caption, and an unclosed quote cannot fill the memory
_PARQUET_BLOCK_ROWS = 32_768
_ROWS_AT_ONCE = 1024  # converted to Python objects, which take ten times the memory
_BLOCKS_KEPT = 2


class TableRow(NamedTuple):
    """A row of a table."""

    position: int  # by which `read` finds the row again
    number: int  # line of the file (where the row ends), or number of the row, from 1
    cells: Cells


class TextTable:
    """CSV, TSV, JSONL or plain lines in UTF-8; positions are byte offsets.

    `strict` refuses stray and unclosed quotes, where csv would guess, and accepts blanks before a quote. Of a table
    that is not a file, `content` is the bytes, `path` is what messages call it, and `suffix` tells its format.
    """

    unit = "line"  # what the number of a row counts

    def __init__(self, path: Path | str, strict: bool = True, content: bytes | None = None, suffix: str = "") -> None:
        self.path, self.strict = path, strict
        self.columns: list[str] = []  # of the header, in lower case; empty where each row names its own columns
        self.comments = self.blank_lines = 0
        """Lines of plain text that `stream` has skipped."""
        suffix = suffix or Path(path).suffix.lower()
        self._parse, self._delimiter = _PARSERS[suffix], "\t" if suffix == ".tsv" else ","
        self._content = content
        with self._open() as file:
            self._first_row = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        self._header_lines = 0
        if self._parse is _parse_csv:
            lines = self._lines(self._first_row)
            cells = (cells for cells in self.csv_reader(lines) if cells)  # blank lines may precede the header
            self.columns = [name.strip().lower() for name in self._next(cells, lines) or []]
            self._first_row, self._header_lines = lines.offset, lines.number

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order, with the byte offsets at which they begin."""
        lines = self._lines(self._first_row, self._header_lines)
        rows, offset = self._parse(self, lines), lines.offset
        while (cells := self._next(rows, lines)) is not None:
            self.comments, self.blank_lines = lines.comments, lines.blank
            yield TableRow(offset, lines.number, cells)
            offset = lines.offset
        self.comments, self.blank_lines = lines.comments, lines.blank

    def read(self, positions: Iterable[int]) -> list[Cells]:
        """Return the rows that begin at some byte offsets."""
        found: list[Cells] = []
        lines: _Lines | None = None
        for offset in positions:
            if lines is None or lines.offset != offset:  # reading on from the last row halves the time
                lines = self._lines(offset)
                rows = self._parse(self, lines)
            found.append(next(rows))
        return found

    def csv_reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Return a reader of cells."""
        csv.field_size_limit(_MAX_CELL)
        if self.strict and self._delimiter == "\t":
            lines = _quote_unquoted(lines)
        return csv.reader(lines, delimiter=self._delimiter, strict=self.strict, skipinitialspace=self.strict)

    def _open(self) -> BinaryIO:
        return Path(self.path).open("rb") if self._content is None else io.BytesIO(self._content)

    def _lines(self, offset: int, number: int = 0) -> _Lines:
        return _Lines(self._open, str(self.path), offset, number)

    def _next(self, rows: Iterator[Row], lines: _Lines) -> Row | None:
        begins = lines.number + 1
        try:
            return next(rows, None)
        except csv.Error as error:
            raise UserError(
                f"The row that begins in line {begins} of {self.path} could not be read: {error}.",
                "Often a quote is not closed, or a cell begins with a quote that is not doubled.",
                'Write a cell that holds quotes as "He said ""hello"" to her".',
            ) from error


class _Lines:
    """The lines of a UTF-8 file from a byte offset on; counts the bytes and lines taken."""

    def __init__(self, open: Callable[[], BinaryIO], name: str, offset: int, number: int) -> None:
        self.open, self.name, self.offset, self.number = open, name, offset, number
        self.comments = self.blank = 0  # of plain text

    def __iter__(self) -> Iterator[str]:
        with self.open() as file:
            file.seek(self.offset)
            # Undecodable bytes pass here and fail below, in the line that holds them.
            for line in io.TextIOWrapper(file, "utf-8", "surrogateescape", newline=""):
                self.number += 1
                try:
                    self.offset += len(line.encode())
                except UnicodeError as error:
                    raise UserError(
                        f"Line {self.number} of {self.name}, from byte {self.offset:,} on, is not UTF-8 text.",
                        fix="Save the file as UTF-8.",
                    ) from error
                yield line


def _parse_csv(table: TextTable, lines: _Lines) -> Iterator[Cells]:
    header = table.columns
    for cells in table.csv_reader(lines):
        if not cells:
            continue
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
            lines.blank += 1
        elif prompt.startswith("#"):
            lines.comments += 1
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
    """The rows of a Parquet file; positions are row numbers. Caches a few blocks, however large its row groups are."""

    unit = "row"

    def __init__(self, path: Path, wanted: Iterable[str]) -> None:
        self.path = path
        self._blocks: LruCache[Any] = LruCache(_BLOCKS_KEPT)
        self._block_places: list[tuple[int, int]] = []  # row group of each block, and its number there
        self._starts = [0]  # first row of each block
        with self._explain_damage():
            names = self._open().schema_arrow.names
        self.columns = [name.strip().lower() for name in names]
        wanted = set(wanted)
        self._names = [name for name, column in zip(names, self.columns, strict=True) if column in wanted]

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order, and note where blocks begin, which `read` needs for the rows seen so far."""
        file, row = self._open(), 0
        for group in range(file.num_row_groups):
            for number, block in enumerate(self._read_blocks(file, group)):
                if row == self._starts[-1]:
                    self._block_places.append((group, number))
                    self._starts.append(row + block.num_rows)
                for start in range(0, block.num_rows, _ROWS_AT_ONCE):
                    for cells in self._to_cells(block.slice(start, _ROWS_AT_ONCE)):
                        yield TableRow(row, row + 1, cells)
                        row += 1

    def read(self, positions: Iterable[int]) -> list[Cells]:
        """Return rows by number."""
        found = []
        for row in positions:
            index = bisect_right(self._starts, row) - 1
            block = self._blocks.get(index, self._read_block)
            found += self._to_cells(block.slice(row - self._starts[index], 1))
        return found

    def _read_block(self, index: int) -> Any:
        group, number = self._block_places[index]
        return next(islice(self._read_blocks(self._open(), group), number, None))

    def _read_blocks(self, file: Any, group: int) -> Iterator[Any]:
        with self._explain_damage():
            # Threads of the parent process do not exist in a forked worker, so none are used.
            yield from file.iter_batches(_PARQUET_BLOCK_ROWS, [group], self._names, use_threads=False)

    def _to_cells(self, block: Any) -> list[Cells]:
        with self._explain_damage():
            return [_lower_case_names(row) for row in block.to_pylist()]

    def _open(self) -> Any:
        import pyarrow.parquet

        with self._explain_damage():
            return pyarrow.parquet.ParquetFile(self.path, memory_map=True)

    @contextmanager
    def _explain_damage(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        # ValueError: names or texts that are not UTF-8; OverflowError: a date beyond the calendar.
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise UserError(f"The Parquet file {self.path} could not be read: {error}.") from error


class CocoCaptionTable:
    """The annotations of a file such as captions_val2014.json, in its order; positions are annotation numbers.

    JSON can only be parsed as one document, so captions stay in memory: some 50 MB for MS-COCO.
    """

    unit = "annotation"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._annotations: LruCache[list[Cells]] = LruCache(1)

    def stream(self) -> Iterator[TableRow]:
        """Yield all annotations in order."""
        for index, cells in enumerate(self._annotations.get(0, self._load)):
            yield TableRow(index, index + 1, cells)

    def read(self, positions: Iterable[int]) -> list[Cells]:
        """Return annotations by number."""
        rows = self._annotations.get(0, self._load)
        return [rows[index] for index in positions]

    def _load(self, _: int) -> list[Cells]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is not JSON: {error}.", fix="Check that it was copied completely.") from error
        annotations = content.get("annotations") if isinstance(content, dict) else None
        if not isinstance(annotations, list) or not all(isinstance(row, dict) for row in annotations):
            raise UserError(
                f"{self.path} is not a file of MS-COCO captions.",
                "Such a file is an object with a list of annotations, each with an image_id and a caption.",
                "Save other prompts as .jsonl, one object with a prompt per line.",
            )
        # An annotation's own id would name images that nobody can find again.
        return [{name: row[name] for name in ("image_id", "caption") if name in row} for row in annotations]


class ListTable:
    """Rows that are given in memory; positions are row numbers."""

    unit = "row"

    def __init__(self, rows: Sequence[Cells]) -> None:
        self._rows = [_lower_case_names(row) for row in rows]
        self.columns: list[str] = []

    def stream(self) -> Iterator[TableRow]:
        """Yield all rows in order."""
        for index, cells in enumerate(self._rows):
            yield TableRow(index, index + 1, cells)

    def read(self, positions: Iterable[int]) -> list[Cells]:
        """Return rows by number."""
        return [self._rows[index] for index in positions]


Table = TextTable | ParquetTable | CocoCaptionTable | ListTable


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
