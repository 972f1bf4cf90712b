"""A generation folder while it fills: the progress of each GPU, the newest images, failures and their reasons.

The ledger and the workers' shards are read once, as they grow. Only the file offset of each image's line is kept, a few
megabytes for a million images; the line is read again when a page shows it.
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

from muralist.board.files import GrowingFile, is_real_folder, open_regular, read_regular
from muralist.data.ledger_reader import DONE, LEDGER, PLANNED, PROGRESS, WORK_DIR, is_sample_record

NEWEST = 48
_ALIVE = 60.0  # seconds: a running command updates its lock every ten
_MAX_READ_SECONDS = 1.0  # per request; a longer ledger is continued by the next request
_MAX_FAILURES = 500  # kept with their reasons; all are counted
_RECENT = 256  # images that determine the speed of a GPU
_MAX_FOLDERS = 32
_MAX_ROW = 1 << 28  # a larger index comes from a damaged line
_MAX_COPIES = 4096
_ABSENT, _DONE, _FAILED = 0, 1, 2
_FIELDS = ("index", "copy", "id", "seed", "prompt", "negative_prompt", "height", "width", "file", "gpu", "seconds")
_MAX_TEXT = 2000


class _Samples:
    """State and ledger position of one copy of every row."""

    def __init__(self) -> None:
        self.states = bytearray()
        self.positions = array("q")

    def update(self, row: int, state: int, position: int) -> int:
        """Record the newest line about a row, and return its earlier state."""
        if (missing := row + 1 - len(self.states)) > 0:
            missing += len(self.states) // 8  # amortized growth
            self.states.extend(bytes(missing))
            self.positions.extend([0] * missing)
        before = self.states[row]
        self.states[row], self.positions[row] = state, position
        return before


class Generation:
    """One generation folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.version = secrets.token_hex(4)
        self._files = [GrowingFile(self.folder / LEDGER)]
        self._samples: dict[int, _Samples] = {}  # by copy
        self._done: Counter[str] = Counter()  # by GPU
        self._failed: Counter[str] = Counter()
        self._failures: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()
        self._newest: deque[tuple[int, int, int]] = deque(maxlen=NEWEST)  # time, copy, row
        self._times: dict[str, deque[int]] = {}  # by GPU
        self._order: np.ndarray | None = None
        self._planned: int | None = None

    def progress(self) -> dict[str, Any]:
        """Return everything about the folder except the list of its images."""
        with self._lock:
            self._read()
            running, owner = _owner(self.folder)
            reported, unassigned = self._reported_progress() if running else ({}, 0)
            gpus = sorted({*self._done, *reported}, key=_natural_order)
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
                "workers": [self._worker(gpu, reported.get(gpu), running) for gpu in gpus],
                "unassigned": unassigned,
                "newest": [line for line in newest if line],
                "reasons": Counter(line["error"] for line in self._failures.values()).most_common(20),
                "failures": list(self._failures.values())[-100:][::-1],
                "settings": self._settings(),
            }

    def images(self, begin: int, count: int) -> dict[str, Any]:
        """Return some of the finished images, in the order of the table."""
        with self._lock:
            self._read()
            if self._order is None:
                self._order = self._sort_done()
            codes = self._order[begin : begin + count].tolist()
            lines = [self._line(code % _MAX_COPIES, code // _MAX_COPIES) for code in codes]
            return {"version": self.version, "total": len(self._order), "begin": begin, "images": lines}

    def _read(self) -> None:
        shards = _shards(self.folder)
        known = {file.path for file in self._files}
        # When a command ends, it merges its shards into the ledger and removes them: everything is read again.
        if known - {self.folder / LEDGER, *shards} or not all(file.is_unchanged() for file in self._files):
            self._restart()
            known = {self.folder / LEDGER}
        self._files.extend(GrowingFile(path) for path in shards if path not in known)
        deadline = time.monotonic() + _MAX_READ_SECONDS
        for number, file in enumerate(self._files):
            for offset, data in file.new_lines():
                self._parse(number, offset, data)
                if time.monotonic() > deadline:
                    return

    def _parse(self, file: int, offset: int, data: bytes) -> None:
        for raw in data.splitlines(keepends=True):
            try:
                line = from_json(raw)
                if type(planned := line.get(PLANNED)) is int:
                    self._planned = planned
            except (ValueError, AttributeError):
                line = None  # truncated by a kill
            if is_sample_record(line) and 0 <= line["index"] < _MAX_ROW and 0 <= line["copy"] < _MAX_COPIES:
                self._record(line, file << 48 | offset)
            offset += len(raw)

    def _record(self, line: dict[str, Any], position: int) -> None:
        row, copy, gpu, done = line["index"], line["copy"], line["gpu"], line["status"] == DONE
        before = self._samples.setdefault(copy, _Samples()).update(row, _DONE if done else _FAILED, position)
        if before == _FAILED:
            earlier = self._failures.pop((row, copy), None)
            self._failed[earlier["gpu"] if earlier else gpu] -= 1
        if done != (before == _DONE):
            self._done[gpu] += 1 if done else -1 if before == _DONE else 0
            self._order = None
        if done:
            self._times.setdefault(gpu, deque(maxlen=_RECENT)).append(line["changed"])
            if (line["changed"], copy, row) not in self._newest:
                self._newest.append((line["changed"], copy, row))
            return
        self._failed[gpu] += 1
        self._done[gpu] += 0  # so that a GPU that has only failed is listed
        self._failures[row, copy] = _visible(line) | {"error": _truncate(line["error"])}
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _sort_done(self) -> np.ndarray:
        codes = [
            np.flatnonzero(np.frombuffer(samples.states, np.uint8) == _DONE) * _MAX_COPIES + copy
            for copy, samples in self._samples.items()
        ]
        return np.sort(np.concatenate(codes)) if codes else np.empty(0, np.int64)

    def _line(self, copy: int, row: int) -> dict[str, Any]:
        position = self._samples[copy].positions[row]
        try:
            with open_regular(self._files[position >> 48].path) as file:
                file.seek(position & ((1 << 48) - 1))
                return _visible(from_json(file.readline()))
        except (OSError, ValueError):
            return {}  # the command just ended: the next request finds the line in the ledger

    def _worker(self, gpu: str, reported: tuple[int, int, int] | None, running: bool) -> dict[str, Any]:
        times = sorted(self._times.get(gpu, ()))
        seconds = (times[-1] - times[0]) / 1e9 if len(times) > 1 else 0.0
        stale = running and times and time.time() - times[-1] / 1e9 > _ALIVE
        speed = 0.0 if stale or seconds <= 0 else (len(times) - 1) / seconds
        done, failed, total = reported or (self._done[gpu], self._failed[gpu], None)
        return {"gpu": gpu, "done": done, "failed": failed, "total": total, "speed": float(f"{speed:.4g}")}

    def _reported_progress(self) -> tuple[dict[str, tuple[int, int, int]], int]:
        """Return done, failed and total of each worker of the running command, and how many samples are unassigned."""
        try:
            if not is_real_folder(self.folder / WORK_DIR):
                return {}, 0
            progress = from_json(read_regular(self.folder / WORK_DIR / PROGRESS, 1 << 20))
            workers = {
                gpu: (int(done), int(failed), int(total)) for gpu, (done, failed, total) in progress["workers"].items()
            }
            return workers, int(progress["unassigned"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, 0

    def _settings(self) -> dict[str, Any]:
        try:
            with open_regular(self.folder / LEDGER) as file:
                return dict(from_json(file.readline(1 << 20)).get("settings", {}))
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


class Generations:
    """The recently viewed generation folders."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, Generation] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, folder: Path) -> Generation:
        """Return a folder with what was read so far."""
        with self._lock:
            found = self._known.setdefault(folder, Generation(folder))
            self._known.move_to_end(folder)
            if len(self._known) > _MAX_FOLDERS:
                self._known.popitem(last=False)
            return found


def summary(folder: Path) -> dict[str, Any]:
    """Return what the list shows of a folder, without reading its ledger."""
    running, owner = _owner(folder)
    try:
        changed = max(path.stat().st_mtime for path in (folder / LEDGER, *_shards(folder)))
    except (OSError, ValueError):
        changed = 0.0
    return {"state": _state(running, owner), "changed": round(changed)}


def _shards(folder: Path) -> list[Path]:
    work = folder / WORK_DIR
    return sorted(work.glob("*.jsonl")) if is_real_folder(work) else []


def _owner(folder: Path) -> tuple[bool, dict[str, Any]]:
    """Return whether a command is running in a folder, and the content of its lock."""
    try:
        owner = dict(from_json(read_regular(folder / "lock", 1 << 16)))
        return time.time() - float(owner["heartbeat"]) < _ALIVE, owner
    except (OSError, ValueError, TypeError, KeyError):
        return False, {}


def _state(running: bool, owner: dict[str, Any]) -> str:
    return "running" if running else "lost" if owner else "finished"  # a command that ends normally removes its lock


def _visible(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _truncate(line[name]) for name in _FIELDS if name in line}


def _truncate(value: Any) -> Any:
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _natural_order(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdecimal() else (1 << 30, gpu)
