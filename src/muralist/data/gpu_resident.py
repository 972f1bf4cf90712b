"""A small data set kept in GPU memory: batches are gathered there, in the same order, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes
from muralist.core.progress import progress_bar
from muralist.data.decode import Size, height_width
from muralist.data.loader import Batch, training_batches
from muralist.data.sampler import Indices, SampleOrder, Split
from muralist.data.source import CachedSource, Source
from muralist.settings import DataSettings

_MAX_FRACTION = 0.1  # of the GPU's free memory, under auto
_MAX_BYTES = 8e9  # under auto
_CHUNK_BYTES = 1 << 23  # read and copied at once
_LOOKAHEAD = 1 << 16  # samples whose positions are computed at once: for a step of 256 alone it takes milliseconds


class _StoredOrder:
    """The order in which images are copied to the GPU: that of the data set."""

    def positions(self, sample_indices: Indices) -> Indices:
        """Return the sample indices."""
        return sample_indices


@dataclass(frozen=True)
class GpuResidentDataset:
    """The training images of a run, by position in the training set."""

    images_u8: Tensor  # [N, H, W, 3]
    labels: Tensor  # [N] int64
    captions: list[str] | None  # None if all are empty

    def batches(self, order: SampleOrder, batches: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield one batch for every list of sample indices in `batches`, equal to those of `training_batches`."""
        for sample_indices, positions in _positions_ahead(order, batches):
            both = torch.from_numpy(np.stack((sample_indices, positions)))
            if self.images_u8.is_cuda:
                both = both.pin_memory()
            samples, rows = both.to(self.images_u8.device, non_blocking=True)
            captions = [self.captions[row] for row in positions] if self.captions else [""] * len(positions)
            yield Batch(self.images_u8.index_select(0, rows), self.labels.index_select(0, rows), captions, samples)


def _positions_ahead(order: SampleOrder, batches: Iterable[list[int]]) -> Iterator[tuple[Indices, Indices]]:
    """Yield sample indices and positions of every batch; a thread computes those of the next thousands of samples."""
    waiting = iter(batches)

    def compute() -> list[tuple[Indices, Indices]]:
        first = next(waiting, None)
        if first is None:
            return []
        samples = [np.asarray(batch) for batch in (first, *islice(waiting, _LOOKAHEAD // len(first)))]
        positions = order.positions(np.concatenate(samples))
        ends = np.cumsum([len(batch) for batch in samples[:-1]])
        return list(zip(samples, np.split(positions, ends), strict=True))

    with ThreadPoolExecutor(1, "sample order") as thread:
        coming = thread.submit(compute)
        while found := coming.result():
            coming = thread.submit(compute)
            yield from found


def image_bytes(samples: int, img_size: Size) -> int:
    """Return the bytes of so many images."""
    height, width = height_width(img_size)
    return samples * height * width * 3


def free_device_memory(device: torch.device) -> float | None:
    """Return the free bytes of a GPU; None for the CPU, whose memory is not queried."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def fits_on_device(cache: str, needed: int, free: float | None, whole_epoch: bool) -> bool:
    """Return whether to keep images of so many bytes on the device: as --cache says, or under auto if they are small.

    A run shorter than an epoch does not wait for images that it never uses.
    """
    if cache == "auto":
        return free is not None and whole_epoch and needed <= min(_MAX_FRACTION * free, _MAX_BYTES)
    if cache == "device" and free is not None and needed > free:
        raise UserError(
            f"--cache device: the images take {format_bytes(needed)}, and the GPU has {format_bytes(free)} free.",
            fix="Leave --cache out to read images during training, or use fewer with --max_samples.",
        )
    return cache == "device"


def load_to_device(
    device: torch.device,
    source: Source,
    split: Split,
    img_size: Size,
    settings: DataSettings,
    on_progress: Callable[[int], None],
    shown: bool = True,
) -> GpuResidentDataset:
    """Read all training images once, in DataLoader workers, and copy them; `on_progress` gets the number copied."""
    count, (height, width) = split.training_size, height_width(img_size)
    chunk = max(1, min(256, _CHUNK_BYTES // image_bytes(1, img_size)))
    images = torch.empty((count, height, width, 3), dtype=torch.uint8, device=device)
    labels = torch.empty(count, dtype=torch.int64, device=device)
    captions: list[str] = []
    chunks = [list(range(start, min(start + chunk, count))) for start in range(0, count, chunk)]
    # Bypass the cache in host memory: each image is read this once.
    uncached = source.source if isinstance(source, CachedSource) else source
    with progress_bar("images to the device", count, shown) as advance:
        for batch in training_batches(uncached, split, _StoredOrder(), chunks, settings):
            rows = slice(len(captions), len(captions) + len(batch.labels))
            images[rows].copy_(batch.images_u8, non_blocking=True)
            labels[rows].copy_(batch.labels, non_blocking=True)
            captions += batch.captions
            advance(len(batch.labels))
            on_progress(len(captions))
    return GpuResidentDataset(images, labels, captions if any(captions) else None)
