"""What the page shows of the folders under the root: runs with their samples, and evaluations, in their states.

What was read of a file or folder is cached with its modification time: unchanged ones are not read again.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from muralist.board.curves import number, parse_row
from muralist.board.files import (
    NotFound,
    is_real_folder,
    last_line,
    list_matching,
    read_object,
    read_regular,
    read_tail,
    sample_lines,
    version_of,
)
from muralist.core.run_dir import RunDir
from muralist.data.ledger_reader import LEDGER, WORK_DIR

Kind = Literal["run", "generation", "evaluation"]
_MAX_DEPTH = 6
_MAX_ENTRIES = 20_000  # of one folder: a larger one is full of images
_MAX_FOLDERS = 20_000
_RUN_FOLDERS = {"checkpoints", "samples", "logs", "tensorboard", "heartbeats", "wandb"}


class BoardEntry(NamedTuple):
    """A folder to show."""

    kind: Kind
    folder: Path
    """Its real path, under the root."""
    name: Path
    """Where it was found: a link elsewhere under the root, or the same path."""


class _Listing(NamedTuple):
    kinds: Sequence[Kind] = ()
    folders: Sequence[str] = ()
    links: Sequence[str] = ()  # to folders


def find_entries(root: Path) -> list[BoardEntry]:
    """Return all entries under the root, sorted by path."""
    return sorted(_walk(root), key=lambda entry: (entry.name, entry.kind))


def _walk(root: Path) -> Iterator[BoardEntry]:
    waiting = deque([(root, root, 1)])  # real path, name and depth of folders, the highest ones first
    for _ in range(_MAX_FOLDERS):
        if not waiting:
            return
        folder, name, depth = waiting.popleft()
        try:
            listing = _list_folder(folder, version_of(folder))
        except OSError:
            continue
        yield from (BoardEntry(kind, folder, name) for kind in listing.kinds)
        if folder != name:
            continue  # nothing below a link: links may loop
        for link in listing.links:
            target = Path(os.path.realpath(folder / link))
            if target.is_relative_to(root) and all(map(_is_shown, target.relative_to(root).parts)):
                waiting.append((target, folder / link, depth))
        if depth < _MAX_DEPTH:
            waiting.extend((folder / below, folder / below, depth + 1) for below in listing.folders)


@lru_cache(maxsize=_MAX_FOLDERS)
def _list_folder(folder: Path, version: int) -> _Listing:
    names: set[str] = set()
    folders: list[str] = []
    links: list[str] = []
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_symlink() and Path(entry).is_dir():  # entry.is_dir() would raise on circular links
                links.append(entry.name)
            else:
                names.add(entry.name)
    kinds: list[Kind] = []
    if is_run := "config.yaml" in names and ("metrics.jsonl" in names or "checkpoints" in folders):
        kinds.append("run")
    if (folder / LEDGER).is_file() or (folder / WORK_DIR).is_dir():
        kinds.append("generation")
    if (folder / "report.json").is_file():
        kinds.append("evaluation")
    below = [name for name in folders if _is_shown(name) and not (is_run and name in _RUN_FOLDERS)]
    return _Listing(kinds, sorted(below), list(filter(_is_shown, links)))


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


def run_summary(folder: Path) -> dict[str, Any]:
    """Return state, step, loss and sparkline of a run."""
    run = RunDir(folder)
    beats = _heartbeats(run.heartbeats)
    metrics = _size_and_mtime(run.metrics)
    facts = dict(_run_facts(run, (metrics, _size_and_mtime(run.log))))
    # Files much older than the newest one are from an earlier launch on more processes.
    failure = _failure([run.heartbeats / name for name, changed in beats if changed > beats[0][1] - _ALIVE * 1e9])
    ended = facts.pop("ended")
    newest = max((changed for _, changed in beats), default=0 if ended else metrics[1]) / 1e9
    facts["changed"] = round(max(newest, metrics[1] / 1e9))
    if failure:
        return facts | {"state": "failed", "message": failure}
    if newest > time.time() - _ALIVE:
        return facts | {"state": "running"}
    if beats:
        return facts | {"state": "lost", "message": "No sign of life: it was killed, or its machine is gone."}
    complete = facts["step"] is not None and facts["step"] == facts["steps"]
    return facts | {"state": "finished" if complete or ended == "Finished" else "stopped"}


@lru_cache(maxsize=4096)
def _run_facts(run: RunDir, version: tuple[Any, ...]) -> dict[str, Any]:
    last = parse_row(last_line(read_tail(run.metrics))) or {}
    log = _read_log(run, 16384)
    steps = [total for _, total in _STEPS.findall(log)] or _LENGTH.findall(log)
    end = _END.search(last_line(log))
    rows = [row for line in sample_lines(run.metrics, _SPARKLINE_POINTS) if (row := parse_row(line))]
    losses = [number(row.get("train/loss")) for row in [*rows, last]]
    return {
        "step": number(last.get("step")),
        "steps": int(steps[-1].replace(b",", b"")) if steps else None,
        "images": number(last.get("images")),
        "loss": number(last.get("train/loss")),
        "sparkline": [round(loss, 5) for loss in losses if loss is not None],
        "ended": (end[1] or end[2]).decode() if end else "",
    }


def _failure(heartbeats: list[Path]) -> str:
    """Return why processes ended, if one recorded it; a failed one knows more than those that lost contact."""
    records = [read_object(path, 1 << 16) for path in heartbeats]
    messages = {str(record.get("left")): str(record.get("message")) for record in reversed(records)}
    return messages.get("failed") or messages.get("lost contact") or ""


def _heartbeats(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return names and modification times, newest first; a file that was removed meanwhile does not count."""
    beats = [(entry.name, _size_and_mtime(Path(entry))[1]) for _, entry in list_matching(folder, _HEARTBEAT)]
    return tuple(sorted((beat for beat in beats if beat[1]), key=lambda beat: -beat[1])[:_MAX_HEARTBEATS])


def _size_and_mtime(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_size, status.st_mtime_ns


_MAX_CONFIG_BYTES = _MAX_LOG_BYTES = 1 << 16


def run_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run by dotted name; empty where config.yaml is damaged."""
    run = _run_dir(folder)
    return _read_config(run.config, _size_and_mtime(run.config)[1])


@lru_cache(maxsize=256)
def _read_config(path: Path, version: int) -> dict[str, Any]:
    try:
        text = read_regular(path, _MAX_CONFIG_BYTES)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            return {}  # repeated aliases make a short file endless
        tree = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        branch = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {str(name): value}
        found |= {key: _plain(one) for key, one in branch.items()}
    return found


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold; what a run does not write, such as a date, becomes text."""
    if isinstance(value, list):
        return [str(one) if isinstance(one, list) else _plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def log_tail(folder: Path) -> dict[str, Any]:
    """Return the last complete lines of a run's log."""
    tail = _read_log(_run_dir(folder), _MAX_LOG_BYTES)
    begin = tail.find(b"\n") + 1 if len(tail) == _MAX_LOG_BYTES else 0
    return {"text": tail[begin : tail.rfind(b"\n") + 1].decode(errors="replace"), "is_whole": begin == 0}


def _read_log(run: RunDir, limit: int) -> bytes:
    return read_tail(run.log, limit) if is_real_folder(run.log.parent) else b""


def _run_dir(folder: Path) -> RunDir:
    """Return a run's folder: settings and logs of other folders are not shown."""
    if "run" not in _list_folder(folder, version_of(folder)).kinds:
        raise NotFound
    return RunDir(folder)


_MAX_REPORT_BYTES = 256 << 20
_REPORT_PAGES = ("report/index.html", "index.html")


def evaluation_summary(folder: Path) -> dict[str, Any] | None:
    """Return scores and the path of the page; None where report.json is not an evaluation's."""
    path = folder / "report.json"
    size, changed = _size_and_mtime(path)
    report = _read_report(path, changed) if size < _MAX_REPORT_BYTES else None
    if report is None:
        return None
    page = next((folder / name for name in _REPORT_PAGES if (folder / name).is_file()), None)
    return report | {"state": "finished", "changed": round(changed / 1e9), "page": page}


@lru_cache(maxsize=4096)
def _read_report(path: Path, version: int) -> dict[str, Any] | None:
    """Read the fields that the board shows; a damaged report of any kind is left out."""
    report = read_object(path, _MAX_REPORT_BYTES)
    try:
        scores = {
            name: {key: number(score.get(key)) for key in ("value", "low", "high")}
            for name, score in report["scores"].items()
            if score
        }
        return {
            "scores": {name: score for name, score in scores.items() if score["value"] is not None},
            "images": (report.get("images") or {}).get("count"),
            "warnings": [str(warning) for warning in report.get("warnings") or []][:20],
        }
    except (KeyError, TypeError, AttributeError):
        return None


_STEP = re.compile(r"step_(\d+)")
_SAMPLE = re.compile(r"gpu_(\d+)_sample(?:_(\d+))?\.png")
_ERROR = re.compile(r"gpu_(\d+)_error\.txt")
_MAX_PROMPT = 2000  # characters


class _Checkpoint(NamedTuple):
    samples: Sequence[tuple[str, str]] = ()  # file and prompt
    errors: Sequence[tuple[str, str]] = ()  # GPU and reason


def sample_grid(folder: Path) -> dict[str, Any]:
    """Return the prompts and steps of a run's samples, and for each step the file of each prompt, or null.

    A prompt with several samples per checkpoint has as many rows.
    """
    rows: dict[tuple[str, int], int] = {}
    columns: list[tuple[int, dict[int, str], _Checkpoint]] = []
    folders = [(int(match[1]), entry) for match, entry in list_matching(folder, _STEP)]
    for step, entry in sorted(folders, key=lambda found: found[0]):
        if not entry.is_dir(follow_symlinks=False):
            continue
        try:
            checkpoint = _read_checkpoint(entry.path, version_of(Path(entry)))
        except OSError:
            continue
        repeats: Counter[str] = Counter()
        files: dict[int, str] = {}
        for name, prompt in checkpoint.samples:
            repeats[prompt] += 1
            files[rows.setdefault((prompt, repeats[prompt]), len(rows))] = name
        if files or checkpoint.errors:
            columns.append((step, files, checkpoint))
    return {
        "prompts": [prompt for prompt, _ in rows],
        "steps": [step for step, _, _ in columns],
        "files": [[files.get(row) for row in range(len(rows))] for _, files, _ in columns],
        "errors": [
            {"step": step, "gpu": gpu, "reason": reason}
            for step, _, checkpoint in columns
            for gpu, reason in checkpoint.errors
        ],
    }


@lru_cache(maxsize=8192)
def _read_checkpoint(folder: str, version: int) -> _Checkpoint:
    names = set(os.listdir(folder))  # noqa: PTH208  # a Path for each of many files would be slow
    # The GPUs take turns: the first sample of each GPU, then the second ones, are the prompts in their order.
    found = sorted((int(match[2] or 1), int(match[1]), name) for name in names if (match := _SAMPLE.fullmatch(name)))
    samples = []
    for _, _, name in found:
        prompt_file = name.replace("_sample", "_prompt", 1).replace(".png", ".txt")
        if prompt_file in names:  # written after the image: without it, the image may be incomplete
            samples.append((name, _read_text(f"{folder}/{prompt_file}")))
    errors = [(match[1], _read_text(f"{folder}/{name}")) for name in sorted(names) if (match := _ERROR.fullmatch(name))]
    return _Checkpoint(samples, errors)


def _read_text(path: str) -> str:
    try:
        return read_regular(path, 4 * _MAX_PROMPT).decode(errors="replace").strip()[:_MAX_PROMPT]
    except OSError:
        return ""
