"""Processes that decode: the same pixels, the same words for what cannot be read, and none is left behind."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from muralist.data.images import decode
from muralist.errors import UserError
from muralist.evaluate.decoders import Decoders
from muralist.evaluate.features import compute, hash_files
from tests.support.colours import Colours
from tests.support.evaluating import scenes, write_pictures


def wanted(folder: Path) -> list[tuple[Path, bytes]]:
    return [(path, hashlib.sha256(path.read_bytes()).digest()) for path in sorted(folder.iterdir())]


def test_pixels_are_those_of_this_process(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "images", scenes(17, 0, side=24))
    write_pictures(folder, scenes(2, 1, side=300))  # more than a pipe holds, and another size: 000000 and 000001
    (folder / "torn ü\n.png").write_bytes((folder / "000004.png").read_bytes()[:60])
    files = wanted(folder)
    with Decoders(2) as decoders:
        found = [row for part in decoders.decode(files) for row in part.result()]
        processes = decoders._processes
    for (path, _), row in zip(files[:-1], found[:-1], strict=True):
        assert not isinstance(row, str) and np.array_equal(row.numpy(), np.asarray(decode(path)))
    assert isinstance(found[-1], str) and "truncated" in found[-1]
    assert [process.returncode for process in processes] == [0, 0]


def test_a_picture_that_changed_is_an_error_and_the_next_ones_are_not(tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(2, 0)))
    with Decoders(1) as decoders:
        (changed,) = decoders.decode([(files[0][0], files[1][1]), files[1]])
        with pytest.raises(UserError, match="000000.png changed while it was evaluated. Something still writes"):
            changed.result()
        (after,) = decoders.decode(files)
        assert len(after.result()) == 2


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    files = wanted(write_pictures(tmp_path / "images", scenes(1, 0)))
    with Decoders(1) as decoders:
        decoders._processes[0].kill()
        decoders._processes[0].wait()
        with pytest.raises(UserError, match="A process that decodes pictures ended. It was busy with .*000000.png"):
            decoders.decode(files)[0].result()


def test_features_of_pictures_that_processes_decode(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "images", scenes(9, 0))
    (folder / "torn.png").write_bytes((folder / "000001.png").read_bytes()[:60])
    items = hash_files(sorted(folder.iterdir()))
    here = compute(Colours(), items, {"0": "cpu"}, tmp_path / "here")
    there = compute(Colours(takes_pixels=True), items, {"0": "cpu"}, tmp_path / "there")
    assert np.array_equal(here.rows, there.rows) and len(there.rows) == 9
    assert here.unreadable == there.unreadable and list(there.unreadable) == [9]
