"""The curves of a run: metrics.jsonl is read once, as it grows, and downsampled to the points of a screen.

Rows are grouped into buckets of a power of two rows. The page gets mean, minimum and maximum of each bucket, so that a
single spike among a million steps stays visible. Buckets begin at multiples of their width: when a run continues, only
the last bucket changes, and a page that states what it has gets only new ones.
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

from muralist.board.files import GrowingFile

Axis = Literal["step", "images", "hours"]
POINTS = 2000
_AXES: tuple[str, ...] = ("step", "images", "time")
_MAX_COLUMNS = 64
_MAX_CELLS = 24_000_000  # of all runs together, 4 to 8 bytes each; beyond, the least recently used run is dropped
_LONGEST_PAUSE = 600.0  # seconds between two lines; a longer pause means that the run was stopped
_DIGITS = 6


class ClientState(NamedTuple):
    """The part of a run's curves that a page already has."""

    version: str
    width: int
    row: int


class Series:
    """The metrics of one run, as columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.version = secrets.token_hex(4)
        self.rows = 0
        self._file = GrowingFile(self.path)
        self._columns: dict[str, array[float]] = {name: array("d") for name in _AXES}

    @property
    def cells(self) -> int:
        """Return how many values are held."""
        return self.rows * len(self._columns)

    def window(
        self, axis: Axis, have: ClientState | None = None, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Return the curves over a range of the axis, or all of it; with `have`, only new buckets."""
        with self._lock:
            self._read()
            positions = self._positions(axis)
            begin, end = 0, self.rows
            if low is not None and high is not None:
                # One row beyond each side, so that lines reach the edge.
                begin = max(0, int(np.searchsorted(positions, low)) - 1)
                end = min(self.rows, int(np.searchsorted(positions, high, side="right")) + 1)
            width = _bucket_width(end - begin)
            begin -= begin % width
            if have and have.version == self.version and have.width == width and begin <= have.row <= end:
                begin = have.row - have.row % width
            return {
                "version": self.version,
                "rows": self.rows,
                "width": width,
                "begin": begin,
                "next": end - end % width,  # the first bucket that may still change
                "x": _to_json(_bucket_ends(positions[begin:end], width)),
                "series": self._series(begin, end, width),
            }

    def _read(self) -> None:
        if not self._file.is_unchanged():
            self._restart()
        for _, data in self._file.new_lines():
            rows = _parse_rows(data)
            for name in {name for row in rows for name in row}:
                if "/" in name and name not in self._columns and len(self._columns) < _MAX_COLUMNS:
                    self._columns[name] = array("f", [math.nan]) * self.rows
            for name, column in self._columns.items():
                column.extend([_number(row.get(name)) for row in rows])
            self.rows += len(rows)

    def _positions(self, axis: Axis) -> np.ndarray:
        if axis != "hours":
            return np.array(self._columns[axis])
        times = np.array(self._columns["time"])
        if not len(times):
            return times
        elapsed = np.nan_to_num(np.diff(times))
        training = np.where((elapsed < 0) | (elapsed > _LONGEST_PAUSE), 0, elapsed)
        return np.concatenate(([0.0], np.cumsum(training))) / 3600

    def _series(self, begin: int, end: int, width: int) -> dict[str, dict[str, list[float | None]]]:
        series: dict[str, dict[str, list[float | None]]] = {}
        for name, column in self._columns.items():
            if name in _AXES:
                continue
            values = np.array(column[begin:end], dtype=np.float64)
            if width == 1:
                series[name] = {"mean": _to_json(values)}
                continue
            starts = np.arange(0, len(values), width)
            known = np.isfinite(values)
            if not len(starts):
                series[name] = {"mean": [], "low": [], "high": []}
                continue
            counts = np.add.reduceat(known, starts, dtype=np.int64)
            sums = np.add.reduceat(np.where(known, values, 0.0), starts)
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = np.where(counts > 0, sums / counts, np.nan)
            finite = np.where(known, values, np.nan)
            series[name] = {
                "mean": _to_json(mean),
                "low": _to_json(np.fmin.reduceat(finite, starts)),
                "high": _to_json(np.fmax.reduceat(finite, starts)),
            }
        return series


class Curves:
    """The series of recently viewed runs, in bounded memory."""

    def __init__(self, max_cells: int = _MAX_CELLS) -> None:
        self.max_cells = max_cells
        self._series: OrderedDict[Path, Series] = OrderedDict()
        self._lock = threading.Lock()

    def window(
        self,
        path: Path,
        axis: Axis,
        have: ClientState | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> dict[str, Any]:
        """Return the curves of one metrics.jsonl; see `Series.window`."""
        with self._lock:
            series = self._series.setdefault(path, Series(path))
            self._series.move_to_end(path)
        window = series.window(axis, have, low, high)
        with self._lock:
            while len(self._series) > 1 and sum(kept.cells for kept in self._series.values()) > self.max_cells:
                self._series.popitem(last=False)
        return window

    @property
    def cells(self) -> int:
        """Return how many values are held."""
        return sum(series.cells for series in self._series.values())


def _parse_rows(data: bytes) -> list[dict[str, Any]]:
    lines = data.splitlines()
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:  # a line that a crash truncated, or an empty one
        rows = [row for line in lines if (row := parse_row(line)) is not None]
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None where it is invalid."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _number(value: Any) -> float:
    return value if type(value) in (int, float) and abs(value) < 1e38 else math.nan


def _bucket_width(rows: int) -> int:
    return 1 << max(0, (-(-rows // POINTS) - 1).bit_length())


def _bucket_ends(positions: np.ndarray, width: int) -> np.ndarray:
    """Return the last position of each bucket."""
    ends = np.arange(width - 1, len(positions) + width - 1, width)
    return positions[np.minimum(ends, len(positions) - 1)] if len(positions) else positions


def _to_json(values: np.ndarray) -> list[float | None]:
    """Round to the digits that a screen shows; NaN and Inf become null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(_DIGITS - 1 - np.where(np.isfinite(exponent), exponent, 0), 0, 300)
        rounded = np.round(values * scale) / scale
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
