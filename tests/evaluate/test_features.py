"""Features: computed once, cached, and equal in every batch and any number of processes, which may fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.core.errors import UserError
from muralist.core.hardware import select_devices, share_devices
from muralist.evaluate import decoders, features
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import ClipEncoder
from muralist.evaluate.features import BATCH, compute_features, hash_files, hash_texts, start_ahead
from tests.support.colors import MeanColor
from tests.support.evaluating import scenes, small_clip, write_images

ALONE = {"0": "cpu"}


def items_of(folder: Path, count: int) -> list[FeatureItem]:
    return hash_files(sorted(write_images(folder / "images", scenes(count, 0)).iterdir()))


@pytest.fixture(scope="module")
def encoders(clip: Path) -> tuple[ClipEncoder, ClipEncoder]:
    return ClipEncoder.from_checkpoint(clip)


def test_an_interrupted_evaluation_resumes(tmp_path: Path, encoders: tuple[ClipEncoder, ClipEncoder]) -> None:
    items = items_of(tmp_path, 10)
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
    """A flipped bit in the key, the features or the checksum of a record; a truncated file, and a foreign one."""
    items = hash_texts(["a red car", "a blue car", "rain"])
    first = compute_features(encoders[1], items, ALONE, tmp_path)
    assert len({row.tobytes() for row in first.rows}) == 3
    (path,) = tmp_path.glob("*/*.bin")
    intact = path.read_bytes()
    record = len(intact) // 3
    for place, kept in ((5, record * 3), (40, record * 3 - 3), (record - 1, record + 7)):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 16]) + intact[place + 1 : kept])
        (path.parent / "0-0.bin").write_bytes(os.urandom(1000))
        again = compute_features(encoders[1], items, ALONE, tmp_path)
        assert again.cached == kept // record - 1 and again.computed + again.cached == 3
        assert np.array_equal(first.rows, again.rows)
        for other in path.parent.glob(f"{os.getpid()}-*.bin"):
            other.unlink()


def test_a_changed_image_is_not_cached_under_its_old_hash(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", scenes(3, 0))
    items = hash_files(sorted(folder.iterdir()))
    before = (folder / "000001.png").read_bytes()
    (folder / "000001.png").write_bytes((folder / "000002.png").read_bytes())
    with pytest.raises(UserError, match="000001.png changed while it was evaluated. Another process still writes"):
        compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    (folder / "000001.png").unlink()
    with pytest.raises(UserError, match="000001.png could not be read: No such file"):
        compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    (folder / "000001.png").write_bytes(before)
    found = compute_features(MeanColor(), items, ALONE, tmp_path / "cache").rows
    np.testing.assert_allclose(found, scenes(3, 0).astype(float).mean((1, 2)), rtol=1e-5)


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
    warnings: list[str] = []
    monkeypatch.setattr(features.log, "warning", lambda text, *values: warnings.append(text % values))
    items = items_of(tmp_path, 6)
    alone = compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows
    monkeypatch.setitem(BATCH, "cpu", 4)
    for encoder, seen in ((Watched(), [4, 4, 4, 4]), (Watched(by_place=1.0), [4, 4, *[1] * 6])):
        found = compute_features(encoder, items, ALONE, tmp_path / str(len(seen))).rows
        assert encoder.seen == seen  # the first two batches test for it
        assert np.array_equal(found, alone)
        assert len(warnings) == int(encoder.by_place)
    assert warnings[0].startswith("color computes batches of 1 instead of 4 on this device")
    assert "pass --gpu_ids" in warnings[0]


def processes() -> dict[str, int]:
    return {one.name.rpartition("-")[2]: one.pid or 0 for one in multiprocessing.active_children()}


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_workers")
def test_the_others_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes one fails, one is killed and one hangs; the features are equal."""
    captured: list[str] = []
    monkeypatch.setattr(features.log, "warning", lambda text, *values: captured.append(text % values))
    items = items_of(tmp_path, 40)
    hung = 0

    def disturb(done: int, total: int) -> None:
        nonlocal hung
        if not hung and {"1", "2", "3"} <= processes().keys():
            hung = processes()["2"]
            os.kill(hung, signal.SIGSTOP)
            os.kill(processes()["1"], signal.SIGKILL)
        if done == 16:  # more than those two can have done: the last one is at work
            monkeypatch.setattr(features, "TIMEOUT", 3.0)

    found = compute_features(
        MeanColor(fails_as="muralist-evaluate-0"), items, {str(n): "cpu" for n in range(4)}, tmp_path, progress=disturb
    )
    taken = "The others take over its share."
    assert sorted(captured) == [
        f"Process 0, which computes features, failed: RuntimeError: out of memory. {taken}",
        f"Process 1, which computes features, was killed by SIGKILL. {taken}",
        f"Process 2, which computes features, finished nothing for 3 s and was killed. {taken}",
    ]
    assert found.computed == 40 and len(np.unique(found.rows, axis=0)) == 40
    assert np.array_equal(found.rows, compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_workers")
def test_processes_start_before_images_are_hashed(tmp_path: Path) -> None:
    """They end with the features, or with an error on the way; cached features need none."""
    devices = {"0": "cpu", "1": "cpu"}
    seen: list[dict[str, int]] = []

    def note(done: int, total: int) -> None:
        seen.append(processes())

    with pytest.raises(KeyboardInterrupt), start_ahead(MeanColor(), devices, tmp_path / "cache"):
        assert processes().keys() == devices.keys()
        raise KeyboardInterrupt
    assert processes() == {}
    with start_ahead(MeanColor(), devices, tmp_path / "cache") as workers:
        started = processes()
        items = items_of(tmp_path, 1)  # fewer than the processes
        found = compute_features(MeanColor(), items, devices, tmp_path / "cache", "images", note, workers)
        assert seen == [started]  # scores are computed while the processes end
    assert processes() == {}
    assert np.array_equal(found.rows, compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows)
    for few in (devices, ALONE):
        with start_ahead(MeanColor(), few, tmp_path / ("cache" if few is devices else "empty")) as workers:
            assert workers is None


@pytest.mark.slow
def test_processes_start_before_the_command_imports_torch(tmp_path: Path) -> None:
    """They compute what the command then asks for, and are gone when it ends, or when it is refused."""
    script = """if True:
        import sys
        from multiprocessing import active_children
        from pathlib import Path
        from muralist.evaluate.decoders import workers_before_torch
        with workers_before_torch([], Path(sys.argv[1])) as pool:
            started = {child.pid for child in active_children()}
            assert len(started) == 2 and "torch" not in sys.modules
            from muralist.evaluate.encoders import ClipEncoder
            from muralist.evaluate.features import hash_texts, compute_features, start_ahead
            encoder = ClipEncoder.from_checkpoint(Path(sys.argv[2]))[1]
            devices, cache = {"0": "cpu", "1": "cpu"}, Path(sys.argv[1], "features")
            with start_ahead(encoder, devices, cache, pool) as workers:
                found = compute_features(encoder, hash_texts("abcd"), devices, cache, workers=workers)
                assert found.computed == 4
                assert {child.pid for child in active_children()} <= started, "no others were needed"
        assert not active_children()
        with workers_before_torch([], Path(sys.argv[1])) as pool:
            assert pool is None, "some features are cached, and perhaps all"
        try:
            with workers_before_torch([], Path(sys.argv[1], "elsewhere")) as pool:
                assert len(active_children()) == 2
                raise ValueError
        except ValueError:
            assert not active_children()
    """
    words = [sys.executable, "-c", script, tmp_path / "out", small_clip(tmp_path / "clip")]
    environment = {**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NPROC": "1"},
        {"NPROC": "3"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,5", "NPROC": "3"},
    ],
)
@pytest.mark.parametrize("gpu_ids", [[], [1, 3]])
def test_the_expected_processes_are_those_of_the_devices(
    environment: dict[str, str], gpu_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("GPUs are not chosen by these variables alone")
    for name in ("NPROC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices = share_devices(select_devices(gpu_ids))
    assert decoders._expected_labels(gpu_ids) == (list(devices) if len(devices) > 1 else [])


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_workers")
def test_the_same_command_resumes_when_all_processes_died(tmp_path: Path) -> None:
    items = items_of(tmp_path, 12)

    def kill_all(done: int, total: int) -> None:
        for pid in processes().values():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError) as told:
        compute_features(MeanColor(), items, {"0": "cpu", "1": "cpu"}, tmp_path / "cache", progress=kill_all)
    assert "was killed by SIGKILL. No other process is left. It was busy with " in str(told.value)
    assert str(told.value).endswith(".png. Run the same command again to resume.")
    assert processes() == {}
    resumed = compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    assert 0 < resumed.cached < 12 and resumed.computed + resumed.cached == 12
    assert np.array_equal(resumed.rows, compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows)
