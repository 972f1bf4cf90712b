"""The curves of a run: metrics.jsonl read once, line by line as it grows, and drawn with as many points as a screen has.

Rows are put into buckets of a power of two rows. Of each bucket the page gets mean, smallest and largest value, so that a
single spike among a million steps stays visible. Buckets begin at multiples of their width: when a run goes on, only the
last one changes and new ones come, and a page that says what it has gets just those.
"""

from __future__ import annotations

import math
import secrets
import threading
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic_core import from_json

from muralist.board.tail import Tail

Axis = Literal["step", "images", "hours"]
POINTS = 2000
_PLACES: tuple[str, ...] = ("step", "images", "time")
_MOST_COLUMNS = 64
_MOST_CELLS = (
    24_000_000  # of all runs together, 4 to 8 bytes each; beyond them the run not looked at for longest is dropped
)
_LONGEST_PAUSE = (
    600.0  # seconds between two lines; what is longer is a run that was stopped, and does not count as training
)
_DIGITS = 6


class Have(NamedTuple):
    """What a page already shows of a run."""

    version: str
    width: int
    row: int


class Series:
    """The numbers of one run, as columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.version = secrets.token_hex(4)
        self.rows = 0
        self._tail = Tail(self.path)
        self._columns: dict[str, array[float]] = {name: array("d") for name in _PLACES}

    @property
    def cells(self) -> int:
        """How many numbers are held."""
        return self.rows * len(self._columns)

    def window(
        self, axis: Axis, have: Have | None = None, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """The curves over a stretch of the axis, or all of it; with `have`, only what is new."""
        with self._lock:
            self._read()
            places = self._places(axis)
            begin, end = 0, self.rows
            if low is not None and high is not None:
                # One row beyond each side, so that lines run to the edge.
                begin = max(0, int(np.searchsorted(places, low)) - 1)
                end = min(self.rows, int(np.searchsorted(places, high, side="right")) + 1)
            width = _width(end - begin)
            begin -= begin % width
            if have and have.version == self.version and have.width == width and begin <= have.row <= end:
                begin = have.row - have.row % width
            return {
                "version": self.version,
                "rows": self.rows,
                "width": width,
                "begin": begin,
                "next": end - end % width,  # the first bucket that may still change
                "x": _plain(_ends(places[begin:end], width)),
                "series": self._series(begin, end, width),
            }

    def _read(self) -> None:
        if not self._tail.is_same():
            self._restart()
        for _, data in self._tail.parts():
            rows = _parsed(data)
            for name in {name for row in rows for name in row}:
                if "/" in name and name not in self._columns and len(self._columns) < _MOST_COLUMNS:
                    self._columns[name] = array("f", [math.nan]) * self.rows
            for name, column in self._columns.items():
                column.extend([_number(row.get(name)) for row in rows])
            self.rows += len(rows)

    def _places(self, axis: Axis) -> np.ndarray:
        if axis != "hours":
            return np.array(self._columns[axis])
        times = np.array(self._columns["time"])
        if not len(times):
            return times
        pauses = np.nan_to_num(np.diff(times))
        return np.concatenate(([0.0], np.cumsum(np.where((pauses < 0) | (pauses > _LONGEST_PAUSE), 0, pauses)))) / 3600

    def _series(self, begin: int, end: int, width: int) -> dict[str, dict[str, list[float | None]]]:
        drawn: dict[str, dict[str, list[float | None]]] = {}
        for name, column in self._columns.items():
            if name in _PLACES:
                continue
            values = np.array(column[begin:end], dtype=np.float64)
            if width == 1:
                drawn[name] = {"mean": _plain(values)}
                continue
            starts = np.arange(0, len(values), width)
            known = np.isfinite(values)
            if not len(starts):
                drawn[name] = {"mean": [], "low": [], "high": []}
                continue
            counts = np.add.reduceat(known, starts, dtype=np.int64)
            sums = np.add.reduceat(np.where(known, values, 0.0), starts)
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = np.where(counts > 0, sums / counts, np.nan)
            finite = np.where(known, values, np.nan)
            drawn[name] = {
                "mean": _plain(mean),
                "low": _plain(np.fmin.reduceat(finite, starts)),
                "high": _plain(np.fmax.reduceat(finite, starts)),
            }
        return drawn


class Curves:
    """The series of all runs that are looked at, in bounded memory."""

    def __init__(self, most_cells: int = _MOST_CELLS) -> None:
        self.most_cells = most_cells
        self._series: OrderedDict[Path, Series] = OrderedDict()
        self._lock = threading.Lock()

    def window(
        self, path: Path, axis: Axis, have: Have | None = None, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """The curves of one metrics.jsonl; see `Series.window`."""
        with self._lock:
            series = self._series.setdefault(path, Series(path))
            self._series.move_to_end(path)
        window = series.window(axis, have, low, high)
        with self._lock:
            while len(self._series) > 1 and sum(kept.cells for kept in self._series.values()) > self.most_cells:
                self._series.popitem(last=False)
        return window

    @property
    def cells(self) -> int:
        """How many numbers are held."""
        return sum(series.cells for series in self._series.values())


def _parsed(data: bytes) -> list[dict[str, Any]]:
    lines = data.splitlines()
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:  # a line that a crash cut short, or an empty one
        rows = [row for line in lines if (row := parsed_line(line)) is not None]
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """One line of numbers; None where it is none."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _number(value: Any) -> float:
    return value if type(value) in (int, float) and abs(value) < 1e38 else math.nan


def _width(rows: int) -> int:
    return 1 << max(0, (-(-rows // POINTS) - 1).bit_length())


def _ends(places: np.ndarray, width: int) -> np.ndarray:
    """Where each bucket ends."""
    ends = np.arange(width - 1, len(places) + width - 1, width)
    return places[np.minimum(ends, len(places) - 1)] if len(places) else places


def _plain(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON knows them, with as many digits as a screen shows."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(_DIGITS - 1 - np.where(np.isfinite(size), size, 0), 0, 300)
        rounded = np.round(values * scale) / scale
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
