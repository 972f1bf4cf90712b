"""Guidance that ends early: really fewer passes, exactly the uncut picture at one end and the unguided one at the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

from muralist.generate.guidance import DenoisingLoop
from muralist.generate.painter import CannotPaint
from tests.support.painting import CAR, NIGHT, SNOW, STEPS, differ, no_beat, paint, painter_of
from tests.support.pipelines import BUILDERS

Build = Callable[[str], Path]
NETWORKS = {
    "hunyuan": diffusers.HunyuanDiT2DModel,
    "hunyuan11": diffusers.HunyuanDiT2DModel,
    "sd": diffusers.UNet2DConditionModel,
    "sdxl": diffusers.UNet2DConditionModel,
    "sd3": diffusers.SD3Transformer2DModel,
    "flux": diffusers.FluxTransformer2DModel,
    "schnell": diffusers.FluxTransformer2DModel,
    "pixart": diffusers.PixArtTransformer2DModel,
    "sana": diffusers.SanaTransformer2DModel,
    "wan21": diffusers.WanTransformer3DModel,
    "wan22": diffusers.WanTransformer3DModel,
    "zimage": diffusers.ZImageTransformer2DModel,
    "qwenimage": diffusers.QwenImageTransformer2DModel,
}
GUIDED = [name for name in BUILDERS if name != "flux"]
SCALE = 7.5


@contextmanager
def counted_rows(monkeypatch: pytest.MonkeyPatch, network: Any) -> Iterator[list[int]]:
    """How many pictures every real pass of a network sees; for painters that are opened meanwhile."""
    rows: list[int] = []
    forward = network.forward

    @functools.wraps(forward)
    def count(self: Any, *inputs: Any, **named: Any) -> Any:
        rows.append(len(inputs[0] if inputs else named["hidden_states"]))
        return forward(self, *inputs, **named)

    with monkeypatch.context() as patch:
        patch.setattr(network, "forward", count)
        yield rows


@pytest.mark.parametrize("name", GUIDED)
def test_guidance_that_ends_early(name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_pipeline(name)
    orders = [CAR, NIGHT]
    whole = paint(painter_of(folder, guidance_scale=SCALE), *orders)
    none = paint(painter_of(folder, guidance_scale=0.0 if name == "zimage" else 1.0), *orders)
    with counted_rows(monkeypatch, NETWORKS[name]) as rows:
        for cut, expected in ((STEPS, whole), (0, none), (2, None)):
            rows.clear()
            painter = painter_of(folder, guidance_scale=SCALE, cfg_truncation_step=cut)
            pictures = paint(painter, *orders)
            assert sum(rows) == len(orders) * (STEPS + min(cut, STEPS)), f"cut at {cut}: passes of {rows}"
            if expected is not None:
                assert all(map(np.array_equal, pictures, expected)), f"cut at {cut}"
            else:
                assert differ(pictures[0], whole[0]) > 0
                assert differ(pictures[0], none[0]) > 0
                assert np.array_equal(pictures[0], paint(painter, SNOW, CAR)[1])


def test_distilled_guidance_has_nothing_to_cut(tiny_pipeline: Build) -> None:
    with pytest.raises(CannotPaint, match="nothing to cut: FluxPipeline"):
        painter_of(tiny_pipeline("flux"), cfg_truncation_step=2)
    with pytest.raises(CannotPaint, match="nothing to cut: StableDiffusionPipeline"):
        painter_of(tiny_pipeline("sd"), cfg_truncation_step=2, guidance_scale=1.0)


def test_what_small_files_do_not_tell_is_seen_at_the_first_step(tiny_pipeline: Build) -> None:
    painter: Any = painter_of(tiny_pipeline("flux"))
    DenoisingLoop(painter._pipe, STEPS, 2)
    beats: list[int] = []
    with pytest.raises(CannotPaint, match="nothing to cut"):
        painter.paint([CAR], (64, 64), lambda: beats.append(1))
    assert beats == []


@pytest.mark.parametrize(("scheduler", "stages", "of_first"), [("HeunDiscrete", 2 * STEPS - 1, 2), ("PNDM", 13, 4)])
def test_schedulers_of_several_stages_a_step(
    scheduler: str, stages: int, of_first: int, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pipeline("sd")
    with counted_rows(monkeypatch, NETWORKS["sd"]) as rows:
        for cut, guided in ((0, 0), (1, of_first), (STEPS, stages)):
            rows.clear()
            paint(painter_of(folder, scheduler=scheduler, cfg_truncation_step=cut), CAR)
            assert rows == [2] * guided + [1] * (stages - guided)


def test_where_the_negative_prompt_comes_first_in_two_calls_it_is_refused(tiny_pipeline: Build) -> None:
    """Wan with its two calls in the other order."""
    painter: Any = painter_of(tiny_pipeline("wan21"), cfg_truncation_step=1)
    pipe = painter._pipe
    encode = pipe.encode_prompt

    def swapped(*inputs: Any, **named: Any) -> Any:
        positive, negative = encode(*inputs, **named)
        return negative, positive

    pipe.encode_prompt = swapped
    with pytest.raises(CannotPaint, match="WanPipeline.*negative prompt first"):
        painter.paint([CAR], (64, 64), no_beat)
