"""Features of many items, computed by one process per device; the others finish the batches of one that fails."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_list, loading_progress
from muralist.core.hardware import available_cpus
from muralist.core.run_dir import disk_write_error
from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited
from muralist.data.decode import ImageDecodeError, decode_pixels
from muralist.evaluate.encoders import Encoder
from muralist.evaluate.extraction import (
    BATCH,
    CPU,
    DECODING_AHEAD,
    Batch,
    FeatureCache,
    FeatureItem,
    FinishedBatch,
    extract,
)

TIMEOUT = 600.0  # seconds without a finished batch, after which a process is killed
_POLL = 1.0  # seconds
_EXIT_SECONDS = 10.0  # for processes that have nothing left to do
_NAMES_SHOWN = 3
_STOP = "stop"


def extract_together(
    encoder: Encoder,
    cache: FeatureCache,
    batches: Sequence[Batch],
    devices: dict[str, str],
    progress: Callable[[int, int], None],
) -> dict[bytes, str]:
    """Compute and cache the features of all batches; returns which items cannot be decoded, and why."""
    labels = list(devices)[: len(batches)]
    arguments = {label: (encoder, cache, devices[label], len(labels)) for label in labels}
    pool = ProcessPool("muralist-evaluate", _work, arguments)
    scheduler = _Scheduler(pool, deque(batches), progress)
    grace = 0.0
    try:
        for label in labels:
            scheduler.start(label)
        with loading_progress(f"the weights of {encoder.name}", encoder.source):
            scheduler.run(until_first=True)
        scheduler.run()
        grace = _EXIT_SECONDS
        return scheduler.broken
    finally:
        scheduler.stop()
        pool.close(grace)


class _Scheduler:
    """Hands batches to processes, and those of a lost process to the others."""

    def __init__(self, pool: ProcessPool, waiting: deque[Batch], progress: Callable[[int, int], None]) -> None:
        self.pool, self.waiting, self.progress = pool, waiting, progress
        self.pending: dict[str, deque[Batch]] = {}  # batches that a process has and has not finished, in its order
        self.broken: dict[bytes, str] = {}
        self.done, self.total = 0, sum(map(len, waiting))

    def start(self, label: str) -> None:
        """Start a process."""
        self.pending[label] = deque()
        self.pool.start(label)

    def stop(self) -> None:
        """Tell processes that no more batches come."""
        for label in self.pending:
            self.pool.send(label, _STOP)

    def run(self, until_first: bool = False) -> None:
        """Return when every batch is finished, or one is."""
        while (self.waiting or any(self.pending.values())) and not (until_first and self.done):
            self._hand_out()
            for label, message in self.pool.receive(_POLL):
                if label in self.pending:
                    self._handle(label, message)
            for label in [label for label, batches in self.pending.items() if batches]:
                if self.pool.silence(label) > TIMEOUT:
                    self.pool.kill(label)
                    self._lose(label, f"finished nothing for {TIMEOUT:.0f} s and was killed")

    def _hand_out(self) -> None:
        """Give batches in turn, so that each process has one before any has several."""
        for depth in range(1, DECODING_AHEAD + 2):
            for label, batches in self.pending.items():
                while self.waiting and len(batches) < depth:
                    if not batches:
                        self.pool.reset_silence(label)
                    batches.append(self.waiting.popleft())
                    self.pool.send(label, batches[-1])

    def _handle(self, label: str, message: Any) -> None:
        match message:
            case FinishedBatch():
                self.pending[label].popleft()
                self.done += message.items
                self.broken |= message.broken
                self.progress(self.done, self.total)
            case WorkerExited(reason):
                self._lose(label, reason)
            case BaseException():
                raise message
            case str():
                self.pool.kill(label)
                self._lose(label, f"failed: {message}")

    def _lose(self, label: str, how: str) -> None:
        batches = self.pending.pop(label)
        what = f"Process {label}, which computes features, {how}."
        if not self.pending:
            names = [str(item.content) for batch in list(batches)[:1] for item in batch]
            busy = f" It was busy with {format_list(names, _NAMES_SHOWN)}." if names else ""
            raise UserError(what, f"No other process is left.{busy}", "Run the same command again to resume.")
        self.waiting.extendleft(reversed(batches))
        log.warning("%s The others take over its share.", what)


def _work(inbox: Inbox, send: Send, encoder: Encoder, cache: FeatureCache, device: str, processes: int) -> None:
    """Run in a worker process: batches come through the inbox, what is finished goes back."""
    stopped = False

    def next_batch(waits: bool) -> Batch | None:
        nonlocal stopped
        if stopped:
            return None
        try:
            message = inbox.get(block=waits)
        except queue.Empty:
            return None
        stopped = message == _STOP
        return None if stopped else message

    try:
        for finished in extract(encoder, cache, next_batch, torch.device(device), processes):
            send(finished)
    except (UserError, OSError) as error:  # the other processes would meet it as well
        send(error)
    except Exception as error:
        send(f"{type(error).__name__}: {first_line(error)}")


log = logging.getLogger("muralist")
_LOG_INTERVAL = 10.0  # seconds between lines of progress
Progress = Callable[[int, int], None]
"""Called with the number of finished items and their total."""


@dataclass
class Features:
    """Features of the readable items, in the order of the items."""

    rows: np.ndarray  # [N, D] float32
    indices: list[int]
    """The item of each row."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Why an item has no row, by its index."""
    computed: int = 0
    cached: int = 0

    def split(self, count: int) -> tuple[Features, Features]:
        """Split into the features of the first `count` items and those of the others."""
        place = sum(index < count for index in self.indices)
        first = {index: why for index, why in self.unreadable.items() if index < count}
        rest = {index - count: why for index, why in self.unreadable.items() if index >= count}
        return (
            Features(self.rows[:place], self.indices[:place], first),
            Features(self.rows[place:], [index - count for index in self.indices[place:]], rest),
        )

    def require_two(self, folder: str | None) -> None:
        """Refuse a set that is too small for statistics."""
        if len(self.indices) < 2:
            first = next(iter(self.unreadable.values()), "")
            raise UserError(
                f"Fewer than two images of {folder} can be read.",
                f"{len(self.unreadable):,} are broken, the first because: {first}." if first else "",
                "Check that they were copied completely.",
            )


def find_unreadable(items: Sequence[FeatureItem]) -> Features:
    """Decode every image without an encoder: where no metric reads the images, the report still names broken ones."""

    def problem(item: FeatureItem) -> str | None:
        data = item.read()
        assert isinstance(data, bytes)
        try:
            decode_pixels(data)
        except ImageDecodeError as error:
            return error.reason
        return None

    with ThreadPoolExecutor(available_cpus()) as pool:
        unreadable = {index: why for index, why in enumerate(pool.map(problem, items)) if why}
    indices = [index for index in range(len(items)) if index not in unreadable]
    return Features(np.zeros((len(indices), 0), np.float32), indices, unreadable)


def device_kind(devices: dict[str, str]) -> str:
    """Return the model names of the devices: other models compute features with other last bits."""
    names = {CPU if name == "cpu" else torch.cuda.get_device_name(torch.device(name)) for name in devices.values()}
    return " and ".join(sorted(names))


def compute_features(
    encoder: Encoder,
    items: Sequence[FeatureItem],
    devices: dict[str, str],
    cache_dir: Path,
    what: str = "images",
    progress: Progress | None = None,
) -> Features:
    """Return the features of all items: cached ones from disk, the rest computed on all devices."""
    cache = FeatureCache(cache_dir, encoder, device_kind(devices))
    keys = {item.key for item in items}
    found = cache.read(keys)
    missing = list({item.key: item for item in items if item.key not in found}.values())
    broken: dict[bytes, str] = {}
    if missing:
        try:
            broken = _compute_missing(encoder, missing, devices, cache, _logged(what, progress))
        except OSError as error:
            raise disk_write_error(error, cache_dir) from None
        found = cache.read(keys)
        if lost := next((item for item in missing if item.key not in found and item.key not in broken), None):
            raise UserError(f"The features of {lost.content} are missing.", fix="Run the same command again.")
    indices = [index for index, item in enumerate(items) if item.key in found]
    rows = np.stack([found[items[i].key] for i in indices]) if indices else np.zeros((0, encoder.width), np.float32)
    unreadable = {index: broken[item.key] for index, item in enumerate(items) if item.key not in found}
    features = Features(rows, indices, unreadable, len(missing) - len(broken), len(keys) - len(missing))
    log.info("%s: features of %s computed, of %s cached.", what, f"{features.computed:,}", f"{features.cached:,}")
    return features


def _logged(what: str, progress: Progress | None) -> Progress:
    """Log the progress now and then, and pass it on."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOG_INTERVAL:
            last = now
            log.info("%s: %s of %s, %.1f per second.", what, f"{done:,}", f"{total:,}", done / (now - start))
        if progress:
            progress(done, total)

    return report


def _compute_missing(
    encoder: Encoder, items: Sequence[FeatureItem], devices: dict[str, str], cache: FeatureCache, progress: Progress
) -> dict[bytes, str]:
    """Compute and cache features; returns why some items cannot be decoded, by key."""
    kind = torch.device(next(iter(devices.values()))).type
    batches = [items[start : start + BATCH[kind]] for start in range(0, len(items), BATCH[kind])]
    if kind != "cpu" or min(len(devices), len(batches)) > 1:
        # Even a single GPU gets its own process: a driver may hang, or kill the process.
        return extract_together(encoder, cache, batches, devices, progress)
    broken: dict[bytes, str] = {}
    done, remaining = 0, iter(batches)
    for finished in extract(encoder, cache, lambda waits: next(remaining, None), torch.device("cpu")):
        done += finished.items
        broken |= finished.broken
        progress(done, len(items))
    return broken
