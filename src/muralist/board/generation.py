"""A generation folder while it fills: the progress of each GPU, the newest images, failures and their reasons.

The ledger and the workers' shards are read once, as they grow. Only the file offset of each image's line is kept, a few
megabytes for a million images; the line is read again when a page shows it.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from muralist.board.files import GrowingFile, is_real_folder, open_regular, read_object
from muralist.data.ledger_reader import (
    DONE,
    LEDGER,
    PLANNED,
    PROGRESS,
    TAR_SHARD,
    WORK_DIR,
    ImageFinder,
    is_sample_record,
)

NEWEST = 48
_ALIVE = 60.0  # seconds: a running command updates its lock every ten
_MAX_READ_SECONDS = 1.0  # per request; a longer ledger is continued by the next request
_MAX_FAILURES = 500  # kept with their reasons; all are counted
_RECENT = 256  # images that determine the speed of a GPU
_MAX_ROW = 1 << 28  # a larger index comes from a damaged line
_MAX_COPIES = 4096
_FIELDS = ("index", "copy", "id", "seed", "prompt", "negative_prompt", "height", "width", "file", "gpu", "seconds")
_MAX_TEXT = 2000


class Generation:
    """One generation folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.version = secrets.token_hex(4)
        self._files = [GrowingFile(self.folder / LEDGER)]
        self._lines: dict[int, array[int]] = {}  # by copy, then row: see _record
        self._done: Counter[str] = Counter()  # by GPU
        self._failed: Counter[str] = Counter()
        self._failures: dict[tuple[int, int], dict[str, Any]] = {}
        self._newest: deque[tuple[int, int, int]] = deque(maxlen=NEWEST)  # time, copy, row
        self._times: dict[str, deque[int]] = {}  # by GPU
        self._order: np.ndarray | None = None
        self._planned: int | None = None
        self._finder: ImageFinder | None = None  # None: tar files were written since

    def progress(self) -> dict[str, Any]:
        """Return everything about the folder except the list of its images."""
        with self._lock:
            self._read()
            state = _state(self.folder)
            running = state == "running"
            reported, unassigned = self._reported_progress() if running else ({}, 0)
            gpus = sorted({*self._done, *self._failed, *reported}, key=_natural_order)
            newest = [self._line(copy, row) for _, copy, row in sorted(self._newest, reverse=True)]
            size = sum(file.size for file in self._files)
            return {
                "version": self.version,
                "state": state,
                "read": round(sum(file.offset for file in self._files) / size, 3) if size else 1.0,
                "done": self._done.total(),
                "failed": self._failed.total(),
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
                codes = [
                    np.flatnonzero(np.array(lines) > 0) * _MAX_COPIES + copy for copy, lines in self._lines.items()
                ]
                self._order = np.sort(np.concatenate(codes)) if codes else np.empty(0, np.int64)
            codes_shown = self._order[begin : begin + count].tolist()
            lines = [self._line(code % _MAX_COPIES, code // _MAX_COPIES) for code in codes_shown]
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
                if TAR_SHARD in line:
                    self._finder = None
            except (ValueError, AttributeError):
                line = None  # truncated by a kill
            if is_sample_record(line) and 0 <= line["index"] < _MAX_ROW and 0 <= line["copy"] < _MAX_COPIES:
                self._record(line, 1 + (file << 48 | offset))
            offset += len(raw)

    def _record(self, line: dict[str, Any], position: int) -> None:
        """Record the newest line about a row: its position, negative where the row failed; 0 stands for no line."""
        row, copy, gpu, done = line["index"], line["copy"], line["gpu"], line["status"] == DONE
        lines = self._lines.setdefault(copy, array("q"))
        if row >= len(lines):
            lines.frombytes(bytes(8 * (row + 1 - len(lines) + len(lines) // 8)))  # amortized growth
        before, lines[row] = lines[row], position if done else -position
        if before < 0:
            earlier = self._failures.pop((row, copy), None)
            self._failed[earlier["gpu"] if earlier else gpu] -= 1
        if done != (before > 0):
            self._done[gpu] += 1 if done else -1
            self._order = None
        if done:
            self._times.setdefault(gpu, deque(maxlen=_RECENT)).append(line["changed"])
            if (line["changed"], copy, row) not in self._newest:
                self._newest.append((line["changed"], copy, row))
            return
        self._failed[gpu] += 1
        self._failures[row, copy] = _visible(line) | {"error": line["error"][:_MAX_TEXT]}
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _line(self, copy: int, row: int) -> dict[str, Any]:
        position = abs(self._lines[copy][row]) - 1
        try:
            with open_regular(self._files[position >> 48].path) as file:
                file.seek(position & ((1 << 48) - 1))
                line = from_json(file.readline())
                self._finder = self._finder or ImageFinder(self.folder)
                if path := self._finder.path(line):
                    line["file"] = path.relative_to(self.folder).as_posix()
                return _visible(line)
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
        progress = read_object(self.folder / WORK_DIR / PROGRESS) if is_real_folder(self.folder / WORK_DIR) else {}
        try:
            workers = {
                gpu: (int(done), int(failed), int(total)) for gpu, (done, failed, total) in progress["workers"].items()
            }
            return workers, int(progress["unassigned"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}, 0

    def _settings(self) -> dict[str, Any]:
        try:
            with open_regular(self.folder / LEDGER) as file:
                return dict(from_json(file.readline(1 << 20)).get("settings", {}))
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def generation_summary(folder: Path) -> dict[str, Any]:
    """Return what the list shows of a folder, without reading its ledger."""
    try:
        changed = max(path.stat().st_mtime for path in (folder / LEDGER, *_shards(folder)))
    except OSError:
        changed = 0.0
    return {"state": _state(folder), "changed": round(changed)}


def _shards(folder: Path) -> list[Path]:
    work = folder / WORK_DIR
    return sorted(work.glob("*.jsonl")) if is_real_folder(work) else []


def _state(folder: Path) -> str:
    """Return the state of a folder by its lock, which a command that ends normally removes."""
    if not isinstance(heartbeat := read_object(folder / "lock").get("heartbeat"), int | float):
        return "finished"
    return "running" if time.time() - heartbeat < _ALIVE else "lost"


def _visible(line: dict[str, Any]) -> dict[str, Any]:
    shown = {name: line[name] for name in _FIELDS if name in line}
    return {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in shown.items()}


def _natural_order(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdecimal() else (1 << 30, gpu)
