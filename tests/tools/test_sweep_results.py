"""The combinations of a sweep, sweep.json and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from muralist.core.errors import UserError
from muralist.models.weights import WeightSet
from muralist.settings import SweepSettings
from muralist.tools.sweep import Combination, SweepResults, SweepScore, conclusions, list_combinations, results_table

SETTINGS = {"model": "JiT-T/8 at 16 px", "num_inference_steps": 50, "num_samples": 8192, "reference": "ab"}


def score(scale: float, fid: float, around: float = 0.1, weights: WeightSet = "ema1") -> SweepScore:
    interval = None if scale == 1 else (0.1, 1.0)
    return SweepScore(Combination(weights, scale, interval), fid, fid - around, fid + around, 8192, 75.0)


def found(folder: Path, *scores: SweepScore, **changes: Any) -> SweepResults:
    opened = SweepResults.open(folder / "sweep.json", "results/run", SETTINGS | changes)
    opened.scores |= {score.combination: score for score in scores}
    return opened


def test_results_are_read_back(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="damaged. Delete it and run the same command: images and features are kept"):
        found(tmp_path)


def test_the_table() -> None:
    ranked = [score(2.5, 4.0), score(2, 4.15, weights="ema2"), score(3, 4.3), score(1, 9.0)]
    console = Console(width=118, color_system=None)
    with console.capture() as capture:
        console.print(results_table(ranked, score(2.5, 3.52)))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert lines == [
        "weights guidance interval FID 95% images GPU time",
        "ema1 2.5 0.1 to 1 4.00 3.90 to 4.10 8,192 1 min 15 s best",
        "ema2 2 0.1 to 1 4.15 4.05 to 4.25 8,192 1 min 15 s within noise",
        "ema1 3 0.1 to 1 4.30 4.20 to 4.40 8,192 1 min 15 s",
        "ema1 1 - 9.00 8.90 to 9.10 8,192 1 min 15 s",
        "ema1 2.5 0.1 to 1 3.52 3.42 to 3.62 8,192 1 min 15 s full count",
    ]
    with console.capture() as capture:
        console.print(results_table(ranked, limit=1))
    assert len(capture.get().splitlines()) == 2


def test_conclusions() -> None:
    middle = conclusions([score(2, 4.0), score(3, 4.5), score(1, 9.0)])
    assert middle == ["Best of 3: ema1_cfg2_0.1-1, FID 4.00 with 8,192 images."]
    edge = conclusions([score(3, 4.0), score(2, 4.1), score(1, 9.0)])
    assert "within noise of 1 other:" in edge[1]
    assert edge[2] == "Its guidance scale is the highest one tried: try higher ones too, in the same folder."
    assert "the lowest one tried" in conclusions([score(2, 4.0), score(3, 4.5)])[1]
    assert len(conclusions([score(1, 4.0), score(2, 5.0)])) == 1  # no scale is below no guidance


def given(**changes: Any) -> SweepSettings:
    return SweepSettings(model_path="", reference="", output_dir="", **changes)


def names(settings: SweepSettings, guided: bool = True, single_set: bool = False) -> list[str]:
    return [combination.name for combination in list_combinations(settings, guided, single_set)[0]]


def test_every_combination_once() -> None:
    settings = given(guidance_scale=[1, 2, 2.9, 2.0], guidance_interval=["0,1", "0.1,1"])
    found, notes = list_combinations(settings, guided=True, single_set=False)
    each = ["cfg1", "cfg2_0-1", "cfg2_0.1-1", "cfg2.9_0-1", "cfg2.9_0.1-1"]
    assert [combination.name for combination in found] == [
        f"{which}_{rest}" for which in ("ema1", "ema2") for rest in each
    ]
    assert notes == ["6 of 16 combinations are duplicates and left out."]  # a scale of 1 has no interval; 2 is 2.0
    assert len(names(given())) == 14


def test_close_scales_have_different_folders() -> None:
    assert names(given(weights=["model"], guidance_scale=[2.9, 2.9000001])) == [
        "model_cfg2.9_0.1-1",
        "model_cfg2.9000001_0.1-1",
    ]


def test_missing_choices_are_logged() -> None:
    found, notes = list_combinations(given(weights=["ema1", "ema2", "ema1"]), guided=False, single_set=False)
    assert [(combination.name, combination.generate_settings) for combination in found] == [
        ("ema1", {"weights": "ema1"}),
        ("ema2", {"weights": "ema2"}),
    ]
    assert notes == ["The model is unconditional and cannot be guided: only its weights are compared."]
    found, notes = list_combinations(given(guidance_scale=[1, 3]), guided=True, single_set=True)
    assert [combination.name for combination in found] == ["weights_cfg1", "weights_cfg3_0.1-1"]
    assert notes == ["The model has a single set of weights: there are no EMA weights to choose from."]
    assert found[1].flags == "--guidance_scale 3 --guidance_interval 0.1 1"


def test_flags_of_a_combination() -> None:
    chosen = Combination("ema2", 2.5, (0.1, 1.0))
    assert chosen.flags == "--weights ema2 --guidance_scale 2.5 --guidance_interval 0.1 1"
    assert Combination("ema1", 1.0, None).flags == "--weights ema1 --guidance_scale 1"


@pytest.mark.parametrize(
    ("written", "why"),
    [("0.1", "not two numbers"), ("0.1:1", "not two"), ("0,0.5,1", "not two"), ("1,0", "empty"), ("0,1.5", "outside")],
)
def test_invalid_intervals_are_refused(written: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"'{written}' is not an interval.*{why}.*Write LOW,HIGH"):
        names(given(guidance_interval=[written]))
