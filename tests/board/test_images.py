"""Sample grids and thumbnails."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.board.images import SampleGrids, Thumbnails, image_facts
from tests.support.boards import PROMPTS, write_run


def test_a_sample_grid_grows_by_prompts_and_checkpoints(tmp_path: Path) -> None:
    samples = write_run(tmp_path / "run", checkpoints=2) / "samples"
    grids = SampleGrids()
    assert grids.get(samples)["steps"] == [10, 20]
    # Resumed on two GPUs: the second one draws a prompt of its own, one that is there already, and fails at the third.
    late = samples / "step_0000100"
    shutil.copytree(samples / "step_0000010", late)
    shutil.copy(late / "gpu_0_sample.png", late / "gpu_1_sample.png")
    (late / "gpu_1_prompt.txt").write_text("a new prompt\n")
    shutil.copy(late / "gpu_0_sample.png", late / "gpu_1_sample_2.png")
    (late / "gpu_1_prompt_2.txt").write_text(PROMPTS[0] + "\n")
    (late / "gpu_1_sample_3.png").write_bytes(b"its text is not there yet")
    (late / "gpu_1_error.txt").write_text("out of memory\n")
    (samples / "sheet.png").write_bytes(b"")
    grid = grids.get(samples)
    assert grid["prompts"] == [*PROMPTS, "a new prompt", PROMPTS[0]] and grid["steps"] == [10, 20, 100]
    assert grid["files"][0][4:] == [None, None]
    assert grid["files"][2][4:] == ["gpu_1_sample.png", "gpu_1_sample_2.png"]
    assert grid["errors"] == [{"step": 100, "gpu": "1", "reason": "out of memory"}]
    shutil.rmtree(samples / "step_0000020")
    assert grids.get(samples)["steps"] == [10, 100]
    assert grids.get(tmp_path / "nowhere") == {"prompts": [], "steps": [], "files": [], "errors": []}


def test_an_unchanged_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_run(tmp_path / "run", checkpoints=2) / "samples"
    for folder in samples.iterdir():
        os.utime(folder, (time.time() - 60,) * 2)
    grids = SampleGrids()
    before = grids.get(samples)
    monkeypatch.setattr("muralist.board.images._read_text", lambda path: pytest.fail("read again"))
    assert grids.get(samples) == before


def test_a_thumbnail_is_cached_until_its_image_changes(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((100, 500, 3), np.uint8)).save(image)
    thumbnails = Thumbnails(tmp_path / "cache")
    first = thumbnails.get(image, 96)
    assert first is not None and first.media_type == "image/webp"
    (kept,) = (tmp_path / "cache").glob("??/*.webp")
    kept.write_bytes(b"from the cache")
    assert thumbnails.get(image, 96) == ("image/webp", b"from the cache")
    Image.fromarray(np.full((100, 500, 3), 255, np.uint8)).save(image)
    os.utime(image, ns=(1, 1))
    assert thumbnails.get(image, 96).data not in (b"from the cache", first.data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "image.png"]
    thumbnails.shrink(max_bytes=0)
    assert list((tmp_path / "cache").glob("??/*.webp")) == []


def test_a_broken_image_has_no_thumbnail(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 200)
    assert Thumbnails(tmp_path / "cache").get(broken, 96) is None and image_facts(broken) == {}
    postscript = tmp_path / "script.png"
    postscript.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert Thumbnails(tmp_path / "cache").get(postscript, 96) is None and image_facts(postscript) == {}


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((100, 500, 3), np.uint8)).save(image)
    (tmp_path / "cache").write_text("a file where the folder should be")
    thumbnail = Thumbnails(tmp_path / "cache").get(image, 96)
    assert thumbnail is not None and thumbnail.data[:4] == b"RIFF"
