"""sweep.json, the table, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from muralist.errors import UserError
from muralist.models.weights import Which
from muralist.sweep.combinations import Combination
from muralist.sweep.results import Found, Score, table, verdict

SETTINGS = {"model": "JiT-T/8 at 16 px", "num_inference_steps": 50, "num_samples": 8192, "reference": "ab"}


def score(scale: float, fid: float, around: float = 0.1, weights: Which = "ema1") -> Score:
    interval = None if scale == 1 else (0.1, 1.0)
    return Score(Combination(weights, scale, interval), fid, fid - around, fid + around, 8192, 75.0)


def found(folder: Path, *scores: Score, **changes: Any) -> Found:
    opened = Found.open(folder / "sweep.json", "results/run", SETTINGS | changes)
    opened.scores |= {score.combination: score for score in scores}
    return opened


def test_it_is_read_back(tmp_path: Path) -> None:
    first = found(tmp_path, score(2, 4.0), score(1, 9.0))
    first.full = score(2, 3.5)
    first.write(finished=True)
    again = found(tmp_path)
    assert (again.scores, again.full) == (first.scores, first.full)
    assert [one.fid for one in again.ranked()] == [4.0, 9.0]
    with pytest.raises(
        UserError, match=r"Changed: num_inference_steps 50 -> 20; reference ab -> cd\. Its model was resu"
    ):
        found(tmp_path, num_inference_steps=20, reference="cd")
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="damaged. Delete it: pictures and features stay"):
        found(tmp_path)


def test_the_table() -> None:
    ranked = [score(2.5, 4.0), score(2, 4.15, weights="ema2"), score(3, 4.3), score(1, 9.0)]
    console = Console(width=118, color_system=None)
    with console.capture() as capture:
        console.print(table(ranked, score(2.5, 3.52)))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert lines == [
        "weights guidance interval FID 95% pictures GPU time",
        "ema1 2.5 0.1 to 1 4.00 3.90 to 4.10 8,192 1 min 15 s best",
        "ema2 2 0.1 to 1 4.15 4.05 to 4.25 8,192 1 min 15 s within noise",
        "ema1 3 0.1 to 1 4.30 4.20 to 4.40 8,192 1 min 15 s",
        "ema1 1 - 9.00 8.90 to 9.10 8,192 1 min 15 s",
        "ema1 2.5 0.1 to 1 3.52 3.42 to 3.62 8,192 1 min 15 s full count",
    ]
    with console.capture() as capture:
        console.print(table(ranked, most=1))
    assert len(capture.get().splitlines()) == 2


def test_the_verdict() -> None:
    middle = verdict([score(2, 4.0), score(3, 4.5), score(1, 9.0)])
    assert middle == ["Best of 3: ema1_cfg2_0.1-1, FID 4.00 with 8,192 pictures."]
    edge = verdict([score(3, 4.0), score(2, 4.1), score(1, 9.0)])
    assert "within noise of 1 other:" in edge[1]
    assert edge[2] == "Its guidance is the highest that was tried: try higher ones too, in the same folder."
    assert "the lowest that was tried" in verdict([score(2, 4.0), score(3, 4.5)])[1]
    assert len(verdict([score(1, 4.0), score(2, 5.0)])) == 1  # there is nothing below no guidance
