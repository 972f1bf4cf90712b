"""What a run is at: whether it trains, how far it is, what its loss was."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from muralist.board.curves import parsed_line
from muralist.board.root import is_plain_folder, read_plain
from muralist.board.tail import last_line, last_text, lines_across
from muralist.runfolder import RunFolder

_ALIVE = 40.0  # seconds: a process that trains writes its heartbeat every two
_SPARKS = 40
_MOST_HEARTBEATS = 64
_STEPS = re.compile(rb"step (\d+)/(\d+) ")
_LENGTH = re.compile(rb"epoch = ([\d,]+) steps")
_END = re.compile(rb"(Finished at step|Stopped by) ")


class _Signature(NamedTuple):
    metrics: tuple[int, int]
    log: tuple[int, int]
    heartbeats: tuple[tuple[str, int], ...]


class Runs:
    """Says of each run what the list shows; what has not changed is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_Signature, dict[str, Any]]] = {}

    def summary(self, folder: Path) -> dict[str, Any]:
        """State, step, loss and the small curve of one run."""
        run = RunFolder(folder)
        beats = _heartbeats(run.heartbeats)
        signature = _Signature(_size_and_time(run.metrics), _size_and_time(run.log), beats)
        if folder not in self._known or self._known[folder][0] != signature:
            # Files much older than the newest were left by an earlier launch on more processes.
            launch = [name for name, changed in beats if changed > beats[0][1] - _ALIVE * 1e9]
            self._known[folder] = signature, _facts(run, launch)
        facts = dict(self._known[folder][1])
        ended, failed = facts.pop("ended"), facts.pop("failed")
        newest = max((changed for _, changed in beats), default=signature.metrics[1] if not ended else 0) / 1e9
        facts["changed"] = round(max(newest, signature.metrics[1] / 1e9))
        if failed:
            return facts | {"state": "failed", "said": failed}
        if newest > time.time() - _ALIVE:
            return facts | {"state": "running"}
        if beats:
            return facts | {"state": "lost", "said": "It gives no sign of life: it was killed, or its machine is gone."}
        whole = facts["step"] is not None and facts["step"] == facts["steps"]
        return facts | {"state": "finished" if whole or ended == "Finished" else "stopped"}


def _facts(run: RunFolder, heartbeats: list[str]) -> dict[str, Any]:
    last = parsed_line(last_line(run.metrics)) or {}
    log = last_text(run.log, 16384)
    steps = [int(match[2]) for match in _STEPS.finditer(log)]
    if not steps:
        steps = [int(match[1].replace(b",", b"")) for match in _LENGTH.finditer(log)]
    ends = [
        match[1].decode().partition(" ")[0] for match in _END.finditer(log.rpartition(b"\n")[0].rpartition(b"\n")[2])
    ]
    rows = [row for line in lines_across(run.metrics, _SPARKS) if (row := parsed_line(line))]
    losses = [_number(row.get("train/loss")) for row in [*rows, last]]
    return {
        "step": _number(last.get("step")),
        "steps": steps[-1] if steps else None,
        "images": _number(last.get("images")),
        "loss": _number(last.get("train/loss")),
        "sparks": [round(loss, 5) for loss in losses if loss is not None],
        "ended": ends[-1] if ends else "",
        "failed": _failure([run.heartbeats / name for name in heartbeats]),
    }


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 1e38 else None


def _failure(heartbeats: list[Path]) -> str:
    """Why processes ended, where one could still say so; one that failed knows better than those that missed it."""
    said: dict[str, str] = {}
    for path in heartbeats:
        try:
            record = from_json(read_plain(path, 1 << 16))
            said.setdefault(record["left"], str(record["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return said.get("failed") or said.get("lost contact") or ""


def _heartbeats(folder: Path) -> tuple[tuple[str, int], ...]:
    if not is_plain_folder(folder):
        return ()
    try:
        with os.scandir(folder) as entries:
            names = [(e.name, e.stat().st_mtime_ns) for e in entries if e.name.startswith("rank_") and e.is_file()]
    except OSError:
        return ()
    return tuple(sorted(names, key=lambda beat: -beat[1])[:_MOST_HEARTBEATS])


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_size, status.st_mtime_ns
