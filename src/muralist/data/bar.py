"""A progress bar for reading a data set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(label: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal and yield the function that moves it on."""
    if not (shown and sys.stderr.isatty()):
        yield lambda images: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda images: progress.advance(task, images)
