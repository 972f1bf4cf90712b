"""What one sees while pictures are made: a bar for each GPU and a total; lines of text where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from muralist.words import duration

_SECONDS_BETWEEN_LINES = 10.0
_ROOM_FOR_WORDS = 90
_SHORTEST = 4
_TOTAL = "total"


class Count(NamedTuple):
    """How far a worker is."""

    done: int = 0
    failed: int = 0
    total: int = 0
    loading: bool = False  # it has no model yet

    @property
    def finished(self) -> int:
        """Made or failed."""
        return self.done + self.failed


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, counts: Mapping[str, Count], unassigned: int) -> None:
        """How far each worker is, and how many samples are nobody's at the moment."""

    def say(self, sentence: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """No more comes."""


def open_screen() -> Screen:
    """Bars on a terminal, else lines."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal and not console.is_dumb_terminal else Lines()


class Pace:
    """Pictures per second since the first ones came: loading the model does not count."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._first = 0

    def rate(self, finished: int) -> float:
        """Pictures per second, 0 while unknown."""
        now = time.monotonic()
        if self._since is None:
            if finished:
                self._since, self._first = now, finished
            return 0.0
        return (finished - self._first) / max(now - self._since, 1e-3)

    def left(self, count: Count) -> float | None:
        """Seconds that the rest takes, None while unknown."""
        if count.finished == count.total:
            return 0.0
        rate = self.rate(count.finished)
        return (count.total - count.finished) / rate if rate else None


def _sum(counts: Mapping[str, Count], unassigned: int) -> Count:
    done, failed, total = (sum(column) for column in zip(*(count[:3] for count in counts.values()), strict=True))
    return Count(done, failed, total + unassigned)


def clock(seconds: float | None) -> str:
    """Minutes and seconds as progress bars show them."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class _Row(NamedTuple):
    name: str
    reached: Count
    times: str
    rate: float


class Bars:
    """One bar per GPU and one for all; they stand still when no more is shown."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.monotonic()
        self.paces: defaultdict[str, Pace] = defaultdict(Pace)
        self.rows: list[_Row] = []
        self.live = Live(self, console=console, refresh_per_second=4)
        self.live.start()

    def show(self, counts: Mapping[str, Count], unassigned: int) -> None:
        """Move the bars."""
        named = {f"GPU {label}": count for label, count in counts.items()} | {_TOTAL: _sum(counts, unassigned)}
        elapsed = clock(time.monotonic() - self.started)
        self.rows = [
            _Row(name, count, f"{elapsed}<{clock(pace.left(count))}", pace.rate(count.finished))
            for name, count in named.items()
            for pace in [self.paces[name]]
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar gets what room the numbers leave; on a narrow terminal words are shorter, then lines are cut."""
        longest = max((len(row.name) for row in self.rows), default=0)
        heads, tails = [], []
        for name, count, times, rate in self.rows:
            share = count.finished / count.total if count.total else 1.0
            heads.append(f"{name:>{longest}}: {share:4.0%}|")
            words = f"success: {count.done:,}, failed: {count.failed:,}"
            if options.max_width < _ROOM_FOR_WORDS:
                words = f"ok {count.done:,}, failed {count.failed:,}"
            if count.loading:
                words = "loading the model"
            if name == _TOTAL:
                words += f", {rate:.2f} images/s"
            tails.append(f"| {count.finished:,}/{count.total:,} [{times}, {words}]")
        width = max(options.max_width - max(map(len, heads), default=0) - max(map(len, tails), default=0), _SHORTEST)
        for head, tail, row in zip(heads, tails, self.rows, strict=True):
            filled = width * row.reached.finished // row.reached.total if row.reached.total else width
            line = Text(head, no_wrap=True, overflow="ellipsis")
            line.append("#" * filled, style="green").append(" " * (width - filled)).append(tail)
            yield line

    def say(self, sentence: str) -> None:
        """Above the bars."""
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bars as they are."""
        self.live.stop()


class Lines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self.pace, self.shown, self.last = Pace(), time.monotonic(), 0

    def show(self, counts: Mapping[str, Count], unassigned: int) -> None:
        """One line, if it is time for one."""
        whole = _sum(counts, unassigned)
        rate, left = self.pace.rate(whole.finished), self.pace.left(whole)
        soon = time.monotonic() - self.shown < _SECONDS_BETWEEN_LINES
        if whole.finished == self.last or (soon and whole.finished < whole.total):
            return
        self.shown, self.last = time.monotonic(), whole.finished
        pace = f", {rate:.2f} images/s, {duration(left)} left" if rate and left is not None else ""
        each = ", ".join(f"GPU {label}: {count.finished:,}/{count.total:,}" for label, count in counts.items())
        self.say(
            f"{whole.finished:,}/{whole.total:,} (success: {whole.done:,}, failed: {whole.failed:,}){pace}; {each}"
        )

    def say(self, sentence: str) -> None:
        """To the log."""
        print(sentence, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to do."""
