"""The faster decoder: Pillow's pixels, or none at all."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from muralist.core.images import encode_png
from muralist.data.decode import HAS_FAST_PNG, decode_png_fast

pytestmark = pytest.mark.skipif(not HAS_FAST_PNG, reason="needs muralist[fast]")
RANDOM = np.random.default_rng(0)


def soft(height: int, width: int) -> np.ndarray:
    """A image for which an encoder uses every filter."""
    small = Image.fromarray(RANDOM.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return (np.asarray(small, np.float32) + RANDOM.normal(0, 4, (height, width, 3))).clip(0, 255).astype(np.uint8)


def png(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 64), (300, 257)])
@pytest.mark.parametrize("level", [0, 1, 9])
def test_pixels_equal_pillow(shape: tuple[int, int], level: int) -> None:
    data = png(Image.fromarray(soft(*shape)), compress_level=level)
    found = decode_png_fast(data)
    assert found is not None and np.array_equal(found, np.asarray(Image.open(io.BytesIO(data))))


def test_every_png_filter_equals_pillow() -> None:
    rows = RANDOM.integers(0, 256, (40, 31 * 3 + 1), dtype=np.uint8)
    rows[:, 0] = np.arange(40) % 5
    header = struct.pack(">IIBBBBB", 31, 40, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(rows.tobytes()))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
    assert np.array_equal(decode_png_fast(data), np.asarray(Image.open(io.BytesIO(data))))  # type: ignore[arg-type]


def test_pngs_with_text_chunks() -> None:
    data = encode_png(soft(20, 30), {"prompt": "a red car, größer"})
    found = decode_png_fast(data)
    assert found is not None and np.array_equal(found, np.asarray(Image.open(io.BytesIO(data))))


def test_other_pngs_are_left_to_pillow() -> None:
    image = Image.fromarray(soft(9, 9))
    turned = Image.Exif()
    turned[0x0112] = 6
    profile = PngImagePlugin.PngInfo()
    profile.add_text("Raw profile type exif", "\nexif\n 2\n0000")
    packed = PngImagePlugin.PngInfo()
    packed.add_itxt("prompt", "a car", zip=True)
    texts = [PngImagePlugin.PngInfo() for _ in range(3)]
    texts[0].add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    texts[1].add_text("transparency", "0")
    texts[2].add_text("prompt", "a" * ((1 << 20) + 1))
    others = [png(image.convert(mode)) for mode in ("L", "P", "RGBA", "1", "I;16")]
    others += [png(image, exif=turned), png(image, pnginfo=profile), png(image, pnginfo=packed)]
    others += [png(image, pnginfo=text) for text in texts]
    others += [png(image, transparency=(1, 2, 3)), b"", b"GIF89a", b"\x89PNG\r\n\x1a\n"]
    assert [decode_png_fast(data) for data in others] == [None] * len(others)


def test_damage_anywhere_is_left_to_pillow() -> None:
    data = png(Image.fromarray(soft(12, 10)))
    for place in range(len(data)):
        flipped = data[:place] + bytes((data[place] ^ 16,)) + data[place + 1 :]
        assert decode_png_fast(flipped) is None
        assert decode_png_fast(data[:place]) is None
    short = zlib.compress(bytes(100))
    assert decode_png_fast(data[:33] + chunk(b"IDAT", short) + chunk(b"IEND", b"")) is None
    beyond = zlib.compress(bytes(12 * 31) + b"\x07")
    assert decode_png_fast(data[:33] + chunk(b"IDAT", beyond) + chunk(b"IEND", b"")) is None


def test_interrupted_pixel_chunks_are_left_to_pillow() -> None:
    data = png(Image.fromarray(soft(12, 10)))
    start, (length,) = data.index(b"IDAT") - 4, struct.unpack(">I", data[data.index(b"IDAT") - 4 : data.index(b"IDAT")])
    packed = data[start + 8 : start + 8 + length]
    one, two, text = chunk(b"IDAT", packed[:9]), chunk(b"IDAT", packed[9:]), chunk(b"tEXt", b"prompt\0a car")
    end = chunk(b"IEND", b"")
    assert decode_png_fast(data[:start] + one + two + text + end) is not None
    assert decode_png_fast(data[:start] + one + text + two + end) is None


def test_inflation_stops_at_the_size_of_the_image() -> None:
    data = png(Image.fromarray(soft(12, 10)))
    bomb = zlib.compress(bytes(1 << 28), 9)
    tracemalloc.start()
    assert decode_png_fast(data[:33] + chunk(b"IDAT", bomb) + chunk(b"IEND", b"")) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
