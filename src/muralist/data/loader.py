"""Batches for training: each rank's DataLoader workers read its slice of every global batch, into pinned memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muralist.core.errors import UserError
from muralist.core.hardware import available_cpus
from muralist.data.latents import LatentBatch, LatentSource
from muralist.data.sampler import SampleOrder, Split
from muralist.data.source import Source, read_batch
from muralist.settings import DataSettings


class Batch(NamedTuple):
    """Stored images or latents, and the sample index of each, from which all its random numbers derive."""

    images_u8: Tensor  # [B, H, W, 3]; [B, 0, 0, 3] for latents
    labels: Tensor  # [B] int64
    captions: list[str]
    sample_indices: Tensor  # [B] int64
    encoded: LatentBatch | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, asynchronously from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory; DataLoader's pinning thread calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        images, labels, samples = map(function, (self.images_u8, self.labels, self.sample_indices))
        return Batch(images, labels, self.captions, samples, self.encoded and self.encoded.map(function))


class _OrderedDataset(Dataset[Batch]):
    """Reads the training images of a list of sample indices."""

    def __init__(self, source: Source, split: Split, order: SampleOrder) -> None:
        self.source, self.split, self.order = source, split, order

    def __getitems__(self, sample_indices: list[int]) -> Batch | UserError:
        samples = np.asarray(sample_indices, dtype=np.int64)
        return _read(self.source, self.split.training_index(self.order.positions(samples)), samples)


def _read(source: Source, indices: np.ndarray, sample_indices: np.ndarray) -> Batch | UserError:
    encoded = None
    try:
        if isinstance(source, LatentSource):
            encoded, labels, captions = source.read_latents(indices)
            images = np.empty((len(indices), 0, 0, 3), dtype=np.uint8)
        else:
            images, labels, captions = read_batch(source, indices)
    except UserError as error:
        return error  # raised by the main process: DataLoader would wrap it into a traceback
    return Batch(
        torch.from_numpy(images), torch.from_numpy(labels), captions, torch.from_numpy(sample_indices), encoded
    )


def num_loader_workers(settings: DataSettings) -> int:
    """Return the number of DataLoader workers of this rank."""
    if settings.num_workers != "auto":
        return settings.num_workers
    if not torch.cuda.is_available():
        return 1
    return max(1, min(8, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def training_batches(
    source: Source, split: Split, order: SampleOrder, batches: Iterable[list[int]], settings: DataSettings
) -> Iterator[Batch]:
    """Yield one batch for every list of sample indices in `batches`, in order; the workers start at once."""
    workers = num_loader_workers(settings)
    loader: DataLoader[Batch] = DataLoader(
        _OrderedDataset(source, split, order),
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=workers,
        persistent_workers=settings.persistent_workers and workers > 0,
        pin_memory=settings.pin_memory and torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
        collate_fn=_identity,  # type: ignore[arg-type]
        worker_init_fn=_ignore_interrupts,
    )
    found = iter(loader)
    # torch's handler would raise in the middle of an update when a worker dies; _checked notices when its batch is due.
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _checked(found)


def _checked(batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
    while True:
        try:
            batch = next(batches, None)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # A worker that dies while it sends a batch breaks the connection; otherwise torch finds it gone.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise UserError(
                "A DataLoader worker died.",
                "It was killed, most often because the machine ran out of memory.",
                "Run the same command to resume; a smaller --num_workers needs less memory.",
            ) from None
        if batch is None:
            return
        if isinstance(batch, UserError):
            # Ends the workers now: the error and this frame refer to each other, and by the time they are collected the
            # queues that tell the workers to end may be gone.
            del batches
            raise batch
        yield batch


def held_out_batches(source: Source, indices: np.ndarray, positions: np.ndarray, size: int) -> Iterator[Batch]:
    """Yield held-out images by position, which is also their sample index: their noise is the same in every run."""
    for start in range(0, len(positions), size):
        chosen = positions[start : start + size]
        batch = _read(source, indices[chosen], chosen)
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _identity(batch: Batch | UserError) -> Batch | UserError:
    return batch


def _ignore_interrupts(worker: int) -> None:
    # Ctrl+C reaches every process of a terminal; the trainer saves and then ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
