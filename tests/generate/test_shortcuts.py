"""Fast mode: fewer passes of the network, at steps fixed in advance, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muralist.generate.exactness import psnr
from muralist.generate.painter import Way
from muralist.generate.shortcuts import Shortcut, shortcut_of
from tests.generate.test_guidance import NETWORKS, counted_rows
from tests.support.painting import CAR, DOGS, NIGHT, SNOW, differ, paint, painter_of
from tests.support.pipelines import BUILDERS

Build = Callable[[str], Path]
STEPS = 10


def test_steps_are_a_function_of_their_number_alone() -> None:
    shortcut = shortcut_of("WanPipeline")
    assert sorted(shortcut.computed(20)) == [0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert (shortcut.guided_steps(20), shortcut.passes(20)) == (10, 19)
    assert shortcut.words(20) == "fast: guidance in 10 and the network in 12 of 20 steps, fp8"
    assert shortcut.words(20, truncation=3).startswith("fast: guidance in 3 and")
    for steps in range(1, 60):
        computed = shortcut.computed(steps)
        assert steps - 1 in computed and set(range(min(2, steps))) <= computed


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in ("flux", "schnell")])
def test_fewer_passes_and_a_picture_that_depends_on_itself_alone(
    name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pipeline(name)
    with counted_rows(monkeypatch, NETWORKS[name]) as rows:
        painter = painter_of(folder, preset="fast", num_inference_steps=STEPS)
        first = paint(painter, CAR, NIGHT)
    shortcut = Shortcut()
    assert sum(rows) == 2 * shortcut.passes(STEPS) == 2 * 9  # of 2 * 20
    assert np.array_equal(first[0], paint(painter, SNOW, CAR)[1])
    exact = paint(painter_of(folder, num_inference_steps=STEPS), CAR, NIGHT)
    assert differ(first[0], exact[0]) > 0
    assert all(map(np.array_equal, exact, paint(painter, CAR, NIGHT, way=Way.EXACT)))
    assert np.array_equal(first[1], paint(painter, DOGS, NIGHT)[1])  # and back again


@pytest.mark.parametrize("name", ["flux", "schnell"])
def test_where_nothing_is_guided_steps_are_still_left_out(
    name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_rows(monkeypatch, NETWORKS[name]) as rows:
        paint(painter_of(tiny_pipeline(name), preset="fast", num_inference_steps=STEPS), CAR)
    assert len(rows) == len(Shortcut().computed(STEPS)) == 6


@pytest.mark.parametrize(("name", "least"), [("wan21", 20.0), ("sdxl", 20.0), ("sd3", 15.0)])
def test_what_is_foretold_is_nearer_than_half_the_steps(name: str, least: float, tiny_pipeline: Build) -> None:
    """Without guidance only the foretold steps tell the two apart."""
    folder, steps = tiny_pipeline(name), 20
    changes = {"num_inference_steps": steps, "guidance_scale": 1.0}
    exact = paint(painter_of(folder, **changes), CAR)[0]
    fast = paint(painter_of(folder, preset="fast", **changes), CAR)[0]
    assert psnr(fast, exact) > least


def test_psnr() -> None:
    black = np.zeros((4, 4, 3), dtype=np.uint8)
    assert psnr(black, black) == 99.0
    assert psnr(black, black + 255) == 0.0
    assert psnr(black, black + 51) == pytest.approx(13.98, abs=0.01)
