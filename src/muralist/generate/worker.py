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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from muralist import compiled_code
from muralist.errors import UserError
from muralist.generate import exactness, messages, store
from muralist.generate.card import is_out_of_memory
from muralist.generate.folder import OutputFolder, cannot_write
from muralist.generate.ledger import CUT, Shard
from muralist.generate.messages import Job, Measure, Stop, Task
from muralist.generate.painter import CannotPaint, Painter, Pending, Way
from muralist.generate.painter import Order as PaintOrder
from muralist.generate.plan import Sample, apart, place_of
from muralist.runfolder import write_atomically

log = logging.getLogger("muralist")

Send = Callable[[messages.Report], None]
Inbox = queue.Queue[messages.Order]

_MEMORY_TO_USE = 0.92  # of a GPU's; what is left is for the pieces into which memory breaks over hours
_SECONDS_BETWEEN_BEATS = 1.0
_SAVERS = 4  # a picture of 1024 x 1024 is a file after a quarter of a second; no model makes sixteen of them in one
STATUS_BROKEN_DEVICE = 70


def work(job: Job, label: str, device: torch.device, inbox: Inbox, send: Send) -> None:
    """Load the model and serve until told to stop; everything that ends a worker early is reported."""
    try:
        from muralist.generate.pipelines import made_with, open_painter, settle

        settle(device)
        kept = compiled_code.keep()
        painter = open_painter(job.settings, device)
        send(messages.Ready(painter.batches(), made_with(device) | painter.made_with()))
        Worker(job, label, device, painter, _telling(kept, send)).serve(inbox)
    except UserError as error:
        send(messages.Hopeless(error, everyone=True))
    except Exception as error:
        if not is_out_of_memory(error):
            log.debug("GPU %s", label, exc_info=True)
        short = _too_large(label) if is_out_of_memory(error) else UserError(f"GPU {label}: {_in_words(error)}.")
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
    facts: dict[str, Any]  # for the ledger


class _Part(NamedTuple):
    """What one call of the painter makes: all of a task, or less of it when memory is short."""

    samples: tuple[Sample, ...]
    shape: int
    pending: Pending

    def pictures(self) -> dict[Sample, np.ndarray]:
        """Wait for them."""
        made = self.pending.wait()
        return {sample: made[place_of(sample.row, sample.copy, self.shape)] for sample in self.samples}


class _Batch(NamedTuple):
    """A task that was handed to the device, or the reason why it could not be."""

    task: Task
    started: float
    parts: list[_Part]
    reason: str | None

    @property
    def there(self) -> bool:
        return all(part.pending.there for part in self.parts)


@dataclass
class Worker:
    """A loaded painter and where its pictures go."""

    job: Job
    label: str
    device: torch.device
    painter: Painter
    send: Send
    prepared: set[PaintOrder] = field(default_factory=set)
    in_flight: tuple[int, ...] = ()  # samples that the device is at work on while the next are begun
    exact: dict[Sample, np.ndarray] = field(default_factory=dict)  # as exact mode makes them, until fast mode has too
    ended: float = 0.0

    def serve(self, inbox: Inbox) -> None:
        """Paint task after task; text of all tasks that are waiting is encoded at once.

        A task is handed to the device before the pictures of the one before it are waited for, so that it has always work.
        """
        waiting: list[Task] = []
        beaten = 0.0

        def beat() -> None:
            nonlocal beaten
            if time.monotonic() - beaten > _SECONDS_BETWEEN_BEATS:
                beaten = time.monotonic()
                self.send(messages.Beat())

        try:
            shard = Shard(OutputFolder(self.job.folder).shard(self.label), self.job.digest)
        except OSError as error:
            raise cannot_write(error, self.job.folder) from None
        with closing(shard), ThreadPoolExecutor(_SAVERS) as savers:
            saving: list[Future[None]] = []
            flying: _Batch | None = None

            def land(following: tuple[int, ...] = ()) -> None:
                nonlocal saving, flying
                if flying is not None:
                    self.in_flight = following  # what is with the device when one of the landing batch is tried alone
                    painted = self._painted(flying, shard, beat)
                    flying, self.in_flight = None, ()
                    _finish(saving)  # at most one batch waits for the disk
                    saving = [savers.submit(self._save, picture, shard) for picture in painted]

            while True:
                while not waiting or not inbox.empty():
                    if not waiting and inbox.empty():
                        land()
                        _finish(saving)  # whatever goes wrong is told before waiting for more, which may never come
                    message = inbox.get()
                    if isinstance(message, Stop):
                        land()
                        _finish(saving)
                        return
                    if isinstance(message, Measure):
                        self.send(messages.Measured(self._largest_batch(message, beat)))
                    else:
                        waiting.append(message)
                task = waiting.pop(0)
                self._prepare([task, *waiting])
                compared = self._to_compare(task)
                if task.alone or compared:
                    land()  # or the time that comparing takes would count as that of the batch before
                if compared:
                    self._paint_exactly(compared, task.shape, beat)
                numbers = tuple(sample.number for sample in task.samples)
                try:
                    begun = self._begin(task, beat)
                except CannotPaint:
                    land()  # what was begun before is there
                    _finish(saving)
                    raise
                land(following=numbers)
                flying, self.in_flight = begun, numbers
                if begun.there or task.alone:
                    land()

    def _prepare(self, tasks: list[Task]) -> None:
        """Have the painter prepare these, if it has not prepared the first two: the second while it paints the first."""
        if all(_order(sample) in self.prepared for task in tasks[:2] for sample in task.samples):
            return
        orders = [_order(sample) for task in tasks for sample in task.samples]
        try:
            self.painter.prepare(orders)
        except Exception as error:  # one of these prompts; painting says which
            log.debug("Text could not be encoded ahead: %s", error)
            if is_out_of_memory(error):
                _free_memory()
        self.prepared = set(orders)

    def _to_compare(self, task: Task) -> tuple[Sample, ...]:
        """In fast mode: samples that are painted in exact mode too."""
        fast = self.job.settings.preset == "fast"
        return tuple(sample for sample in task.samples if fast and exactness.is_compared(sample))

    def _paint_exactly(self, samples: tuple[Sample, ...], shape: int, beat: Callable[[], None]) -> None:
        """Samples as exact mode makes them, kept for comparison and written aside."""
        folder = OutputFolder(self.job.folder).exact
        self._announce(samples)
        try:
            for part in self._parts(samples, shape, beat, Way.EXACT):
                self.exact |= part.pictures()
        except CannotPaint:
            raise
        except Exception as error:  # in fast mode it will fail too, and be told
            self._check_device(error)
            return
        try:
            folder.mkdir(exist_ok=True)
            for sample in samples:
                try:
                    data = store.encode(self.exact[sample], sample, {}, self.job.settings.video_format)
                except Exception:  # it cannot be a file in fast mode either, which will be told
                    self.exact.pop(sample)
                    continue
                write_atomically(folder / sample.file, data)
        except OSError as error:
            raise cannot_write(error, self.job.folder) from None

    def _begin(self, task: Task, beat: Callable[[], None]) -> _Batch:
        """Hand a task to the device; an error itself, which holds on to memory, is gone by the time this returns."""
        started, parts, reason = time.monotonic(), [], None
        self._announce(task.samples)
        try:
            parts = self._parts(task.samples, task.shape, beat)
        except CannotPaint:
            raise
        except Exception as error:
            self._check_device(error)
            reason = _in_words(error)
        return _Batch(task, started, parts, reason)

    def _announce(self, samples: tuple[Sample, ...]) -> None:
        self.send(messages.Began((*self.in_flight, *(sample.number for sample in samples))))

    def _painted(self, batch: _Batch, shard: Shard, beat: Callable[[], None]) -> list[_Painted]:
        """The pictures of a batch; of one that fails, each sample is tried once more alone, in the same shape."""
        painted, reason = self._wait(batch)
        if reason is None:
            return painted
        for sample in batch.task.samples:
            alone = replace(batch.task, samples=(sample,))
            started = time.monotonic()
            again, reason = self._wait(self._begin(alone, beat))
            painted += again
            if reason is not None:
                self._fail(sample, reason, time.monotonic() - started, shard)
        return painted

    def _wait(self, batch: _Batch) -> tuple[list[_Painted], str | None]:
        """Pictures, or the reason why there are none."""
        if batch.reason is not None:
            return [], batch.reason
        painted: list[_Painted] = []
        try:
            for part in batch.parts:
                facts: dict[str, Any] = {} if part.shape == batch.task.agreed else {"batch_size": part.shape}
                pictures = part.pictures()
                if part.pending.gpu_busy is not None:
                    facts["gpu_busy"] = round(part.pending.gpu_busy, 4)
                painted += [
                    _Painted(sample, pixels, 0.0, facts | self._cut(sample)) for sample, pixels in pictures.items()
                ]
        except Exception as error:
            self._check_device(error)
            return [], _in_words(error)
        # A batch that waited for the one before it was not being painted yet.
        seconds = (time.monotonic() - max(batch.started, self.ended)) / len(painted)
        self.ended = time.monotonic()
        return [picture._replace(seconds=seconds, facts=self._compared(picture)) for picture in painted], None

    def _cut(self, sample: Sample) -> dict[str, Any]:
        return {CUT: True} if self.painter.cut_short(sample.prompt) else {}

    def _compared(self, painted: _Painted) -> dict[str, Any]:
        exact = self.exact.pop(painted.sample, None)
        if exact is None:
            return painted.facts
        return painted.facts | {exactness.PSNR: round(exactness.psnr(painted.pixels, exact), 2)}

    def _parts(
        self, samples: tuple[Sample, ...], shape: int, beat: Callable[[], None], way: Way = Way.USUAL
    ) -> list[_Part]:
        """Samples in as many calls as needed: tried twice when memory is short, then in halves where allowed."""
        orders = [_order(samples[0])] * shape
        for sample in samples:
            orders[place_of(sample.row, sample.copy, shape)] = _order(sample)
        size = (samples[0].height, samples[0].width)
        for _ in range(2):
            try:
                return [_Part(samples, shape, self.painter.begin(orders, size, beat, way))]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            _free_memory()
        if not self.job.settings.allow_batch_change or shape == 1:
            raise CannotPaint(*_out_of_memory(self.label, samples[0], shape))
        half = shape // 2
        self.send(messages.Remark(f"GPU {self.label} is out of memory: {half} at once instead of {shape}."))
        return [part for few in apart(samples, half) for part in self._parts(few, half, beat, way)]

    def _save(self, painted: _Painted, shard: Shard) -> None:
        sample, pixels, seconds, facts = painted
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
                shard.done(sample, path, hashlib.sha256(data).hexdigest(), self.label, seconds, facts)
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
                self.painter.paint([_order(sample)] * shape, (sample.height, sample.width), beat, Way.TRIAL)
            except Exception as error:
                if not is_out_of_memory(error) or shape == 1:
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


def _out_of_memory(label: str, sample: Sample, shape: int) -> tuple[str, str, str]:
    if shape == 1:
        return (
            f"GPU {label} ran out of memory with one picture, {sample.file}: {sample.height} x {sample.width} pixels.",
            "It is too large, or another program holds some of the memory; it was tried twice. What was made is whole.",
            "Make it smaller or leave its row out, or free memory and run the same command to go on.",
        )
    return (
        f"GPU {label} ran out of memory with {shape} pictures at once.",
        "Another program may have taken some of it; it was tried twice. What was made is whole.",
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
