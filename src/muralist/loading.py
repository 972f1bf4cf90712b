"""What one sees while a model is read: on a terminal how far it is, elsewhere one line."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muralist.words import gigabytes

log = logging.getLogger("muralist")

WORTH_SAYING = 100_000_000  # bytes; less is read before one has read that it is
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")

Advance = Callable[[int], None]


@contextmanager
def loading(what: str, place: Path) -> Iterator[Advance | None]:
    """Show that a file or a folder of weights is being read; gives what moves the bar, where there is one.

    A file has a bar of its bytes. Of a folder a library reads what it needs: there the seconds are shown.
    """
    size = _size(place) if _speaks() else 0
    if size < WORTH_SAYING:
        yield None
        return
    if not sys.stderr.isatty():
        log.info("Loading %s (%s).", what, gigabytes(size))
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bytes_read = (BarColumn(bar_width=20), DownloadColumn()) if place.is_file() else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bytes_read, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"Loading {what}", total=size if bytes_read else None)
        yield (lambda count: bar.advance(task, count)) if bytes_read else None


def _speaks() -> bool:
    """Of many processes the first says it, and none of those that another one watches over."""
    return os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in _WEIGHTS]
    return sum(path.stat().st_size for path in files if path.is_file())
