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
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from muralist.board.files import GrowingFile

Axis = Literal["step", "images", "hours"]
POINTS = 2000
_AXES: tuple[str, ...] = ("step", "images", "time")
_MAX_COLUMNS = 64
_MAX_CELLS = 24_000_000  # of all runs together, 4 to 8 bytes each
_LONGEST_PAUSE = 600.0  # seconds between two lines; a longer pause means that the run was stopped
_DIGITS = 6


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
        self, axis: Axis, have: str | None = None, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Return the curves over a range of the axis, or all of it.

        `have` is version.width.row of what the page already shows: then only new buckets are returned.
        """
        with self._lock:
            self._read()
            positions = self._positions(axis)
            begin, end = 0, self.rows
            if low is not None and high is not None:
                # One row beyond each side, so that lines reach the edge.
                begin = max(0, int(np.searchsorted(positions, low)) - 1)
                end = min(self.rows, int(np.searchsorted(positions, high, side="right")) + 1)
            width = 1 << max(0, (-(-(end - begin) // POINTS) - 1).bit_length())
            begin -= begin % width
            version, known_width, row = have.split(".") if have else ("", 0, 0)
            if version == self.version and int(known_width) == width and begin <= int(row) <= end:
                begin = int(row) - int(row) % width
            starts = np.arange(begin, end, width)
            return {
                "version": self.version,
                "rows": self.rows,
                "width": width,
                "begin": begin,
                "next": end - end % width,  # the first bucket that may still change
                "x": _to_json(positions[np.minimum(starts + width, end) - 1]),
                "series": {
                    name: _buckets(np.array(column[begin:end], np.float64), width)
                    for name, column in self._columns.items()
                    if name not in _AXES
                },
            }

    def _read(self) -> None:
        if not self._file.is_unchanged():
            self._restart()
        for _, data in self._file.new_lines():
            rows = [row for line in data.splitlines() if (row := parse_row(line)) is not None]
            for name in {name for row in rows for name in row}:
                if "/" in name and name not in self._columns and len(self._columns) < _MAX_COLUMNS:
                    self._columns[name] = array("f", [math.nan]) * self.rows
            for name, column in self._columns.items():
                values = [number(row.get(name)) for row in rows]
                column.extend([math.nan if value is None else value for value in values])
            self.rows += len(rows)

    def _positions(self, axis: Axis) -> np.ndarray:
        if axis != "hours":
            return np.array(self._columns[axis])
        times = np.array(self._columns["time"])
        elapsed = np.nan_to_num(np.diff(times, prepend=times[:1]))
        return np.cumsum(np.where((elapsed < 0) | (elapsed > _LONGEST_PAUSE), 0, elapsed)) / 3600


class RecentSeries:
    """The series of recently viewed runs; while they hold too many values, the least recently viewed are dropped."""

    def __init__(self, max_cells: int = _MAX_CELLS) -> None:
        self.max_cells = max_cells
        self._series: OrderedDict[Path, Series] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> Series:
        """Return the series of a metrics.jsonl."""
        with self._lock:
            series = self._series.setdefault(path, Series(path))
            self._series.move_to_end(path)
            while len(self._series) > 1 and sum(kept.cells for kept in self._series.values()) > self.max_cells:
                self._series.popitem(last=False)
            return series


def _buckets(values: np.ndarray, width: int) -> dict[str, list[float | None]]:
    if width == 1:
        return {"mean": _to_json(values)}
    starts = np.arange(0, len(values), width)
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # a bucket without values
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / np.add.reduceat(known, starts, dtype=np.int64)
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"mean": _to_json(mean), "low": _to_json(low), "high": _to_json(high)}


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None where it is invalid."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def number(value: Any) -> float | None:
    """Return a finite number of a file; None for anything else."""
    return value if type(value) in (int, float) and abs(value) < 1e38 else None


def _to_json(values: np.ndarray) -> list[float | None]:
    """Round to the digits that a screen shows; NaN and Inf become null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(_DIGITS - 1 - np.where(np.isfinite(exponent), exponent, 0), 0, 300)
        rounded = np.round(values * scale) / scale
    return [value if math.isfinite(value) else None for value in rounded.tolist()]
