"""Features: computed once, cached, and equal in every batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.evaluate.encoders import ClipEncoder
from muralist.evaluate.features import BATCH, compute_features, hash_files, hash_texts
from tests.support.colors import MeanColor
from tests.support.evaluating import scenes, write_images

ALONE = {"0": "cpu"}


@pytest.fixture(scope="module")
def encoders(clip: Path) -> tuple[ClipEncoder, ClipEncoder]:
    return ClipEncoder.from_checkpoint(clip)


def test_an_interrupted_evaluation_resumes(tmp_path: Path, encoders: tuple[ClipEncoder, ClipEncoder]) -> None:
    items = hash_files(sorted(write_images(tmp_path / "images", scenes(10, 0)).iterdir()))
    whole = compute_features(encoders[0], items, ALONE, tmp_path / "other").rows

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features(encoders[0], items, ALONE, tmp_path / "cache", progress=stop)
    resumed = compute_features(encoders[0], items, ALONE, tmp_path / "cache")
    assert (resumed.computed, resumed.cached) == (6, 4)
    assert np.array_equal(resumed.rows, whole)
    again = compute_features(encoders[0], items[::-1], ALONE, tmp_path / "cache")
    assert (again.computed, again.cached) == (0, 10)
    assert np.array_equal(again.rows, whole[::-1])


def test_torn_and_damaged_records_are_computed_again(tmp_path: Path, encoders: tuple[ClipEncoder, ClipEncoder]) -> None:
    items = hash_texts(["a red car", "a blue car", "rain"])
    first = compute_features(encoders[1], items, ALONE, tmp_path)
    (path,) = tmp_path.glob("*/*.bin")
    data = bytearray(path.read_bytes())
    data[40] ^= 1  # inside the first record
    path.write_bytes(data[:-3])
    second = compute_features(encoders[1], items, ALONE, tmp_path)
    assert (second.computed, second.cached) == (2, 1)
    assert np.array_equal(first.rows, second.rows)
    assert len({row.tobytes() for row in first.rows}) == 3


def test_duplicates_are_computed_once_and_broken_files_reported(
    tmp_path: Path, encoders: tuple[ClipEncoder, ClipEncoder]
) -> None:
    folder = write_images(tmp_path / "images", scenes(3, 0))
    (folder / "copy.png").write_bytes((folder / "000000.png").read_bytes())
    (folder / "torn.png").write_bytes((folder / "000001.png").read_bytes()[:60])
    found = compute_features(encoders[0], hash_files(sorted(folder.iterdir())), ALONE, tmp_path / "cache")
    assert (found.computed, found.indices, list(found.unreadable)) == (3, [0, 1, 2, 3], [4])
    assert np.array_equal(found.rows[0], found.rows[3])
    assert "truncated" in found.unreadable[4] or "broken" in found.unreadable[4]


def test_the_cache_depends_on_the_weights(tmp_path: Path, encoders: tuple[ClipEncoder, ClipEncoder]) -> None:
    items = hash_texts(["a red car"])
    compute_features(encoders[1], items, ALONE, tmp_path)
    changed = ClipEncoder(encoders[1].source, "another digest", encoders[1].width, encoders[1].name)
    assert compute_features(changed, items, ALONE, tmp_path).computed == 1


@dataclass(frozen=True)
class Watched(MeanColor):
    """Records its batch sizes; features may depend on the position in a batch, as with some GPU kernels."""

    seen: list[int] = field(default_factory=list)
    by_place: float = 0.0

    def compute(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(batch))
        return super().compute(batch) + self.by_place * torch.arange(len(batch))[:, None]


def test_batches_have_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is padded; where features depend on the position in a batch, every image is computed alone."""
    items = hash_files(sorted(write_images(tmp_path / "images", scenes(6, 0)).iterdir()))
    alone = compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows
    monkeypatch.setitem(BATCH, "cpu", 4)
    for encoder, seen in ((Watched(), [4, 4, 4, 4]), (Watched(by_place=1.0), [4, 4, *[1] * 6])):
        found = compute_features(encoder, items, ALONE, tmp_path / str(len(seen))).rows
        assert encoder.seen == seen  # the first two batches test for it
        assert np.array_equal(found, alone)
