"""A small data set that lies on the card: batches are gathered there, by the same order, and nothing is read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.data.bar import bar
from muralist.data.cache import CachedSource
from muralist.data.images import Size, height_width
from muralist.data.loader import Batch, training_batches
from muralist.data.sources import Source
from muralist.data.stream import Numbers, Order, Split
from muralist.errors import UserError
from muralist.settings import DataSettings
from muralist.words import gigabytes

_LARGEST_PART = 0.1  # of the card's free memory, under auto
_MOST_BYTES = 8e9  # under auto
_CHUNK_BYTES = 1 << 23  # read and brought over at once
_AHEAD = 1 << 16  # sample numbers whose places are computed at once: a step of 256 alone would take milliseconds


class _AsStored:
    """The order in which pictures are brought to the card: their own."""

    def positions(self, numbers: Numbers) -> Numbers:
        """Every number is a position."""
        return numbers


@dataclass(frozen=True)
class PicturesOnDevice:
    """The training pictures of a run: the one at position n is the n-th that is not held out."""

    images_u8: Tensor  # [N, H, W, 3]
    labels: Tensor  # [N] int64
    captions: list[str] | None  # None: all are empty

    def batches(self, order: Order, parts: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch for every list of sample numbers in `parts`: what `training_batches` reads, to the bit."""
        for numbers, positions in _places(order, parts):
            both = torch.from_numpy(np.stack((numbers, positions)))
            if self.images_u8.is_cuda:
                both = both.pin_memory()
            number, place = both.to(self.images_u8.device, non_blocking=True)
            captions = [self.captions[at] for at in positions] if self.captions else [""] * len(numbers)
            yield Batch(self.images_u8.index_select(0, place), self.labels.index_select(0, place), captions, number)


class _Places(NamedTuple):
    numbers: Numbers
    positions: Numbers


def _places(order: Order, parts: Iterable[list[int]]) -> Iterator[_Places]:
    """Numbers and positions of every part; a thread computes those of the next thousands of samples meanwhile."""
    waiting = iter(parts)

    def some() -> list[_Places]:
        first = next(waiting, None)
        if first is None:
            return []
        rows = [np.asarray(part) for part in (first, *islice(waiting, _AHEAD // len(first)))]
        positions = order.positions(np.concatenate(rows))
        return [
            _Places(row, found)
            for row, found in zip(rows, np.split(positions, np.cumsum([len(row) for row in rows[:-1]])), strict=True)
        ]

    with ThreadPoolExecutor(1, "order") as thread:
        coming = thread.submit(some)
        while found := coming.result():
            coming = thread.submit(some)
            yield from found


def picture_bytes(samples: int, img_size: Size) -> int:
    """Bytes of so many pictures."""
    height, width = height_width(img_size)
    return samples * height * width * 3


def free_memory(device: torch.device) -> float | None:
    """Bytes that are free on a card; None of the host, whose memory is not asked for."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def lies_on_device(wish: str, needed: int, free: float | None, whole_epoch: bool) -> bool:
    """Whether pictures of so many bytes are kept on the device: as told, or because they are few beside its free memory.

    A run that does not come to all of them is spared the wait until all are there.
    """
    if wish == "auto":
        return free is not None and whole_epoch and needed <= min(_LARGEST_PART * free, _MOST_BYTES)
    if wish == "device" and free is not None and needed > free:
        raise UserError(
            f"--cache device: the pictures take {gigabytes(needed)}, and the GPU has {gigabytes(free)} free.",
            fix="Leave --cache out: they are then read while training goes on. Or use fewer with --max_samples.",
        )
    return wish == "device"


def put_on(
    device: torch.device,
    source: Source,
    split: Split,
    img_size: Size,
    settings: DataSettings,
    told: Callable[[int], None],
    shown: bool = True,
) -> PicturesOnDevice:
    """Read all training pictures once, by loader processes, and bring them over; `told` hears how many are there."""
    count, (height, width) = split.training_size, height_width(img_size)
    chunk = max(1, min(256, _CHUNK_BYTES // picture_bytes(1, img_size)))
    images = torch.empty((count, height, width, 3), dtype=torch.uint8, device=device)
    labels = torch.empty(count, dtype=torch.int64, device=device)
    captions: list[str] = []
    chunks = [list(range(start, min(start + chunk, count))) for start in range(0, count, chunk)]
    # Not by way of what remembers pictures in host memory: they are read this once.
    read = source.source if isinstance(source, CachedSource) else source
    with bar("pictures to the device", count, shown) as advance:
        for batch in training_batches(read, split, _AsStored(), chunks, settings):
            rows = slice(len(captions), len(captions) + len(batch.numbers))
            images[rows].copy_(batch.images_u8, non_blocking=True)
            labels[rows].copy_(batch.labels, non_blocking=True)
            captions += batch.captions
            advance(len(batch.numbers))
            told(len(captions))
    return PicturesOnDevice(images, labels, captions if any(captions) else None)
