"""Test bench/checkpoint_cost.py on a run with known costs."""

from __future__ import annotations

import pytest
from bench.checkpoint_cost import cost


def test_cost_is_pause_plus_slower_steps() -> None:
    # Steps take 0.1 s. After the checkpoints of steps 20 and 40 the loop pauses for 3 s and 1 s, then five steps
    # take 0.12 s each while files are written.
    lines, now = [], 100.0
    for first in range(1, 61, 5):
        before, after = first - 1, first + 4
        now += {20: 3.0, 40: 1.0}.get(before, 0.0)
        each = 0.12 if before in (20, 40) else 0.1
        now += 5 * each
        lines += [
            {"step": step, "images": 8 * step, "time": now, "train/samples_per_second": 8 / each + after * 1e-9}
            for step in range(first, after + 1)
        ]
    at = {line["step"]: line["time"] for line in lines}
    found = cost(lines, {20: at[25] - 0.01, 40: at[45] - 0.01, 60: at[60] + 2})
    assert [row["step"] for row in found["checkpoints"]] == [20, 40]
    assert [row["seconds lost"] for row in found["checkpoints"]] == pytest.approx([3.1, 1.1])
    assert [row["of which the loop stands still"] for row in found["checkpoints"]] == pytest.approx([3.0, 1.0])
    assert not any(row["the next had to wait for them"] for row in found["checkpoints"])
    assert found["ms of a step without"] == pytest.approx(100)
    assert found["share of the time with one every 1000 steps"] == pytest.approx(1.1 / 101.1, abs=1e-5)
    assert found["the same, the first"] == pytest.approx(3.1 / 103.1, abs=1e-5)


def test_checkpoint_that_delays_the_next_is_marked() -> None:
    lines = [
        {"step": step, "images": step, "time": float(step), "train/samples_per_second": 1 + step * 1e-9}
        for step in range(1, 13)
    ]
    rows = cost(lines, {4: 8.5, 8: 9.5, 12: 13.0})["checkpoints"]
    assert [row["the next had to wait for them"] for row in rows] == [True, False]
