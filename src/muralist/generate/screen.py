"""What one sees while pictures are made: a bar for each GPU and a total; lines of text where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from muralist.words import duration

Counts = dict[str, tuple[int, int, int]]
"""Done, failed and total of each worker."""

_SECONDS_BETWEEN_LINES = 10.0


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, counts: Counts) -> None:
        """How far each worker is."""

    def say(self, sentence: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """No more comes."""


def open_screen() -> Screen:
    """Bars on a terminal, else lines."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()


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

    def left(self, finished: int, total: int) -> str:
        """How long the rest takes, in words."""
        rate = self.rate(finished)
        return duration((total - finished) / rate) if rate else "?"


class _TimeColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed = duration(task.fields["elapsed_time"])
        return Text(f"[{elapsed}<{task.fields['left']}, {task.fields['told']}]", style="dim")


class Bars:
    """One bar per GPU and one for all."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.percentage:>3.0f}%", style="bold"),
            BarColumn(None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            _TimeColumn(),
            console=console,
            refresh_per_second=4,
        )
        self.tasks: dict[str, TaskID] = {}
        self.paces: dict[str, Pace] = {}
        self.started = time.monotonic()
        self.progress.start()

    def show(self, counts: Counts) -> None:
        """Move the bars."""
        whole = tuple(sum(column) for column in zip(*counts.values(), strict=True))
        rows = {f"GPU {label}:": three for label, three in counts.items()}
        for name, (done, failed, total) in {**rows, "total": whole}.items():
            pace = self.paces.setdefault(name, Pace())
            told = f"success: {done:,}, failed: {failed:,}"
            if name == "total":
                told += f", {pace.rate(done + failed):.2f} images/s"
            fields: dict[str, Any] = {
                "elapsed_time": time.monotonic() - self.started,
                "left": pace.left(done + failed, total),
                "told": told,
            }
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(name, total=total, **fields)
            self.progress.update(self.tasks[name], completed=done + failed, total=total, **fields)

    def say(self, sentence: str) -> None:
        """Above the bars."""
        self.progress.console.print(sentence, highlight=False)

    def close(self) -> None:
        """Leave the bars as they are."""
        self.progress.stop()


class Lines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self.pace, self.shown, self.last = Pace(), time.monotonic(), -1

    def show(self, counts: Counts) -> None:
        """One line, if it is time for one."""
        done, failed, total = (sum(column) for column in zip(*counts.values(), strict=True))
        rate = self.pace.rate(done + failed)
        finished = done + failed == total
        if done + failed in (0, self.last) or (time.monotonic() - self.shown < _SECONDS_BETWEEN_LINES and not finished):
            return
        self.shown, self.last = time.monotonic(), done + failed
        each = "  ".join(f"GPU {label}: {d + f:,}/{t:,}" for label, (d, f, t) in counts.items())
        self.say(
            f"{done + failed:,}/{total:,} (success: {done:,}, failed: {failed:,}), {rate:.2f} images/s, "
            f"{self.pace.left(done + failed, total)} left  {each}"
        )

    def say(self, sentence: str) -> None:
        """To the log."""
        print(sentence, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to do."""
