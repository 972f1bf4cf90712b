"""The plan of a command: all samples of a table, with seeds and file names that depend on the row alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from muralist.data.image_inputs import STRENGTH, ImageInputs
from muralist.data.prompts import PromptTable, image_file_stem, refuse_collision

SEED_STRIDE = 1_000_000
"""Copy c of a row has the row's seed plus c times this: the same for any number of rows or copies."""

# Fractions in 64 bits. The first was the best of some hundred: shares of 1 to 32 workers need the fewest batches.
_ROW_STEP, _COPY_STEP = 0x5CD9B3836CEA0001, 0x9E3779B97F4A7C15


class Sample(NamedTuple):
    """One image to generate; `sample_index` counts within this command, row and copy identify the image for good."""

    sample_index: int
    row: int
    copy: int
    id: str
    seed: int
    prompt: str
    negative_prompt: str
    height: int
    width: int
    file: str
    inputs: ImageInputs | None = None  # of the columns that the pipeline uses

    @property
    def key(self) -> str:
        """Hash of everything that the row determines."""
        parts: tuple[Any, ...] = (self.id, self.seed, self.prompt, self.negative_prompt, self.height, self.width)
        if self.inputs is not None:
            parts += (self.inputs.cells,)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The samples of one command, by index: row 0's copies first."""

    table: PromptTable
    copies: int
    seed_start: int
    negative_prompt: str
    size: tuple[int, int]  # height and width of rows that have none
    extension: str
    samples_per_tar: int = 0  # of --shards; 0: images stay files
    input_columns: tuple[str, ...] = ()  # of image inputs that the pipeline uses
    input_sizes: np.ndarray | None = None  # of rows that have none, from their image inputs: as `PromptTable.sizes`

    def __len__(self) -> int:
        return len(self.table) * self.copies

    def sample(self, index: int) -> Sample:
        """Return one sample."""
        row_index, copy = divmod(index, self.copies)
        row = self.table.row(row_index)
        seed = int(self.row_seeds[row_index]) + copy * SEED_STRIDE
        height, width = self.size_of(index)
        negative = self.negative_prompt if row.negative_prompt is None else row.negative_prompt
        file = f"{image_file_stem(row.id, seed)}.{self.extension}"
        inputs = (row.inputs or ImageInputs()).keep(self.input_columns) if self.input_columns else None
        return Sample(index, row_index, copy, row.id, seed, row.prompt, negative, height, width, file, inputs)

    def samples(self, indices: np.ndarray) -> Iterator[Sample]:
        """Yield many samples in order."""
        return (self.sample(int(index)) for index in indices)

    @cached_property
    def row_seeds(self) -> np.ndarray:
        """The seed of each row's first copy."""
        seeds = self.seed_start + np.arange(len(self.table), dtype=np.int64)
        own = self.table.seeds
        return seeds if own is None else np.where(own < 0, seeds, own)

    @cached_property
    def _batch_keys(self) -> np.ndarray:
        """What the samples of a batch share, for each row: height, width and strength, -1 for none; float64 [N, 3]."""
        keys = np.broadcast_to((*self.size, -1.0), (len(self.table), 3))  # takes no memory where all rows are alike
        for sizes in (self.input_sizes, self.table.sizes):
            if sizes is not None:
                keys = np.column_stack((np.where(sizes == 0, keys[:, :2], sizes), keys[:, 2]))
        if STRENGTH in self.input_columns and self.table.strengths is not None:
            keys = np.column_stack((keys[:, :2], np.nan_to_num(self.table.strengths, nan=-1.0)))
        return keys

    def slot(self, index: int, batch_size: int) -> int:
        """Return a sample's slot in a batch, without reading its row."""
        return batch_slot(*divmod(index, self.copies), batch_size)

    def size_of(self, index: int) -> tuple[int, int]:
        """Return a sample's height and width, without reading its row."""
        height, width, _ = self.batch_key(index)
        return height, width

    def batch_key(self, index: int) -> tuple[int, int, float]:
        """Return what all samples of a batch share, size and strength, without reading the row."""
        height, width, strength = self._batch_keys[index // self.copies].tolist()
        return int(height), int(width), strength

    def grouped_by_size(self, indices: np.ndarray) -> np.ndarray:
        """Order samples as they are generated: as in the table, but one size and strength after another."""
        keys = self._batch_keys[indices // self.copies]
        if (keys == keys[:1]).all():
            return indices
        _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return indices[np.argsort(first[which.ravel()], kind="stable")]

    def check_file_names(self) -> None:
        """Refuse a table whose rows would overwrite each other's files."""
        copies = np.arange(self.copies, dtype=np.int64) * SEED_STRIDE
        refuse_collision(self.table, self.row_seeds[:, None] + copies)


def batch_slot(row: int, copy: int, batch_size: int) -> int:
    """Return a sample's slot in every batch: kernels may sum in another order in another slot.

    Fractions of multiples of such a step fall evenly into the slots, and so do every second, third or W-th of them:
    the rows of one worker among any number fill their batches well.
    """
    return ((row * _ROW_STEP + copy * _COPY_STEP) % 2**64) * batch_size >> 64


def split_by_slot(samples: Sequence[Sample], batch_size: int) -> list[tuple[Sample, ...]]:
    """Split samples into as few batches as their slots allow."""
    batches: list[dict[int, Sample]] = []
    for sample in samples:
        slot = batch_slot(sample.row, sample.copy, batch_size)
        batch = next((batch for batch in batches if slot not in batch), None)
        if batch is None:
            batches.append(batch := {})
        batch[slot] = sample
    return [tuple(batch.values()) for batch in batches]


def round_robin(indices: np.ndarray, workers: int) -> list[np.ndarray]:
    """Split samples: worker w of W takes w, w + W, w + 2 W, ..."""
    return [indices[worker::workers] for worker in range(workers)]
