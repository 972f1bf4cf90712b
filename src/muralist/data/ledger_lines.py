"""Reads the lines of a ledger: what `muralist generate` says of every picture it made, or could not make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DONE, FAILED = "done", "failed"
_ABOUT = {"status", "index", "copy", "id", "seed", "prompt", "file", "gpu", "key"}
_NEEDED = {True: _ABOUT | {"bytes", "changed", "sha256"}, False: _ABOUT | {"error"}}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a ledger or a shard, without the header."""
    return (line for _, line in placed_lines(path))


def placed_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same, each with its place in the file."""
    if not path.is_file():
        return
    place = 0
    with path.open("rb") as file:
        for raw in file:
            if (line := parsed(raw)) is not None:
                yield place, line
            place += len(raw)


def lines_at(path: Path, places: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The lines at some places, which `placed_lines` told."""
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            yield json.loads(file.readline())


def parsed(raw: bytes) -> dict[str, Any] | None:
    """A line about a sample; None for the header and for what a kill or a full disk has torn."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and line.keys() >= _NEEDED[line.get("status") == DONE] else None
