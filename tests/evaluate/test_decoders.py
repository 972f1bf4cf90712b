"""Decoder processes: equal pixels, equal errors, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.core.errors import UserError
from muralist.data.decode import decode_image
from muralist.evaluate import features
from muralist.evaluate.decoders import DecoderPool, FeatureItem, PendingDecode, SharedMemory
from muralist.evaluate.features import compute_features, hash_files
from tests.support.colors import MeanColor
from tests.support.evaluating import scenes, write_images

pytestmark = pytest.mark.usefixtures("spawned_workers")


def wanted(folder: Path) -> list[FeatureItem]:
    return hash_files(sorted(folder.iterdir()))


def check(items: list[FeatureItem], rows: list[torch.Tensor | str]) -> None:
    for item, row in zip(items, rows, strict=True):
        assert isinstance(item.content, Path) and not isinstance(row, str)
        assert np.array_equal(row.numpy(), np.asarray(decode_image(item.content)))


def test_pool_decodes_the_same_pixels_as_this_process(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", scenes(17, 0, side=24))
    write_images(folder, scenes(2, 1, side=300))  # another size: 000000 and 000001
    (folder / "torn ü\n.png").write_bytes((folder / "000004.png").read_bytes()[:60])
    resource_tracker.ensure_running()  # its pipe stays open
    files, descriptors = wanted(folder), len(list(Path("/proc/self/fd").iterdir()))
    with DecoderPool(2, ahead=1) as decoders:
        found = decoders.decode(files).rows()
    check(files[:-1], found[:-1])
    assert isinstance(found[-1], str) and "truncated" in found[-1]
    del found
    assert not multiprocessing.active_children()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_shared_memory_is_reused_grows_and_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muralist.evaluate.decoders._KEPT", 10_000)
    sizes = (16, 32, 48, 16)
    batches = [wanted(write_images(tmp_path / str(side), scenes(3, side, side))) for side in sizes]
    with DecoderPool(2, ahead=1) as decoders:
        (memory,) = decoders._memories
        for files, size, kept in zip(batches, (2304, 9216, 20736, 2304), (2304, 9216, 0, 2304), strict=True):
            underway = decoders.decode(files)
            rows = underway.rows()
            check(files, rows)
            assert underway.size == os.fstat(memory.descriptor).st_size == size
            underway.release()
            assert os.fstat(memory.descriptor).st_size == kept
    check(batches[-1], rows)  # they outlive the pool


@pytest.mark.parametrize("told", [None, (24, 23), (12, 48)])
def test_a_header_with_the_wrong_size(told: tuple[int, int] | None, tmp_path: Path) -> None:
    files = wanted(write_images(tmp_path / "images", scenes(3, 0, side=24)))
    files[1] = replace(files[1], shape=told)
    with DecoderPool(1, ahead=1) as decoders:
        check(files, decoders.decode(files).rows())


def test_a_changed_file_is_an_error_and_later_batches_work(tmp_path: Path) -> None:
    files = wanted(write_images(tmp_path / "images", scenes(2, 0)))
    with DecoderPool(1, ahead=2) as decoders:
        changed = decoders.decode([replace(files[0], key=files[1].key), files[1]])
        with pytest.raises(UserError, match="000000.png changed while it was evaluated. Another process still writes"):
            changed.rows()
        assert len(decoders.decode(files).rows()) == 2


def test_fewer_batches_of_large_images_are_decoded_ahead() -> None:
    def begun(size: int) -> list[tuple[list[FeatureItem], PendingDecode]]:
        ahead: list[tuple[list[FeatureItem], PendingDecode]] = []
        while features._may_decode_ahead(ahead):
            ahead.append(([], PendingDecode(list, size=size)))
        return ahead

    assert [len(begun(size)) for size in (0, 12 << 20, 1 << 30, 5 << 30)] == [6, 6, 2, 1]


@pytest.mark.parametrize("refused", [False, True])
def test_shared_memory_without_memfd(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    if refused:
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory()
    os.pwrite(memory.descriptor, b"abc", 0)
    assert bytes(memory.view(3)) == b"abc"
    memory.close()


def test_a_killed_decoder_is_an_error(tmp_path: Path) -> None:
    files = wanted(write_images(tmp_path / "images", scenes(1, 0)))
    with DecoderPool(1, ahead=1) as decoders:
        decoders._pool._pool.kill("0")
        with pytest.raises(
            UserError, match="A process that decodes images was killed by SIGKILL. It was busy with .*0.png"
        ):
            decoders.decode(files).rows()


def test_features_are_equal_with_decoder_processes(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", scenes(9, 0))
    (folder / "torn.png").write_bytes((folder / "000001.png").read_bytes()[:60])
    items = hash_files(sorted(folder.iterdir()))
    here = compute_features(MeanColor(), items, {"0": "cpu"}, tmp_path / "here")
    there = compute_features(MeanColor(takes_pixels=True), items, {"0": "cpu"}, tmp_path / "there")
    assert np.array_equal(here.rows, there.rows) and len(there.rows) == 9
    assert here.unreadable == there.unreadable and list(there.unreadable) == [9]
