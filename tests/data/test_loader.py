"""Batches of the loader and of images kept on the device: one stream, to the bit, for every rank and from any step."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data import loader
from muralist.data.decode import ImageDecodeError
from muralist.data.loader import (
    Batch,
    GpuResidentDataset,
    fits_on_device,
    held_out_batches,
    load_to_device,
    training_batches,
)
from muralist.data.sampler import ShuffledOrder, Split, split_held_out
from muralist.data.source import Sample, Source
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


# -- the loader: the same stream whoever reads which part of it


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """53 images that each show their own index."""
    index = np.arange(53, dtype=np.uint8)
    images = np.broadcast_to(index[:, None, None, None], (53, 4, 4, 3))
    path = tmp_path_factory.mktemp("numbered") / "numbered.npz"
    np.savez(path, train_x=images, train_y=index)
    return open_source(str(path), 4)


def read(
    source: Source, rank: int, ranks: int, total: int, part: int, steps: range, num_workers: int = 0
) -> Iterator[list[Batch]]:
    """The batches of one rank, step by step."""
    settings = DataSettings(batch_size=part, global_batch_size=total, num_workers=num_workers, pin_memory=False)
    plan = plan_batch(settings, OptimSettings(), ranks)
    parts = split_held_out(len(source), 0.1)
    stream = ShuffledOrder(9, parts.training_size)
    batches = training_batches(source, parts, stream, plan.sample_indices(rank, steps), settings)
    while group := list(itertools.islice(batches, plan.accumulation_steps)):
        yield group


def shown(batches: list[Batch]) -> list[tuple[int, int, int]]:
    """Number, image and label of every sample."""
    return [
        (int(number), int(image[0, 0, 0]), int(label))
        for batch in batches
        for number, image, label in zip(batch.sample_indices, batch.images_u8, batch.labels, strict=True)
    ]


@hypothesis_settings(max_examples=25)
@given(ranks=st.sampled_from([1, 2, 4]), part=st.integers(1, 12), first=st.integers(0, 40), length=st.integers(1, 6))
def test_ranks_read_disjoint_slices_of_one_order(
    numbered: Source, ranks: int, part: int, first: int, length: int
) -> None:
    total = 12
    by_rank = [list(read(numbered, rank, ranks, total, part, range(first, first + length))) for rank in range(ranks)]
    together = [row for step in range(length) for rank in range(ranks) for row in shown(by_rank[rank][step])]
    parts = split_held_out(53, 0.1)
    numbers = np.arange(first * total, (first + length) * total)
    indices = parts.training_index(ShuffledOrder(9, parts.training_size).positions(numbers))
    assert together == [(number, index, index) for number, index in zip(numbers, indices, strict=True)]
    assert not {index for _, index, _ in together} & set(parts.held_out.tolist())


def test_batches_do_not_depend_on_loader_workers(numbered: Source) -> None:
    alone, helped = (list(read(numbered, 1, 2, 12, 3, range(2, 12), workers)) for workers in (0, 2))
    assert len(alone) == len(helped) == 10
    for one, two in zip(itertools.chain(*alone), itertools.chain(*helped), strict=True):
        assert torch.equal(one.images_u8, two.images_u8)
        assert torch.equal(one.sample_indices, two.sample_indices)
        assert torch.equal(one.labels, two.labels)
        assert one.captions == two.captions


class ProcessSource(Source):
    """Twelve images whose label is the process that read them."""

    def __init__(self) -> None:
        self.label_names = []

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> Sample:
        return Sample(np.full((4, 4, 3), index, np.uint8), os.getpid(), "")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_live_for_an_epoch_unless_they_are_persistent(num_workers: int) -> None:
    seen: dict[bool, list[list[int]]] = {}
    for persistent in (True, False):
        settings = DataSettings(batch_size=4, num_workers=num_workers, persistent_workers=persistent)
        plan, parts = plan_batch(settings, OptimSettings(), 1), split_held_out(12, 0.0)
        order = ShuffledOrder(0, 12)
        batches = list(training_batches(ProcessSource(), parts, order, plan.sample_indices(0, range(1, 9)), settings))
        epochs = [batches[:2], batches[2:5], batches[5:]]  # steps 1 and 2, 3 to 5, 6 to 8 of three steps per epoch
        processes = [{int(label) for batch in epoch for label in batch.labels} for epoch in epochs]
        assert all(len(found) == 1 for found in processes)
        assert len(set.union(*processes)) == (1 if persistent or not num_workers else 3)
        seen[persistent] = [batch.images_u8[:, 0, 0, 0].tolist() for batch in batches]
        assert not multiprocessing.active_children()
    assert seen[True] == seen[False] and len(seen[True]) == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_reaches_the_trainer_as_a_user_error(
    photo_folder: Path, tmp_path: Path, num_workers: int
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for path in sorted((photo_folder / "meadow").glob("*.png")):
        (folder / path.name).write_bytes(path.read_bytes())
    broken = folder / "010.png"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(ImageDecodeError) as caught:
        list(read(open_source(str(folder), 8), 0, 1, 4, 2, range(5), num_workers))
    assert isinstance(caught.value, UserError)
    assert caught.value.name == str(broken)
    assert str(broken) in caught.value.what
    assert "--on_broken skip; `muralist pack` leaves broken images out and lists them." in caught.value.fix
    assert not multiprocessing.active_children()  # nothing waits for the garbage collector


def test_held_out_sample_indices_are_positions(numbered: Source) -> None:
    indices = np.array([40, 7, 21, 33, 2])
    batches = list(held_out_batches(numbered, indices, np.array([0, 2, 3, 4]), size=3))
    assert [len(batch.sample_indices) for batch in batches] == [3, 1]
    assert shown(batches) == [(0, 40, 40), (2, 21, 21), (3, 33, 33), (4, 2, 2)]


LOST_TRAINER = """
import os, socket, sys, time
from multiprocessing import resource_sharer
from muralist.data.loader import _prepare_worker

if {prepared}:
    _prepare_worker(0)
address, _ = resource_sharer.DupFd(os.dup(0))._id  # starts the thread that hands a tensor to the trainer
with socket.socket(socket.AF_UNIX) as trainer:
    trainer.connect(address)
time.sleep(0.5)
sys.excepthook(ValueError, ValueError("another error"), None)
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_a_worker_is_silent_when_its_trainer_is_killed(prepared: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST_TRAINER.format(prepared=prepared)], capture_output=True, text=True, check=True
    )
    assert ("Traceback" in done.stderr) is not prepared
    assert "ValueError: another error" in done.stderr
