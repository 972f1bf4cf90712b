"""The words beside the pictures of a folder: a text file of the same name, or a row of a metadata table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data.captions import Caption
from muralist.data.fields import CAPTION_FIELDS, pick
from muralist.data.rows import table_rows
from muralist.errors import UserError

TEXT_SUFFIX = ".txt"
METADATA_NAMES = ("metadata.csv", "metadata.jsonl")  # as the Hugging Face hub knows them

_NAME_COLUMN = "file_name"
_SAMPLED_TEXTS = 256

_Rows = dict[str, dict[str, object]]  # of the picture of a name


class FolderCaptions:
    """Makes the captions of a folder's pictures; text files are read only with their pictures."""

    def __init__(
        self, folder: Path, names: list[str], texts: set[str], tables: list[str], labelled: bool, rule: str | None
    ) -> None:
        """Take picture names in order and what else was found beside them, all relative to the folder."""
        import pyarrow

        self.folder = folder
        self._has_text = np.array([bool(texts) and _text_name(name) in texts for name in names], dtype=bool)
        rows, columns = _read_tables(folder, tables, set(names)) if tables else ({}, [])
        known = dict.fromkeys([*columns, "caption", *(["label"] if labelled else [])])
        self._caption = Caption.settle(rule, known, str(folder))
        # Arrow keeps a million values in one block, which loader processes share; dictionaries they would each copy.
        self._values: dict[str, Any] = {
            column: pyarrow.array(
                [self._caption.word(rows.get(name, {}).get(column), str(folder / name)) for name in names],
                pyarrow.large_string(),
            )
            for column in self._caption.columns
            if column in columns
        }

    def text(self, index: int, name: str, label_name: str | None) -> str:
        """Return the caption of picture `index`, which has this name."""
        facts: dict[str, object] = {column: values[index].as_py() for column, values in self._values.items()}
        where = str(self.folder / name)
        if label_name is not None:
            facts["label"] = label_name
        if self._has_text[index] and "caption" in self._caption.columns:
            facts["caption"] = self._read_text(name)
        return self._caption.text(facts, where)

    def hashed(self, name_of: Callable[[int], str]) -> list[Any]:
        """Return what a fingerprint takes in: all that the tables say, which pictures have texts, and samples of those."""
        parts: list[Any] = list(self._caption.hashed)
        if "caption" in self._caption.columns and self._has_text.any():
            numbers = np.flatnonzero(self._has_text)
            sampled = numbers[:: -(-len(numbers) // _SAMPLED_TEXTS)].tolist()
            parts += ["texts", np.packbits(self._has_text), *(self._read_text(name_of(number)) for number in sampled)]
        for column, values in self._values.items():
            parts += ["column", column, values]
        return parts

    def _read_text(self, name: str) -> str:
        path = self.folder / _text_name(name)
        try:
            return path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"The caption {path} is not UTF-8 text: {error}.", fix="Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"The caption {path} could not be read: {error.strerror}.") from error


def _text_name(name: str) -> str:
    return name[: name.rfind(".")] + TEXT_SUFFIX


def _read_tables(folder: Path, tables: list[str], names: set[str]) -> tuple[_Rows, list[str]]:
    """Return what metadata tables say of pictures, and their columns; a table deeper in the folder has the last word."""
    rows: _Rows = {}
    columns: dict[str, None] = {}
    seen: dict[str, str] = {}
    for table in sorted(tables, key=lambda name: (name.count(os.sep), name)):
        prefix = os.path.dirname(table)  # noqa: PTH120  (names are wanted, not Path objects)
        if prefix in seen:
            raise UserError(
                f"{folder / prefix} holds both {Path(seen[prefix]).name} and {Path(table).name}.",
                "Either could describe the pictures.",
                "Remove one of them.",
            )
        seen[prefix] = table
        for line, row in table_rows(folder / table):
            where = f"line {line} of {folder / table}"
            file_name = row.pop(_NAME_COLUMN, None)
            if not isinstance(file_name, str):
                raise UserError(
                    f"There is no {_NAME_COLUMN} in {where}.",
                    f"Its columns are {', '.join(row) or 'none'}.",
                    f"A table of this name gives the picture of each row as {_NAME_COLUMN}; give others another name.",
                )
            name = os.path.normpath(os.path.join(prefix, file_name.strip()))  # noqa: PTH118
            if name not in names:
                raise UserError(
                    f"{where[0].upper()}{where[1:]} names {file_name}, but there is no such picture.",
                    fix=f"The paths of {_NAME_COLUMN} are relative to {folder / prefix}.",
                )
            if found := pick(row, CAPTION_FIELDS):
                row.setdefault("caption", row[found])
            columns.update(dict.fromkeys(row))
            rows[name] = row
    return rows, list(columns)
