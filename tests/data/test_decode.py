"""Decoding: every kind of image file to exact pixels or a named error, cropped to size, by Pillow and the fast PNG path."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from muralist.core.errors import UserError
from muralist.core.images import encode_png
from muralist.data.decode import (
    HAS_FAST_PNG,
    ImageDecodeError,
    center_crop,
    decode_cropped,
    decode_image,
    decode_png_fast,
)
from tests.support.images import encoded, noise, png_chunk, png_file

KINDS: dict[str, dict[str, object]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "GIF": {},
    "BMP": {},
    "PPM": {},
    "TIFF": {},
}


@cache
def smooth_file(kind: str, progressive: bool = False) -> bytes:
    image = noise(1, 5, 6).resize((50, 60), Image.Resampling.BICUBIC)
    return encoded(image, kind, **KINDS[kind], **({"progressive": True} if progressive else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_every_kind_to_the_stored_pixels(kind: str) -> None:
    expected = np.asarray(Image.open(io.BytesIO(smooth_file(kind))).convert("RGB"))
    image = decode_image(smooth_file(kind))
    assert image.mode == "RGB" and image.size == (50, 60)
    assert np.array_equal(np.asarray(image), expected)


def check_broken_or_exact(damaged: bytes, whole: bytes) -> None:
    try:
        image = decode_image(damaged, "photo")
    except ImageDecodeError as error:
        assert error.name == "photo" and error.reason
    else:
        assert image.tobytes() == decode_image(whole).tobytes()


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), progressive=st.booleans(), cut=st.integers(0, 10**6))
def test_a_truncated_file_is_broken_or_exact(kind: str, progressive: bool, cut: int) -> None:
    whole = smooth_file(kind, progressive and kind == "JPEG")
    check_broken_or_exact(whole[: cut % len(whole)], whole)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(["JPEG", "PNG"]), progressive=st.booleans(), cut=st.integers(0, 10**6))
def test_a_file_whose_end_was_never_written_is_broken_or_exact(kind: str, progressive: bool, cut: int) -> None:
    whole = smooth_file(kind, progressive and kind == "JPEG")
    kept = cut % len(whole)
    check_broken_or_exact(whole[:kept] + bytes(len(whole) - kept), whole)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_half_a_file_is_broken(kind: str) -> None:
    whole = smooth_file(kind)
    half = whole[: len(whole) // 2]
    for damaged in (half, half + bytes(len(half))):
        with pytest.raises(ImageDecodeError):
            decode_image(damaged)


def test_truncation_is_found_even_if_load_truncated_images_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ImageDecodeError, match="truncated"):
        decode_image(smooth_file("JPEG")[:-400])


def test_the_end_marker_of_a_thumbnail_does_not_count() -> None:
    thumbnail, photo = smooth_file("JPEG"), encoded(noise(2, 40, 40), "JPEG")
    header = b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    whole = photo[:2] + header + photo[2:]
    assert decode_image(whole).tobytes() == decode_image(photo).tobytes()
    with pytest.raises(ImageDecodeError):
        decode_image(whole[:-300] + bytes(300))


def test_data_after_the_end_of_a_jpeg_is_ignored() -> None:
    whole = smooth_file("JPEG")
    assert decode_image(whole + b"\xff\xda" + bytes(1000)).tobytes() == decode_image(whole).tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(3, 30, 20), kind, **KINDS[kind], exif=exif.tobytes())
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert decode_image(data).tobytes() == expected.convert("RGB").tobytes()
    assert decode_image(data).size == ((30, 20) if orientation < 5 else (20, 30))


def test_unreadable_exif_is_ignored() -> None:
    data = encoded(noise(3, 30, 20), "JPEG", exif=b"Exif\0\0nonsense")
    assert decode_image(data).size == (30, 20)


def test_transparent_parts_become_white() -> None:
    rgba = np.zeros((2, 2, 4), dtype=np.uint8)
    rgba[0, 0] = (10, 20, 30, 255)
    rgba[0, 1] = (10, 20, 30, 0)
    rgba[1, 0] = (0, 0, 0, 51)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(rgba))))
    assert pixels.tolist() == [[[10, 20, 30], [255, 255, 255]], [[204, 204, 204], [255, 255, 255]]]


def test_palette_with_a_transparent_color() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putdata([0, 1])
    assert np.asarray(decode_image(encoded(image, "PNG"))).tolist() == [[[200, 0, 0], [0, 0, 200]]]
    assert np.asarray(decode_image(encoded(image, "PNG", transparency=1))).tolist() == [[[200, 0, 0], [255, 255, 255]]]


def test_sixteen_bits_become_the_upper_eight() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(decode_image(encoded(Image.fromarray(values), kind)))
        assert pixels[..., 0].tolist() == [[0, 0, 1, 0x12, 255]]
        assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    pixels = np.asarray(decode_image(encoded(image, "TIFF" if mode == "1" else "JPEG")))
    assert pixels.shape == (8, 8, 3) and (pixels == 255).all()


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(ImageDecodeError, match="floating-point"):
        decode_image(encoded(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"))


def test_decompression_bombs_are_refused() -> None:
    with pytest.raises(ImageDecodeError, match="more pixels"):
        decode_image(png_file(60_000, 60_000, bytes(1000)))


def test_strips_are_refused_before_they_are_scaled_up() -> None:
    with pytest.raises(ImageDecodeError, match="strip of 100000 x 1"):
        decode_cropped(encoded(Image.new("RGB", (100_000, 1))), 64, "strip.png")
    tall = encoded(Image.new("RGB", (1, 20_000)))
    assert decode_cropped(tall, (512, 4)).shape == (512, 4, 3)
    with pytest.raises(ImageDecodeError, match="strip of 1 x 20000"):
        decode_cropped(tall, (4, 512))


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\xff\xd8"]
)
def test_files_that_are_not_images_are_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageDecodeError) as caught:
        decode_image(path)
    assert str(path) in str(caught.value)
    assert "`muralist pack` leaves broken images out and lists them" in str(caught.value)


def test_a_missing_file_is_not_a_broken_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be read") as caught:
        decode_image(tmp_path / "gone.png")
    assert not isinstance(caught.value, ImageDecodeError)


def test_image_decode_error_can_be_pickled() -> None:
    error = ImageDecodeError("a.jpg", "image file is truncated")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.name, copy.reason) == (str(error), "a.jpg", "image file is truncated")


def reference_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The recipe word by word: halve by averaging boxes while twice as large both ways, scale to cover, cut the middle."""
    while pixels.shape[0] // 2 >= height and pixels.shape[1] // 2 >= width:
        half = (pixels.shape[1] // 2, pixels.shape[0] // 2)
        pixels = np.asarray(Image.fromarray(pixels).resize(half, resample=Image.Resampling.BOX))
    rows, columns = pixels.shape[:2]
    if columns / rows >= width / height:  # too wide: the height fits
        columns, rows = round(columns * (height / rows)), height
    else:
        columns, rows = width, round(rows * (width / columns))
    pixels = np.asarray(Image.fromarray(pixels).resize((columns, rows), resample=Image.Resampling.BICUBIC))
    top, left = (rows - height) // 2, (columns - width) // 2
    return pixels[top : top + height, left : left + width]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 70), st.integers(1, 70), st.integers(0, 9))
def test_center_crop_equals_adm_and_covers_any_rectangle(
    columns: int, rows: int, height: int, width: int, seed: int
) -> None:
    image = noise(seed, columns, rows)
    cropped = center_crop(image, (height, width))
    assert cropped.shape == (height, width, 3) and cropped.dtype == np.uint8 and cropped.flags.writeable
    assert np.array_equal(cropped, reference_crop(np.asarray(image), height, width))
    assert np.array_equal(center_crop(image, height), reference_crop(np.asarray(image), height, height))


def test_an_image_of_the_target_ratio_is_not_cropped() -> None:
    image = noise(5, 60, 40)
    assert np.array_equal(center_crop(image, (40, 60)), np.asarray(image))
    corner = noise(6, 60, 40)
    corner.paste((255, 0, 0), (0, 0, 30, 20))
    assert center_crop(corner, (20, 30))[:9, :14].reshape(-1, 3).tolist() == [[255, 0, 0]] * 126
    assert center_crop(corner, (20, 20))[:9, :9].tolist() == [[[255, 0, 0]] * 9] * 9


def test_an_image_of_the_target_size_is_unchanged() -> None:
    image = noise(5, 64, 64)
    assert np.array_equal(center_crop(image, 64), np.asarray(image))
    wide = noise(6, 101, 64)
    assert np.array_equal(center_crop(wide, 64), np.asarray(wide)[:, 18:82])


def test_large_images_are_halved_by_box_filters() -> None:
    pixels = np.random.default_rng(0).integers(0, 128, (64, 64, 3), dtype=np.uint8) * 2
    quarters = pixels.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3))
    cropped = center_crop(Image.fromarray(pixels), 32)
    assert np.abs(cropped - quarters).max() <= 0.5


# -- the fast PNG path: Pillow's pixels, or none at all

fast = pytest.mark.skipif(not HAS_FAST_PNG, reason="needs muralist[fast]")
RANDOM = np.random.default_rng(0)


def soft(height: int, width: int) -> np.ndarray:
    """A image for which an encoder uses every filter."""
    small = Image.fromarray(RANDOM.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return (np.asarray(small, np.float32) + RANDOM.normal(0, 4, (height, width, 3))).clip(0, 255).astype(np.uint8)


@fast
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 64), (300, 257)])
@pytest.mark.parametrize("level", [0, 1, 9])
def test_pixels_equal_pillow(shape: tuple[int, int], level: int) -> None:
    image = soft(*shape)
    texts = encode_png(image, {"prompt": "a red car, größer"})
    for data in (encoded(Image.fromarray(image), compress_level=level), texts):
        found = decode_png_fast(data)
        assert found is not None and np.array_equal(found, np.asarray(Image.open(io.BytesIO(data))))


@fast
def test_every_png_filter_equals_pillow() -> None:
    rows = RANDOM.integers(0, 256, (40, 31 * 3 + 1), dtype=np.uint8)
    rows[:, 0] = np.arange(40) % 5
    data = png_file(31, 40, rows.tobytes())
    assert np.array_equal(decode_png_fast(data), np.asarray(Image.open(io.BytesIO(data))))  # type: ignore[arg-type]


@fast
def test_other_pngs_are_left_to_pillow() -> None:
    image = Image.fromarray(soft(9, 9))
    turned = Image.Exif()
    turned[0x0112] = 6
    texts = [PngImagePlugin.PngInfo() for _ in range(5)]
    texts[0].add_text("Raw profile type exif", "\nexif\n 2\n0000")
    texts[1].add_itxt("prompt", "a car", zip=True)
    texts[2].add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    texts[3].add_text("transparency", "0")
    texts[4].add_text("prompt", "a" * ((1 << 20) + 1))
    others = [encoded(image.convert(mode)) for mode in ("L", "P", "RGBA", "1", "I;16")]
    others += [encoded(image, exif=turned), *(encoded(image, pnginfo=text) for text in texts)]
    others += [encoded(image, transparency=(1, 2, 3)), b"", b"GIF89a", b"\x89PNG\r\n\x1a\n"]
    assert [decode_png_fast(data) for data in others] == [None] * len(others)


@fast
def test_damage_anywhere_is_left_to_pillow() -> None:
    data = encoded(Image.fromarray(soft(12, 10)))
    for place in range(len(data)):
        flipped = data[:place] + bytes((data[place] ^ 16,)) + data[place + 1 :]
        assert decode_png_fast(flipped) is None
        assert decode_png_fast(data[:place]) is None
    short = zlib.compress(bytes(100))
    assert decode_png_fast(data[:33] + png_chunk(b"IDAT", short) + png_chunk(b"IEND", b"")) is None
    beyond = zlib.compress(bytes(12 * 31) + b"\x07")
    assert decode_png_fast(data[:33] + png_chunk(b"IDAT", beyond) + png_chunk(b"IEND", b"")) is None


@fast
def test_interrupted_pixel_chunks_are_left_to_pillow() -> None:
    data = encoded(Image.fromarray(soft(12, 10)))
    start, (length,) = data.index(b"IDAT") - 4, struct.unpack(">I", data[data.index(b"IDAT") - 4 : data.index(b"IDAT")])
    packed = data[start + 8 : start + 8 + length]
    one, two, text = (
        png_chunk(b"IDAT", packed[:9]),
        png_chunk(b"IDAT", packed[9:]),
        png_chunk(b"tEXt", b"prompt\0a car"),
    )
    end = png_chunk(b"IEND", b"")
    assert decode_png_fast(data[:start] + one + two + text + end) is not None
    assert decode_png_fast(data[:start] + one + text + two + end) is None


@fast
def test_inflation_stops_at_the_size_of_the_image() -> None:
    data = encoded(Image.fromarray(soft(12, 10)))
    bomb = zlib.compress(bytes(1 << 28), 9)
    tracemalloc.start()
    assert decode_png_fast(data[:33] + png_chunk(b"IDAT", bomb) + png_chunk(b"IEND", b"")) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
