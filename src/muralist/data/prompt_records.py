"""Tables of prompts on disk: their rows in order once, then any row by its place, never all of them in memory."""

from __future__ import annotations

import codecs
import csv
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from muralist.data.recent import Recent
from muralist.data.rows import NumberedRow, csv_header, csv_reader, csv_rows, json_rows
from muralist.errors import UserError

Cells = dict[str, object]

_BLOCK_ROWS = 32_768
_ROWS_AT_ONCE = 1024  # as Python objects, which take ten times the memory
_BLOCKS_KEPT = 2

# Without possessive quantifiers, which early releases of Python 3.11 match wrongly.
_OPENING = re.compile(r'(?:(?! *")[^\t]*\t)* *"')  # of the next cell in quotes, from the beginning of a cell on
_CLOSING = re.compile(r'[^"]*(?:""[^"]*)*"(?!")')
_LONE_RETURN = re.compile(r"(?<=\r)(?!\n|\Z)")
_LONE_RETURN_BYTE = re.compile(_LONE_RETURN.pattern.encode())
_BYTES_AT_ONCE = 8192


class Record(NamedTuple):
    """A row as it lies in the file."""

    place: int  # what `read` finds it by
    line: int
    cells: Cells


class Records(Protocol):
    """The rows of one file."""

    unit: str  # what the number of a row counts: lines, or rows
    columns: list[str]  # as the header names them, in small letters; none where every row names its own

    def stream(self) -> Iterator[Record]:
        """Yield all rows in order."""
        ...

    def read(self, places: Iterable[int]) -> list[Cells]:
        """Return the rows at some places."""
        ...


class TextRecords:
    """CSV, TSV, JSONL and plain lines in UTF-8, or in UTF-16 with a byte order mark; places are byte offsets."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._header: list[str] = []
        with path.open("rb") as file:
            self._encoding, self._mark = _encoding(file)
            self._first = self._mark
            self._rows = _ROWS[path.suffix.lower()]
            if self._rows is _csv:
                lines = self._lines(file, self._mark)
                try:
                    self.columns = csv_header(csv_reader(path, _taken(lines, self._header), strict=True))
                except csv.Error as error:
                    raise self._misread(error, 1) from error
                self._first = lines.place

    def stream(self) -> Iterator[Record]:
        """Yield all rows in order, with the offsets at which they begin."""
        with self.path.open("rb") as file:
            lines = self._lines(file, self._mark)
            place, first_line = self._first, len(self._header) + 1
            try:
                for line, cells in self._rows(self.path, lines):
                    yield Record(place, line, cells)
                    place, first_line = lines.place, lines.number + 1
            except csv.Error as error:
                raise self._misread(error, first_line) from error

    def read(self, places: Iterable[int]) -> list[Cells]:
        """Return the rows that begin at some offsets."""
        found: list[Cells] = []
        with self.path.open("rb") as file:
            lines: _Lines | None = None
            rows: Iterator[NumberedRow] = iter(())
            for place in places:
                if (
                    lines is None or lines.place != place
                ):  # rows that follow each other are read on, which takes half the time
                    lines = self._lines(file, place)
                    rows = self._rows(self.path, chain(self._header, lines))
                found.append(next(rows)[1])
        return found

    def _lines(self, file: BinaryIO, place: int) -> _Lines:
        return _Lines(self.path, file, self._encoding, place)

    def _misread(self, error: csv.Error, line: int) -> UserError:
        return UserError(
            f"The row that begins in line {line} of {self.path} could not be read: {error}.",
            "Often a quote is not closed, or stands where a cell begins without being doubled.",
            'Write a cell that holds quotes as "He said ""hello"" to her".',
        )


class ParquetRecords:
    """The rows of a Parquet file; places are row numbers. A few blocks of rows are kept, however large row groups are."""

    unit = "row"

    def __init__(self, path: Path, wanted: Iterable[str]) -> None:
        self.path = path
        self._files: Recent[Any] = Recent(1)
        self._blocks: Recent[Any] = Recent(_BLOCKS_KEPT)
        names = self._names_of(self._file())
        self.columns = [name.strip().lower() for name in names]
        wanted = set(wanted)
        self._names = [name for name, column in zip(names, self.columns, strict=True) if column in wanted]
        self._parts: list[tuple[int, int]] = []  # of each block: its row group, and its number there
        self._starts = [0]

    def stream(self) -> Iterator[Record]:
        """Yield all rows in order; it also notes where blocks begin, which `read` needs for the rows seen so far."""
        row = 0
        for group in range(self._file().num_row_groups):
            for number, block in enumerate(self._batches(group)):
                if row == self._starts[-1]:
                    self._parts.append((group, number))
                    self._starts.append(row + block.num_rows)
                for start in range(0, block.num_rows, _ROWS_AT_ONCE):
                    for cells in self._cells(block.slice(start, _ROWS_AT_ONCE)):
                        yield Record(row, row + 1, _folded(cells))
                        row += 1

    def read(self, places: Iterable[int]) -> list[Cells]:
        """Return the rows of some numbers."""
        found = []
        for place in places:
            part = bisect_right(self._starts, place) - 1
            block = self._blocks.get(part, self._block)
            found.append(_folded(self._cells(block.slice(place - self._starts[part], 1))[0]))
        return found

    def _block(self, part: int) -> Any:
        group, number = self._parts[part]
        return next(islice(self._batches(group), number, None))

    def _batches(self, group: int) -> Iterator[Any]:
        import pyarrow

        try:
            # Threads of the parent process do not exist in a forked worker, so none are used.
            yield from self._file().iter_batches(_BLOCK_ROWS, [group], self._names, use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"The Parquet file {self.path} is damaged: {error}.") from error

    def _cells(self, block: Any) -> list[Cells]:
        try:
            return block.to_pylist()
        except (ValueError, OverflowError) as error:  # a text that is none, a date beyond the calendar
            raise UserError(f"The Parquet file {self.path} is damaged: {error}.") from error

    def _file(self) -> Any:
        return self._files.get(0, self._open)

    def _names_of(self, file: Any) -> list[str]:
        try:
            return file.schema_arrow.names
        except (ValueError, OSError) as error:  # ValueError: names that are no text; an ArrowException may be one
            raise UserError(f"The Parquet file {self.path} is damaged: {error}.") from error

    def _open(self, _: int) -> Any:
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.path, memory_map=True)
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: a name that is no text
            raise UserError(f"The Parquet file {self.path} could not be read: {error}.") from error


class _Lines:
    """The lines of an open file from some offset on; `place` and `number` say how many bytes and lines were taken."""

    def __init__(self, path: Path, file: BinaryIO, encoding: str, place: int) -> None:
        self.path, self.encoding, self.place, self.number = path, encoding, place, 0
        file.seek(place)
        self._file = file

    def __iter__(self) -> Iterator[str]:
        for data in _raw_lines(self._file, self.encoding):
            try:
                text = data.decode(self.encoding)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"Line {self.number + 1} of {self.path} is not {self.encoding[:6].upper()} text.",
                    f"{error.reason[0].upper()}{error.reason[1:]}, at byte {self.place + error.start:,} of the file.",
                    "Save it as UTF-8.",
                ) from error
            self.place += len(data)
            self.number += 1
            yield text


def _encoding(file: BinaryIO) -> tuple[str, int]:
    """Tell the encoding from the byte order mark, and the length of that mark."""
    start = file.read(4)
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if start.startswith(mark):
            return encoding, len(mark)
    return "utf-8", 0


def _raw_lines(file: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Lines, read a little at a time; a return alone ends one too, as in old Macintosh files and as every editor knows."""
    feed, lone_return = "\n".encode(encoding), "\r".encode(encoding)
    split = _split if encoding == "utf-8" else partial(_split_wide, file, encoding)
    held: list[bytes] = []  # of a line whose end was not seen yet
    while data := file.readline(_BYTES_AT_ONCE):
        *whole, last = split(data)
        if held and held[-1].endswith(lone_return) and not (whole or [last])[0].startswith(feed):
            yield b"".join(held)
            held = []
        for piece in whole:
            yield b"".join((*held, piece))
            held = []
        held.append(last)
        if last.endswith(feed):
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)


def _split(data: bytes) -> list[bytes]:
    return _LONE_RETURN_BYTE.split(data) if b"\r" in data else [data]


def _split_wide(file: BinaryIO, encoding: str, data: bytes) -> list[bytes]:
    """Split UTF-16: a byte 10 or 13 may be half of another character, and so may be the last byte that was read."""
    if len(data) % 2:
        data += file.read(1)
    even = len(data) // 2 * 2
    pieces = _LONE_RETURN.split(data[:even].decode(encoding, "surrogatepass"))
    found = [piece.encode(encoding, "surrogatepass") for piece in pieces]
    found[-1] += data[even:]  # half a character at the end of the file
    return found


def _taken(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    for line in lines:
        taken.append(line)
        yield line


def _folded(cells: Cells) -> Cells:
    return {name.strip().lower(): value for name, value in cells.items()}


def _csv(path: Path, lines: Iterable[str]) -> Iterator[NumberedRow]:
    return csv_rows(path, _quoted(lines) if path.suffix.lower() == ".tsv" else lines, strict=True)


def _quoted(lines: Iterable[str]) -> Iterator[str]:
    """Quote the cells of lines that were written without any quoting, as those of PartiPrompts are.

    Such a line is known by a cell in which text follows the closing quote: "STOP" on a red sign.
    """
    inside = False  # a cell that goes on over several lines
    for line in lines:
        if inside or '"' in line:
            was_inside, (inside, is_stray) = inside, _quotes(line, inside)
            if is_stray and not was_inside:
                body = line.rstrip("\r\n")
                line = '"' + body.replace('"', '""').replace("\t", '"\t"') + '"' + line[len(body) :]
        yield line


def _quotes(line: str, inside: bool) -> tuple[bool, bool]:
    """Tell whether a line ends inside quotes, and whether text follows a closing quote in it."""
    place = 0
    while True:
        if not inside:
            if (opening := _OPENING.match(line, place)) is None:
                return False, False
            place = opening.end()
        if (closing := _CLOSING.match(line, place)) is None:
            return True, False
        inside, place = False, closing.end() + 1
        if line[place - 1 : place] not in ("", "\t", "\r", "\n"):
            return False, True


def _plain(path: Path, lines: Iterable[str]) -> Iterator[NumberedRow]:
    for number, line in enumerate(lines, start=1):
        if prompt := line.strip():
            yield number, {"prompt": prompt}


_ROWS: dict[str, Callable[[Path, Iterable[str]], Iterator[NumberedRow]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": json_rows,
    ".txt": _plain,
}
TEXT_SUFFIXES = tuple(_ROWS)
