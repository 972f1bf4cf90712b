"""Processes that decode: the same pixels, the same words for what cannot be read, and none is left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from muralist.data.images import decode
from muralist.errors import UserError
from muralist.evaluate import extraction, shared_memory
from muralist.evaluate.cache import Item
from muralist.evaluate.decoders import Decoders, Underway, Wanted
from muralist.evaluate.features import compute, hash_files
from muralist.evaluate.shared_memory import SharedMemory
from tests.support.colours import Colours
from tests.support.evaluating import scenes, write_pictures


def wanted(folder: Path) -> list[Wanted]:
    return [Wanted(item.content, item.key, item.shape) for item in hash_files(sorted(folder.iterdir()))]  # type: ignore[arg-type]


def test_pixels_are_those_of_this_process(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "images", scenes(17, 0, side=24))
    write_pictures(folder, scenes(2, 1, side=300))  # another size: 000000 and 000001
    (folder / "torn ü\n.png").write_bytes((folder / "000004.png").read_bytes()[:60])
    files = wanted(folder)
    with Decoders(2, ahead=1) as decoders:
        found = decoders.decode(files).rows()
        processes = decoders._processes
    for one, row in zip(files[:-1], found[:-1], strict=True):
        assert not isinstance(row, str) and np.array_equal(row.numpy(), np.asarray(decode(one.path)))
    assert isinstance(found[-1], str) and "truncated" in found[-1]
    assert [process.returncode for process in processes] == [0, 0]


def test_a_picture_that_changed_is_an_error_and_the_next_ones_are_not(tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(2, 0)))
    with Decoders(1, ahead=2) as decoders:
        changed = decoders.decode([replace(files[0], key=files[1].key), files[1]])
        with pytest.raises(UserError, match="000000.png changed while it was evaluated. Something still writes"):
            changed.rows()
        assert len(decoders.decode(files).rows()) == 2


def test_memory_is_used_again_and_grows(tmp_path: Path) -> None:
    small, large = (wanted(write_pictures(tmp_path / str(side), scenes(3, side, side))) for side in (16, 48))
    with Decoders(2, ahead=1) as decoders:
        for files in (small, large, small):
            underway = decoders.decode(files)
            for one, row in zip(files, underway.rows(), strict=True):
                assert not isinstance(row, str) and np.array_equal(row.numpy(), np.asarray(decode(one.path)))
            underway.forget()
    assert np.array_equal(row.numpy(), np.asarray(decode(small[-1].path)))  # type: ignore[union-attr]  # it outlives them


def test_memory_of_large_pictures_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_USUAL", 4000)
    small, large = (wanted(write_pictures(tmp_path / str(side), scenes(3, side, side))) for side in (16, 48))
    with Decoders(2, ahead=1) as decoders:
        (memory,) = decoders._all_memory
        for files, size in ((small, 2304), (large, 20736), (small, 2304)):
            underway = decoders.decode(files)
            for one, row in zip(files, underway.rows(), strict=True):
                assert not isinstance(row, str) and np.array_equal(row.numpy(), np.asarray(decode(one.path)))
            assert underway.size == os.fstat(memory.descriptor).st_size == size
            underway.forget()
            assert os.fstat(memory.descriptor).st_size == (size if size < 4000 else 0)


def test_of_large_pictures_fewer_batches_are_begun() -> None:
    def begun(size: int) -> list[tuple[list[Item], Underway]]:
        ahead: list[tuple[list[Item], Underway]] = []
        while extraction._has_room(ahead):
            ahead.append(([], Underway([], lambda: None, size)))
        return ahead

    assert [len(begun(size)) for size in (0, 12 << 20, 1 << 30, 5 << 30)] == [6, 6, 2, 1]


@pytest.mark.parametrize("refused", [False, True])
def test_memory_where_python_or_the_kernel_has_no_files_without_names(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    if refused:
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory()
    os.pwrite(memory.descriptor, b"abc", 0)
    assert bytes(memory.of(3)) == b"abc"
    memory.close()


@pytest.mark.parametrize("told", [None, (24, 23), (12, 48)])
def test_a_header_that_tells_another_size(told: tuple[int, int] | None, tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(3, 0, side=24)))
    files[1] = replace(files[1], shape=told)
    with Decoders(1, ahead=1) as decoders:
        rows = decoders.decode(files).rows()
    for one, row in zip(files, rows, strict=True):
        assert not isinstance(row, str) and np.array_equal(row.numpy(), np.asarray(decode(one.path)))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(2, 0)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Decoders(1, ahead=2) as decoders:
        decoders.decode(files).rows()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(1, 0)))
    with Decoders(1, ahead=1) as decoders:
        decoders._processes[0].kill()
        decoders._processes[0].wait()
        with pytest.raises(UserError, match="A process that decodes pictures ended. It was busy with .*000000.png"):
            decoders.decode(files).rows()


def test_features_of_pictures_that_processes_decode(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "images", scenes(9, 0))
    (folder / "torn.png").write_bytes((folder / "000001.png").read_bytes()[:60])
    items = hash_files(sorted(folder.iterdir()))
    here = compute(Colours(), items, {"0": "cpu"}, tmp_path / "here")
    there = compute(Colours(takes_pixels=True), items, {"0": "cpu"}, tmp_path / "there")
    assert np.array_equal(here.rows, there.rows) and len(there.rows) == 9
    assert here.unreadable == there.unreadable and list(there.unreadable) == [9]
