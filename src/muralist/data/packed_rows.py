"""Rows of one size in Arrow files: written in batches of one length, read from mapped memory by number."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muralist.data.manifest import PACK_AGAIN, PackedFile
from muralist.data.recent import Recent
from muralist.errors import UserError

_MOST_FILE_BYTES = 10**9
_FOOTER_BYTES = 10**6  # an Arrow file ends with its schema and a list of its batches
_BATCH_BYTES = 16 * 2**20
_MOST_BATCH_ROWS = 2**16
_MOST_MAPPED_FILES = 4096


class RowWriter:
    """Writes rows to Arrow files in batches of one length, whatever the lengths they come in."""

    def __init__(self, folder: Path, columns: Mapping[str, Any], prefix: str = "") -> None:
        """`columns` names Arrow types; a fixed-size binary column is given as uint8 [rows, bytes]."""
        import pyarrow

        self._folder, self._prefix = folder, prefix
        self._schema = pyarrow.schema(columns)
        widths = [kind.byte_width for kind in self._schema.types if pyarrow.types.is_fixed_size_binary(kind)]
        self.row_bytes = sum(widths)
        self.rows_per_batch = min(max(1, _BATCH_BYTES // max(widths)), _MOST_BATCH_ROWS)
        self._buffers: list[Any] = [
            np.empty((self.rows_per_batch, kind.byte_width), np.uint8)
            if pyarrow.types.is_fixed_size_binary(kind)
            else []
            for kind in self._schema.types
        ]
        self._filled = 0
        self._files: list[PackedFile] = []
        self._stream: Any = None
        self._rows = 0  # in the file being written

    def add(self, *columns: Sequence[Any] | np.ndarray) -> None:
        """Append rows, given column by column."""
        taken, count = 0, len(columns[0])
        while taken < count:
            until = min(count, taken + self.rows_per_batch - self._filled)
            for buffer, column in zip(self._buffers, columns, strict=True):
                if isinstance(buffer, np.ndarray):
                    buffer[self._filled : self._filled + until - taken] = column[taken:until]
                else:
                    buffer.extend(column[taken:until])
            self._filled += until - taken
            taken = until
            if self._filled == self.rows_per_batch:
                self._write_batch()

    def close(self) -> list[PackedFile]:
        """Write what is left, and describe the files."""
        if self._filled:
            self._write_batch()
        if self._stream is not None:
            self._close_file()
        return self._files

    def _write_batch(self) -> None:
        import pyarrow

        columns = []
        for field, buffer in zip(self._schema, self._buffers, strict=True):
            if isinstance(buffer, np.ndarray):
                content = [None, pyarrow.py_buffer(buffer[: self._filled])]
                columns.append(pyarrow.FixedSizeBinaryArray.from_buffers(field.type, self._filled, content))
            else:
                columns.append(pyarrow.array(buffer, field.type))
                buffer.clear()
        batch = pyarrow.record_batch(columns, schema=self._schema)
        if self._stream is not None and self._stream.tell() + batch.nbytes + _FOOTER_BYTES > _MOST_FILE_BYTES:
            self._close_file()
        if self._stream is None:
            self._stream = pyarrow.OSFile(str(self._path()), "wb")
            self._arrow = pyarrow.ipc.new_file(self._stream, self._schema)
        self._arrow.write_batch(batch)
        self._rows += self._filled
        self._filled = 0

    def _close_file(self) -> None:
        self._arrow.close()
        self._stream.close()
        path = self._path()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._files.append(PackedFile(path.name, self._rows, path.stat().st_size, digest))
        self._stream, self._rows = None, 0

    def _path(self) -> Path:
        return self._folder / f"{self._prefix}{len(self._files):05}.arrow"


class Column(NamedTuple):
    """What a column must hold: so many bytes per row, or whole numbers from 0 up to a bound; else text."""

    bytes: int | None = None
    below: int | None = None


class RowReader:
    """The rows of such files, as views of mapped memory."""

    def __init__(
        self, folder: Path, files: list[PackedFile], rows_per_batch: int, columns: Mapping[str, Column]
    ) -> None:
        self.folder, self.files, self.rows_per_batch, self.columns = folder, files, rows_per_batch, columns
        for file in files:
            path = folder / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {file.bytes:,}"
                raise UserError(f"The packed file {path} {found}.", "The copy may be incomplete.", PACK_AGAIN)
        self._starts = np.cumsum([0, *(file.rows for file in files)])
        self._mapped: Recent[list[dict[str, Any]]] = Recent(_MOST_MAPPED_FILES)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def places(self, indices: np.ndarray) -> Iterator[tuple[dict[str, Any], int]]:
        """The columns of the record batch that holds each row, and its place in them."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"there are {len(self)} rows, but {indices.min()} to {indices.max()} were asked for")
        files = np.searchsorted(self._starts, indices, side="right") - 1
        batches, rows = np.divmod(indices - self._starts[files], self.rows_per_batch)
        for file, batch, row in zip(files.tolist(), batches.tolist(), rows.tolist(), strict=True):
            yield self._mapped.get(file, self._map)[batch], row

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest."""
        for file in self.files:
            with (self.folder / file.name).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                    raise UserError(f"The packed file {self.folder / file.name} is damaged.", fix=PACK_AGAIN)

    def _map(self, number: int) -> list[dict[str, Any]]:
        import pyarrow

        path = self.folder / self.files[number].name
        try:
            # Closing the file at once saves its descriptor; the memory stays mapped as long as a view of it lives.
            with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_file(memory) as reader:
                batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
                self._check_lengths([batch.num_rows for batch in batches], self.files[number].rows)
                return [_columns(batch, self.columns) for batch in batches]
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"The packed file {path} is damaged: {error}.", fix=PACK_AGAIN) from error

    def _check_lengths(self, found: list[int], rows: int) -> None:
        """The place of a row is arithmetic, so batches must have the lengths that were written."""
        full, rest = divmod(rows, self.rows_per_batch)
        if found != [self.rows_per_batch] * full + [rest] * bool(rest):
            raise ValueError(f"its {sum(found):,} rows in {len(found):,} batches are not those of the manifest")


def _columns(batch: Any, wanted: Mapping[str, Column]) -> dict[str, Any]:
    """Views of a record batch: bytes as uint8 [rows, bytes], numbers as they are, texts as Arrow keeps them."""
    return {name: _view(batch, name, column) for name, column in wanted.items()}


def _view(batch: Any, name: str, wanted: Column) -> Any:
    from pyarrow import types

    if batch.schema.names.count(name) != 1:
        raise ValueError(f"it has {batch.schema.names.count(name)} columns called {name}")
    column = batch.column(name)
    column.validate(full=True)  # a damaged offset would make Arrow read beyond the file, which ends the process
    if column.null_count or column.offset:
        raise ValueError(f"rows of its column {name} are empty")
    if wanted.bytes is not None:
        if not types.is_fixed_size_binary(column.type) or column.type.byte_width != wanted.bytes:
            raise ValueError(f"its column {name} is {column.type}, not {wanted.bytes:,} bytes per row")
        flat = np.frombuffer(column.buffers()[1], dtype=np.uint8, count=len(column) * wanted.bytes)
        return flat.reshape(len(column), wanted.bytes)
    if wanted.below is None:
        if not types.is_string(column.type):
            raise ValueError(f"its column {name} is {column.type}, not text")
        return column
    if not types.is_integer(column.type):
        raise ValueError(f"its column {name} is {column.type}, not whole numbers")
    numbers = column.to_numpy()
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < wanted.below:
        raise ValueError(f"its column {name} holds numbers that are not from 0 to {wanted.below - 1:,}")
    return numbers
