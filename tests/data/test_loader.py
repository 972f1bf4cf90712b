"""Images that lie on the device: the stream of the loader, to the bit, for every rank and from any step."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muralist.core.errors import UserError
from muralist.data import loader
from muralist.data.loader import Batch, GpuResidentDataset, fits_on_device, load_to_device, training_batches
from muralist.data.sampler import ShuffledOrder, Split, split_held_out
from muralist.data.source import Source
from muralist.data.sources import open_source
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.tools.pack import pack
from muralist.train.dataset import open_data
from muralist.train.distributed import World
from muralist.train.schedule import plan_batch
from muralist.train.trainer import SignalHandler, Trainer

SIDE = 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["folder", "packed", "npz", "driving_world", "several"])
def source(request: pytest.FixtureRequest, photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Some images, with labels, and with captions where the kind has them."""
    if request.param == "driving_world":
        from muralist.demo.driving_world import DrivingWorld

        return DrivingWorld(SIDE, samples=61)
    place = tmp_path_factory.mktemp("data")
    if request.param == "packed":
        pack(str(photo_folder), place / "packed", SIDE, workers=0, progress=False, caption="A {label}")
        return open_source(str(place / "packed"), SIDE)
    if request.param == "npz":
        images = np.random.default_rng(0).integers(0, 256, (53, SIDE, SIDE, 3), dtype=np.uint8)
        np.savez(place / "some.npz", train_x=images, train_y=np.arange(53) % 7)
        return open_source(str(place / "some.npz"), SIDE)
    path = str(photo_folder)
    return open_source([path, path] if request.param == "several" else path, SIDE, caption="A {label}")


def on_cpu(source: Source, parts: Split, workers: int = 0) -> tuple[GpuResidentDataset, list[int]]:
    heard: list[int] = []
    return load_to_device(CPU, source, parts, SIDE, DataSettings(num_workers=workers), heard.append), heard


def assert_same(one: Batch, other: Batch) -> None:
    for ours, theirs in zip(one[:2] + one[3:4], other[:2] + other[3:4], strict=True):
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert one.captions == other.captions and one.encoded is other.encoded is None


@pytest.mark.parametrize(("ranks", "samples", "held_out"), [(1, None, 0.1), (2, None, 0.0), (2, 31, 0.2)])
def test_batches_equal_those_of_the_loader(
    source: Source, ranks: int, samples: int | None, held_out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_LOOKAHEAD", 20)  # so that the stream is made of many pieces
    parts = split_held_out(samples or len(source), held_out)
    settings = DataSettings(batch_size=3, global_batch_size=12, num_workers=0)
    plan, order = plan_batch(settings, OptimSettings(), ranks), ShuffledOrder(5, parts.training_size)
    dataset, heard = on_cpu(source, parts)
    assert heard[-1] == parts.training_size == len(dataset.images_u8)
    for rank in range(ranks):
        for first in (0, 7):  # from the start, and as a resumed run goes on; over the end of an epoch
            steps = range(first, first + 9)
            read = list(training_batches(source, parts, order, plan.sample_indices(rank, steps), settings))
            kept = list(dataset.batches(order, plan.sample_indices(rank, steps)))
            assert len(read) == len(kept) == 9 * plan.accumulation_steps
            for one, other in zip(read, kept, strict=True):
                assert_same(one, other)


def test_captions_are_kept_where_there_are_any(photo_folder: Path) -> None:
    named, plain = (open_source(str(photo_folder), SIDE, caption=caption) for caption in ("A {label}", None))
    for source, expected in ((named, {"A sunrise", "A meadow"}), (plain, {""})):
        dataset, _ = on_cpu(source, split_held_out(len(source), 0.0))
        (batch,) = islice(dataset.batches(ShuffledOrder(0, 48), [list(range(48))]), 1)
        assert set(batch.captions) == expected
    assert dataset.captions is None


def test_loader_workers_give_the_same_images(photo_folder: Path) -> None:
    source = open_source(str(photo_folder), SIDE)
    parts = split_held_out(len(source), 0.1)
    alone, helped = (on_cpu(source, parts, workers)[0] for workers in (0, 2))
    assert torch.equal(alone.images_u8, helped.images_u8) and torch.equal(alone.labels, helped.labels)


def test_a_broken_image_is_a_user_error(photo_folder: Path, tmp_path: Path) -> None:
    for path in sorted((photo_folder / "meadow").glob("*.png")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = tmp_path / "010.png"
    broken.write_bytes(broken.read_bytes()[:100])
    source = open_source(str(tmp_path), SIDE)
    with pytest.raises(UserError, match=f"{broken} is a broken image"):
        on_cpu(source, split_held_out(len(source), 0.0))


@pytest.mark.parametrize(
    ("wish", "needed", "free", "whole_epoch", "expected"),
    [
        ("auto", 10**9, 20e9, True, True),
        ("auto", 3 * 10**9, 20e9, True, False),  # more than a tenth
        ("auto", 9 * 10**9, 141e9, True, False),  # more than 8 GB
        ("auto", 10**9, 20e9, False, False),  # most would never be seen
        ("auto", 10**3, None, True, False),  # no GPU
        ("none", 10**3, 20e9, True, False),
        ("device", 10**10, 20e9, False, True),
        ("device", 10**10, None, False, True),
    ],
)
def test_auto_cache_decision(wish: str, needed: int, free: float | None, whole_epoch: bool, expected: bool) -> None:
    assert fits_on_device(wish, needed, free, whole_epoch) is expected


def test_more_than_gpu_memory_is_refused() -> None:
    with pytest.raises(UserError, match="the images take 15.0 GB, and the GPU has 14.0 GB free"):
        fits_on_device("device", 15 * 10**9, 14e9, True)


def test_a_stop_signal_during_loading_stops_the_run(photo_folder: Path, tmp_path: Path) -> None:
    settings = TrainSettings(
        data=DataSettings(path=str(photo_folder)), model=ModelSettings(name="JiT-T/8", img_size=16)
    )
    signals = SignalHandler(tmp_path / "save")
    signals.signal_name = "SIGTERM"
    reports: list[str] = []
    stopped: Any = SimpleNamespace(
        settings=settings,
        data=open_data(settings),
        plan=plan_batch(settings.data, settings.optim, ranks=1),
        steps=range(1),
        gpu_bytes=1,
        world=World(),
        watchdog=SimpleNamespace(report=reports.append),
        signals=signals,
    )
    assert Trainer._open_batches(stopped) is None
    assert len(reports) == 1 and reports[0].startswith("loading images to the device")
