"""A generation folder while it fills: how far each GPU is, the newest pictures, what failed and why.

The ledger and the workers' shards are read once, as they grow. Of each picture only its place in the file is kept, so that
a million of them take a few megabytes; the rest of a line is read again when a page shows it.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from muralist.board.root import is_plain_folder, open_plain, read_plain
from muralist.board.tail import Tail
from muralist.data.ledger_lines import DONE, PLANNED, is_about_a_sample
from muralist.generate.folder import OutputFolder

NEWEST = 48
_ALIVE = 60.0  # seconds: the lock of a command that works is touched every ten
_READ_AT_ONCE = 1.0  # seconds a page waits; a longer ledger is read on when it asks again
_MOST_FAILURES = 500  # kept with their reasons; all are counted
_RECENT = 256  # pictures from which the speed of a GPU is told
_MOST_FOLDERS = 32
_LARGEST_NUMBER = 1 << 28  # of a row: what is above comes from a damaged line
_MOST_COPIES = 4096
_NOTHING, _DONE, _FAILED = 0, 1, 2
_SHOWN = ("index", "copy", "id", "seed", "prompt", "negative_prompt", "height", "width", "file", "gpu", "seconds")
_LONGEST_TEXT = 2000


class _Copies:
    """What became of one copy of every row, and where its last line stands."""

    def __init__(self) -> None:
        self.state = bytearray()
        self.places = array("q")

    def note(self, row: int, state: int, place: int) -> int:
        """Take in a line; returns what was known before."""
        if (missing := row + 1 - len(self.state)) > 0:
            missing += len(self.state) // 8  # so that growing row by row does not copy everything each time
            self.state.extend(bytes(missing))
            self.places.extend([0] * missing)
        before = self.state[row]
        self.state[row], self.places[row] = state, place
        return before


class Generation:
    """One generation folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = OutputFolder(folder)
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.version = secrets.token_hex(4)
        self._files = [Tail(self.folder.ledger)]  # a place says which, and where in it
        self._copies: dict[int, _Copies] = {}
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._failures: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()
        self._newest: deque[tuple[int, int, int]] = deque(maxlen=NEWEST)  # time, copy, row
        self._times: dict[str, deque[int]] = {}
        self._order: np.ndarray | None = None
        self._planned: int | None = None

    def progress(self) -> dict[str, Any]:
        """Everything about the folder but the list of its pictures."""
        with self._lock:
            self._read()
            running, owner = _owner(self.folder)
            told, unassigned = self._told() if running and is_plain_folder(self.folder.work) else ({}, 0)
            workers = [self._worker(gpu, told.get(gpu), running) for gpu in sorted({*self._done, *told}, key=_natural)]
            newest = [self._line(copy, row) for _, copy, row in sorted(self._newest, reverse=True)]
            size = sum(file.size for file in self._files)
            return {
                "version": self.version,
                "state": _state(running, owner),
                "owner": owner,
                "read": round(sum(file.offset for file in self._files) / size, 3) if size else 1.0,
                "done": sum(self._done.values()),
                "failed": sum(self._failed.values()),
                "planned": self._planned,
                "workers": workers,
                "unassigned": unassigned,
                "newest": [line for line in newest if line],
                "reasons": Counter(line["error"] for line in self._failures.values()).most_common(20),
                "failures": list(self._failures.values())[-100:][::-1],
                "settings": self._settings(),
            }

    def pictures(self, begin: int, count: int) -> dict[str, Any]:
        """Some of the finished pictures, by their place in the table."""
        with self._lock:
            self._read()
            if self._order is None:
                self._order = self._in_order()
            chosen = self._order[begin : begin + count].tolist()
            lines = [self._line(code % _MOST_COPIES, code // _MOST_COPIES) for code in chosen]
            return {"version": self.version, "total": len(self._order), "begin": begin, "pictures": lines}

    def _read(self) -> None:
        shards = _shards(self.folder)
        known = {file.path for file in self._files}
        # When a command ends, its shards are gone and their lines stand in the ledger: all is read anew from there.
        if known - {self.folder.ledger, *shards} or not all(file.is_same() for file in self._files):
            self._restart()
            known = {self.folder.ledger}
        self._files.extend(Tail(path) for path in shards if path not in known)
        deadline = time.monotonic() + _READ_AT_ONCE
        for number, file in enumerate(self._files):
            for begin, data in file.parts():
                self._take(number, begin, data)
                if time.monotonic() > deadline:
                    return

    def _take(self, file: int, place: int, data: bytes) -> None:
        for raw in data.splitlines(keepends=True):
            try:
                line = from_json(raw)
                if type(planned := line.get(PLANNED)) is int:
                    self._planned = planned
            except (ValueError, AttributeError):
                line = None  # a kill has torn it
            if is_about_a_sample(line) and 0 <= line["index"] < _LARGEST_NUMBER and 0 <= line["copy"] < _MOST_COPIES:
                self._note(line["index"], line["copy"], line["status"] == DONE, line["gpu"], line, file << 48 | place)
            place += len(raw)

    def _note(self, row: int, copy: int, done: bool, gpu: str, line: dict[str, Any], place: int) -> None:
        before = self._copies.setdefault(copy, _Copies()).note(row, _DONE if done else _FAILED, place)
        if before == _FAILED:
            earlier = self._failures.pop((row, copy), None)
            self._failed[earlier["gpu"] if earlier else gpu] -= 1
        if done:
            if before != _DONE:
                self._done[gpu] += 1
                self._order = None
            changed = line["changed"]
            self._times.setdefault(gpu, deque(maxlen=_RECENT)).append(changed)
            if (changed, copy, row) not in self._newest:
                self._newest.append((changed, copy, row))
            return
        if before == _DONE:
            self._done[gpu] -= 1
            self._order = None
        self._failed[gpu] += 1
        self._done[gpu] += 0  # a GPU that has only failed is shown too
        self._failures[row, copy] = _shown(line) | {"error": _cut(line["error"])}
        if len(self._failures) > _MOST_FAILURES:
            self._failures.popitem(last=False)

    def _in_order(self) -> np.ndarray:
        codes = [
            np.flatnonzero(np.frombuffer(copies.state, np.uint8) == _DONE) * _MOST_COPIES + copy
            for copy, copies in self._copies.items()
        ]
        return np.sort(np.concatenate(codes)) if codes else np.empty(0, np.int64)

    def _line(self, copy: int, row: int) -> dict[str, Any]:
        place = self._copies[copy].places[row]
        try:
            with open_plain(self._files[place >> 48].path) as file:
                file.seek(place & ((1 << 48) - 1))
                return _shown(from_json(file.readline()))
        except (OSError, ValueError):
            return {}  # the command ended at this moment: the next look finds the line in the ledger

    def _worker(self, gpu: str, told: tuple[int, int, int] | None, running: bool) -> dict[str, Any]:
        times = sorted(self._times.get(gpu, ()))
        seconds = (times[-1] - times[0]) / 1e9 if len(times) > 1 else 0.0
        stale = running and times and time.time() - times[-1] / 1e9 > _ALIVE
        speed = 0.0 if stale or seconds <= 0 else (len(times) - 1) / seconds
        done, failed, total = told or (self._done[gpu], self._failed[gpu], None)
        return {"gpu": gpu, "done": done, "failed": failed, "total": total, "speed": float(f"{speed:.4g}")}

    def _told(self) -> tuple[dict[str, tuple[int, int, int]], int]:
        """How far each worker says it is, and how many samples are nobody's."""
        try:
            words = from_json(read_plain(self.folder.progress, 1 << 20))
            workers = {
                gpu: (int(done), int(failed), int(total)) for gpu, (done, failed, total) in words["workers"].items()
            }
            return workers, int(words["unassigned"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, 0

    def _settings(self) -> dict[str, Any]:
        try:
            with open_plain(self.folder.ledger) as file:
                return dict(from_json(file.readline(1 << 20)).get("settings", {}))
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


class Generations:
    """The generation folders that are looked at."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, Generation] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> Generation:
        """One of them, as far as it was read."""
        with self._lock:
            found = self._known.setdefault(folder, Generation(folder))
            self._known.move_to_end(folder)
            if len(self._known) > _MOST_FOLDERS:
                self._known.popitem(last=False)
            return found


def summary(folder: Path) -> dict[str, Any]:
    """What the list shows of a folder, without reading its ledger."""
    output = OutputFolder(folder)
    running, owner = _owner(output)
    try:
        changed = max(path.stat().st_mtime for path in (output.ledger, *_shards(output)))
    except (OSError, ValueError):
        changed = 0.0
    return {"state": _state(running, owner), "changed": round(changed)}


def _shards(folder: OutputFolder) -> list[Path]:
    return sorted(folder.work.glob("*.jsonl")) if is_plain_folder(folder.work) else []


def _owner(folder: OutputFolder) -> tuple[bool, dict[str, Any]]:
    """Whether a command works in a folder, and which."""
    try:
        owner = dict(from_json(read_plain(folder.root / "lock", 1 << 16)))
        return time.time() - float(owner["heartbeat"]) < _ALIVE, owner
    except (OSError, ValueError, TypeError, KeyError):
        return False, {}


def _state(running: bool, owner: dict[str, Any]) -> str:
    """The lock is removed by a command that ends in good order."""
    return "running" if running else "lost" if owner else "finished"


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _cut(line[name]) for name in _SHOWN if name in line}


def _cut(value: Any) -> Any:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def _natural(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdecimal() else (1 << 30, gpu)
