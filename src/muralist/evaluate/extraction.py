"""What one process does: decode ahead, compute in batches of one shape, keep the rows.

An item's features are the same to the last bit whichever process computes them, in whichever batch: batches have one
shape, padded where items are missing; a CPU process computes in one thread; and a device whose results depend on the place
in a batch is found out at the start and computes one item at a time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.data.images import BrokenImage, read_image_file
from muralist.errors import UserError
from muralist.evaluate.cache import Cache, Item
from muralist.evaluate.data_pictures import DataPicture
from muralist.evaluate.extractors import Extractor, Loaded
from muralist.loading import loading
from muralist.machine import usable_cores

BATCH = {"cpu": 1, "cuda": 64}  # a CPU is no faster with more
DECODING_AHEAD = 2  # batches

Batch = Sequence[Item]
NextBatch = Callable[[bool], Batch | None]
"""The next batch; None: there is none now, or, where the caller said that it waits, never again."""


class Finished(NamedTuple):
    """A batch whose features are kept; `broken` are those that cannot be decoded, and why."""

    items: int
    broken: dict[bytes, str]


def content(item: Item) -> bytes | str:
    """A prompt, or the bytes of a file: those that were hashed, or features would be kept under another's name."""
    if isinstance(item.content, str):
        return item.content
    if isinstance(item.content, DataPicture):
        return item.content.file()
    data = read_image_file(item.content)
    if hashlib.sha256(data).digest() != item.key:
        raise UserError(
            f"The image {item.content} changed while it was evaluated.",
            "Something still writes into its folder.",
            "Run the same command again when that is done: it computes only what is missing.",
        )
    return data


def extract(
    extractor: Extractor, cache: Cache, next_batch: NextBatch, device: torch.device, processes: int = 1
) -> Iterator[Finished]:
    """Compute and keep, batch after batch."""
    decoders = max(1, usable_cores() // processes)
    with torch.inference_mode(), _exact(device), cache.writer() as write, ThreadPoolExecutor(decoders) as pool:
        with loading(f"the weights of {extractor.name}", extractor.source):
            loaded = extractor.load(device)
        size = 0
        ahead: deque[tuple[Batch, list[Future[Tensor | str]]]] = deque()
        while True:
            while len(ahead) < DECODING_AHEAD and (taken := next_batch(not ahead)) is not None:
                ahead.append((taken, [pool.submit(_prepared, loaded, item) for item in taken]))
            if not ahead:
                return
            batch, futures = ahead.popleft()
            prepared = [(item.key, future.result()) for item, future in zip(batch, futures, strict=True)]
            good = [(key, row) for key, row in prepared if not isinstance(row, str)]
            if good:
                rows = [row for _, row in good]
                size = size or _batch_size(loaded, rows[0], BATCH[device.type])
                write([key for key, _ in good], _in_batches(loaded, rows, size))
            yield Finished(len(batch), {key: row for key, row in prepared if isinstance(row, str)})


def _prepared(loaded: Loaded, item: Item) -> Tensor | str:
    # Each thread has its own modes: these pixels are computed outside the worker's.
    with torch.inference_mode():
        try:
            return loaded.prepare(content(item))
        except BrokenImage as error:
            return error.reason


def _in_batches(loaded: Loaded, rows: Sequence[Tensor], size: int) -> np.ndarray:
    """Features of rows, in batches of one shape."""
    made = []
    for start in range(0, len(rows), size):
        part = list(rows[start : start + size])
        batch = torch.stack(part + [part[-1]] * (size - len(part)))
        made.append(loaded.compute(batch)[: len(part)].float().cpu().numpy())
    return np.concatenate(made)


def _batch_size(loaded: Loaded, row: Tensor, size: int) -> int:
    """The usual number of items at once, or 1 where a row's features change with its place or its neighbours."""
    if size == 1:
        return 1
    other = row.roll(1, -1)
    alike = loaded.compute(torch.stack([row] * size))
    mixed = loaded.compute(torch.stack([row, other] * (size // 2)))[::2]
    same = torch.equal(alike, alike[:1].expand_as(alike)) and torch.equal(mixed, alike[: len(mixed)])
    return size if same else 1


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Full float32, the same kernels every time, one thread on a CPU: then results do not depend on who computes."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    matmul = torch.backends.cuda.matmul.allow_tf32
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with cudnn:
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = matmul
