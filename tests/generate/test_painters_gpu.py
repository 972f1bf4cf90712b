"""The painters' promise on a GPU: the same bytes at any place of a batch, in every precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.generate.pipelines import open_painter, settle
from tests.support.painting import CAR, CAT, DOGS, NIGHT, SIZE, SNOW, differ, paint, settings
from tests.support.pipelines import BUILDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_picture_depends_on_neither_its_neighbours_nor_its_place(
    name: str, dtype: str, tiny_pipeline: Callable[[str], Path]
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    painter = open_painter(settings(tiny_pipeline(name), dtype=dtype), device)
    first = paint(painter, CAR, NIGHT, SNOW)
    last = paint(painter, DOGS, CAT, CAR)
    assert first[0].shape == (*SIZE, 3)
    for picture in (last[2], *paint(painter, CAR, CAR, CAR)):
        assert np.array_equal(first[0], picture)
    assert differ(first[0], last[0]) > 5


def test_the_cut_of_guidance_is_exact_on_a_gpu(tiny_pipeline: Callable[[str], Path]) -> None:
    device = torch.device("cuda:0")
    settle(device)
    for name in ("sdxl", "wan21", "hunyuan"):
        whole = open_painter(settings(tiny_pipeline(name)), device)
        cut_at_the_end = open_painter(settings(tiny_pipeline(name), cfg_truncation_step=4), device)
        assert np.array_equal(paint(whole, CAR, NIGHT)[1], paint(cut_at_the_end, CAR, NIGHT)[1])
