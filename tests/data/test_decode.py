from __future__ import annotations

import io
import pickle
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, center_crop, decode_cropped, decode_image
from tests.support.images import encoded, noise

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


def bomb(side: int) -> bytes:
    """A valid PNG header that promises side x side pixels, in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_decompression_bombs_are_refused() -> None:
    with pytest.raises(ImageDecodeError, match="more pixels"):
        decode_image(bomb(60_000))


def test_strips_are_refused_before_they_are_scaled_up() -> None:
    strip = encoded(Image.new("RGB", (100_000, 1)))
    with pytest.raises(ImageDecodeError, match="strip of 100000 x 1"):
        decode_cropped(strip, 64, "strip.png")


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


def reference_crop(pixels: np.ndarray, size: int) -> np.ndarray:
    """The recipe word by word, on whole arrays: halve by averaging boxes, scale, cut."""
    while min(pixels.shape[:2]) // 2 >= size:
        height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), resample=Image.Resampling.BOX))
    height, width = pixels.shape[:2]
    if width < height:
        width, height = size, round(height * (size / width))
    else:
        width, height = round(width * (size / height)), size
    pixels = np.asarray(Image.fromarray(pixels).resize((width, height), resample=Image.Resampling.BICUBIC))
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 200), size=st.integers(1, 70), seed=st.integers(0, 9))
def test_center_crop_equals_adm(width: int, height: int, size: int, seed: int) -> None:
    image = noise(seed, width, height)
    cropped = center_crop(image, size)
    assert cropped.shape == (size, size, 3) and cropped.dtype == np.uint8 and cropped.flags.writeable
    assert np.array_equal(cropped, reference_crop(np.asarray(image), size))


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
