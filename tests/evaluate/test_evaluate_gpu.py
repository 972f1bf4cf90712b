"""Features on a GPU: those of the CPU but for rounding, and the same bits in any batch, on any number of GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.evaluate import inception
from muralist.evaluate.cache import Item
from muralist.evaluate.dinov2 import Dinov2Features
from muralist.evaluate.extractors import ClipFeatures, Extractor, InceptionFeatures
from muralist.evaluate.features import compute, hash_files, hash_texts
from muralist.evaluate.metrics import frechet, moments
from tests.support.evaluating import inception_weights, scenes, small_clip, small_dinov2, write_pictures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ONE = {"0": "cuda:0"}
COUNT = 70  # a batch of 64, and a part of one


def pictures(folder: Path) -> list[Item]:
    return hash_files(sorted(write_pictures(folder / "images", scenes(COUNT, 0, side=48)).iterdir()))


def test_fid_is_that_of_the_cpu(tmp_path: Path) -> None:
    items, extractor = pictures(tmp_path), InceptionFeatures.of(inception_weights(), tf32=False)
    values = []
    for devices in (ONE, {"0": "cpu"}):
        found = compute(extractor, items, devices, tmp_path / "cache")
        assert found.computed == COUNT  # what one kind of device computed is not remembered for the other
        one, two = found.rows[: COUNT // 2], found.rows[COUNT // 2 :]
        values.append(frechet(moments(one), moments(two), one, two).value)
    assert values[0] > 1 and values[0] == pytest.approx(values[1], abs=1e-2)


@pytest.mark.parametrize("name", ["inception", "clip", "clip-text", "dinov2"])
def test_features_depend_on_neither_the_batch_nor_the_number_of_gpus(name: str, tmp_path: Path) -> None:
    extractor, items = _extractor(name, tmp_path), pictures(tmp_path)
    if name == "clip-text":
        items = hash_texts([f"{number} red cars in the rain" for number in range(COUNT)])
    found = compute(extractor, items, ONE, tmp_path / "forwards")
    assert found.computed == COUNT and len(np.unique(found.rows, axis=0)) == COUNT
    backwards = compute(extractor, items[::-1], ONE, tmp_path / "backwards").rows[::-1]
    assert np.array_equal(found.rows, backwards)
    alone = compute(extractor, items[5:6], ONE, tmp_path / "alone").rows
    assert np.array_equal(found.rows[5:6], alone)
    everywhere = {str(gpu): f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())}
    kinds = {torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())}
    if len(kinds) == 1:
        assert np.array_equal(found.rows, compute(extractor, items, everywhere, tmp_path / "everywhere").rows)


def _extractor(name: str, folder: Path) -> Extractor:
    if name == "inception":
        return InceptionFeatures.of(inception_weights())
    if name == "dinov2":
        return Dinov2Features.of(small_dinov2(folder / "dinov2"))
    images, texts = ClipFeatures.both(small_clip(folder / "clip"))
    return texts if name == "clip-text" else images


def test_inception_is_the_same_every_time_whatever_lies_in_the_memory(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    with torch.inference_mode():
        loaded = InceptionFeatures.of(inception_weights()).load(device)
        batch = torch.rand(64, 3, inception.SIDE, inception.SIDE, device=device)
        first = loaded.compute(batch)
        assert first.isfinite().all()
        for _ in range(5):
            inception.spoil_memory(device)
            assert torch.equal(loaded.compute(batch), first)
