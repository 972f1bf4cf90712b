"""The pictures of a run as a wall: prompts by checkpoints."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from muralist.board.root import is_plain_folder, read_plain

_STEP = re.compile(r"step_(\d+)$")
_PICTURE = re.compile(r"gpu_(\d+)_sample(?:_(\d+))?\.png$")
_ERROR = re.compile(r"gpu_(\d+)_error\.txt$")
_LONGEST_PROMPT = 2000  # characters; some are books
_MOST_PICTURES = 400_000  # of all runs that are remembered
_SETTLED = 2.0


class _Column(NamedTuple):
    """The pictures of one checkpoint."""

    changed: int
    pictures: list[tuple[str, str]]  # file and prompt
    errors: list[tuple[str, str]]  # GPU and reason


class Walls:
    """The walls of all runs that are looked at; a checkpoint whose folder has not changed is not read again."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, dict[int, _Column]] = OrderedDict()
        self._lock = threading.Lock()

    def wall(self, samples: Path) -> dict[str, Any]:
        """Prompts, steps, and for each step the file of each prompt, or null."""
        with self._lock:
            before = self._known.pop(samples, {})
            columns = {}
            for step, folder in sorted(_folders(samples)):
                columns[step] = _column(folder, before.get(step))
            self._known[samples] = columns
            while len(self._known) > 1 and sum(map(_size, self._known.values())) > _MOST_PICTURES:
                self._known.popitem(last=False)
        return _arranged(columns)


def _size(columns: dict[int, _Column]) -> int:
    return sum(len(column.pictures) for column in columns.values())


def _folders(samples: Path) -> list[tuple[int, Path]]:
    if not is_plain_folder(samples):
        return []
    try:
        with os.scandir(samples) as entries:
            return [
                (int(match[1]), Path(entry.path))
                for entry in entries
                if (match := _STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _column(folder: Path, before: _Column | None) -> _Column:
    try:
        changed = folder.stat().st_mtime_ns
        if before is not None and before.changed == changed:
            return before
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return _Column(-1, [], [])
    if time.time() - changed / 1e9 < _SETTLED:
        changed = -1  # pictures are still coming, and one that came at this very moment would not change the time
    found = sorted((int(match[1]), int(match[2] or 1), name) for name in names if (match := _PICTURE.fullmatch(name)))
    there = set(names)
    pictures = []
    for _, _, name in found:
        text = name.replace("_sample", "_prompt", 1).replace(".png", ".txt")
        if text in there:  # written after the picture: without it, the picture is not whole yet
            pictures.append((name, _text(f"{folder}/{text}")))
    errors = [(match[1], _text(f"{folder}/{name}")) for name in sorted(names) if (match := _ERROR.fullmatch(name))]
    return _Column(changed, pictures, errors)


def _text(path: str) -> str:
    try:
        return read_plain(path, 4 * _LONGEST_PROMPT).decode(errors="replace").strip()[:_LONGEST_PROMPT]
    except OSError:
        return ""


def _arranged(columns: dict[int, _Column]) -> dict[str, Any]:
    """Rows by prompt; a prompt drawn more than once at a checkpoint has as many rows."""
    rows: dict[tuple[str, int], int] = {}
    placed: list[tuple[int, dict[int, str], list[tuple[str, str]]]] = []
    for step, column in columns.items():
        turns: dict[str, int] = {}
        cells: dict[int, str] = {}
        for name, prompt in column.pictures:
            turn = turns[prompt] = turns.get(prompt, 0) + 1
            cells[rows.setdefault((prompt, turn), len(rows))] = name
        if cells or column.errors:
            placed.append((step, cells, column.errors))
    return {
        "prompts": [prompt for prompt, _ in rows],
        "steps": [step for step, _, _ in placed],
        "files": [[cells.get(row) for row in range(len(rows))] for _, cells, _ in placed],
        "errors": [
            {"step": step, "gpu": gpu, "reason": reason} for step, _, errors in placed for gpu, reason in errors
        ],
    }
