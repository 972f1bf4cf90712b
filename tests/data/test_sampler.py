"""One global order: every epoch is a fair permutation, and the same stream comes out whoever reads which part of it."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.core.rng import Purpose
from muralist.data.decode import ImageDecodeError
from muralist.data.loader import Batch, held_out_batches, training_batches
from muralist.data.sampler import ShuffledOrder, Split, permute, split_held_out
from muralist.data.source import Source
from muralist.data.sources import open_source
from muralist.settings import DataSettings, OptimSettings
from muralist.train.schedule import plan_batch
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


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4096, 4097])
def test_sizes_around_the_powers_of_four(size: int) -> None:
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


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """53 images that each show their own index."""
    index = np.arange(53, dtype=np.uint8)
    images = np.broadcast_to(index[:, None, None, None], (53, 4, 4, 3))
    path = tmp_path_factory.mktemp("numbered") / "numbered.npz"
    np.savez(path, train_x=images, train_y=index)
    return open_source(str(path), 4)


def read(
    source: Source, rank: int, ranks: int, total: int, part: int, steps: range, num_workers: int = 0
) -> Iterator[list[Batch]]:
    """The batches of one rank, step by step."""
    settings = DataSettings(batch_size=part, global_batch_size=total, num_workers=num_workers, pin_memory=False)
    plan = plan_batch(settings, OptimSettings(), ranks)
    parts = split_held_out(len(source), 0.1)
    stream = ShuffledOrder(9, parts.training_size)
    batches = training_batches(source, parts, stream, plan.sample_indices(rank, steps), settings)
    while group := list(itertools.islice(batches, plan.accumulation_steps)):
        yield group


def shown(batches: list[Batch]) -> list[tuple[int, int, int]]:
    """Number, image and label of every sample."""
    return [
        (int(number), int(image[0, 0, 0]), int(label))
        for batch in batches
        for number, image, label in zip(batch.sample_indices, batch.images_u8, batch.labels, strict=True)
    ]


@settings(max_examples=25)
@given(ranks=st.sampled_from([1, 2, 4]), part=st.integers(1, 12), first=st.integers(0, 40), length=st.integers(1, 6))
def test_ranks_read_disjoint_slices_of_one_order(
    numbered: Source, ranks: int, part: int, first: int, length: int
) -> None:
    total = 12
    by_rank = [list(read(numbered, rank, ranks, total, part, range(first, first + length))) for rank in range(ranks)]
    together = [row for step in range(length) for rank in range(ranks) for row in shown(by_rank[rank][step])]
    parts = split_held_out(53, 0.1)
    numbers = np.arange(first * total, (first + length) * total)
    indices = parts.training_index(ShuffledOrder(9, parts.training_size).positions(numbers))
    assert together == [(number, index, index) for number, index in zip(numbers, indices, strict=True)]
    assert not {index for _, index, _ in together} & set(parts.held_out.tolist())


def test_batches_do_not_depend_on_loader_workers(numbered: Source) -> None:
    alone, helped = (list(read(numbered, 1, 2, 12, 3, range(2, 12), workers)) for workers in (0, 2))
    assert len(alone) == len(helped) == 10
    for one, two in zip(itertools.chain(*alone), itertools.chain(*helped), strict=True):
        assert torch.equal(one.images_u8, two.images_u8)
        assert torch.equal(one.sample_indices, two.sample_indices)
        assert torch.equal(one.labels, two.labels)
        assert one.captions == two.captions


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_reaches_the_trainer_as_a_user_error(
    photo_folder: Path, tmp_path: Path, num_workers: int
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for path in sorted((photo_folder / "meadow").glob("*.png")):
        (folder / path.name).write_bytes(path.read_bytes())
    broken = folder / "010.png"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(ImageDecodeError) as caught:
        list(read(open_source(str(folder), 8), 0, 1, 4, 2, range(5), num_workers))
    assert isinstance(caught.value, UserError)
    assert caught.value.name == str(broken)
    assert str(broken) in caught.value.what
    assert caught.value.fix == "`muralist pack` leaves broken images out and lists them."
    assert not multiprocessing.active_children()  # nothing waits for the garbage collector


def test_held_out_sample_indices_are_positions(numbered: Source) -> None:
    indices = np.array([40, 7, 21, 33, 2])
    batches = list(held_out_batches(numbered, indices, np.array([0, 2, 3, 4]), size=3))
    assert [len(batch.sample_indices) for batch in batches] == [3, 1]
    assert shown(batches) == [(0, 40, 40), (2, 21, 21), (3, 33, 33), (4, 2, 2)]


def test_positions_between_held_out_images() -> None:
    parts = Split(8, np.array([0, 3, 4, 7]))
    assert parts.training_size == 4
    assert parts.training_index(np.array([0, 1, 2, 3])).tolist() == [1, 2, 5, 6]
