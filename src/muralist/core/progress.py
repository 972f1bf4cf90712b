"""Progress while weights are loaded and data sets are read: bars on a terminal, one log line elsewhere."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muralist.core.formatting import format_bytes

log = logging.getLogger("muralist")

MIN_REPORTED_BYTES = 100_000_000  # smaller files load in less time than a message takes to read
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")

Advance = Callable[[int], None]


@contextmanager
def loading_progress(what: str, place: Path) -> Iterator[Advance | None]:
    """Show that a file or folder of weights is being read; yield a function that advances the bar, if there is one.

    A file has a bar in bytes. A folder is read by a library: it has a timer.
    """
    size = _size(place) if _is_reporting() else 0
    if size < MIN_REPORTED_BYTES:
        yield None
        return
    if not sys.stderr.isatty():
        log.info("Loading %s (%s).", what, format_bytes(size))
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bytes_read = (BarColumn(bar_width=20), DownloadColumn()) if place.is_file() else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bytes_read, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"Loading {what}", total=size if bytes_read else None)
        yield (lambda count: bar.advance(task, count)) if bytes_read else None


def _is_reporting() -> bool:
    """Whether this process reports progress: rank 0, and not a worker of another process."""
    return os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in _WEIGHTS]
    return sum(path.stat().st_size for path in files if path.is_file())


@contextmanager
def progress_bar(label: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal and yield the function that advances it."""
    if not (shown and sys.stderr.isatty()):
        yield lambda images: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda images: progress.advance(task, images)
