"""Read a ledger: the record of every image that `muralist generate` made or failed to make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LEDGER = "ledger.jsonl"
"""The file in an output folder."""
WORK_DIR = ".ledger"
"""The folder beside it that exists while a command runs: a shard for each worker, and `PROGRESS`."""
PROGRESS = "progress.beat"
DONE, FAILED = "done", "failed"
PLANNED = "planned"
"""The only key of a line that gives the total number of planned samples."""
_COMMON_FIELDS = {"index": int, "copy": int, "id": str, "seed": int, "prompt": str, "file": str, "gpu": str, "key": str}
_REQUIRED_FIELDS: dict[str, list[tuple[str, type]]] = {
    DONE: list({**_COMMON_FIELDS, "bytes": int, "changed": int, "sha256": str}.items()),
    FAILED: list({**_COMMON_FIELDS, "error": str}.items()),
}
_MAX_LABEL = 100


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the intact lines of a ledger or a shard, without the header."""
    return (line for _, line in lines_with_offsets(path))


def lines_with_offsets(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the intact lines with their byte offsets."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            if (line := parse_line(raw)) is not None:
                yield offset, line
            offset += len(raw)


def read_lines_at(path: Path, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the lines at some byte offsets of `lines_with_offsets`."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield json.loads(file.readline())


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line about a sample; None for the header, and for truncated or malformed lines."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if is_sample_record(line) else None


def is_sample_record(line: Any) -> bool:
    """Return whether a line has every required field, each of its type."""
    try:
        if any(type(line[name]) is not kind for name, kind in _REQUIRED_FIELDS[line["status"]]):
            return False
        # The GPU becomes part of a file name, and a foreign ledger must not lead out of the folder.
        gpu, seconds = line["gpu"], line.get("seconds", 0)
        return gpu.isprintable() and "/" not in gpu and len(gpu) <= _MAX_LABEL and isinstance(seconds, int | float)
    except (KeyError, TypeError):
        return False
