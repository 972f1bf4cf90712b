"""Curves: nothing is lost in fewer points, and what grows is read once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from muralist.board import curves as module
from muralist.board.curves import POINTS, RecentSeries, Series
from tests.support.boards import line


def write(path: Path, steps: int, **values: float) -> Path:
    path.write_text("".join(line(step, **values) for step in range(1, steps + 1)))
    return path


def test_a_short_run_is_not_downsampled(tmp_path: Path) -> None:
    window = Series(write(tmp_path / "metrics.jsonl", 5)).window("images")
    assert window["width"] == 1 and window["x"] == [4, 8, 12, 16, 20]
    assert window["series"]["train/loss"] == {"mean": [1, 0.5, 0.333333, 0.25, 0.2]}
    assert "epoch" not in window["series"] and "time" not in window["series"]


def test_a_spike_survives_any_number_of_steps(tmp_path: Path) -> None:
    losses = np.full(50_000, 0.25)
    losses[31_234], losses[40_001] = 99.0, 0.001
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "train/loss": {loss}}}\n' for n, loss in enumerate(losses, 1)))
    window = Series(path).window("step")
    loss = window["series"]["train/loss"]
    assert window["width"] == 32 and len(window["x"]) == len(loss["mean"]) == 1563 <= POINTS
    assert window["x"][0] == 32 and window["x"][-1] == 50_000
    assert loss["high"][31_234 // 32] == 99.0 and loss["low"][40_001 // 32] == 0.001
    assert loss["mean"][31_234 // 32] == pytest.approx((31 * 0.25 + 99) / 32, rel=1e-5)
    assert loss["low"][0] == loss["mean"][0] == loss["high"][0] == 0.25

    near = Series(path).window("step", low=31_200, high=31_300)
    assert near["width"] == 1 and near["x"][0] == 31_199 and near["x"][-1] == 31_301
    assert near["series"]["train/loss"]["mean"].index(99.0) == near["x"].index(31_235)


def test_only_new_buckets_are_sent(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", 5000)
    series = Series(path)
    first = series.window("step")
    assert first["width"] == 4 and first["next"] == 5000
    with path.open("a") as file:
        file.write(line(5001, 7.0) + line(5002, 9.0) + '{"step": 5003, "train/lo')
    news = series.window("step", f"{first['version']}.4.{first['next']}")
    assert news["begin"] == 5000 and news["rows"] == 5002 and news["x"] == [5002]
    assert news["series"]["train/loss"] == {"mean": [8.0], "low": [7.0], "high": [9.0]}
    with path.open("a") as file:
        file.write('ss": 3.0}\n')
    assert series.window("step", f"{first['version']}.4.{news['next']}")["series"]["train/loss"]["mean"] == [
        pytest.approx(19 / 3, rel=1e-5)
    ]
    other = series.window("step", "ffffffff.4.5000")
    assert other["begin"] == 0, "another version is told everything"


def test_a_truncated_run_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", 100)
    series = Series(path)
    first = series.window("step")
    other = tmp_path / "other"
    other.write_text("".join(line(step) for step in range(1, 51)) + line(51, 5.0) * 60)
    other.replace(path)
    again = series.window("step", f"{first['version']}.1.100")
    assert again["version"] != first["version"] and again["begin"] == 0 and again["rows"] == 110


def test_invalid_values_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = ["torn {", "", "[1]", '{"no": 1}', "\x00"]
    rows = [
        '{"step": 1, "train/loss": NaN}',
        '{"step": 2, "train/loss": "high"}',
        '{"step": 3, "train/loss": 1e300, "val/loss": 0.5}',
        *torn,
        '{"step": 4, "train/loss": 2, "val/loss": true}',
    ]
    path.write_text("\n".join(rows) + "\n")
    window = Series(path).window("step")
    assert window["x"] == [1, 2, 3, 4]
    assert window["series"] == {
        "train/loss": {"mean": [None, None, None, 2]},
        "val/loss": {"mean": [None, None, 0.5, None]},
    }
    json.dumps(window, allow_nan=False)


def test_hours_exclude_pauses(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [1000, 1036, 1072, 90_000, 90_036]
    path.write_text("".join(line(step, time=time) for step, time in enumerate(times, 1)))
    assert Series(path).window("hours")["x"] == [0, 0.01, 0.02, 0.02, 0.03]


def test_a_missing_file_is_an_empty_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(path)
    assert series.window("hours")["x"] == [] and series.window("step", low=0, high=5)["series"] == {}
    write(path, 2)
    assert series.window("step")["x"] == [1, 2]


def test_memory_is_bounded_over_runs_and_columns(tmp_path: Path) -> None:
    recent = RecentSeries(max_cells=25_000)
    paths = [write(tmp_path / f"{number}.jsonl", 1000) for number in range(4)]
    series = [recent.get(path) for path in paths]
    for one in series:
        one.window("step")
    assert recent.get(paths[3]) is series[3] and recent.get(paths[2]) is series[2]
    assert recent.get(paths[0]) is not series[0], "the least recently viewed are dropped"
    crowd = tmp_path / "crowd.jsonl"
    crowd.write_text(json.dumps({"step": 1, **{f"a/{n}": n for n in range(500)}}) + "\n")
    assert len(Series(crowd).window("step")["series"]) == module._MAX_COLUMNS - 3
