"""Reads the lines of a ledger: what `muralist generate` says of every picture it made, or could not make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DONE, FAILED = "done", "failed"
PLANNED = "planned"
"""The one word of a line that says how many samples there are to be in all."""
_ABOUT = {"index": int, "copy": int, "id": str, "seed": int, "prompt": str, "file": str, "gpu": str, "key": str}
_NEEDED: dict[str, list[tuple[str, type]]] = {
    DONE: list({**_ABOUT, "bytes": int, "changed": int, "sha256": str}.items()),
    FAILED: list({**_ABOUT, "error": str}.items()),
}
_LONGEST_LABEL = 100


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
    """A line about a sample; None for the header, for what a kill or a full disk has torn, and for what nobody wrote so."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if is_about_a_sample(line) else None


def is_about_a_sample(line: Any) -> bool:
    """Whether what a line says has every part that is needed, each of its kind."""
    try:
        if any(type(line[name]) is not kind for name, kind in _NEEDED[line["status"]]):
            return False
        return _is_label(line["gpu"]) and isinstance(line.get("seconds", 0), int | float)
    except (KeyError, TypeError):
        return False


def _is_label(gpu: str) -> bool:
    """A label becomes part of a file's name: one out of a ledger that came from elsewhere must stay in the folder."""
    return gpu.isprintable() and "/" not in gpu and len(gpu) <= _LONGEST_LABEL
