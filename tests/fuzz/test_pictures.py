"""Picture files, damaged: decoded to the same pixels or called broken, never more, in bounded memory."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from muralist.data.images import BrokenImage, read_cropped, stored_shape
from tests.fuzz.damage import damaged, examples, refused_or
from tests.support.pictures import encoded, noise

PICTURE = noise(1, 21, 17)
VALID = {
    "PNG": encoded(PICTURE),
    "PNG of few colours": encoded(PICTURE.convert("P")),
    "PNG with transparency": encoded(PICTURE.convert("RGBA")),
    "JPEG": encoded(PICTURE, "JPEG"),
    "progressive JPEG": encoded(
        PICTURE,
        "JPEG",
        progressive=True,
        exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
    ),
    "GIF": encoded(PICTURE, "GIF"),
    "BMP": encoded(PICTURE, "BMP"),
    "WEBP": encoded(PICTURE, "WEBP", lossless=True),
    "TIFF": encoded(PICTURE, "TIFF", compression="tiff_lzw"),
    "PPM": encoded(PICTURE, "PPM"),
}


@pytest.mark.parametrize("kind", VALID)
@examples(22)
@given(data=st.data())
def test_damaged_pictures_are_decoded_or_broken(kind: str, data: st.DataObject) -> None:
    content = data.draw(damaged(VALID[kind]))
    found = refused_or(lambda: read_cropped(content, 8, "it"))
    if isinstance(found, Exception):
        assert isinstance(found, BrokenImage) and found.name == "it" and found.reason
    else:
        assert found.shape == (8, 8, 3) and found.dtype == np.uint8
    shape = refused_or(lambda: stored_shape(content, "it"))
    assert isinstance(shape, BrokenImage) or (len(shape) == 2 and min(shape) >= 0)


@examples(22)
@given(data=st.data())
def test_a_png_that_is_decoded_has_the_pixels_that_were_written(data: st.DataObject) -> None:
    """Every chunk has a checksum: other bytes in it are found out, not shown."""
    position = data.draw(st.integers(0, len(VALID["PNG"]) - 1))
    content = bytearray(VALID["PNG"])
    content[position] ^= data.draw(st.integers(1, 255))
    found = refused_or(lambda: read_cropped(bytes(content), (17, 21)))
    assert isinstance(found, BrokenImage) or np.array_equal(found, np.asarray(PICTURE))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("size", [(65535, 65535), (2**31 - 1, 1), (1, 2**31 - 1), (20000, 20000), (0, 5)])
def test_a_header_of_more_pixels_than_memory_is_refused_at_once(size: tuple[int, int], tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(b"\0" * 10**6))
        + _chunk(b"IEND", b"")
    )
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(BrokenImage):
        read_cropped(tmp_path / "bomb.png", 8)


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1)])
def test_a_strip_is_no_picture(size: tuple[int, int]) -> None:
    with pytest.raises(BrokenImage, match="strip"):
        read_cropped(encoded(Image.new("RGB", size)), 256)
