"""What the list shows: runs, generation folders and evaluations found under the root, and the state of each."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from muralist.board.curves import parse_row
from muralist.board.files import BoardRoot, last_line, list_matching, read_regular, read_tail, sample_lines
from muralist.core.run_dir import RunDir
from muralist.data.ledger_reader import LEDGER, WORK_DIR

Kind = Literal["run", "generation", "evaluation"]
_MAX_DEPTH = 6
_MAX_ENTRIES = 20_000  # of one folder: a larger one is full of images
_MAX_FOLDERS = 20_000
_RUN_FOLDERS = {"checkpoints", "samples", "logs", "tensorboard", "heartbeats", "wandb"}
_MTIME_RESOLUTION = 2.0  # seconds after which another change of a folder has another modification time
_SCAN_INTERVAL = 1.0


class BoardEntry(NamedTuple):
    """A folder to show."""

    kind: Kind
    folder: Path
    """Its real path, under the root."""
    name: Path
    """Where it was found: a link elsewhere under the root, or the same path."""


class _Listing(NamedTuple):
    """The relevant content of a folder."""

    kinds: tuple[Kind, ...] = ()
    folders: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # to folders


_Listings = dict[Path, tuple[int, _Listing]]  # with the modification time


class Scanner:
    """Finds entries under the root; a folder that has not changed is not read again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._listings: _Listings = {}
        self._entries: list[BoardEntry] = []
        self._scanned = -_SCAN_INTERVAL
        self._lock = threading.Lock()

    def entries(self) -> list[BoardEntry]:
        """Return all entries sorted by path, scanned at most once per second."""
        with self._lock:
            if time.monotonic() - self._scanned >= _SCAN_INTERVAL:
                before, self._listings = self._listings, {}
                self._entries = sorted(self._walk(before), key=lambda entry: (entry.name, entry.kind))
                self._scanned = time.monotonic()
            return self._entries

    def _walk(self, before: _Listings) -> Iterator[BoardEntry]:
        level = [self.root]
        for _ in range(_MAX_DEPTH):
            below: list[Path] = []
            for folder in level:
                if len(self._listings) >= _MAX_FOLDERS:
                    return
                listing = self._listing(folder, before)
                yield from (BoardEntry(kind, folder, folder) for kind in listing.kinds)
                for name in listing.links:
                    yield from self._follow(folder / name, before)
                below.extend(folder / name for name in listing.folders)
            level = below

    def _follow(self, link: Path, before: _Listings) -> Iterator[BoardEntry]:
        """Yield the target of a link if it is under the root and not hidden, but nothing below it: links may loop."""
        folder = Path(os.path.realpath(link))  # each time: the target may have been replaced by another link
        if folder.is_relative_to(self.root) and all(map(_is_shown, folder.relative_to(self.root).parts)):
            yield from (BoardEntry(kind, folder, link) for kind in self._listing(folder, before).kinds)

    def _listing(self, folder: Path, before: _Listings) -> _Listing:
        try:
            changed = folder.stat().st_mtime_ns
            if folder in before and before[folder][0] == changed:
                listing = before[folder][1]
            else:
                listing = _list_folder(folder)
                if time.time() - changed / 1e9 < _MTIME_RESOLUTION:
                    changed = -1
        except OSError:
            return _Listing()
        self._listings[folder] = changed, listing
        return listing


def _list_folder(folder: Path) -> _Listing:
    names: set[str] = set()
    folders: list[str] = []
    links: list[str] = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == _MAX_ENTRIES:
                break
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_symlink() and Path(entry).is_dir():  # entry.is_dir() would raise on circular links
                links.append(entry.name)
            elif entry.name.endswith((".jsonl", ".json", ".yaml")):
                names.add(entry.name)
    kinds: list[Kind] = []
    if is_run := "config.yaml" in names and ("metrics.jsonl" in names or "checkpoints" in folders):
        kinds.append("run")
    if (folder / LEDGER).is_file() or (folder / WORK_DIR).is_dir():
        kinds.append("generation")
    if (folder / "report.json").is_file():
        kinds.append("evaluation")
    below = (name for name in folders if _is_shown(name) and not (is_run and name in _RUN_FOLDERS))
    return _Listing(tuple(kinds), tuple(sorted(below)), tuple(filter(_is_shown, links)))


def _is_shown(name: str) -> bool:
    """Return whether a name is not hidden, and is text that an address can spell."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith(".")


_ALIVE = 40.0  # seconds: a training process writes its heartbeat every two
_SPARKLINE_POINTS = 40
_MAX_HEARTBEATS = 64
_HEARTBEAT = re.compile("rank_.*")
_STEPS = re.compile(rb"step (\d+)/(\d+) ")
_LENGTH = re.compile(rb"epoch = ([\d,]+) steps")
_END = re.compile(rb"(Finished) at step |(Stopped) by ")


class Runs:
    """Summarizes training runs; files that have not changed are not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def summary(self, folder: Path) -> dict[str, Any]:
        """Return state, step, loss and sparkline of a run."""
        run = RunDir(folder)
        beats = _heartbeats(run.heartbeats)
        metrics = _size_and_mtime(run.metrics)
        signature = metrics, _size_and_mtime(run.log), beats
        if folder not in self._known or self._known[folder][0] != signature:
            # Files much older than the newest one are from an earlier launch on more processes.
            launch = [run.heartbeats / name for name, changed in beats if changed > beats[0][1] - _ALIVE * 1e9]
            self._known[folder] = signature, _facts(run, launch)
        facts = dict(self._known[folder][1])
        end, failure = facts.pop("end"), facts.pop("failure")
        newest = max((changed for _, changed in beats), default=0 if end else metrics[1]) / 1e9
        facts["changed"] = round(max(newest, metrics[1] / 1e9))
        if failure:
            return facts | {"state": "failed", "message": failure}
        if newest > time.time() - _ALIVE:
            return facts | {"state": "running"}
        if beats:
            return facts | {"state": "lost", "message": "No sign of life: it was killed, or its machine is gone."}
        complete = facts["step"] is not None and facts["step"] == facts["steps"]
        return facts | {"state": "finished" if complete or end == "Finished" else "stopped"}


def _facts(run: RunDir, heartbeats: list[Path]) -> dict[str, Any]:
    last = parse_row(last_line(read_tail(run.metrics))) or {}
    log = read_tail(run.log, 16384)
    steps = [int(match[2]) for match in _STEPS.finditer(log)]
    steps = steps or [int(match[1].replace(b",", b"")) for match in _LENGTH.finditer(log)]
    end = _END.search(last_line(log))
    rows = [row for line in sample_lines(run.metrics, _SPARKLINE_POINTS) if (row := parse_row(line))]
    losses = [_number(row.get("train/loss")) for row in [*rows, last]]
    return {
        "step": _number(last.get("step")),
        "steps": steps[-1] if steps else None,
        "images": _number(last.get("images")),
        "loss": _number(last.get("train/loss")),
        "sparkline": [round(loss, 5) for loss in losses if loss is not None],
        "end": (end[1] or end[2]).decode() if end else "",
        "failure": _failure(heartbeats),
    }


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 1e38 else None


def _failure(heartbeats: list[Path]) -> str:
    """Return why processes ended, if one recorded it; a failed one knows more than those that lost contact."""
    messages: dict[str, str] = {}
    for path in heartbeats:
        try:
            record = from_json(read_regular(path, 1 << 16))
            messages.setdefault(record["left"], str(record["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return messages.get("failed") or messages.get("lost contact") or ""


def _heartbeats(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return names and modification times, newest first."""
    beats = []
    for _, entry in list_matching(folder, _HEARTBEAT):
        try:
            if entry.is_file():
                beats.append((entry.name, entry.stat().st_mtime_ns))
        except OSError:
            continue
    return tuple(sorted(beats, key=lambda beat: -beat[1])[:_MAX_HEARTBEATS])


def _size_and_mtime(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_size, status.st_mtime_ns


_MAX_REPORT_BYTES = 256 << 20
_REPORT_PAGES = ("report/index.html", "index.html")


class Evaluations:
    """Summarizes evaluations; a report that has not changed is not read again."""

    def __init__(self, root: BoardRoot) -> None:
        self.root = root
        self._known: dict[Path, tuple[int, dict[str, Any] | None]] = {}

    def summary(self, folder: Path) -> dict[str, Any] | None:
        """Return scores and the address of the page; None where report.json is not an evaluation's."""
        path = folder / "report.json"
        try:
            status = path.stat()
        except OSError:
            return None
        if folder not in self._known or self._known[folder][0] != status.st_mtime_ns:
            report = _read_report(path) if status.st_size < _MAX_REPORT_BYTES else None
            self._known[folder] = status.st_mtime_ns, report
        report = self._known[folder][1]
        if report is None:
            return None
        page = next((folder / name for name in _REPORT_PAGES if (folder / name).is_file()), None)
        address = self.root.relative(page) if page else None
        return report | {"state": "finished", "changed": round(status.st_mtime), "page": address}


def _read_report(path: Path) -> dict[str, Any] | None:
    """Read the fields that the board shows; a damaged report of any kind is left out."""
    try:
        report = from_json(read_regular(path, _MAX_REPORT_BYTES))
        scores = {
            name: {key: _finite(score.get(key)) for key in ("value", "low", "high")}
            for name, score in report["scores"].items()
            if score
        }
        images, reference = report.get("images") or {}, report.get("reference") or {}
        return {
            "scores": {name: score for name, score in scores.items() if score["value"] is not None},
            "images": images.get("count"),
            "folder": images.get("folder"),
            "reference": reference.get("path"),
            "failures": len(report.get("failures") or []),
            "warnings": [str(warning) for warning in report.get("warnings") or []][:20],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
