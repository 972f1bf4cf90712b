"""One worker: a model on one device, painting what the fleet asks for and storing it.

What it does to a picture does not depend on which worker it is, what it painted before, or what else is in a batch: batches
have one shape, every picture has its own place in them, what is missing is padded with the first picture's order, and every
picture draws from its own seed.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from muralist import compiled_code
from muralist.errors import UserError
from muralist.generate import messages, store
from muralist.generate.folder import OutputFolder, cannot_write
from muralist.generate.ledger import Shard
from muralist.generate.messages import Job, Measure, Stop, Task
from muralist.generate.painter import CannotPaint, Painter
from muralist.generate.painter import Order as PaintOrder
from muralist.generate.plan import Sample, apart, place_of
from muralist.runfolder import write_atomically

log = logging.getLogger("muralist")

Send = Callable[[messages.Report], None]
Inbox = queue.Queue[messages.Order]

_MEMORY_TO_USE = 0.92  # of a GPU's; what is left is for the pieces into which memory breaks over hours
_TRIAL_STEPS = 2
_SECONDS_BETWEEN_BEATS = 1.0
_SAVERS = 2
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
STATUS_BROKEN_DEVICE = 70


def work(job: Job, label: str, device: torch.device, inbox: Inbox, send: Send) -> None:
    """Load the model and serve until told to stop; everything that ends a worker early is reported."""
    try:
        from muralist.generate.pipelines import made_with, open_painter, settle

        settle(device)
        kept = compiled_code.keep()
        painter = open_painter(job.settings, device)
        send(messages.Ready(painter.batches(), made_with(device)))
        Worker(job, label, device, painter, _telling(kept, send)).serve(inbox)
    except UserError as error:
        send(messages.Hopeless(error, everyone=True))
    except Exception as error:
        if not _is_out_of_memory(error):
            log.debug("GPU %s", label, exc_info=True)
        short = _too_large(label) if _is_out_of_memory(error) else UserError(f"GPU {label}: {_in_words(error)}.")
        send(messages.Hopeless(short, everyone=False))


def _telling(kept: compiled_code.Kept, send: Send) -> Send:
    """Reports go on their way; with the first picture, what was compiled for it is told as well."""
    told = False

    def passed_on(report: messages.Report) -> None:
        nonlocal told
        send(report)
        if isinstance(report, messages.Done) and not told:
            told = True
            if words := kept.words():
                send(messages.Remark(words))

    return passed_on


class _Painted(NamedTuple):
    sample: Sample
    pixels: np.ndarray
    seconds: float
    batch_size: int | None  # only where it is not the ledger's


@dataclass
class Worker:
    """A loaded painter and where its pictures go."""

    job: Job
    label: str
    device: torch.device
    painter: Painter
    send: Send
    prepared: set[PaintOrder] = field(default_factory=set)

    def serve(self, inbox: Inbox) -> None:
        """Paint task after task; text of all tasks that are waiting is encoded at once."""
        waiting: list[Task] = []
        beaten = 0.0

        def beat() -> None:
            nonlocal beaten
            if time.monotonic() - beaten > _SECONDS_BETWEEN_BEATS:
                beaten = time.monotonic()
                self.send(messages.Beat())

        shard = Shard(OutputFolder(self.job.folder).shard(self.label), self.job.digest)
        with closing(shard), ThreadPoolExecutor(_SAVERS) as savers:
            saving: list[Future[None]] = []
            while True:
                while not waiting or not inbox.empty():
                    if not waiting and inbox.empty():
                        _finish(saving)  # whatever goes wrong is told before waiting for more, which may never come
                    message = inbox.get()
                    if isinstance(message, Stop):
                        _finish(saving)
                        return
                    if isinstance(message, Measure):
                        self.send(messages.Measured(self._largest_batch(message, beat)))
                    else:
                        waiting.append(message)
                task = waiting.pop(0)
                self._prepare([task, *waiting])
                painted = self._paint(task, shard, beat)
                _finish(saving)  # at most one batch waits for the disk
                saving = [savers.submit(self._save, picture, shard) for picture in painted]

    def _prepare(self, tasks: list[Task]) -> None:
        if all(_order(sample) in self.prepared for sample in tasks[0].samples):
            return
        orders = [_order(sample) for task in tasks for sample in task.samples]
        try:
            self.painter.prepare(orders)
        except Exception as error:  # one of these prompts; painting says which
            log.debug("Text could not be encoded ahead: %s", error)
        self.prepared = set(orders)

    def _paint(self, task: Task, shard: Shard, beat: Callable[[], None]) -> list[_Painted]:
        """The pictures of a task; of a batch that fails, each sample is tried once more alone, in the same shape."""
        painted, reason = self._try(task, task.samples, beat)
        if reason is None:
            return painted
        for sample in task.samples:
            started = time.monotonic()
            again, reason = self._try(task, (sample,), beat)
            painted += again
            if reason is not None:
                self._fail(sample, reason, time.monotonic() - started, shard)
        return painted

    def _try(
        self, task: Task, samples: tuple[Sample, ...], beat: Callable[[], None]
    ) -> tuple[list[_Painted], str | None]:
        """Pictures, or the reason why there are none; the error itself, which holds on to memory, is gone by then."""
        started = time.monotonic()
        self.send(messages.Began(tuple(sample.number for sample in samples)))
        try:
            pictures = self._batch(samples, task.shape, beat)
        except CannotPaint:
            raise
        except Exception as error:
            self._check_device(error)
            return [], _in_words(error)
        seconds = (time.monotonic() - started) / len(samples)
        return [
            _Painted(sample, pixels, seconds, None if shape == task.agreed else shape)
            for sample, (pixels, shape) in zip(samples, pictures, strict=True)
        ], None

    def _batch(self, samples: tuple[Sample, ...], shape: int, beat: Callable[[], None]) -> list[tuple[np.ndarray, int]]:
        """Pictures, and how many were made at once: tried twice when memory is short, then in halves where allowed."""
        places = [place_of(sample.row, sample.copy, shape) for sample in samples]
        orders = [_order(samples[0])] * shape
        for place, sample in zip(places, samples, strict=True):
            orders[place] = _order(sample)
        size = (samples[0].height, samples[0].width)
        for _ in range(2):
            try:
                pictures = self.painter.paint(orders, size, beat)
                return [(pictures[place], shape) for place in places]
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
            _free_memory()
        if not self.job.settings.allow_batch_change or shape == 1:
            raise CannotPaint(*_out_of_memory(self.label, shape))
        half = shape // 2
        self.send(messages.Remark(f"GPU {self.label} is out of memory: {half} at once instead of {shape}."))
        parts = apart(samples, half)
        made = {
            sample: made for part in parts for sample, made in zip(part, self._batch(part, half, beat), strict=True)
        }
        return [made[sample] for sample in samples]

    def _save(self, painted: _Painted, shard: Shard) -> None:
        sample, pixels, seconds, batch_size = painted
        path = self.job.folder / sample.file
        try:
            data = store.encode(pixels, sample, self.job.facts, self.job.settings.video_format)
        except Exception as error:  # this one cannot be a file; the next one can
            self._fail(sample, _in_words(error), seconds, shard)
            return
        try:
            shard.check_there()
            try:
                write_atomically(path, data)
                shard.check_there()
                shard.done(sample, path, hashlib.sha256(data).hexdigest(), self.label, seconds, batch_size)
            except FileNotFoundError:
                path.unlink(missing_ok=True)  # alone in a new folder, it would stand in the way of the next command
                shard.check_there()  # which says it better
                raise
        except OSError as error:
            raise cannot_write(error, self.job.folder) from None
        self.send(messages.Done(sample.number))

    def _fail(self, sample: Sample, reason: str, seconds: float, shard: Shard) -> None:
        try:
            shard.failed(sample, reason, self.label, seconds)
        except OSError as error:
            raise cannot_write(error, self.job.folder) from None
        self.send(messages.Failed(sample.number, reason))

    def _largest_batch(self, asked: Measure, beat: Callable[[], None]) -> int:
        """Twice as many as fitted, until they do not; on a CPU, where memory ends in a kill, one at a time."""
        if not self.painter.batches() or self.device.type == "cpu":
            return 1
        sample, fitted, shape = asked.sample, 1, 1
        while shape <= asked.most:
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                self.painter.paint([_order(sample)] * shape, (sample.height, sample.width), beat, _TRIAL_STEPS)
            except Exception as error:
                if not _is_out_of_memory(error) or shape == 1:
                    raise
                break
            finally:
                _free_memory()
            if torch.cuda.max_memory_reserved(self.device) > _MEMORY_TO_USE * _memory(self.device) and shape > 1:
                break
            fitted, shape = shape, shape * 2
        return fitted

    def _check_device(self, error: Exception) -> None:
        """End at once where the device itself is broken: after some errors of CUDA every further call fails."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except Exception:
            log.error("GPU %s does not work any more: %s", self.label, _in_words(error))
            os._exit(STATUS_BROKEN_DEVICE)


def _order(sample: Sample) -> PaintOrder:
    return PaintOrder(sample.prompt, sample.negative_prompt, sample.seed)


def _finish(saving: list[Future[None]]) -> None:
    for future in saving:
        future.result()


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)
    )


def _out_of_memory(label: str, shape: int) -> tuple[str, str, str]:
    return (
        f"GPU {label} ran out of memory with {shape} picture{'s' if shape > 1 else ''} at once.",
        "Another program may have taken some of it; it was tried twice. What was made before is whole.",
        "Run the same command to go on, or with --allow_batch_change to go on with fewer at once "
        "(whose pictures differ in their last bits and are marked in the ledger).",
    )


def _too_large(label: str) -> UserError:
    return UserError(
        f"The model does not fit into the memory of GPU {label}.",
        fix="Give --cpu_offload true, --dtype bf16, or a GPU that other programs leave free.",
    )


def _in_words(error: BaseException) -> str:
    said = f"{' '.join(str(error).split()):.300}"
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
