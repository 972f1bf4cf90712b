"""Features: computed once, kept, and the same whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.evaluate.extraction import BATCH
from muralist.evaluate.extractors import ClipFeatures
from muralist.evaluate.features import compute, hash_files, hash_texts
from tests.support.colours import Colours
from tests.support.evaluating import scenes, small_clip, write_pictures

ALONE = {"0": "cpu"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClipFeatures, ClipFeatures]:
    return ClipFeatures.both(small_clip(tmp_path_factory.mktemp("clip")))


def test_an_interrupted_evaluation_resumes(tmp_path: Path, clip: tuple[ClipFeatures, ClipFeatures]) -> None:
    items = hash_files(sorted(write_pictures(tmp_path / "images", scenes(10, 0)).iterdir()))
    whole = compute(clip[0], items, ALONE, tmp_path / "other").rows

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute(clip[0], items, ALONE, tmp_path / "cache", stop)
    resumed = compute(clip[0], items, ALONE, tmp_path / "cache")
    assert (resumed.computed, resumed.remembered) == (6, 4)
    assert np.array_equal(resumed.rows, whole)
    again = compute(clip[0], items[::-1], ALONE, tmp_path / "cache")
    assert (again.computed, again.remembered) == (0, 10)
    assert np.array_equal(again.rows, whole[::-1])


def test_torn_and_damaged_records_are_computed_again(tmp_path: Path, clip: tuple[ClipFeatures, ClipFeatures]) -> None:
    items = hash_texts(["a red car", "a blue car", "rain"])
    first = compute(clip[1], items, ALONE, tmp_path)
    (path,) = tmp_path.glob("*/*.bin")
    data = bytearray(path.read_bytes())
    data[40] ^= 1  # inside the first record
    path.write_bytes(data[:-3])
    second = compute(clip[1], items, ALONE, tmp_path)
    assert (second.computed, second.remembered) == (2, 1)
    assert np.array_equal(first.rows, second.rows)
    assert len({row.tobytes() for row in first.rows}) == 3


def test_the_same_content_is_computed_once_and_broken_files_are_named(
    tmp_path: Path, clip: tuple[ClipFeatures, ClipFeatures]
) -> None:
    folder = write_pictures(tmp_path / "images", scenes(3, 0))
    (folder / "copy.png").write_bytes((folder / "000000.png").read_bytes())
    (folder / "torn.png").write_bytes((folder / "000001.png").read_bytes()[:60])
    found = compute(clip[0], hash_files(sorted(folder.iterdir())), ALONE, tmp_path / "cache")
    assert (found.computed, found.kept, list(found.unreadable)) == (3, [0, 1, 2, 3], [4])
    assert np.array_equal(found.rows[0], found.rows[3])
    assert "truncated" in found.unreadable[4] or "broken" in found.unreadable[4]


def test_other_weights_have_other_features(tmp_path: Path, clip: tuple[ClipFeatures, ClipFeatures]) -> None:
    items = hash_texts(["a red car"])
    compute(clip[1], items, ALONE, tmp_path)
    changed = ClipFeatures(clip[1].folder, "another digest", clip[1].width, clip[1].name)
    assert compute(changed, items, ALONE, tmp_path).computed == 1


@dataclass(frozen=True)
class Watched(Colours):
    """Remembers the batches it saw; its features may depend on the place in a batch, as some GPU kernels' do."""

    seen: list[int] = field(default_factory=list)
    by_place: float = 0.0

    def compute(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(batch))
        return super().compute(batch) + self.by_place * torch.arange(len(batch))[:, None]


def test_batches_have_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is padded; and where features depend on the place in a batch, every picture is computed alone."""
    items = hash_files(sorted(write_pictures(tmp_path / "images", scenes(6, 0)).iterdir()))
    alone = compute(Colours(), items, ALONE, tmp_path / "alone").rows
    monkeypatch.setitem(BATCH, "cpu", 4)
    for extractor, seen in ((Watched(), [4, 4, 4, 4]), (Watched(by_place=1.0), [4, 4, *[1] * 6])):
        found = compute(extractor, items, ALONE, tmp_path / str(len(seen))).rows
        assert extractor.seen == seen  # the first two find out
        assert np.array_equal(found, alone)
