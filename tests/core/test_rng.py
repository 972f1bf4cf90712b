"""The generator is Philox to the bit, its draws follow their distributions, and each belongs to its sample alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muralist.core import rng
from muralist.core.rng import Purpose, SampleKeys, normal, normal_chunked, philox4x32, uniform, words
from tests.support.statistics import assert_counts, assert_follows, standard_normal

Draw = Callable[..., torch.Tensor]
seeds = st.integers(0, 2**63 - 1)
numbers = st.integers(0, 2**63 - 1)
purposes = st.sampled_from([*Purpose, Purpose.DROPOUT + 77])
DRAWS = pytest.mark.parametrize("draw", [uniform, normal])


def philox_in_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper states it, in exact integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    out = philox4x32(tuple(torch.tensor(word) for word in counter), key[0] | key[1] << 32)  # type: ignore[arg-type]
    assert tuple(map(int, out)) == expected
    assert philox_in_python(counter, key) == expected


@given(seeds, purposes, st.lists(numbers, min_size=1, max_size=4), st.integers(1, 11))
def test_words_are_philox_of_block_purpose_and_number(seed: int, purpose: int, chosen: list[int], count: int) -> None:
    key = (seed % 2**32, seed >> 32)
    blocks = range(-(-count // 4))
    expected = [
        [word for block in blocks for word in philox_in_python((block, purpose, n % 2**32, n >> 32), key)][:count]
        for n in chosen
    ]
    assert words(seed, purpose, torch.tensor(chosen), count).tolist() == expected


@DRAWS
@given(seed=seeds, chosen=st.lists(numbers, min_size=2, max_size=6, unique=True), data=st.data())
def test_a_sample_has_its_numbers_whatever_its_neighbours_and_place(
    draw: Draw, seed: int, chosen: list[int], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(chosen))
    whole = draw(seed, Purpose.NOISE, torch.tensor(chosen), (3, 5))
    other = draw(seed, Purpose.NOISE, torch.tensor(shuffled), (3, 5))
    alone = draw(seed, Purpose.NOISE, torch.tensor(chosen[:1]), (3, 5))
    for place, number in enumerate(shuffled):
        assert torch.equal(other[place], whole[chosen.index(number)])
    assert torch.equal(alone[0], whole[0])


@DRAWS
@given(seed=seeds, short=st.integers(1, 40), more=st.integers(1, 40))
def test_a_longer_draw_extends_a_shorter_one(draw: Draw, seed: int, short: int, more: int) -> None:
    sample = torch.tensor([3, 2**40])
    assert torch.equal(
        draw(seed, Purpose.TIME, sample, (short + more,))[:, :short], draw(seed, Purpose.TIME, sample, (short,))
    )


def test_shapes_and_types() -> None:
    keys = SampleKeys(1, torch.arange(4))
    for draw in (keys.uniform, keys.normal):
        assert draw(Purpose.TIME).shape == (4,)
        assert draw(Purpose.TIME, (3, 2, 5)).shape == (4, 3, 2, 5)
        assert draw(Purpose.TIME).dtype == torch.float32
        assert torch.equal(draw(Purpose.TIME, (30,)).view(4, 3, 2, 5), draw(Purpose.TIME, (3, 2, 5)))
    assert torch.equal(keys.normal(Purpose.NOISE, (7,)), normal(1, Purpose.NOISE, torch.arange(4), (7,)))
    assert words(1, Purpose.TIME, torch.arange(0), 5).shape == (0, 5)


def changed_bits(one: torch.Tensor, two: torch.Tensor) -> int:
    return sum(bin(a ^ b).count("1") for a, b in zip(one.flatten().tolist(), two.flatten().tolist(), strict=True))


@given(seeds, numbers, st.integers(0, 62))
def test_every_bit_of_seed_number_and_purpose_matters(seed: int, number: int, bit: int) -> None:
    base = words(seed, Purpose.NOISE, torch.tensor([number]), 4)
    others = [
        words(seed ^ 1 << bit, Purpose.NOISE, torch.tensor([number]), 4),
        words(seed, Purpose.NOISE, torch.tensor([number ^ 1 << bit]), 4),
        words(seed, Purpose.NOISE ^ 1 << bit % 17, torch.tensor([number]), 4),
        words(seed, Purpose.NOISE, torch.tensor([number]), 8)[:, 4:],
    ]
    for other in others:
        # Of 128 bits half change: 64, give or take 5.7; 20 to 108 is eight standard deviations.
        assert 20 < changed_bits(base, other) < 108


def test_purposes_are_never_renumbered() -> None:
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "TIME": 1, "NOISE": 2, "LABEL_DROP": 3, "FLIP": 4, "CROP": 5, "ORDER": 6, "HELD_OUT": 7, "SAMPLE_NOISE": 8,
        "SCENE": 9, "LATENT": 10, "CAPTION_DROP": 11, "INIT": 12, "BUCKET": 13, "REPLACEMENT": 14,
        "COMPARED_NOISE": 15,
        "COMPARED_TIME": 16,
        "CRITIC_NOISE": 17,
        "CRITIC_TIME": 18, "DROPOUT": 65536,
    }  # fmt: skip


def test_uniform_stays_inside_the_open_interval() -> None:
    extremes = torch.tensor([0, 0x1FF, 0x200, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFFFF])
    unit = rng._unit(extremes).double()
    assert unit.min() == 2.0**-24
    assert unit.max() == 1 - 2.0**-24
    # Symmetric about one half: nothing is rounded, or the largest would be 1.
    assert torch.equal(unit + rng._unit(0xFFFFFFFF - extremes).double(), torch.ones(7, dtype=torch.float64))
    assert torch.sqrt(-2 * torch.log(unit)).isfinite().all()


@pytest.mark.parametrize(("seed", "first"), [(0, 0), (2**62 + 1, 2**40)])
def test_uniform_follows_its_distribution(seed: int, first: int) -> None:
    sample = uniform(seed, Purpose.TIME, torch.arange(first, first + 20_000), (5,)).numpy()
    assert_follows(sample, lambda value: value)
    assert sample.mean() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / sample.size))
    assert sample.var() == pytest.approx(1 / 12, abs=5 * math.sqrt(1 / 180 / sample.size))
    for column in range(5):  # each place of a draw by itself, sample by sample
        assert_follows(sample[:, column], lambda value: value)


@pytest.mark.parametrize(("seed", "first"), [(0, 0), (2**62 + 1, 2**40)])
def test_normal_follows_its_distribution(seed: int, first: int) -> None:
    sample = normal(seed, Purpose.NOISE, torch.arange(first, first + 10_000), (6,)).numpy().astype(np.float64)
    assert_follows(sample, standard_normal)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (sample**power).mean() == pytest.approx(moment, abs=5 * math.sqrt(spread / sample.size)), power
    correlation = np.corrcoef(sample.T) - np.eye(6)  # cosine and sine of one pair included
    assert np.abs(correlation).max() < 5 / math.sqrt(len(sample))


def test_neighbouring_samples_and_seeds_are_independent() -> None:
    run = uniform(0, Purpose.NOISE, torch.arange(40_000)).numpy()
    other = uniform(1, Purpose.NOISE, torch.arange(40_000)).numpy()
    for one, two in ((run[:-1], run[1:]), (run, other)):
        joint = np.histogram2d(one, two, bins=16, range=((0, 1), (0, 1)))[0]
        assert_counts(joint, len(one) / 256, 255)


@pytest.mark.slow
def test_compiled_integers_are_the_same() -> None:
    sample = torch.tensor([0, 1, 2**33 + 5, 2**62])
    # As in training, where the seed is a constant of the compiled step.
    compiled = torch.compile(words, fullgraph=True, dynamic=False)
    for seed in (0, 2**63 - 1):
        assert torch.equal(compiled(seed, Purpose.NOISE, sample, 50), words(seed, Purpose.NOISE, sample, 50))
    drawn = torch.compile(normal, fullgraph=True)(7, Purpose.NOISE, sample, (3, 8, 8))
    torch.testing.assert_close(drawn, normal(7, Purpose.NOISE, sample, (3, 8, 8)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 200, 200), (3, 64, 64), (5,), ()])
def test_numbers_drawn_in_parts_are_the_same(shape: tuple[int, ...]) -> None:
    numbers = torch.tensor([4, 1 << 33, 0, 9, 9])
    parts = normal_chunked(3, Purpose.SAMPLE_NOISE, numbers, shape)
    assert torch.equal(parts, normal(3, Purpose.SAMPLE_NOISE, numbers, shape))


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 16, 24), (3, 5, 7), (3, 64, 64), (3, 160, 160)])
@pytest.mark.parametrize(("first", "count"), [(0, 64), (42, 23), (2**33 - 3, 7), (2**61, 1)])
def test_images_drawn_at_once_have_the_bits_of_each_alone(shape: tuple[int, ...], first: int, count: int) -> None:
    indices = torch.arange(first, first + count)
    alone = torch.cat([normal_chunked(0, Purpose.SAMPLE_NOISE, index[None], shape) for index in indices])
    assert torch.equal(normal_chunked(0, Purpose.SAMPLE_NOISE, indices, shape), alone)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("side", [64, 256, 512])
def test_compiled_words_on_a_gpu_are_those_of_a_cpu(side: int) -> None:
    numbers, count = torch.tensor([0, 7, 1 << 40]), 3 * side * side
    found = torch.compile(words, dynamic=False)(5, int(Purpose.NOISE), numbers.cuda(), count)
    assert torch.equal(found.cpu(), words(5, Purpose.NOISE, numbers, count))


@pytest.mark.gpu
@GPU
def test_compiled_noise_on_a_gpu_is_that_of_a_cpu_but_for_rounding() -> None:
    numbers, shape = torch.arange(4), (3, 256, 256)
    found = torch.compile(normal, dynamic=False)(5, int(Purpose.NOISE), numbers.cuda(), shape).cpu()
    assert (found - normal(5, Purpose.NOISE, numbers, shape)).abs().max() < 1e-4
