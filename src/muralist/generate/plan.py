"""What is to be made: every row of the table as often as asked, with seeds and file names that depend on the row alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from muralist.data.picture_names import file_stem
from muralist.data.prompts import PromptTable, Row, refuse_collision

SEEDS_BETWEEN_COPIES = 1_000_000
"""Copy c of a row has the row's seed plus c times this: the same whatever the number of rows or copies."""

_READ_AT_ONCE = 1024
# Fractions in 64 bits. The first was the best of some hundred: with it, shares of 1 to 32 workers need the fewest batches.
_STEP_OF_ROWS, _STEP_OF_COPIES = 0x5CD9B3836CEA0001, 0x9E3779B97F4A7C15


class Sample(NamedTuple):
    """One picture to make; `number` counts within this command, row and copy say which picture it is for good."""

    number: int
    row: int
    copy: int
    id: str
    seed: int
    prompt: str
    negative_prompt: str
    height: int
    width: int
    file: str

    @property
    def key(self) -> str:
        """Tells this picture from any other that the same row of another table would give."""
        parts = (self.id, self.seed, self.prompt, self.negative_prompt, self.height, self.width)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The samples of one command, by number: row 0's copies first."""

    table: PromptTable
    copies: int
    seed_start: int
    negative_prompt: str
    size: tuple[int, int]  # height and width of rows that say nothing
    extension: str

    def __len__(self) -> int:
        return len(self.table) * self.copies

    def sample(self, number: int) -> Sample:
        """Everything about one sample."""
        return self._sample(number, self.table.row(number // self.copies))

    def samples(self, numbers: np.ndarray) -> Iterator[Sample]:
        """Everything about many samples, in order; rows are read some at a time."""
        for first in range(0, len(numbers), _READ_AT_ONCE):
            part = numbers[first : first + _READ_AT_ONCE].tolist()
            rows = self.table.rows([number // self.copies for number in part])
            yield from map(self._sample, part, rows)

    def _sample(self, number: int, row: Row) -> Sample:
        index, copy = divmod(number, self.copies)
        seed = int(self.row_seeds[index]) + copy * SEEDS_BETWEEN_COPIES
        height, width = (row.height, row.width) if row.height and row.width else self.size
        negative = self.negative_prompt if row.negative_prompt is None else row.negative_prompt
        file = f"{file_stem(row.id, seed)}.{self.extension}"
        return Sample(number, index, copy, row.id, seed, row.prompt, negative, height, width, file)

    @cached_property
    def row_seeds(self) -> np.ndarray:
        """The seed of each row's first copy."""
        seeds = self.seed_start + np.arange(len(self.table), dtype=np.int64)
        own = self.table.seeds()
        return seeds if own is None else np.where(own < 0, seeds, own)

    @cached_property
    def _sizes(self) -> np.ndarray | None:
        """Height and width of each row, where rows differ."""
        own = self.table.sizes()
        return None if own is None else np.where(own == 0, np.array(self.size, dtype=own.dtype), own)

    def place_in(self, shape: int, number: int) -> int:
        """The place of a sample in a batch, without reading its row."""
        return place_of(*divmod(number, self.copies), shape)

    def size_of(self, number: int) -> tuple[int, int]:
        """Height and width of a sample, without reading its row."""
        if self._sizes is None:
            return self.size
        height, width = self._sizes[number // self.copies].tolist()
        return height, width

    def sizes_of(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """The heights and widths that some samples have, each once."""
        if self._sizes is None:
            return [self.size]
        return [(height, width) for height, width in np.unique(self._sizes[numbers // self.copies], axis=0).tolist()]

    def in_order(self, numbers: np.ndarray) -> np.ndarray:
        """Samples in the order in which they are made: as in the table, but one size after another."""
        if self._sizes is None:
            return numbers
        sizes = self._sizes[numbers // self.copies].astype(np.int64)
        _, first, which = np.unique(sizes[:, 0] << 32 | sizes[:, 1], return_index=True, return_inverse=True)
        return numbers[np.argsort(first[which], kind="stable")]

    def check(self) -> None:
        """Refuse a table whose rows would overwrite each other's files."""
        copies = np.arange(self.copies, dtype=np.int64) * SEEDS_BETWEEN_COPIES
        refuse_collision(self.table, self.row_seeds[:, None] + copies)

    def prompts_not(self, known: Callable[[str], bool]) -> list[str]:
        """The prompts of rows that something does not know."""
        unknown = []
        for first in range(0, len(self.table), _READ_AT_ONCE):
            rows = self.table.rows(range(first, min(first + _READ_AT_ONCE, len(self.table))))
            unknown += [row.prompt for row in rows if not known(row.prompt)]
        return unknown


def place_of(row: int, copy: int, shape: int) -> int:
    """The place of a sample in every batch of `shape` pictures: kernels may sum in another order at another place.

    Fractions of multiples of such a number fall evenly into `shape` places, and so do every second, third or W-th of them:
    the rows of one worker among any number fill their batches well.
    """
    return ((row * _STEP_OF_ROWS + copy * _STEP_OF_COPIES) % 2**64) * shape >> 64


def apart(samples: Sequence[Sample], shape: int) -> list[tuple[Sample, ...]]:
    """Samples in as few batches as their places allow."""
    batches: list[dict[int, Sample]] = []
    for sample in samples:
        place = place_of(sample.row, sample.copy, shape)
        batch = next((batch for batch in batches if place not in batch), None)
        if batch is None:
            batches.append(batch := {})
        batch[place] = sample
    return [tuple(batch.values()) for batch in batches]


def shares(numbers: np.ndarray, workers: int) -> Sequence[np.ndarray]:
    """Round-robin: worker w of W takes numbers w, w + W, w + 2 W, ..."""
    return [numbers[worker::workers] for worker in range(workers)]
