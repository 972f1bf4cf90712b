"""Pictures that lie on the device: the stream of the loader, to the bit, for every rank and from any step."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from muralist.data import on_device
from muralist.data.loader import Batch, training_batches
from muralist.data.on_device import PicturesOnDevice, lies_on_device, put_on
from muralist.data.packed import pack
from muralist.data.sources import Source, open_source
from muralist.data.stream import Split, Stream, split
from muralist.errors import UserError
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train import loop
from muralist.train.data import open_data
from muralist.train.distributed import Engine
from muralist.train.schedule import plan_batch
from muralist.train.stop import Requests

SIDE = 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["folder", "packed", "npz", "driving_world", "several"])
def source(request: pytest.FixtureRequest, photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Some pictures, with labels, and with captions where the kind has them."""
    if request.param == "driving_world":
        from muralist.data.driving_world import DrivingWorld

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


def on_cpu(source: Source, parts: Split, workers: int = 0) -> tuple[PicturesOnDevice, list[int]]:
    heard: list[int] = []
    return put_on(CPU, source, parts, SIDE, DataSettings(num_workers=workers), heard.append), heard


def assert_same(one: Batch, other: Batch) -> None:
    for ours, theirs in zip(one[:2] + one[3:4], other[:2] + other[3:4], strict=True):
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert one.captions == other.captions and one.encoded is other.encoded is None


@pytest.mark.parametrize(("ranks", "samples", "held_out"), [(1, None, 0.1), (2, None, 0.0), (2, 31, 0.2)])
def test_the_stream_is_that_of_the_loader(
    source: Source, ranks: int, samples: int | None, held_out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "_AHEAD", 20)  # so that the stream is made of many pieces
    parts = split(samples or len(source), held_out)
    settings = DataSettings(batch_size=3, global_batch_size=12, num_workers=0)
    plan, order = plan_batch(settings, OptimSettings(), ranks), Stream(5, parts.training_size)
    pictures, heard = on_cpu(source, parts)
    assert heard[-1] == parts.training_size == len(pictures.images_u8)
    for rank in range(ranks):
        for first in (0, 7):  # from the start, and as a resumed run goes on; over the end of an epoch
            steps = range(first, first + 9)
            read = list(training_batches(source, parts, order, plan.numbers(rank, steps), settings))
            kept = list(pictures.batches(order, plan.numbers(rank, steps)))
            assert len(read) == len(kept) == 9 * plan.parts
            for one, other in zip(read, kept, strict=True):
                assert_same(one, other)


def test_captions_are_kept_where_there_are_any(photo_folder: Path) -> None:
    named, plain = (open_source(str(photo_folder), SIDE, caption=caption) for caption in ("A {label}", None))
    for source, expected in ((named, {"A sunrise", "A meadow"}), (plain, {""})):
        pictures, _ = on_cpu(source, split(len(source), 0.0))
        (batch,) = islice(pictures.batches(Stream(0, 48), [list(range(48))]), 1)
        assert set(batch.captions) == expected
    assert pictures.captions is None


def test_loader_processes_bring_the_same(photo_folder: Path) -> None:
    source = open_source(str(photo_folder), SIDE)
    parts = split(len(source), 0.1)
    alone, helped = (on_cpu(source, parts, workers)[0] for workers in (0, 2))
    assert torch.equal(alone.images_u8, helped.images_u8) and torch.equal(alone.labels, helped.labels)


def test_a_broken_picture_is_told_as_ever(photo_folder: Path, tmp_path: Path) -> None:
    for path in sorted((photo_folder / "meadow").glob("*.png")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = tmp_path / "010.png"
    broken.write_bytes(broken.read_bytes()[:100])
    source = open_source(str(tmp_path), SIDE)
    with pytest.raises(UserError, match=f"{broken} is a broken image"):
        on_cpu(source, split(len(source), 0.0))


@pytest.mark.parametrize(
    ("wish", "needed", "free", "whole_epoch", "expected"),
    [
        ("auto", 10**9, 20e9, True, True),
        ("auto", 3 * 10**9, 20e9, True, False),  # more than a tenth
        ("auto", 9 * 10**9, 141e9, True, False),  # more than 8 GB
        ("auto", 10**9, 20e9, False, False),  # most would never be seen
        ("auto", 10**3, None, True, False),  # no card
        ("none", 10**3, 20e9, True, False),
        ("device", 10**10, 20e9, False, True),
        ("device", 10**10, None, False, True),
    ],
)
def test_what_lies_on_the_device(wish: str, needed: int, free: float | None, whole_epoch: bool, expected: bool) -> None:
    assert lies_on_device(wish, needed, free, whole_epoch) is expected


def test_more_than_the_card_holds_is_refused() -> None:
    with pytest.raises(UserError, match="the pictures take 15.0 GB, and the GPU has 14.0 GB free"):
        lies_on_device("device", 15 * 10**9, 14e9, True)


def test_a_stop_while_pictures_are_on_their_way_is_a_stop(photo_folder: Path, tmp_path: Path) -> None:
    settings = TrainSettings(
        data=DataSettings(path=str(photo_folder)), model=ModelSettings(name="JiT-T/8", img_size=16)
    )
    requests = Requests(tmp_path / "save")
    requests.signal_name = "SIGTERM"
    said: list[str] = []
    heartbeat = SimpleNamespace(report=said.append)
    assert loop._pictures_on_device(settings, open_data(settings), Engine(), heartbeat, requests) is None
    assert len(said) == 1 and said[0].startswith("bringing pictures to the device")
