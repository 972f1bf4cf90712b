"""Computes features in several processes, one per device; the others finish the batches of one that fails."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_list
from muralist.core.progress import loading_progress
from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited
from muralist.evaluate.encoders import Encoder
from muralist.evaluate.extraction import DECODING_AHEAD, Batch, FinishedBatch, extract
from muralist.evaluate.feature_cache import FeatureCache

log = logging.getLogger("muralist")
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
