"""From stream to batches: each rank reads its slice of every global batch, in loader processes, into pinned memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muralist.data.encoded import EncodedSource
from muralist.data.encoded_batch import EncodedBatch, read_encoded
from muralist.data.sources import Source, read_batch
from muralist.data.stream import Order, Split
from muralist.errors import UserError
from muralist.machine import usable_cores
from muralist.settings import DataSettings


class Batch(NamedTuple):
    """Images as they are stored, and the number of each in the global stream: the key of all its randomness."""

    images_u8: Tensor  # [B, H, W, 3]; of encoded data [B, 0, 0, 3]
    labels: Tensor  # [B] int64
    captions: list[str]
    numbers: Tensor  # [B] int64
    encoded: EncodedBatch | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy overlaps with work already queued there."""
        return Batch(
            self.images_u8.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.captions,
            self.numbers.to(device, non_blocking=True),
            self.encoded and self.encoded.to(device),
        )

    def pin_memory(self) -> Batch:
        """Called by the loader's pinning thread."""
        return Batch(
            self.images_u8.pin_memory(),
            self.labels.pin_memory(),
            self.captions,
            self.numbers.pin_memory(),
            self.encoded and self.encoded.pin_memory(),
        )


class _StreamDataset(Dataset[Batch]):
    """Reads whole batches of sample numbers at once."""

    def __init__(self, source: Source, split: Split, stream: Order) -> None:
        self.source, self.split, self.stream = source, split, stream

    def __getitems__(self, numbers: list[int]) -> Batch | UserError:
        number = np.asarray(numbers, dtype=np.int64)
        indices = self.split.training_index(self.stream.positions(number))
        return _read(self.source, indices, number)


def _read(source: Source, indices: np.ndarray, numbers: np.ndarray) -> Batch | UserError:
    encoded = None
    try:
        if isinstance(source, EncodedSource):
            encoded, labels, captions = read_encoded(source, indices)
            images = np.empty((len(indices), 0, 0, 3), dtype=np.uint8)
        else:
            images, labels, captions = read_batch(source, indices)
    except UserError as error:
        return error  # raised by the main process: a loader process would wrap it into a traceback
    return Batch(torch.from_numpy(images), torch.from_numpy(labels), captions, torch.from_numpy(numbers), encoded)


def loader_processes(settings: DataSettings) -> int:
    """How many processes read for this rank."""
    if settings.num_workers != "auto":
        return settings.num_workers
    if not torch.cuda.is_available():
        return 1
    return max(1, min(8, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def training_batches(
    source: Source, split: Split, stream: Order, parts: Iterable[list[int]], settings: DataSettings
) -> Iterator[Batch]:
    """One batch for every list of sample numbers in `parts`, in order; loader processes start at once."""
    workers = loader_processes(settings)
    loader: DataLoader[Batch] = DataLoader(
        _StreamDataset(source, split, stream),
        batch_sampler=parts,  # type: ignore[arg-type]
        num_workers=workers,
        persistent_workers=settings.persistent_workers and workers > 0,
        pin_memory=settings.pin_memory and torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
        collate_fn=_as_it_is,  # type: ignore[arg-type]
        worker_init_fn=_leave_interrupts_to_the_trainer,
    )
    batches = iter(loader)
    # torch would raise in the middle of an update when a loader process dies; this way it is noticed when its batch is due.
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _checked(batches)


def _checked(batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
    while True:
        try:
            batch = next(batches, None)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # A process that dies while it hands over a batch breaks the connection; else torch finds it gone.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise UserError(
                "A loader process died.",
                "It was killed, most often because the machine ran out of memory.",
                "Run the same command to go on; a smaller --num_workers needs less memory.",
            ) from None
        if batch is None:
            return
        if isinstance(batch, UserError):
            # Ends the loader processes now: the error refers to this frame and this frame to the error, and by the time
            # the garbage is collected the queues may be gone by which the processes are told to end.
            del batches
            raise batch
        yield batch


def held_out_batches(source: Source, indices: np.ndarray, positions: np.ndarray, size: int) -> Iterator[Batch]:
    """Held-out images by position; the one at position i has number i, so that its noise is the same in every run."""
    for start in range(0, len(positions), size):
        chosen = positions[start : start + size]
        batch = _read(source, indices[chosen], chosen)
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _as_it_is(batch: Batch | UserError) -> Batch | UserError:
    return batch


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    # Ctrl+C reaches every process of a terminal; the trainer saves and then ends its loader processes itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
