"""The rows of text tables: CSV and TSV with a header, and JSONL."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from muralist.errors import UserError

if TYPE_CHECKING:
    from _csv import Reader  # the type has no public name before Python 3.13

NumberedRow = tuple[int, dict[str, object]]
"""The line of a row, as an editor counts them, and its cells by column."""

_LONGEST_CELL = 2**24  # far above any caption, and low enough that a quote nobody closes does not fill the memory


def table_rows(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of a table, their columns in small letters, with their line numbers, as an editor counts them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                yield from json_rows(path, file)
            else:
                yield from csv_rows(path, file)
    except UnicodeDecodeError as error:
        raise UserError(f"The table {path} is not UTF-8 text: {error}.", fix="Save it as UTF-8.") from error
    except (csv.Error, OSError) as error:
        raise UserError(f"The table {path} could not be read: {error}.") from error


def csv_rows(path: Path, lines: Iterable[str], strict: bool = False) -> Iterator[NumberedRow]:
    """Yield the rows of a CSV or TSV table; for `strict`, see `csv_reader`."""
    reader = csv_reader(path, lines, strict)
    header = csv_header(reader)
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            missing = "Is it cut short? A row has as many separators as the header, also where fields are empty."
            many = "Put quotes around fields that hold the separator or a line break."
            raise UserError(
                f"Line {reader.line_num} of {path} has {len(cells)} field{'s' if len(cells) > 1 else ''}, "
                f"but the header has {len(header)}.",
                fix=many if len(cells) > len(header) else missing,
            )
        yield reader.line_num, dict(zip(header, cells, strict=True))


def csv_reader(path: Path, lines: Iterable[str], strict: bool = False) -> Reader:
    """Return a reader of cells, for the separator that the name of the table tells.

    A strict one refuses quotes that are stray or never closed, where others guess, and takes blanks before a quote.
    """
    csv.field_size_limit(_LONGEST_CELL)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    return csv.reader(lines, delimiter=delimiter, strict=strict, skipinitialspace=strict)


def csv_header(reader: Iterator[list[str]]) -> list[str]:
    """Read the names of the columns, in small letters; blank lines may stand before them."""
    return [name.strip().lower() for name in next((cells for cells in reader if cells), [])]


def json_rows(path: Path, lines: Iterable[str]) -> Iterator[NumberedRow]:
    """Yield the rows of a JSONL table: one object per line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            said = f"{error.msg}, at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"Line {number} of {path} is not JSON: {said}.") from error
        if not isinstance(row, dict):
            raise UserError(f"Line {number} of {path} is not a JSON object with named fields.")
        yield number, {name.strip().lower(): value for name, value in row.items()}
