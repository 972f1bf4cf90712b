"""Aspect-ratio buckets: pictures of many shapes, each trained at the size nearest its own shape, batches of one size each.

The order is a pure function, like that of `Stream`. Every bucket is an endless stream of its own, used a total batch at a
time; after e rounds bucket b, of N_b pictures, has given floor(e * N_b / batch) batches, and a keyed permutation mixes the
batches of each round. So every bucket gets its share exactly, what does not fill a batch is carried on into the next
round, and there is nothing to restore.
"""

from __future__ import annotations

import copy
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from muralist.data.hydit_index import IndexSource
from muralist.data.images import BrokenImage, size_words
from muralist.data.item import Item
from muralist.data.several import SeveralSources
from muralist.data.sources import Source
from muralist.data.stream import Numbers, permute
from muralist.errors import UserError
from muralist.keyed_random import Purpose

log = logging.getLogger("muralist")
ALIGNED = 16
"""Sides are multiples of this, as HunyuanDiT needs them."""
_SECONDS_BETWEEN_NEWS = 5.0
_EPOCHS_OF_A_BUCKET = 1 << 40  # so far apart lie the orders of two buckets
_MOST_SIZES_SHOWN = 6
Shape = tuple[int, int]


@runtime_checkable
class MeasurableSource(Source, Protocol):
    """A source of pictures of any shape, which it crops to `img_size`."""

    img_size: int | Shape

    def shape(self, index: int) -> Shape:
        """Return height and width of picture `index` before it is cropped, without decoding it."""
        ...


def measurable(source: Source, path: str) -> MeasurableSource:
    """The source, if its pictures can be divided into buckets; else the sentence that says why not."""
    if isinstance(source, SeveralSources):
        raise UserError(
            f"--multireso reads one data set, and {path} are {len(source.sources)}.",
            fix="Put their pictures into one folder or one index, or leave --multireso out.",
        )
    if not isinstance(source, MeasurableSource):
        raise UserError(
            f"--multireso cannot read the packed folder {path}.",
            "Its pictures were all cropped to one size when they were packed.",
            "Give the data set that was packed, or leave --multireso out.",
        )
    for (height, width), _ in source.groups if isinstance(source, IndexSource) else []:
        if height % ALIGNED or width % ALIGNED:
            raise UserError(
                f"The index {path} has pictures of {height} x {width} pixels.",
                f"Both sides must be multiples of {ALIGNED}.",
                "Make the index again, or leave --multireso out to train at one size.",
            )
    return source


def default_step(base: int) -> int:
    """The step between sizes: a sixteenth of the base, as multiples of 16."""
    return max(ALIGNED, round(base / 16 / ALIGNED) * ALIGNED)


def bucket_sizes(base: int, step: int) -> list[Shape]:
    """The official sizes, from wide to tall: beginning with the square, one side grows by `step` up to twice the base while
    the other shrinks by it down to half.
    """
    shortest, longest = -(-base // 2 // ALIGNED) * ALIGNED, 2 * base
    steps = range(1, -(-(longest - base) // step) + 1)
    pairs = [(min(base + n * step, longest), max(base - n * step, shortest)) for n in steps]
    sizes = {(base, base), *pairs, *((short, long) for long, short in pairs)}
    return sorted(sizes, key=lambda size: size[0] / size[1])


def nearest_size(shapes: np.ndarray, sizes: Sequence[Shape]) -> np.ndarray:
    """For every picture, [N, 2], the number of the size whose ratio of sides is nearest its own."""
    wanted = np.log(shapes[:, 0] / shapes[:, 1])
    ratios = np.log([height / width for height, width in sizes])
    # Sizes are sorted by ratio: the border between two lies in the middle of them.
    return np.searchsorted((ratios[1:] + ratios[:-1]) / 2, wanted)


def measure(source: MeasurableSource, count: int, meanwhile: Callable[[], object] = lambda: None) -> np.ndarray:
    """Height and width of the first `count` pictures, int32 [N, 2]; calls `meanwhile` every few seconds."""
    shapes = np.empty((count, 2), dtype=np.int32)
    told = time.monotonic()
    for index in range(count):
        try:
            shapes[index] = source.shape(index)
        except BrokenImage as error:
            raise BrokenImage(error.name, error.reason, "Remove it, or put a whole one in its place.") from error
        if time.monotonic() - told > _SECONDS_BETWEEN_NEWS:
            log.info("Looking at the shapes of pictures: %s of %s", f"{index + 1:,}", f"{count:,}")
            meanwhile()
            told = time.monotonic()
    return shapes


@dataclass(frozen=True)
class Buckets:
    """The sizes in use, and the number of the size that each picture of a source has."""

    sizes: list[Shape]
    of_picture: np.ndarray  # uint16 [N]

    @classmethod
    def divide(cls, sizes: Sequence[Shape], of_picture: np.ndarray) -> Buckets:
        """Keep the sizes that have pictures."""
        used, numbers = np.unique(of_picture, return_inverse=True)
        return cls([sizes[number] for number in used], numbers.astype(np.uint16))

    @classmethod
    def of_index(cls, source: IndexSource, count: int) -> Buckets:
        """The groups of a multi-resolution index, as far as they are among its first `count` pictures."""
        sizes, rows = zip(*source.groups, strict=True)
        return cls.divide(sizes, np.repeat(np.arange(len(sizes)), rows)[:count])

    @property
    def largest(self) -> int:
        """The number of a picture that is as large as any."""
        areas = np.array([height * width for height, width in self.sizes])
        return int(np.argmax(areas[self.of_picture]))

    def lines(self, pictures: np.ndarray, batch: int) -> list[str]:
        """The buckets for people: how many of the pictures trained on each has, and what small ones mean."""
        numbers, found = np.unique(self.of_picture[pictures], return_counts=True)
        counts = {size_words(self.sizes[number]): int(count) for number, count in zip(numbers, found, strict=True)}
        by_count = sorted(counts, key=lambda size: -counts[size])
        shown = _listed([f"{size} ({counts[size]:,})" for size in by_count])
        text = [f"sizes      {len(counts)} in use, with so many pictures: {shown}"]
        if small := [size for size in by_count if counts[size] < batch]:
            text.append(
                f"note       fewer pictures than a total batch of {batch} at {_listed(small)}: a batch of such a size shows "
                "them more than once, and over time each picture comes as often as any other"
            )
        return text


def _listed(words: list[str]) -> str:
    more = len(words) - _MOST_SIZES_SHOWN
    return ", ".join(words[:_MOST_SIZES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class BucketedSource:
    """A source whose pictures have the sizes of their buckets; it is opened once and read through a view for each size."""

    def __init__(self, source: MeasurableSource, buckets: Buckets) -> None:
        self.source, self.buckets, self.label_names = source, buckets, source.label_names
        self._views: list[MeasurableSource] = []
        for size in buckets.sizes:
            view = copy.copy(source)  # open files and decoded blocks stay shared
            view.img_size = size
            self._views.append(view)

    def __len__(self) -> int:
        return len(self.buckets.of_picture)

    def read(self, index: int) -> Item:
        """Return picture `index` at the size of its bucket."""
        return self._views[self.buckets.of_picture[index]].read(index)

    def fingerprint(self) -> str:
        """Return that of the source itself."""
        return self.source.fingerprint()


@dataclass(frozen=True)
class BucketStream:
    """The endless sequence of training samples: every run of `batch` numbers, from a multiple of it on, is of one bucket."""

    seed: int
    members: list[Numbers]
    """Of each bucket, the positions in the training set; none is empty."""
    batch: int

    @classmethod
    def divide(cls, seed: int, bucket_of_position: np.ndarray, batch: int) -> BucketStream:
        """The stream over a training set whose images are in these buckets."""
        order = np.argsort(bucket_of_position, kind="stable")
        _, starts = np.unique(bucket_of_position[order], return_index=True)
        return cls(seed, np.split(order, starts[1:]), batch)

    def positions(self, numbers: Numbers) -> Numbers:
        """Position in the training set of each sample number."""
        positions = np.empty_like(numbers)
        batches = numbers // self.batch
        for batch in np.unique(batches):
            bucket, turn = self._turn(int(batch))
            here = batches == batch
            members = self.members[bucket]
            epoch, place = np.divmod(turn * self.batch + numbers[here] % self.batch, len(members))
            places = permute(place, epoch + bucket * _EPOCHS_OF_A_BUCKET, len(members), self.seed)
            positions[here] = members[places]
        return positions

    def _turn(self, batch: int) -> tuple[int, int]:
        """Which bucket a global batch is of, and how many batches of this bucket alone come before it."""
        images = sum(map(len, self.members))
        # The last round that no more than `batch` batches come before; rounding down costs each bucket less than one batch
        # in all rounds together, which tells where to look.
        earliest, beyond = batch * self.batch // images, -(-(batch + len(self.members)) * self.batch // images)
        number = bisect_right(range(beyond), batch, lo=earliest, key=lambda rounds: sum(self._batches(rounds))) - 1
        before, after = self._batches(number), self._batches(number + 1)
        place = np.array([batch - sum(before)])
        slot = int(permute(place, np.array([number]), sum(after) - sum(before), self.seed, Purpose.BUCKET)[0])
        for bucket, (first, end) in enumerate(zip(before, after, strict=True)):
            if slot < end - first:
                return bucket, first + slot
            slot -= end - first
        raise AssertionError("a round has as many slots as batches")

    def _batches(self, rounds: int) -> list[int]:
        """Batches that each bucket has given after so many rounds."""
        return [rounds * len(members) // self.batch for members in self.members]
