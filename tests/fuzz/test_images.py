"""EncodedSample files, damaged: decoded to the same pixels or called broken, never more, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from muralist.data.decode import ImageDecodeError, decode_cropped, read_image_shape
from tests.fuzz.damage import damaged, examples, refused_or
from tests.support.images import encoded, noise, png_file

IMAGE = noise(1, 21, 17)
VALID = {
    "PNG": encoded(IMAGE),
    "PNG of few colors": encoded(IMAGE.convert("P")),
    "PNG with transparency": encoded(IMAGE.convert("RGBA")),
    "JPEG": encoded(IMAGE, "JPEG"),
    "progressive JPEG": encoded(
        IMAGE,
        "JPEG",
        progressive=True,
        exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
    ),
    "GIF": encoded(IMAGE, "GIF"),
    "BMP": encoded(IMAGE, "BMP"),
    "WEBP": encoded(IMAGE, "WEBP", lossless=True),
    "TIFF": encoded(IMAGE, "TIFF", compression="tiff_lzw"),
    "PPM": encoded(IMAGE, "PPM"),
}


@pytest.mark.parametrize("kind", VALID)
@examples(22)
@given(data=st.data())
def test_damaged_images_are_decoded_or_refused(kind: str, data: st.DataObject) -> None:
    content = data.draw(damaged(VALID[kind]))
    found = refused_or(lambda: decode_cropped(content, 8, "it"))
    if isinstance(found, Exception):
        assert isinstance(found, ImageDecodeError) and found.name == "it" and found.reason
    else:
        assert found.shape == (8, 8, 3) and found.dtype == np.uint8
    shape = refused_or(lambda: read_image_shape(content, "it"))
    assert isinstance(shape, ImageDecodeError) or (len(shape) == 2 and min(shape) >= 0)


@examples(22)
@given(data=st.data())
def test_a_damaged_png_is_exact_or_refused(data: st.DataObject) -> None:
    """Every chunk has a checksum: other bytes in it are found out, not shown."""
    position = data.draw(st.integers(0, len(VALID["PNG"]) - 1))
    content = bytearray(VALID["PNG"])
    content[position] ^= data.draw(st.integers(1, 255))
    found = refused_or(lambda: decode_cropped(bytes(content), (17, 21)))
    assert isinstance(found, ImageDecodeError) or np.array_equal(found, np.asarray(IMAGE))


@pytest.mark.parametrize("size", [(65535, 65535), (2**31 - 1, 1), (1, 2**31 - 1), (20000, 20000), (0, 5)])
def test_a_header_of_more_pixels_than_memory_is_refused_at_once(size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_file(*size, b"\0" * 10**6))
    with pytest.raises(ImageDecodeError):
        decode_cropped(tmp_path / "bomb.png", 8)


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1)])
def test_strips_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageDecodeError, match="strip"):
        decode_cropped(encoded(Image.new("RGB", size)), 256)
