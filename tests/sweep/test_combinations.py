"""What a sweep tries."""

from __future__ import annotations

from typing import Any

import pytest

from muralist.errors import UserError
from muralist.settings import SweepSettings
from muralist.sweep.combinations import Combination, combinations


def given(**changes: Any) -> SweepSettings:
    return SweepSettings(model_path="", reference="", output_dir="", **changes)


def names(settings: SweepSettings, guided: bool = True, one_set: bool = False) -> list[str]:
    return [combination.name for combination in combinations(settings, guided, one_set)[0]]


def test_every_combination_once() -> None:
    settings = given(guidance_scale=[1, 2, 2.9, 2.0], guidance_interval=["0,1", "0.1,1"])
    found, notes = combinations(settings, guided=True, one_set=False)
    each = ["cfg1", "cfg2_0-1", "cfg2_0.1-1", "cfg2.9_0-1", "cfg2.9_0.1-1"]
    assert [combination.name for combination in found] == [
        f"{which}_{rest}" for which in ("ema1", "ema2") for rest in each
    ]
    assert notes == [
        "Left out, because another is the same: 6 of 16 combinations."
    ]  # no guidance has no interval; 2 is 2.0
    assert len(names(given())) == 14


def test_numbers_close_to_each_other_are_not_one_folder() -> None:
    assert names(given(weights=["model"], guidance_scale=[2.9, 2.9000001])) == [
        "model_cfg2.9_0.1-1",
        "model_cfg2.9000001_0.1-1",
    ]


def test_what_there_is_not_to_choose_is_said() -> None:
    found, notes = combinations(given(weights=["ema1", "ema2", "ema1"]), guided=False, one_set=False)
    assert [(combination.name, combination.chosen) for combination in found] == [
        ("ema1", {"weights": "ema1"}),
        ("ema2", {"weights": "ema2"}),
    ]
    assert notes == ["The model is unconditional, so there is nothing to guide: only its weights are compared."]
    found, notes = combinations(given(guidance_scale=[1, 3]), guided=True, one_set=True)
    assert [combination.name for combination in found] == ["weights_cfg1", "weights_cfg3_0.1-1"]
    assert notes == ["The model is one set of weights: there are no averages to choose from."]
    assert found[1].flags == "--guidance_scale 3 --guidance_interval 0.1 1"


def test_what_to_type_for_a_combination() -> None:
    chosen = Combination("ema2", 2.5, (0.1, 1.0))
    assert chosen.flags == "--weights ema2 --guidance_scale 2.5 --guidance_interval 0.1 1"
    assert Combination("ema1", 1.0, None).flags == "--weights ema1 --guidance_scale 1"


@pytest.mark.parametrize(
    ("written", "why"),
    [("0.1", "not two numbers"), ("0.1:1", "not two"), ("0,0.5,1", "not two"), ("1,0", "empty"), ("0,1.5", "outside")],
)
def test_an_interval_that_is_none(written: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"'{written}' is no interval.*{why}.*Write LOW,HIGH"):
        names(given(guidance_interval=[written]))
