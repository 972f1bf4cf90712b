"""Messages for people: durations, sizes, counts, lists, and progress while weights and data sets are read."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from muralist.core.errors import UserError

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

log = logging.getLogger("muralist")

MIN_REPORTED_BYTES = 100_000_000  # smaller files load in less time than a message takes to read
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")

Advance = Callable[[int], None]


def format_duration(seconds: float) -> str:
    """Format seconds as `45 s`, `3 min 05 s`, `2 h 10 min` or `1 d 4 h`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_bytes(count: float) -> str:
    """Format bytes as gigabytes."""
    return f"{count / 1e9:.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f} GB"


def format_list(words: Sequence[object], most: int = 6) -> str:
    """Format a list as `a, b and 4 more`."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"


def parse_count(text: str) -> float:
    """Parse a number such as 10B, 1T, 1.5M or 5e9."""
    # 10,000 is ten thousand, as our own messages print it; 1,5 is one and a half.
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip().upper().replace("_", ""))
    match = re.fullmatch(r"(\d+(?:[.,]\d+)?(?:[eE]\d+)?)\s*([KMBGT]?)", plain)
    if match is None or not float(match[1].replace(",", ".")):
        raise UserError(f"{text!r} is not a number.", fix="Write 10B, 1T, 300M or 5e9.")
    return float(match[1].replace(",", ".")) * _UNITS[match[2]]


def format_count(number: float) -> str:
    """Format a large number as 1T, 10B or 342K."""
    for unit in ("T", "B", "M", "K"):
        if number >= 0.9995 * _UNITS[unit]:  # rounds up to one unit
            return f"{number / _UNITS[unit]:.3g}{unit}"
    return f"{number:.3g}"


@contextmanager
def loading_progress(what: str, place: Path) -> Iterator[Advance | None]:
    """Show that a file or folder of weights is being read; yield a function that advances the bar, if there is one.

    A file has a bar in bytes. A folder is read by a library: it has a timer. Only rank 0 reports, and no worker process.
    """
    size = 0
    if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:
        files = [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in _WEIGHTS]
        size = sum(path.stat().st_size for path in files if path.is_file())
    if size < MIN_REPORTED_BYTES:
        yield None
    elif not sys.stderr.isatty():
        log.info("Loading %s (%s).", what, format_bytes(size))
        yield None
    else:
        from rich.progress import BarColumn, DownloadColumn, TimeElapsedColumn

        bytes_read = (BarColumn(bar_width=20), DownloadColumn()) if place.is_file() else ()
        with _bar(f"Loading {what}", size if bytes_read else None, *bytes_read, TimeElapsedColumn()) as advance:
            yield advance if bytes_read else None


@contextmanager
def progress_bar(label: str, total: int, shown: bool) -> Iterator[Advance]:
    """Show a progress bar on a terminal and yield the function that advances it."""
    if not (shown and sys.stderr.isatty()):
        yield lambda images: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with _bar(label, total, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int | None, *columns: ProgressColumn) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(SpinnerColumn(), text, *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
