"""One global order: every epoch is a fair permutation, and the same stream comes out whoever reads which part of it."""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.rng import Purpose
from muralist.data import sampler as buckets_module
from muralist.data.decode import decode_cropped, decode_image, read_image_shape
from muralist.data.sampler import (
    BucketedSource,
    Buckets,
    BucketSampler,
    MeasurableSource,
    ShuffledOrder,
    Split,
    bucket_sizes,
    check_measurable,
    default_step,
    measure_shapes,
    nearest_size,
    permute,
    split_held_out,
)
from muralist.data.sources import open_source
from muralist.tools.pack import pack
from tests.data.test_sources import WRITERS
from tests.support.images import (
    encoded,
    encoded_samples,
    noise,
    write_folder,
    write_tar,
)
from tests.support.statistics import assert_counts

sizes = st.integers(1, 5000)
seeds = st.integers(0, 2**63 - 1)


def order(size: int, epoch: int, seed: int, purpose: int = Purpose.ORDER) -> list[int]:
    positions = np.arange(size, dtype=np.int64)
    return permute(positions, np.full_like(positions, epoch), size, seed, purpose).tolist()


def orders(size: int, epochs: int, seed: int) -> np.ndarray:
    """One row per epoch."""
    positions = np.tile(np.arange(size), epochs)
    return permute(positions, np.repeat(np.arange(epochs), size), size, seed).reshape(epochs, size)


@given(sizes, st.integers(0, 2**40), seeds)
def test_every_epoch_is_a_permutation(size: int, epoch: int, seed: int) -> None:
    assert sorted(order(size, epoch, seed)) == list(range(size))


def test_sizes_around_the_powers_of_four() -> None:
    for size in (*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4096, 4097):
        assert sorted(order(size, 3, 1)) == list(range(size))


@given(st.integers(30, 5000), st.integers(0, 1000), seeds)
def test_epochs_seeds_and_purposes_have_independent_orders(size: int, epoch: int, seed: int) -> None:
    base = order(size, epoch, seed)
    others = [order(size, epoch + 1, seed), order(size, epoch, seed ^ 1), order(size, epoch, seed ^ 1 << 62)]
    others += [order(size, epoch + shift, seed, Purpose.HELD_OUT) for shift in (-1, 0, 1) if epoch + shift >= 0]
    for other in (list(range(size)), *others):
        # Two independent permutations agree in one place on average; in 20 never.
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 20
    assert base == order(size, epoch, seed)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_set_are_equally_likely(size: int) -> None:
    seen = Counter(map(tuple, orders(size, 12_000, 7).tolist()))
    counts = np.array([seen[each] for each in itertools.permutations(range(size))])
    assert_counts(counts, 12_000 / math.factorial(size), math.factorial(size) - 1)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 16, 17, 63, 64, 65, 200])
def test_positions_are_uniform(size: int) -> None:
    drawn = orders(size, 6_000, 3)
    places = np.stack([np.bincount(drawn[:, place], minlength=size) for place in range(size)])
    assert_counts(places, len(drawn) / size, (size - 1) ** 2)


@pytest.mark.parametrize("size", [5, 10, 17, 64])
def test_neighbors_in_the_order_are_independent(size: int) -> None:
    drawn = orders(size, 20_000, 11)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (drawn[:, 0], drawn[:, 1]), 1)
    different = pairs[~np.eye(size, dtype=bool)]
    assert_counts(different, len(drawn) / len(different), len(different) - 1)
    # And from one epoch to the next.
    follow = np.zeros((size, size))
    np.add.at(follow, (drawn[:-1, 0], drawn[1:, 0]), 1)
    assert_counts(follow, (len(drawn) - 1) / size**2, size**2 - 1)


@given(st.integers(1, 400), seeds, st.integers(0, 10**15))
def test_the_order_is_a_sequence_of_full_epochs(size: int, seed: int, epoch: int) -> None:
    numbers = np.arange(epoch * size, (epoch + 1) * size)
    positions = ShuffledOrder(seed, size).positions(numbers)
    assert sorted(positions.tolist()) == list(range(size))
    assert positions.tolist() == order(size, epoch, seed)
    some = np.array([numbers[-1], numbers[0]])
    assert ShuffledOrder(seed, size).positions(some).tolist() == [positions[-1], positions[0]]


@given(st.integers(1, 5000), st.floats(0, 1))
def test_held_out_and_training_images_partition_the_source(size: int, fraction: float) -> None:
    parts = split_held_out(size, fraction)
    training = parts.training_index(np.arange(parts.training_size))
    assert sorted([*training.tolist(), *parts.held_out.tolist()]) == list(range(size))
    assert training.tolist() == sorted(training.tolist())
    expected = min(1024, round(fraction * size))
    assert len(parts.held_out) == (max(1, expected) if fraction > 0 and size > 1 else expected)
    assert parts.held_out.tolist() == split_held_out(size, fraction).held_out.tolist()


def test_held_out_images_are_chosen_uniformly() -> None:
    # A source that is sorted by class must not lose one class: the tenths of it lose about as much each.
    lost = np.bincount(split_held_out(100_000, 0.01).held_out // 10_000, minlength=10)
    assert lost.sum() == 1000
    assert_counts(lost, 100, 9)
    assert split_held_out(100_000, 0.5).held_out.size == 1024


def test_positions_between_held_out_images() -> None:
    parts = Split(8, np.array([0, 3, 4, 7]))
    assert parts.training_size == 4
    assert parts.training_index(np.array([0, 1, 2, 3])).tolist() == [1, 2, 5, 6]


# Sizes


def test_bucket_sizes_equal_hunyuan_dit() -> None:
    sizes = bucket_sizes(1024, 64)
    assert len(sizes) == 33 and sizes[16] == (1024, 1024)
    assert sizes[17:20] == [(1088, 960), (1152, 896), (1216, 832)]
    assert sizes[24:26] == [(1536, 512), (1600, 512)] and sizes[-1] == (2048, 512)
    assert [(width, height) for height, width in reversed(sizes)] == sizes
    assert [default_step(base) for base in (32, 64, 256, 512, 768, 1024)] == [16, 16, 16, 32, 48, 64]
    assert bucket_sizes(512, 256) == [(256, 1024), (256, 768), (512, 512), (768, 256), (1024, 256)]


@given(st.integers(1, 128).map(lambda n: 16 * n), st.data())
def test_bucket_sizes_are_multiples_of_16_sorted_by_ratio(base: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, max(1, base // 32)).map(lambda n: 16 * n))
    sizes = bucket_sizes(base, step)
    ratios = [height / width for height, width in sizes]
    assert (base, base) in sizes and ratios == sorted(set(ratios))
    for side in np.ravel(sizes):
        assert side % 16 == 0 and base / 2 <= side <= 2 * base


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_an_image_goes_to_the_nearest_aspect_ratio(height: int, width: int) -> None:
    sizes = bucket_sizes(512, 32)
    (chosen,) = nearest_size(np.array([[height, width]]), sizes)
    distances = [abs(np.log(height / width) - np.log(h / w)) for h, w in sizes]
    assert distances[chosen] == pytest.approx(min(distances), abs=1e-9)


# Order

counts = st.lists(st.integers(1, 60), min_size=1, max_size=8)
batches = st.integers(1, 40)


def stream_of(sizes: list[int], batch: int, seed: int = 0) -> tuple[BucketSampler, np.ndarray]:
    """A stream over buckets whose images lie in any order, and each image's bucket."""
    bucket_of = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return BucketSampler.build(seed, bucket_of, batch), bucket_of


@given(counts, batches, seeds, st.integers(0, 2**40))
def test_every_batch_comes_from_one_bucket(sizes: list[int], batch: int, seed: int, first: int) -> None:
    stream, bucket_of = stream_of(sizes, batch, seed)
    positions = stream.positions(np.arange(first * batch, (first + 5) * batch))
    for chosen in positions.reshape(5, batch):
        assert len(set(bucket_of[chosen].tolist())) == 1


@settings(max_examples=30)
@given(counts, batches, seeds, st.integers(1, 6))
def test_each_round_gives_every_bucket_its_share(sizes: list[int], batch: int, seed: int, rounds: int) -> None:
    stream, bucket_of = stream_of(sizes, batch, seed)
    wanted = [rounds * size // batch for size in sizes]
    seen = Counter(stream.positions(np.arange(sum(wanted) * batch)).tolist())
    for bucket, given_batches in enumerate(wanted):
        times = [seen[position] for position in np.flatnonzero(bucket_of == bucket).tolist()]
        assert sum(times) == given_batches * batch
        assert max(times) - min(times) <= 1, "no sample comes again before all others of its bucket have"


@settings(max_examples=40)
@given(counts, st.integers(2, 12), seeds, st.data())
def test_positions_do_not_depend_on_slicing(sizes: list[int], batch: int, seed: int, data: st.DataObject) -> None:
    stream, _ = stream_of(sizes, batch, seed)
    numbers = np.arange(20 * batch)
    whole = stream.positions(numbers)
    chosen = data.draw(st.lists(st.integers(0, len(numbers) - 1), min_size=1, max_size=50))
    assert stream.positions(numbers[chosen]).tolist() == whole[chosen].tolist()


def test_a_bucket_smaller_than_a_batch_waits_until_it_fills_one() -> None:
    stream, bucket_of = stream_of([3, 60], batch=10)
    chosen = bucket_of[stream.positions(np.arange(21 * 10 * 10))].reshape(-1, 10)[:, 0]
    assert Counter(chosen.tolist()) == {0: 10, 1: 200}  # 3 : 60, in 33 rounds and a third
    seen = stream.positions(np.flatnonzero(np.repeat(chosen == 0, 10)))
    assert set(Counter(seen.tolist()).values()) == {33, 34}


def test_rounds_and_buckets_are_mixed() -> None:
    stream, bucket_of = stream_of([400, 400], batch=10)
    order = bucket_of[stream.positions(np.arange(0, 160 * 10, 10))]
    halves = order[:80].tolist(), order[80:].tolist()
    assert halves[0] != halves[1]
    for half in halves:
        assert sum(half) == 40 and 20 < sum(a != b for a, b in itertools.pairwise(half)) < 60
    members = [np.flatnonzero(bucket_of == bucket).tolist() for bucket in (0, 1)]
    positions = stream.positions(np.arange(800))
    orders = [
        [members[bucket].index(position) for position in positions[bucket_of[positions] == bucket]] for bucket in (0, 1)
    ]
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 20, "equal buckets have orders of their own"


# Shapes


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_shapes_equal_those_of_decoded_images(kind: str, orientation: int | None) -> None:
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    data = encoded(noise(0, 40, 24), kind, exif=exif)
    sample = decode_image(data)
    assert read_image_shape(data) == (sample.height, sample.width)


def test_a_shape_needs_the_header_alone(tmp_path: Path) -> None:
    data = encoded(noise(0, 200, 100), "JPEG")
    (tmp_path / "cut.jpg").write_bytes(data[:1000])
    assert read_image_shape(tmp_path / "cut.jpg") == (100, 200)
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(UserError, match=r"text\.jpg is a broken image: no image decoder"):
        read_image_shape(tmp_path / "text.jpg")
    with pytest.raises(UserError, match="could not be read: No such file"):
        read_image_shape(tmp_path / "nothing.jpg")


CHOSEN = encoded_samples(7)
SHAPES = [[sample.image.height, sample.image.width] for sample in CHOSEN]


def arrow_with_columns(path: Path, **columns: list[int | None]) -> Path:
    table = pyarrow.table({"image": [sample.png for sample in CHOSEN], **columns})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


@pytest.mark.parametrize("kind", ["folder", "csv", "jsonl", "tar", "parquet", "arrow"])
def test_every_source_gives_shapes_and_reads_at_bucket_sizes(tmp_path: Path, kind: str) -> None:
    path = str(WRITERS[kind](tmp_path, CHOSEN))
    source = check_measurable(open_source(path, 32), path)
    assert measure_shapes(source, 7).tolist() == SHAPES
    sizes = bucket_sizes(32, 16)
    divided = BucketedSource(source, Buckets.assign(sizes, nearest_size(np.array(SHAPES), sizes)))
    assert len(divided) == 7 and divided.fingerprint() == source.fingerprint()
    for index in (6, 0, 3):
        item = divided.read(index)
        size = sizes[nearest_size(np.array([SHAPES[index]]), sizes)[0]]
        assert np.array_equal(item.image, decode_cropped(CHOSEN[index].png, size))
    assert source.read(0).image.shape == (32, 32, 3), "the source itself keeps its size"


def test_long_image_headers_in_tar_files(tmp_path: Path) -> None:
    long = Image.Exif()
    long[0x010E] = "x" * 60_000
    data = io.BytesIO()
    noise(0, 60, 30).save(data, "JPEG", exif=long, icc_profile=b"y" * 100_000)
    path = write_tar(tmp_path / "a.tar", [CHOSEN[0]._replace(png=data.getvalue())])
    source = check_measurable(open_source(str(path), 32), str(path))
    assert source.shape(0) == (30, 60)


def test_size_columns_replace_reading_image_headers(tmp_path: Path) -> None:
    heights: list[int | None] = [7, 6, 5, None, 3, 0, 1]
    path = arrow_with_columns(tmp_path / "a.arrow", height=heights, width=[9] * 7)
    source = check_measurable(open_source(str(path), 32), str(path))
    told = [list(shape) if not height else [height, 9] for height, shape in zip(heights, SHAPES, strict=True)]
    assert measure_shapes(source, 7).tolist() == told


def test_drawn_scenes_and_arrays_have_one_size(tmp_path: Path) -> None:
    scenes = check_measurable(open_source("driving_world", 32), "driving_world")
    assert {scenes.shape(index) for index in range(9)} == {(32, 32)}
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 20, 30, 3), dtype=np.uint8))
    assert measure_shapes(check_measurable(open_source(str(tmp_path / "a.npz"), 32), ""), 3).tolist() == [[20, 30]] * 3


def test_measuring_shapes_logs_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "_LOG_INTERVAL", -1.0)
    calls: list[int] = []
    source = open_source("driving_world", 32)
    assert isinstance(source, MeasurableSource)
    said = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(buckets_module.log, "handlers", [said])
    monkeypatch.setattr(buckets_module.log, "level", logging.INFO)
    measure_shapes(source, 3, meanwhile=lambda: calls.append(1))
    assert len(calls) == 3 and "image sizes: 2 of 3" in said.stream.getvalue()


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", CHOSEN)
    (folder / "class_1" / "b.png").write_bytes(b"not an image")
    source = check_measurable(open_source(str(folder), 32), str(folder))
    with pytest.raises(UserError, match=r"class_1/b\.png is a broken image: no image decoder.*Remove it, or"):
        measure_shapes(source, len(source))


def test_a_packed_folder_is_refused(tmp_path: Path) -> None:
    pack(str(write_folder(tmp_path / "folder", CHOSEN)), tmp_path / "packed", 32, workers=1, progress=False)
    with pytest.raises(UserError, match=r"packed folder.*all cropped to one size.*data set that was packed"):
        check_measurable(open_source(str(tmp_path / "packed"), 32), str(tmp_path / "packed"))


def test_bucket_summary() -> None:
    buckets = Buckets.assign([(16, 64), (32, 32), (64, 16)], np.array([2, 0, 2, 2, 0, 2]))
    assert buckets.sizes == [(16, 64), (64, 16)] and buckets.of_image.tolist() == [1, 0, 1, 1, 0, 1]
    everything = np.arange(6)
    assert buckets.summary(everything, 2) == ["sizes      2 in use (images each): 64 x 16 (4), 16 x 64 (2)"]
    assert "fewer images than a total batch of 3 at 16 x 64:" in buckets.summary(everything, 3)[1]
    assert "1 in use (images each): 64 x 16 (3)" in buckets.summary(np.array([0, 2, 3]), 1)[0]


def test_replacements_are_of_the_same_bucket_and_cover_it() -> None:
    buckets = np.array([0, 1, 0, 1, 1, 0, 1])
    order = BucketSampler.build(3, buckets, batch=2)
    for sample in range(40):
        position = int(order.positions(np.array([sample]))[0])
        tried = [order.replacement(sample, attempt) for attempt in range(1, 9)]
        assert set(tried) == set(np.flatnonzero(buckets == buckets[position])), (
            "an intact image is found if there is one"
        )
        assert tried == [order.replacement(sample, attempt) for attempt in range(1, 9)]
    plain = ShuffledOrder(3, 50)
    assert {plain.replacement(7, attempt) for attempt in range(50)} == set(range(50))
    assert len({plain.replacement(sample, 1) for sample in range(200)}) > 40, "another image for another sample"
    weighted = buckets_module.WeightedOrder(3, (30, 20), (1.0, 5.0))
    for sample, first in zip(range(40), weighted.positions(np.arange(40)), strict=True):
        own = set(range(30)) if first < 30 else set(range(30, 50))
        assert {weighted.replacement(sample, attempt) for attempt in range(len(own))} == own
