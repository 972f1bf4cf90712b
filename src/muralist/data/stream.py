"""One global stream of samples: which image is sample n is a function of (seed, n), whatever the number of ranks.

Each epoch is a permutation of the data set, computed point by point by a keyed Feistel network with cycle walking: no list
to build or keep, so the start of a resumed run costs nothing at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from muralist.keyed_random import Purpose

_ROUNDS = 8
_MOST_HELD_OUT = 1024
_HELD_OUT_SEED = 0  # not the run's seed: every run on the same data holds out the same images
Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]


def _mix(value: Words) -> Words:
    """A 64-bit finaliser (splitmix64): every input bit changes every output bit with probability one half."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(positions: Numbers, epochs: Numbers, size: int, seed: int, purpose: int = Purpose.ORDER) -> Numbers:
    """The element at each position of each epoch's permutation of range(size)."""
    if size == 1:
        return np.zeros_like(positions)
    half_bits = max(3, -(-(size - 1).bit_length() // 2))
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    with np.errstate(over="ignore"):
        # Mixed twice: with one sum of all three, one purpose's epoch would be another purpose's next one.
        base = _mix(np.array((seed + purpose * 0x9E3779B97F4A7C15) % 2**64, dtype=np.uint64))
        key = _mix(epochs.astype(np.uint64) + base)

        def once(value: Words, key: Words) -> Words:
            left, right = value >> half, value & mask
            for index in range(_ROUNDS):
                left, right = right, left ^ (_mix(right + key + np.uint64(index << 48)) & mask)
            return (left << half) | right

        value = once(positions.astype(np.uint64), key)
        # The network permutes a power of four; points that land outside range(size) walk on along their cycle.
        while (outside := value >= np.uint64(size)).any():
            value[outside] = once(value[outside], key[outside])
    return value.astype(np.int64)


@dataclass(frozen=True)
class Split:
    """Which images of a source are held out: a fixed choice for a data set, not of a run."""

    source_size: int
    held_out: Numbers  # sorted

    @property
    def training_size(self) -> int:
        """How many images are trained on."""
        return self.source_size - len(self.held_out)

    def training_index(self, positions: Numbers) -> Numbers:
        """Source index of the n-th image that is not held out."""
        return positions + np.searchsorted(self.held_out - np.arange(len(self.held_out)), positions, side="right")


def split(source_size: int, fraction: float) -> Split:
    """Hold out a fraction of a source, at most 1,024 images, and at least one if the fraction is not zero."""
    count = min(_MOST_HELD_OUT, round(fraction * source_size))
    if fraction > 0 and source_size > 1:
        count = max(1, count)
    positions = np.arange(count, dtype=np.int64)
    chosen = permute(positions, np.zeros_like(positions), source_size, _HELD_OUT_SEED, Purpose.HELD_OUT)
    return Split(source_size, np.sort(chosen))


class Order(Protocol):
    """Which image is sample n of a run."""

    def positions(self, numbers: Numbers) -> Numbers:
        """Position in the training set of each sample number."""
        ...


@dataclass(frozen=True)
class Stream:
    """The endless sequence of training samples of a run."""

    seed: int
    size: int

    def positions(self, numbers: Numbers) -> Numbers:
        """Position in the training set of each sample number."""
        return permute(numbers % self.size, numbers // self.size, self.size, self.seed)
