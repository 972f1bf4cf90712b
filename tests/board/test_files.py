"""Thumbnails: small, cached, and only of images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from muralist.board.files import Thumbnails, image_facts


def test_a_thumbnail_is_cached_until_its_image_changes(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((100, 500, 3), np.uint8)).save(image)
    thumbnails = Thumbnails(tmp_path / "cache")
    first = thumbnails.get(image, 96)
    assert first is not None and first[1] == "image/webp"
    (kept,) = (tmp_path / "cache").glob("??/*.webp")
    kept.write_bytes(b"from the cache")
    assert thumbnails.get(image, 96) == (b"from the cache", "image/webp")
    Image.fromarray(np.full((100, 500, 3), 255, np.uint8)).save(image)
    os.utime(image, ns=(1, 1))
    again = thumbnails.get(image, 96)
    assert again is not None and again[0] not in (b"from the cache", first[0])
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
    assert thumbnail is not None and thumbnail[0][:4] == b"RIFF"
