"""Features on a GPU: equal to the CPU up to rounding, and bit-exact in any batch on any number of GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.evaluate import inception
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import ClipEncoder, Dinov2Encoder, Encoder, InceptionEncoder
from muralist.evaluate.features import compute_features, hash_files, hash_texts
from muralist.evaluate.metrics import compute_moments, frechet_distance
from tests.support.evaluating import inception_weights, scenes, small_clip, small_dinov2, write_images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ONE = {"0": "cuda:0"}
COUNT = 70  # a batch of 64, and a part of one


def images(folder: Path) -> list[FeatureItem]:
    return hash_files(sorted(write_images(folder / "images", scenes(COUNT, 0, side=48)).iterdir()))


def test_fid_equals_the_cpu(tmp_path: Path) -> None:
    items, encoder = images(tmp_path), InceptionEncoder.from_file(inception_weights(), tf32=False)
    values = []
    for devices in (ONE, {"0": "cpu"}):
        found = compute_features(encoder, items, devices, tmp_path / "cache")
        assert found.computed == COUNT  # what one kind of device computed is not remembered for the other
        one, two = found.rows[: COUNT // 2], found.rows[COUNT // 2 :]
        values.append(frechet_distance(compute_moments(one), compute_moments(two), one, two).value)
    assert values[0] > 1 and values[0] == pytest.approx(values[1], abs=1e-2)


@pytest.mark.parametrize("name", ["inception", "clip", "clip-text", "dinov2"])
def test_features_are_independent_of_batch_and_gpu_count(name: str, tmp_path: Path) -> None:
    encoder, items = _encoder(name, tmp_path), images(tmp_path)
    if name == "clip-text":
        items = hash_texts([f"{number} red cars in the rain" for number in range(COUNT)])
    found = compute_features(encoder, items, ONE, tmp_path / "forwards")
    assert found.computed == COUNT and len(np.unique(found.rows, axis=0)) == COUNT
    backwards = compute_features(encoder, items[::-1], ONE, tmp_path / "backwards").rows[::-1]
    assert np.array_equal(found.rows, backwards)
    alone = compute_features(encoder, items[5:6], ONE, tmp_path / "alone").rows
    assert np.array_equal(found.rows[5:6], alone)
    everywhere = {str(gpu): f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())}
    kinds = {torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())}
    if len(kinds) == 1:
        assert np.array_equal(found.rows, compute_features(encoder, items, everywhere, tmp_path / "everywhere").rows)


def _encoder(name: str, folder: Path) -> Encoder:
    if name == "inception":
        return InceptionEncoder.from_file(inception_weights())
    if name == "dinov2":
        return Dinov2Encoder.from_checkpoint(small_dinov2(folder / "dinov2"))
    images, texts = ClipEncoder.from_checkpoint(small_clip(folder / "clip"))
    return texts if name == "clip-text" else images


def test_inception_is_deterministic_on_uninitialized_memory(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    with torch.inference_mode():
        loaded = InceptionEncoder.from_file(inception_weights()).load(device)
        batch = torch.rand(64, 3, inception.SIDE, inception.SIDE, device=device)
        first = loaded.compute(batch)
        assert first.isfinite().all()
        for _ in range(5):
            inception.fill_free_memory_with_nan(device)
            assert torch.equal(loaded.compute(batch), first)
