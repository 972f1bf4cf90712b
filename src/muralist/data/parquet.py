"""Parquet files with the images inside, as the Hugging Face hub stores data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muralist.data.columns import ColumnSource

_MOST_GROUPS_KEPT = 4
_MOST_BYTES_KEPT = 256 * 2**20  # in every loader process


class _ParquetReader:
    """One Parquet file; a row group is read whole, so reading in order is fast and reading at random is not."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        self.schema = self._file.schema_arrow
        _ = self.schema.names  # raises where they are no text
        groups = [self._file.metadata.row_group(group) for group in range(self._file.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        largest = max((group.total_byte_size for group in groups), default=0)
        self.groups_kept = max(1, min(_MOST_GROUPS_KEPT, _MOST_BYTES_KEPT // max(1, largest)))

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Decode some columns of a row group."""
        # Threads of the parent process do not exist in a forked loader process, so none are used.
        return self._file.read_row_group(group, columns=columns, use_threads=False)


class ParquetSource(ColumnSource):
    """The rows of Parquet files."""

    kind, reader = "Parquet", _ParquetReader
