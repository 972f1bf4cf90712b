"""Shows the progress of a command: a bar for each GPU and a total; lines of text where there is no terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from tqdm import tqdm

from muralist.core.formatting import format_duration
from muralist.core.run_dir import atomic_write
from muralist.generate.output_dir import OutputDir

_LINE_INTERVAL = 10.0  # seconds
_RECORD_INTERVAL = 1.0  # seconds
_BAR = "{l_bar}{bar}| {n:,}/{total:,} [{elapsed}<{remaining}{postfix}]"


class WorkerProgress(NamedTuple):
    """How far a worker is."""

    done: int = 0
    failed: int = 0
    total: int = 0
    loading: bool = False  # the model

    @property
    def finished(self) -> int:
        """Samples that are done or failed."""
        return self.done + self.failed


class ProgressDisplay(Protocol):
    """Where progress is shown."""

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        """Show how far each worker is; `unassigned` samples belong to none at the moment."""

    def print(self, text: str) -> None:
        """Print a line for the user."""

    def close(self) -> None:
        """Stop the display."""


def open_display() -> ProgressDisplay:
    """Open bars on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    return ProgressBars(console) if console.is_terminal and not console.is_dumb_terminal else ProgressLines()


class RateMeter:
    """Images per second since the first ones came: loading the model does not count."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._first = 0

    def rate(self, finished: int) -> float:
        """Return images per second, 0 while unknown."""
        now = time.monotonic()
        if self._since is None:
            if finished:
                self._since, self._first = now, finished
            return 0.0
        return (finished - self._first) / max(now - self._since, 1e-3)


def _sum(workers: Mapping[str, WorkerProgress], unassigned: int) -> WorkerProgress:
    done, failed, total = (sum(column) for column in zip(*(worker[:3] for worker in workers.values()), strict=True))
    return WorkerProgress(done, failed, total + unassigned)


class _Bar(NamedTuple):
    label: str
    progress: WorkerProgress
    rate: float
    elapsed: float


class ProgressBars:
    """One bar per GPU and one for all, in tqdm's format."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.monotonic()
        self.meters: defaultdict[str, RateMeter] = defaultdict(RateMeter)
        self.bars: list[_Bar] = []
        self.live = Live(self, console=console, refresh_per_second=4)
        self.live.start()

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        """Move the bars."""
        rows = {f"GPU {label}": worker for label, worker in workers.items() if worker.total}
        rows["total"] = _sum(workers, unassigned)
        elapsed = time.monotonic() - self.started
        self.bars = [_Bar(label, row, self.meters[label].rate(row.finished), elapsed) for label, row in rows.items()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max((len(bar.label) for bar in self.bars), default=0)
        for label, progress, rate, elapsed in self.bars:
            status = f"success: {progress.done:,}, failed: {progress.failed:,}"
            if progress.loading:
                status = "loading the model"
            elif label == "total":
                status += f", {rate:.2f} images/s"
            line = tqdm.format_meter(
                progress.finished,
                progress.total,
                elapsed,
                ncols=options.max_width,
                prefix=f"{label:>{longest}}",
                ascii=" #",
                rate=rate or float(progress.finished == progress.total),  # a rate of 0 is shown as ?
                bar_format=_BAR,
                postfix=status,
            )
            yield Text(line, no_wrap=True)

    def print(self, text: str) -> None:
        """Print above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bars as they are."""
        self.live.stop()


class ProgressLines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self.meter, self.shown, self.last = RateMeter(), time.monotonic(), 0

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        """Print one line, if it is time for one."""
        total = _sum(workers, unassigned)
        rate, left = self.meter.rate(total.finished), total.total - total.finished
        is_soon = time.monotonic() - self.shown < _LINE_INTERVAL
        if total.finished == self.last or (is_soon and left):
            return
        self.shown, self.last = time.monotonic(), total.finished
        speed = f", {rate:.2f} images/s, {format_duration(left / rate)} left" if rate else ""
        each = ", ".join(f"GPU {label}: {worker.finished:,}/{worker.total:,}" for label, worker in workers.items())
        counts = f"success: {total.done:,}, failed: {total.failed:,}"
        self.print(f"{total.finished:,}/{total.total:,} ({counts}){speed}; {each}")

    def print(self, text: str) -> None:
        """Print to stderr."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing."""


class ProgressRecorder:
    """A display whose counts also go into a file of the output folder, for the board."""

    def __init__(self, display: ProgressDisplay, output: OutputDir) -> None:
        self._display, self._output = display, output
        self.print, self.close = display.print, display.close
        self._recorded = -_RECORD_INTERVAL

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        """Show the progress, and write it down every second."""
        self._display.update(workers, unassigned)
        if time.monotonic() - self._recorded >= _RECORD_INTERVAL and self._output.work.is_dir():
            self._recorded = time.monotonic()
            record = {"workers": {label: worker[:3] for label, worker in workers.items()}, "unassigned": unassigned}
            with suppress(OSError):  # a full disk is reported by the first image that does not fit
                atomic_write(self._output.progress, json.dumps(record))
