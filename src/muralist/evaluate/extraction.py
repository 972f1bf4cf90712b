"""What one process does: decode ahead, compute in batches of one shape, keep the rows; all three at the same time.

An item's features are the same to the last bit whichever process computes them, in whichever batch: batches have one
shape, padded where items are missing; a CPU process computes in one thread; and a device whose results depend on the place
in a batch is found out at the start and computes one item at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.data.images import BrokenImage
from muralist.evaluate.cache import Cache, Item
from muralist.evaluate.data_pictures import DataPicture
from muralist.evaluate.decoders import Decoders, Underway, Wanted
from muralist.evaluate.decoding import unchanged
from muralist.evaluate.extractors import AT_ONCE, Extractor, Loaded
from muralist.loading import loading
from muralist.machine import usable_cores

BATCH = {"cpu": 1, "cuda": AT_ONCE}  # a CPU is no faster with more
# Batches: enough that every core of a large machine has something to decode, and more when it is done; of large photographs
# fewer, by their bytes.
DECODING_AHEAD = 6
_MOST_AHEAD = 2 << 30

Batch = Sequence[Item]
NextBatch = Callable[[bool], Batch | None]
"""The next batch; None: there is none now, or, where the caller said that it waits, never again."""


class Finished(NamedTuple):
    """A batch whose features are kept; `broken` are those that cannot be decoded, and why."""

    items: int
    broken: dict[bytes, str]


def content(item: Item) -> bytes | str:
    """A prompt, or the bytes of a file."""
    if isinstance(item.content, str):
        return item.content
    if isinstance(item.content, DataPicture):
        return item.content.file()
    return unchanged(item.content, item.key)


def extract(
    extractor: Extractor, cache: Cache, next_batch: NextBatch, device: torch.device, processes: int = 1
) -> Iterator[Finished]:
    """Compute and keep, batch after batch; while a GPU computes one, the one before it is kept and the next put together."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and page-locked memory belong to the current one
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_exact())
        write = stack.enter_context(cache.writer())
        with loading(f"the weights of {extractor.name}", extractor.source):
            loaded = extractor.load(device)
        prepare = stack.enter_context(_preparing(loaded, max(1, usable_cores() // processes)))
        size = 0
        ahead: deque[tuple[Batch, Underway]] = deque()
        computing: tuple[list[bytes], _Rows | None, Finished] | None = None
        while True:
            idle = computing is None  # else what is computed is kept before anything is waited for
            while _has_room(ahead) and (taken := next_batch(idle and not ahead)) is not None:
                ahead.append((taken, prepare(taken)))
            if idle and not ahead:
                return
            before, computing = computing, None
            if ahead:
                batch, underway = ahead.popleft()
                rows = underway.rows()
                good = [(item.key, row) for item, row in zip(batch, rows, strict=True) if not isinstance(row, str)]
                broken = {item.key: row for item, row in zip(batch, rows, strict=True) if isinstance(row, str)}
                if good:
                    size = size or _batch_size(loaded, good[0][1], BATCH[device.type])
                made = _in_batches(loaded, [row for _, row in good], size) if good else None
                underway.forget()
                computing = [key for key, _ in good], made, Finished(len(batch), broken)
            if before:
                keys, made, finished = before
                if made:
                    write(keys, made.fetch())
                yield finished


def _has_room(ahead: Sequence[tuple[Batch, Underway]]) -> bool:
    return len(ahead) < DECODING_AHEAD and sum(underway.size for _, underway in ahead) < _MOST_AHEAD


Prepare = Callable[[Batch], Underway]


@contextmanager
def _preparing(loaded: Loaded, cores: int) -> Iterator[Prepare]:
    """What turns items into rows ahead of time: threads; or processes, where files only need to be decoded."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(cores))
        decoders: Decoders | None = None

        def prepare(batch: Batch) -> Underway:
            nonlocal decoders
            files = [Wanted(item.content, item.key, item.shape) for item in batch if isinstance(item.content, Path)]
            if not loaded.takes_pixels or len(files) < len(batch):
                return Underway([pool.submit(_prepared, loaded, item) for item in batch], lambda: None)
            decoders = decoders or stack.enter_context(Decoders(cores, DECODING_AHEAD))
            return decoders.decode(files)

        yield prepare


def _prepared(loaded: Loaded, item: Item) -> list[Tensor | str]:
    # Each thread has its own modes: these pixels are computed outside the worker's.
    with torch.inference_mode():
        try:
            return [loaded.prepare(content(item))]
        except BrokenImage as error:
            return [error.reason]


class _Rows:
    """Features on their way to the CPU."""

    def __init__(self, features: Tensor) -> None:
        self._event = torch.cuda.Event() if features.is_cuda else None
        self._rows = features
        if self._event:
            self._rows = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
            self._rows.copy_(features, non_blocking=True)
            self._event.record(torch.cuda.current_stream(features.device))

    def fetch(self) -> np.ndarray:
        """Wait for them alone, not for what was begun after them."""
        if self._event:
            self._event.synchronize()
        return self._rows.numpy()


def _in_batches(loaded: Loaded, rows: Sequence[Tensor], size: int) -> _Rows:
    """Features of rows, in batches of one shape."""
    made = []
    for start in range(0, len(rows), size):
        part = list(rows[start : start + size])
        batch = loaded.stack(part + [part[-1]] * (size - len(part)))
        made.append(loaded.compute(batch)[: len(part)].float())
    return _Rows(torch.cat(made))


def _batch_size(loaded: Loaded, row: Tensor, size: int) -> int:
    """The usual number of items at once, or 1 where a row's features change with its place or its neighbours."""
    if size == 1:
        return 1
    other = row.roll(1, -1)
    alike = loaded.compute(loaded.stack([row] * size))
    mixed = loaded.compute(loaded.stack([row, other] * (size // 2)))[::2]
    same = torch.equal(alike, alike[:1].expand_as(alike)) and torch.equal(mixed, alike[: len(mixed)])
    return size if same else 1


@contextmanager
def _exact() -> Iterator[None]:
    """Float32, unless an extractor has it otherwise, the same kernels every time, one thread on a CPU: then results do not
    depend on who computes. Beside a GPU other threads would only be in the way of the processes that decode."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with cudnn:
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = matmul
