"""Arrow files with the images inside, as HunyuanDiT's csv2arrow writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muralist.data.columns import ColumnSource

_MOST_GROUPS_KEPT = 4096  # they are views of mapped memory and cost next to nothing


class _ArrowReader:
    """One Arrow file, mapped into memory: a row costs what it weighs, in any order."""

    groups_kept = _MOST_GROUPS_KEPT

    def __init__(self, path: Path) -> None:
        import pyarrow

        try:
            # Threads of the parent process do not exist in a forked loader process, so none are used.
            options = pyarrow.ipc.IpcReadOptions(use_threads=False)
            self._file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)), options=options)
        except pyarrow.ArrowInvalid as error:
            raise pyarrow.ArrowInvalid(
                f"{error} (it is cut short, or a stream as Hugging Face datasets keeps them, which to_parquet turns "
                "into a Parquet file)"
            ) from error
        self.schema = self._file.schema
        _ = self.schema.names  # raises where they are no text
        self.group_rows = [self._file.get_batch(group).num_rows for group in range(self._file.num_record_batches)]

    def read_group(self, group: int, columns: list[str]) -> Any:
        """Return views of some columns of a record batch."""
        return self._file.get_batch(group).select(columns)


class ArrowSource(ColumnSource):
    """The rows of Arrow files."""

    kind, reader = "Arrow", _ArrowReader
