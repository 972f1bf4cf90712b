"""Batches for training: from DataLoader workers into pinned memory, or from a small data set kept in GPU memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes, progress_bar
from muralist.core.hardware import available_cpus
from muralist.core.image_size import Size, height_width
from muralist.core.rng import Purpose, SampleKeys
from muralist.core.worker_pool import without_main_module
from muralist.data.decode import ImageDecodeError
from muralist.data.packed import LatentBatch, LatentSource
from muralist.data.sampler import Indices, SampleOrder, Split
from muralist.data.source import CachedSource, Source, read_batch
from muralist.settings import DataSettings


class BrokenImage(NamedTuple):
    """An image that cannot be decoded: its position among the images that were to be read, its name, the reason."""

    position: int
    name: str
    reason: str


class Batch(NamedTuple):
    """Stored images or latents, and the sample index of each, from which all its random numbers derive."""

    images_u8: Tensor  # [B, H, W, 3]; [B, 0, 0, 3] for latents
    labels: Tensor  # [B] int64
    captions: list[str]
    sample_indices: Tensor  # [B] int64
    encoded: LatentBatch | None = None
    broken: tuple[BrokenImage, ...] = ()  # images in whose place others were read

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, asynchronously from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to pinned memory; DataLoader's pinning thread calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        images, labels, samples = map(function, (self.images_u8, self.labels, self.sample_indices))
        return Batch(images, labels, self.captions, samples, self.encoded and self.encoded.map(function), self.broken)


def to_unit_range(images_u8: Tensor, flips: SampleKeys | None) -> Tensor:
    """Convert uint8 [B, H, W, 3] to [-1, 1], [B, 3, H, W]; with keys, mirror the images that `flip_mask` selects."""
    images = images_u8.permute(0, 3, 1, 2).float() / 127.5 - 1.0
    if flips is None:
        return images
    return torch.where(flip_mask(flips)[:, None, None, None], images.flip(-1), images)


def select_posterior(latents: Tensor, flips: SampleKeys | None) -> tuple[Tensor, Tensor | None]:
    """Return mean and deviation of stored latents in float32; with keys, of the mirror images where `flip_mask` says so.

    The deviation of a deterministic VAE is None.
    """
    selected = latents[:, 0]
    if flips is not None:
        mask = flip_mask(flips).view(-1, *[1] * (selected.ndim - 1))
        selected = torch.where(mask, latents[:, 1], selected)
    return selected[:, 0].float(), selected[:, 1].float() if selected.shape[1] == 2 else None


def flip_mask(keys: SampleKeys) -> Tensor:
    """Select the images of a batch to mirror, half of them on average, [B]."""
    return keys.uniform(Purpose.FLIP) < 0.5


class _OrderedDataset(Dataset[Batch]):
    """Reads the training images of a list of sample indices."""

    def __init__(self, source: Source, split: Split, order: SampleOrder, skip_broken: bool) -> None:
        self.source, self.split, self.order, self.skip_broken = source, split, order, skip_broken

    def __getitems__(self, sample_indices: list[int]) -> Batch | UserError:
        samples = np.asarray(sample_indices, dtype=np.int64)
        try:
            positions = self.order.positions(samples)
            try:
                return _read(self.source, self.split.training_index(positions), samples)
            except ImageDecodeError:
                if not self.skip_broken:
                    raise
            return _read_others(self.source, self.split.training_index, self.order, positions, samples)
        except UserError as error:
            return error  # raised by the main process: DataLoader would wrap it into a traceback


class AllBroken(UserError):
    """No intact image was found in place of a broken one."""

    broken: tuple[BrokenImage, ...] = ()


def _read_others(
    source: Source, index_of: Callable[[Indices], Indices], order: SampleOrder, positions: Indices, samples: Indices
) -> Batch:
    """Read a batch with other images in place of broken ones; `index_of` turns positions into indices of the source."""
    broken: dict[int, BrokenImage] = {}

    def is_broken(position: int) -> bool:
        try:
            source.read(int(index_of(np.array([position]))[0]))
        except ImageDecodeError as error:
            broken[position] = BrokenImage(position, error.name, error.reason)
        return position in broken

    try:
        intact = replace_broken(order, positions, samples, is_broken)
    except AllBroken as error:
        error.broken = tuple(broken.values())
        raise
    return _read(source, index_of(intact), samples)._replace(broken=tuple(broken.values()))


def replace_broken(
    order: SampleOrder, positions: Indices, samples: Indices, is_broken: Callable[[int], bool]
) -> Indices:
    """Return the positions with those of broken images replaced, as a function of seed and sample index alone."""
    positions = positions.copy()
    for slot, sample in enumerate(samples.tolist()):
        attempt = 0
        while is_broken(int(positions[slot])):
            attempt += 1
            if attempt > _MAX_ATTEMPTS:
                raise AllBroken(
                    f"--on_broken skip found {_MAX_ATTEMPTS} broken images in a row in place of a broken one.",
                    "Most images of this size are broken.",
                    "Repair the data set; `muralist pack` lists every broken image in broken.txt.",
                )
            positions[slot] = order.replacement(sample, attempt)
    return positions


def _read(source: Source, indices: np.ndarray, sample_indices: np.ndarray) -> Batch:
    encoded = None
    if isinstance(source, LatentSource):
        encoded, labels, captions = source.read_latents(indices)
        images = np.empty((len(indices), 0, 0, 3), dtype=np.uint8)
    else:
        images, labels, captions = read_batch(source, indices)
    images_u8, labels_i64, samples = map(torch.from_numpy, (images, labels, sample_indices))
    return Batch(images_u8, labels_i64, captions, samples, encoded)


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
    """Yield one batch for every list of sample indices in `batches`, in order; the workers start at once.

    They live as long as the run, or with `persistent_workers` false until the end of each epoch.
    """
    workers = num_loader_workers(settings)
    dataset = _OrderedDataset(source, split, order, settings.on_broken == "skip")

    def start(indices: Iterable[list[int]]) -> Iterator[Batch | UserError]:
        loader: DataLoader[Batch] = DataLoader(
            dataset,
            batch_sampler=indices,  # type: ignore[arg-type]
            num_workers=workers,
            pin_memory=settings.pin_memory and torch.cuda.is_available(),
            prefetch_factor=4 if workers else None,
            collate_fn=_identity,  # type: ignore[arg-type]
            worker_init_fn=_prepare_worker,
        )
        with without_main_module():  # where the start method is spawn or forkserver
            found = iter(loader)
        # torch's handler would raise in an update when a worker dies; _checked notices when its batch is due.
        if workers and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return found

    if settings.persistent_workers:
        return _checked(start(batches))
    epochs = groupby(batches, lambda indices: indices[0] // split.training_size)
    started = map(start, (indices for _, indices in epochs))
    return _checked(chain(next(started, ()), chain.from_iterable(started)))


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


def held_out_batches(
    source: Source, indices: np.ndarray, positions: np.ndarray, size: int, skip_broken: bool = False
) -> Iterator[Batch]:
    """Yield held-out images by position, which is also their sample index: their noise is the same in every run.

    With `skip_broken`, the next intact image is read in place of a broken one.
    """
    for start in range(0, len(positions), size):
        chosen = positions[start : start + size]
        try:
            yield _read(source, indices[chosen], chosen)
        except ImageDecodeError:
            if not skip_broken:
                raise
            yield _read_others(source, indices.__getitem__, _StoredOrder(len(indices)), chosen, chosen)


def _identity(batch: Batch | UserError) -> Batch | UserError:
    return batch


def _prepare_worker(worker: int) -> None:
    # Ctrl+C reaches every process of a terminal; the trainer saves and then ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The thread that hands tensors to the trainer prints a traceback when the trainer is killed at that moment.
    print_error = sys.excepthook

    def ignore_lost_trainer(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, ConnectionError | EOFError):
            print_error(kind, error, trace)

    sys.excepthook = ignore_lost_trainer


_MAX_ATTEMPTS = 1000  # to find an intact image in place of a broken one
_MAX_FRACTION = 0.1  # of the GPU's free memory, under auto
_MAX_BYTES = 8e9  # under auto
_CHUNK_BYTES = 1 << 23  # read and copied at once
_LOOKAHEAD = 1 << 13  # samples whose positions are computed at once: for a step of 256 alone it takes a millisecond


@dataclass(frozen=True)
class _StoredOrder:
    """The order in which images are copied to the GPU: that of the data set; after a broken one comes the next."""

    size: int

    def positions(self, sample_indices: Indices) -> Indices:
        return sample_indices

    def replacement(self, sample_index: int, attempt: int) -> int:
        return (sample_index + attempt) % self.size


@dataclass(frozen=True)
class GpuResidentDataset:
    """The training images of a run, by position in the training set."""

    images_u8: Tensor  # [N, H, W, 3]
    labels: Tensor  # [N] int64
    captions: list[str] | None  # None if all are empty
    broken: tuple[BrokenImage, ...] = ()  # whose rows hold other images, and are not used

    def batches(self, order: SampleOrder, batches: Iterable[list[int]]) -> Iterator[Batch]:
        """Yield one batch for every list of sample indices in `batches`, equal to those of `training_batches`."""
        broken = {image.position for image in self.broken}
        for sample_indices, positions in _positions_ahead(order, batches):
            if broken:
                positions = replace_broken(order, positions, sample_indices, broken.__contains__)
            both = torch.from_numpy(np.stack((sample_indices, positions)))
            if self.images_u8.is_cuda:
                both = both.pin_memory()
            samples, rows = both.to(self.images_u8.device, non_blocking=True)
            captions = [self.captions[row] for row in positions] if self.captions else [""] * len(positions)
            yield Batch(self.images_u8.index_select(0, rows), self.labels.index_select(0, rows), captions, samples)


def _positions_ahead(order: SampleOrder, batches: Iterable[list[int]]) -> Iterator[tuple[Indices, Indices]]:
    """Yield sample indices and positions of every batch, computed for thousands of samples at once."""
    waiting = iter(batches)
    for first in waiting:
        samples = [np.asarray(batch) for batch in (first, *islice(waiting, _LOOKAHEAD // len(first)))]
        ends = np.cumsum([len(batch) for batch in samples[:-1]])
        yield from zip(samples, np.split(order.positions(np.concatenate(samples)), ends), strict=True)


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
    broken: list[BrokenImage] = []
    chunks = [list(range(start, min(start + chunk, count))) for start in range(0, count, chunk)]
    # Bypass the cache in host memory: each image is read this once.
    uncached = source.source if isinstance(source, CachedSource) else source
    with progress_bar("images to the device", count, shown) as advance:
        for batch in training_batches(uncached, split, _StoredOrder(count), chunks, settings):
            rows = slice(len(captions), len(captions) + len(batch.labels))
            images[rows].copy_(batch.images_u8, non_blocking=True)
            labels[rows].copy_(batch.labels, non_blocking=True)
            captions += batch.captions
            broken += batch.broken
            advance(len(batch.labels))
            on_progress(len(captions))
    return GpuResidentDataset(images, labels, captions if any(captions) else None, tuple(dict.fromkeys(broken)))
