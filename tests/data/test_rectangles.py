"""Images that are higher than wide or wider than high, from every source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, center_crop, decode_cropped
from muralist.data.packed import PackedSource
from muralist.data.source import CachedSource, cache_in_memory, read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.demo.driving_world import DrivingWorld, draw_scene
from muralist.tools.pack import pack
from tests.data.test_sources import WRITERS
from tests.support.images import encoded, encoded_samples, noise, write_csv, write_folder

TALL = (24, 16)  # height, width


def reference_cover(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
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


sides = st.integers(1, 200)
wanted = st.integers(1, 70)


@settings(max_examples=200, deadline=None)
@given(columns=sides, rows=sides, height=wanted, width=wanted, seed=st.integers(0, 9))
def test_the_image_covers_the_rectangle(columns: int, rows: int, height: int, width: int, seed: int) -> None:
    image = noise(seed, columns, rows)
    cropped = center_crop(image, (height, width))
    assert cropped.shape == (height, width, 3) and cropped.dtype == np.uint8 and cropped.flags.writeable
    assert np.array_equal(cropped, reference_cover(np.asarray(image), height, width))


@settings(max_examples=100, deadline=None)
@given(columns=sides, rows=sides, side=wanted)
def test_equal_sides_are_a_square(columns: int, rows: int, side: int) -> None:
    image = noise(0, columns, rows)
    assert np.array_equal(center_crop(image, (side, side)), center_crop(image, side))


def test_an_image_of_the_target_ratio_is_not_cropped() -> None:
    image = noise(5, 60, 40)
    assert np.array_equal(center_crop(image, (40, 60)), np.asarray(image))
    corner = noise(6, 60, 40)
    corner.paste((255, 0, 0), (0, 0, 30, 20))
    assert center_crop(corner, (20, 30))[:9, :14].reshape(-1, 3).tolist() == [[255, 0, 0]] * 126
    assert center_crop(corner, (20, 20))[:9, :9].tolist() == [[[255, 0, 0]] * 9] * 9


def test_strips_are_refused_by_the_target_shape() -> None:
    strip = encoded(Image.new("RGB", (1, 20_000)))
    assert decode_cropped(strip, (512, 4)).shape == (512, 4, 3)
    with pytest.raises(ImageDecodeError, match="strip of 1 x 20000"):
        decode_cropped(strip, (4, 512))


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "packed"])
def test_every_source_gives_rectangles(kind: str, tmp_path: Path) -> None:
    chosen = encoded_samples(10)
    path = str(WRITERS[kind](tmp_path, chosen))
    source = open_source(path, TALL)
    images, _, _ = read_batch(source, np.arange(10))
    assert images.shape == (10, *TALL, 3)
    for image, sample in zip(images, chosen, strict=True):
        assert np.array_equal(image, center_crop(sample.image, TALL))
    assert source.fingerprint() == open_source(path, 16).fingerprint()


def test_arrays_give_rectangles(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 20, 24, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", train_x=images, test_x=images[::-1])
    source, held_out = open_source(str(tmp_path / "a.npz"), (10, 24)), open_held_out(str(tmp_path / "a.npz"), (10, 24))
    assert held_out is not None
    assert np.array_equal(source.read(1).image, images[1, 5:15])
    assert np.array_equal(held_out.read(0).image, images[3, 5:15])


@pytest.mark.parametrize("size", [(32, 64), (64, 32), (48, 64)])
def test_driving_world_crops_the_center_of_a_square(size: tuple[int, int]) -> None:
    item, square = DrivingWorld(size).read(9), draw_scene(1, 1, 64)
    top, left = (64 - size[0]) // 2, (64 - size[1]) // 2
    assert np.array_equal(item.image, square[top : top + size[0], left : left + size[1]])
    assert item.image.flags.c_contiguous and item.image.flags.writeable
    assert item[1:] == DrivingWorld(64).read(9)[1:]


def test_driving_world_fingerprint_has_both_sides() -> None:
    assert DrivingWorld((32, 64)).fingerprint() == "driving_world-v1-32x64px-29500-seed0-first0"
    assert DrivingWorld((64, 64)).fingerprint() == DrivingWorld(64).fingerprint()
    with pytest.raises(UserError, match="images of 8 x 64 pixels"):
        DrivingWorld((8, 64))
    with pytest.raises(UserError, match="images of 512 x 2048 pixels"):
        DrivingWorld((512, 2048))


def test_the_cache_counts_the_pixels_of_rectangles() -> None:
    world = DrivingWorld((16, 1024))
    assert isinstance(cache_in_memory(world, 20_000, (16, 1024), workers=0), CachedSource)
    assert cache_in_memory(world, 20_000, (32, 1024), workers=0) is world


def test_packed_rectangles(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(9))
    write_folder(tmp_path / "val", encoded_samples(3, first=70))
    report = pack(str(train), tmp_path / "packed", TALL, workers=1)
    assert (report.images, report.held_out) == (9, 3)
    assert json.loads((tmp_path / "packed" / "manifest.json").read_text())["img_size"] == list(TALL)
    source, held_out = open_source(str(tmp_path / "packed"), TALL), open_held_out(str(tmp_path / "packed"), TALL)
    assert isinstance(source, PackedSource) and held_out is not None
    images, _, _ = read_batch(source, np.arange(9))
    assert np.array_equal(images, np.stack([center_crop(sample.image, TALL) for sample in encoded_samples(9)]))
    assert held_out.read(0).image.shape == (*TALL, 3)
    with pyarrow.ipc.open_file(tmp_path / "packed" / "00000.arrow") as file:
        assert str(file.schema.field("image").type) == f"fixed_size_binary[{24 * 16 * 3}]"
    assert pack(str(train), tmp_path / "packed", TALL, workers=1).finished_before
    for other, words in ((16, "16"), ((16, 24), "16 x 24")):
        with pytest.raises(UserError, match=f"packed at 24 x 16 pixels, but --img_size is {words}"):
            open_source(str(tmp_path / "packed"), other)
        with pytest.raises(UserError, match="another pack: of .* at 24 x 16 pixels"):
            pack(str(train), tmp_path / "packed", other, workers=1)


def test_a_pack_of_equal_sides_is_that_of_a_square(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "list.csv", encoded_samples(4))
    for name, size in {"one": 16, "two": (16, 16)}.items():
        pack(str(table), tmp_path / name, size, workers=1)
    for file in ("00000.arrow", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert len(open_source(str(tmp_path / "one"), (16, 16))) == 4
