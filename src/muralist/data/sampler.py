"""The global sample order: the image of sample n is a function of (seed, n), whatever the number of ranks.

Each epoch is a permutation of the data set, computed per index by a Feistel network with cycle walking: there is no list
to build or keep, so resuming costs nothing. With --multireso, every global batch comes from one bucket of image sizes.
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
from numpy.typing import NDArray

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.core.image_size import format_size
from muralist.core.rng import Purpose
from muralist.data.decode import ImageDecodeError
from muralist.data.source import ConcatSource, Sample, Source
from muralist.data.sources.hydit_index import IndexSource

Indices = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Shape = tuple[int, int]

SIZE_MULTIPLE = 16
"""HunyuanDiT needs sides that are multiples of this."""
_ROUNDS = 8
_MAX_HELD_OUT = 1024
_HELD_OUT_SEED = 0  # not the run's seed: every run on the same data holds out the same images
_LOG_INTERVAL = 5.0  # seconds
_EPOCHS_PER_BUCKET = 1 << 40  # separates the permutations of two buckets

log = logging.getLogger("muralist")


def _mix(value: UInt64Array) -> UInt64Array:
    """Apply the splitmix64 finalizer: every input bit changes every output bit with probability one half."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(positions: Indices, epochs: Indices, size: int, seed: int, purpose: int = Purpose.ORDER) -> Indices:
    """Return the element at each position of each epoch's permutation of range(size)."""
    if size == 1:
        return np.zeros_like(positions)
    half_bits = max(3, -(-(size - 1).bit_length() // 2))
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    with np.errstate(over="ignore"):
        # Mixed twice: a sum of seed, purpose and epoch would make one purpose's epoch another purpose's next one.
        base = _mix(np.array((seed + purpose * 0x9E3779B97F4A7C15) % 2**64, dtype=np.uint64))
        key = _mix(epochs.astype(np.uint64) + base)

        def feistel(value: UInt64Array, key: UInt64Array) -> UInt64Array:
            left, right = value >> half, value & mask
            for index in range(_ROUNDS):
                left, right = right, left ^ (_mix(right + key + np.uint64(index << 48)) & mask)
            return (left << half) | right

        value = feistel(positions.astype(np.uint64), key)
        # The network permutes a power of four; cycle walking brings values outside range(size) back into it.
        while (outside := value >= np.uint64(size)).any():
            value[outside] = feistel(value[outside], key[outside])
    return value.astype(np.int64)


@dataclass(frozen=True)
class Split:
    """The images of a source that are held out: fixed for a data set, not for a run."""

    source_size: int
    held_out: Indices  # sorted

    @property
    def training_size(self) -> int:
        """The number of training images."""
        return self.source_size - len(self.held_out)

    def training_positions(self, indices: Indices) -> Indices:
        """Return the number of images before each source index that are not held out."""
        indices = np.minimum(indices, self.source_size)
        return indices - np.searchsorted(self.held_out, indices)

    def training_index(self, positions: Indices) -> Indices:
        """Return the source index of the n-th image that is not held out."""
        return positions + np.searchsorted(self.held_out - np.arange(len(self.held_out)), positions, side="right")


def split_held_out(source_size: int, fraction: float) -> Split:
    """Hold out a fraction of a source, at most 1,024 images, and at least one if the fraction is not zero."""
    count = min(_MAX_HELD_OUT, round(fraction * source_size))
    if fraction > 0 and source_size > 1:
        count = max(1, count)
    positions = np.arange(count, dtype=np.int64)
    chosen = permute(positions, np.zeros_like(positions), source_size, _HELD_OUT_SEED, Purpose.HELD_OUT)
    return Split(source_size, np.sort(chosen))


class SampleOrder(Protocol):
    """Maps the sample indices of a run to images."""

    def positions(self, sample_indices: Indices) -> Indices:
        """Return the position in the training set of each sample index."""
        ...

    def replacement(self, sample_index: int, attempt: int) -> int:
        """Return the position of an image of the same size to try in place of a broken one; `attempt` counts from 1."""
        ...


@dataclass(frozen=True)
class ShuffledOrder:
    """The endless sequence of training samples: one permutation of the training set after the other."""

    seed: int
    size: int

    def positions(self, sample_indices: Indices) -> Indices:
        """Return the position in the training set of each sample index."""
        return permute(sample_indices % self.size, sample_indices // self.size, self.size, self.seed)

    def replacement(self, sample_index: int, attempt: int) -> int:
        """Return the position of an image to try in place of a broken one."""
        return _replacement(sample_index, attempt, self.size, self.seed)


def _replacement(sample_index: int, attempt: int, size: int, seed: int) -> int:
    """Choose among `size` images; the attempts of one sample are the places of one permutation, so none comes twice."""
    place, key = np.array([attempt % size]), np.array([sample_index])
    return int(permute(place, key, size, seed, Purpose.REPLACEMENT)[0])


@dataclass(frozen=True)
class WeightedOrder:
    """Several data sets, each with its share of every epoch, whatever its size.

    The draws from each data set go through one permutation of it after the other, so that a small one is repeated evenly.
    """

    seed: int
    sizes: tuple[int, ...]  # training images of each data set
    weights: tuple[float, ...]

    @property
    def counts(self) -> Indices:
        """Draws from each data set in an epoch, which has as many samples as there are images."""
        ends = np.cumsum(self.weights) / np.sum(self.weights) * sum(self.sizes)
        return np.diff(np.rint(ends).astype(np.int64), prepend=0)

    def positions(self, sample_indices: Indices) -> Indices:
        """Return the position in the training set of each sample index."""
        total, counts = sum(self.sizes), self.counts
        epochs = sample_indices // total
        places = permute(sample_indices % total, epochs, total, self.seed)
        starts, firsts = np.cumsum(counts) - counts, np.cumsum(self.sizes) - self.sizes
        parts = np.searchsorted(np.cumsum(counts), places, side="right")
        found = np.empty_like(places)
        for part, size in enumerate(self.sizes):
            mine = parts == part
            draws = epochs[mine] * counts[part] + places[mine] - starts[part]
            # Another purpose per data set: their permutations are independent.
            purpose = Purpose.ORDER + ((part + 1) << 32)
            found[mine] = firsts[part] + permute(draws % size, draws // size, size, self.seed, purpose)
        return found

    def replacement(self, sample_index: int, attempt: int) -> int:
        """Return the position of an image of the same data set to try in place of a broken one."""
        ends = np.cumsum(self.sizes)
        part = int(np.searchsorted(ends, self.positions(np.array([sample_index])), side="right")[0])
        first = int(ends[part]) - self.sizes[part]
        return first + _replacement(sample_index, attempt, self.sizes[part], self.seed)


# -- multi-resolution buckets


@runtime_checkable
class MeasurableSource(Source, Protocol):
    """A source of images of any shape, which it crops to `img_size`."""

    img_size: int | Shape

    def shape(self, index: int) -> Shape:
        """Return height and width of image `index` before it is cropped, without decoding it."""
        ...


def check_measurable(source: Source, path: str) -> MeasurableSource:
    """Return the source, or raise a UserError if its images cannot be divided into buckets."""
    if isinstance(source, ConcatSource):
        raise UserError(
            f"--multireso reads one data set, and {path} are {len(source.sources)}.",
            fix="Put their images into one folder or one index, or leave --multireso out.",
        )
    if not isinstance(source, MeasurableSource):
        raise UserError(
            f"--multireso cannot read the packed folder {path}.",
            "Its images were all cropped to one size when they were packed.",
            "Give the data set that was packed, or leave --multireso out.",
        )
    for (height, width), _ in source.groups if isinstance(source, IndexSource) else []:
        if height % SIZE_MULTIPLE or width % SIZE_MULTIPLE:
            raise UserError(
                f"The index {path} has images of {height} x {width} pixels.",
                f"Both sides must be multiples of {SIZE_MULTIPLE}.",
                "Make the index again, or leave --multireso out to train at one size.",
            )
    return source


def default_step(base: int) -> int:
    """Return the step between bucket sizes: a sixteenth of the base, rounded to a multiple of 16."""
    return max(SIZE_MULTIPLE, round(base / 16 / SIZE_MULTIPLE) * SIZE_MULTIPLE)


def bucket_sizes(base: int, step: int) -> list[Shape]:
    """Return HunyuanDiT's bucket sizes, from wide to tall.

    From the square on, one side grows by `step` up to twice the base while the other shrinks by it down to half.
    """
    shortest, longest = -(-base // 2 // SIZE_MULTIPLE) * SIZE_MULTIPLE, 2 * base
    steps = range(1, -(-(longest - base) // step) + 1)
    pairs = [(min(base + n * step, longest), max(base - n * step, shortest)) for n in steps]
    sizes = {(base, base), *pairs, *((short, long) for long, short in pairs)}
    return sorted(sizes, key=lambda size: size[0] / size[1])


def nearest_size(shapes: np.ndarray, sizes: Sequence[Shape]) -> np.ndarray:
    """Return, for every image shape [N, 2], the index of the size with the nearest aspect ratio."""
    wanted = np.log(shapes[:, 0] / shapes[:, 1])
    ratios = np.log([height / width for height, width in sizes])
    # Sizes are sorted by ratio, so the boundary between two is their midpoint.
    return np.searchsorted((ratios[1:] + ratios[:-1]) / 2, wanted)


def measure_shapes(
    source: MeasurableSource, count: int, meanwhile: Callable[[], object] = lambda: None, skip_broken: bool = False
) -> np.ndarray:
    """Return height and width of the first `count` images, int32 [N, 2]; calls `meanwhile` every few seconds.

    With `skip_broken`, broken images count as squares: another image is read in place of each later.
    """
    shapes = np.empty((count, 2), dtype=np.int32)
    logged = time.monotonic()
    for index in range(count):
        try:
            shapes[index] = source.shape(index)
        except ImageDecodeError as error:
            if not skip_broken:
                fix = "Remove it, or give --on_broken skip."
                raise ImageDecodeError(error.name, error.reason, fix) from error
            shapes[index] = 1
        if time.monotonic() - logged > _LOG_INTERVAL:
            log.info("Reading image sizes: %s of %s", f"{index + 1:,}", f"{count:,}")
            meanwhile()
            logged = time.monotonic()
    return shapes


@dataclass(frozen=True)
class Buckets:
    """The image sizes in use, and the size of each image of a source."""

    sizes: list[Shape]
    of_image: np.ndarray  # uint16 [N], index into `sizes`

    @classmethod
    def assign(cls, sizes: Sequence[Shape], of_image: np.ndarray) -> Buckets:
        """Keep the sizes that have images."""
        used, of_image = np.unique(of_image, return_inverse=True)
        return cls([sizes[index] for index in used], of_image.astype(np.uint16))

    @classmethod
    def of_index(cls, source: IndexSource, count: int) -> Buckets:
        """Take the groups of a multi-resolution index, for its first `count` images."""
        sizes, rows = zip(*source.groups, strict=True)
        return cls.assign(sizes, np.repeat(np.arange(len(sizes)), rows)[:count])

    @property
    def largest(self) -> int:
        """The index of an image of the largest size."""
        areas = np.array([height * width for height, width in self.sizes])
        return int(np.argmax(areas[self.of_image]))

    def summary(self, images: np.ndarray, batch: int) -> list[str]:
        """Describe the buckets of the training images: how many each has, and what it means if they are few."""
        used, found = np.unique(self.of_image[images], return_counts=True)
        counts = {format_size(self.sizes[index]): int(count) for index, count in zip(used, found, strict=True)}
        by_count = sorted(counts, key=lambda size: -counts[size])
        shown = format_list([f"{size} ({counts[size]:,})" for size in by_count])
        text = [f"sizes      {len(counts)} in use (images each): {shown}"]
        if small := [size for size in by_count if counts[size] < batch]:
            text.append(
                f"note       fewer images than a total batch of {batch} at {format_list(small)}: a batch of such a "
                "size repeats them, and over time each image comes as often as any other"
            )
        return text


class BucketedSource:
    """A source whose images have the sizes of their buckets; it is opened once and has a view for each size."""

    def __init__(self, source: MeasurableSource, buckets: Buckets) -> None:
        self.source, self.buckets, self.label_names = source, buckets, source.label_names
        self._views: list[MeasurableSource] = []
        for size in buckets.sizes:
            view = copy.copy(source)  # open files and decoded blocks stay shared
            view.img_size = size
            self._views.append(view)

    def __len__(self) -> int:
        return len(self.buckets.of_image)

    def read(self, index: int) -> Sample:
        """Return sample `index` at the size of its bucket."""
        return self._views[self.buckets.of_image[index]].read(index)

    def fingerprint(self) -> str:
        """Return the fingerprint of the source."""
        return self.source.fingerprint()


@dataclass(frozen=True)
class BucketSampler:
    """The endless sequence of training samples, where every global batch of `batch` samples comes from one bucket."""

    seed: int
    members: list[Indices]
    """The positions in the training set of each bucket's images; no bucket is empty."""
    batch: int

    @classmethod
    def build(cls, seed: int, bucket_of_position: np.ndarray, batch: int) -> BucketSampler:
        """Build the order of a training set whose images are in these buckets."""
        order = np.argsort(bucket_of_position, kind="stable")
        _, starts = np.unique(bucket_of_position[order], return_index=True)
        return cls(seed, np.split(order, starts[1:]), batch)

    def positions(self, sample_indices: Indices) -> Indices:
        """Return the position in the training set of each sample index."""
        positions = np.empty_like(sample_indices)
        batches = sample_indices // self.batch
        for batch in np.unique(batches):
            bucket, turn = self._turn(int(batch))
            here = batches == batch
            members = self.members[bucket]
            epoch, place = np.divmod(turn * self.batch + sample_indices[here] % self.batch, len(members))
            places = permute(place, epoch + bucket * _EPOCHS_PER_BUCKET, len(members), self.seed)
            positions[here] = members[places]
        return positions

    def replacement(self, sample_index: int, attempt: int) -> int:
        """Return the position of an image of the same bucket to try in place of a broken one."""
        members = self.members[self._turn(sample_index // self.batch)[0]]
        return int(members[_replacement(sample_index, attempt, len(members), self.seed)])

    def _turn(self, batch: int) -> tuple[int, int]:
        """Return the bucket of a global batch, and how many batches of this bucket precede it."""
        images = sum(map(len, self.members))
        # A round gives each bucket its share of batches. Search the last round that at most `batch` batches precede;
        # rounding down costs each bucket less than one batch over all rounds, which bounds the search.
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
        """Return how many batches each bucket has given after so many rounds."""
        return [rounds * len(members) // self.batch for members in self.members]
