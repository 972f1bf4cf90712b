"""One worker: a model on one device, which generates the batches that the scheduler sends and saves the images.

An image does not depend on which worker makes it, what that worker made before, or what else is in a batch: all batches
have one size, every sample has its own slot in them, missing samples are padded with the first one's request, and every
sample has its own seed.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from muralist.core import compile_cache
from muralist.core.errors import UserError
from muralist.core.worker_pool import Inbox, TaskProcessExited
from muralist.data.image_inputs import LoadedInputs, load_inputs
from muralist.generate import workers
from muralist.generate.image_files import (
    GeneratedImage,
    SavedImage,
    SaveProcesses,
    describe_error,
    save_images,
)
from muralist.generate.output_dir import (
    INPUT_FILES,
    PROMPT_TOKENS,
    PROMPT_TRUNCATED,
    OutputDir,
    Shard,
    explain_write_errors,
)
from muralist.generate.pipeline import (
    GenerationMode,
    PendingBatch,
    Pipeline,
    PipelineError,
    SampleRequest,
    environment_info,
    load_pipeline,
    make_deterministic,
)
from muralist.generate.plan import Sample, batch_slot, split_by_slot
from muralist.generate.workers import GenerateBatch, GenerationJob, GroupByText, MeasureBatchSize, StopWorker
from muralist.kernels.cuda_graphs import is_out_of_memory

log = logging.getLogger("muralist")

Send = Callable[[workers.Report], None]

_MEMORY_TO_USE = 0.92  # of a GPU's; the rest is for fragmentation over hours
_LARGEST_BATCH = 64
_PIXELS_PER_BATCH = 4 * 2**20  # enough to fill a GPU: 4 images of 1024 x 1024, 8 of 832 x 480, 16 of 512 x 512
_HEARTBEAT_INTERVAL = 1.0  # seconds
_GROUPED_AT_ONCE = 32  # samples of one call of the pipeline that finds text lengths
_SAVE_THREADS = 4  # encoding a PNG of 1024 x 1024 takes a quarter of a second; no model makes sixteen of them in one
_COMPARED_ROWS = 8  # of a table, generated in fast mode and in exact mode
STATUS_BROKEN_DEVICE = 70


def batch_size_limit(height: int, width: int, frames: int) -> int:
    """Return the largest batch size that `auto` tries: a function of an image's size, never of the number of rows.

    A trial of a few rows then has the batch shape, and so the bytes, of the whole table.
    """
    return min(_LARGEST_BATCH, max(1, _PIXELS_PER_BATCH // (height * width * frames)))


def work(job: GenerationJob, label: str, device: torch.device, inbox: Inbox, send: Send) -> None:
    """Load the model and serve until told to stop; everything that ends a worker early is reported."""
    try:
        make_deterministic(device)
        cache = compile_cache.use_compile_cache()
        pipeline = load_pipeline(job.settings, device, job.model, job.cpus)
        environment = environment_info(device) | pipeline.execution_info()
        send(workers.WorkerReady(pipeline.supports_batching(), environment, pipeline.groups_by_text()))
        Worker(job, label, device, pipeline, send, cache.summary).serve(inbox)
    except TaskProcessExited as error:
        send(workers.WorkerFailed(error, all_workers=False))
    except UserError as error:
        send(workers.WorkerFailed(error, all_workers=True))
    except Exception as error:
        if is_out_of_memory(error):
            failure = UserError(
                f"The model does not fit into the memory of GPU {label}.",
                fix="Give --cpu_offload true, --dtype bf16, or a GPU that other programs leave free.",
            )
        else:
            log.debug("GPU %s", label, exc_info=True)
            failure = UserError(f"GPU {label}: {describe_error(error)}.")
        send(workers.WorkerFailed(failure, all_workers=False))


class _Call(NamedTuple):
    """One call of the pipeline: all of a batch, or less of it when memory is short."""

    samples: tuple[Sample, ...]
    batch_size: int
    pending: PendingBatch

    def images(self) -> list[tuple[Sample, np.ndarray]]:
        """Wait for the images."""
        images = self.pending.wait()
        return [(sample, images[batch_slot(sample.row, sample.copy, self.batch_size)]) for sample in self.samples]


class _RunningBatch(NamedTuple):
    """A batch that was handed to the device, or the reason why it could not be."""

    batch: GenerateBatch
    started: float
    calls: list[_Call]
    failure: str | None


@dataclass
class Worker:
    """A loaded pipeline and where its images go."""

    job: GenerationJob
    label: str
    device: torch.device
    pipeline: Pipeline
    send: Send
    compile_summary: Callable[[], str] | None = None  # reported after the first image
    waiting: deque[GenerateBatch] = field(default_factory=deque)
    prepared: set[SampleRequest] = field(default_factory=set)
    running: _RunningBatch | None = None
    on_device: tuple[int, ...] = ()  # samples that the device works on while the next batch is started
    exact: dict[Sample, np.ndarray] = field(default_factory=dict)  # images of exact mode, until fast mode has made them
    inputs: dict[Sample, LoadedInputs] = field(default_factory=dict)  # of samples that are being generated
    last_end: float = 0.0
    last_heartbeat: float = 0.0

    def __post_init__(self) -> None:
        self.output, self.settings = OutputDir(self.job.output_dir), self.job.settings

    def serve(self, inbox: Inbox) -> None:
        """Generate batch after batch.

        A batch is handed to the device before the images of the one before it are waited for, so that the device always
        has work.
        """
        with explain_write_errors(self.output.root):
            shard = Shard(self.output.shard(self.label), self.job.digest)
        processes = SaveProcesses(self.job, self.label)
        with closing(shard), closing(processes), ThreadPoolExecutor(_SAVE_THREADS) as savers:
            self.shard, self.savers, self.processes = shard, savers, processes
            self.saving: list[Future[None]] = []
            while (batch := self._next_batch(inbox)) is not None:
                self._run(batch)

    def _next_batch(self, inbox: Inbox) -> GenerateBatch | None:
        """Read all messages; returns the next batch, or None when no more come."""
        while not self.waiting or not inbox.empty():
            if not self.waiting and inbox.empty():
                self._finish()  # errors are reported before waiting for messages, which may never come
            message = inbox.get()
            if isinstance(message, StopWorker):
                self._finish()
                return None
            if isinstance(message, MeasureBatchSize):
                self.send(workers.BatchSizeMeasured(self._largest_batch(message)))
            elif isinstance(message, GroupByText):
                self.send(workers.TextGroups(self._text_groups(message.samples)))
            else:
                self.waiting.append(message)
        return self.waiting.popleft()

    def _run(self, batch: GenerateBatch) -> None:
        """Start a batch, then save the one before it; in fast mode, generate some samples in exact mode first."""
        batch = self._load_inputs(batch)
        if not batch.samples:
            return
        self._encode_prompts([batch, *self.waiting])
        fast = self.settings.preset != "exact"
        compared = tuple(sample for sample in batch.samples if fast and sample.row < _COMPARED_ROWS and not sample.copy)
        if batch.exclusive or compared:
            self._complete()  # the time for comparing would count as that of the batch before
        try:
            if compared:
                exact = self._start(batch._replace(samples=compared), GenerationMode.EXACT)
                images, _ = self._wait(exact)  # if it failed, fast mode will fail too and report it
                self.exact |= {image.sample: image.pixels for image in images}
            started = self._start(batch)
        except PipelineError:
            self._finish()
            raise
        self._complete(following=batch.indices)
        self.running, self.on_device = started, batch.indices
        if batch.exclusive or all(call.pending.ready for call in started.calls):
            self._complete()

    def _complete(self, following: tuple[int, ...] = ()) -> None:
        """Wait for the running batch and start saving it; `following` samples are on the device meanwhile."""
        if self.running is not None:
            self.on_device = following  # in case a sample of the running batch is tried alone
            images = self._collect(self.running)
            for sample in self.running.batch.samples:
                self.inputs.pop(sample, None)
            self.running, self.on_device = None, ()
            self._wait_until_saved()  # at most one batch waits for the disk
            if self.processes.accept(len(images)):
                self.saving = [self.savers.submit(self._save, images, self.processes.save(images))]
            else:
                job = self.job, self.label
                self.saving = [self.savers.submit(self._save, [image], save_images([image], *job)) for image in images]

    def _load_inputs(self, batch: GenerateBatch) -> GenerateBatch:
        """Decode the image inputs of a batch; samples whose inputs are broken fail and are left out."""
        if self.job.model.inputs is None:
            return batch
        usable = []
        for sample in batch.samples:
            assert sample.inputs is not None
            started = time.monotonic()
            try:
                self.inputs[sample] = load_inputs(sample.inputs, self.job.model.inputs.images_of(sample.inputs))
                usable.append(sample)
            except UserError as error:
                self._record_failure(sample, describe_error(error), time.monotonic() - started)
        return batch._replace(samples=tuple(usable))

    def _wait_until_saved(self) -> None:
        for future in self.saving:
            future.result()

    def _finish(self) -> None:
        self._complete()
        self._wait_until_saved()

    def _heartbeat(self) -> None:
        if time.monotonic() - self.last_heartbeat > _HEARTBEAT_INTERVAL:
            self.last_heartbeat = time.monotonic()
            self.send(workers.Heartbeat())

    def _encode_prompts(self, batches: Sequence[GenerateBatch]) -> None:
        """Encode the prompts of all waiting batches together, unless those of the next two are encoded already."""
        if all(sample_request(sample) in self.prepared for batch in batches[:2] for sample in batch.samples):
            return
        requests = [sample_request(sample) for batch in batches for sample in batch.samples]
        try:
            self.pipeline.prepare(requests)
        except Exception as error:  # one of these prompts; generating finds out which
            log.debug("Prompts could not be encoded ahead: %s", error)
            if is_out_of_memory(error):
                _free_memory()
        self.prepared = set(requests)

    def _text_groups(self, samples: Sequence[Sample]) -> dict[int, str]:
        groups: dict[int, str] = {}
        for first in range(0, len(samples), _GROUPED_AT_ONCE):
            some = samples[first : first + _GROUPED_AT_ONCE]
            try:
                found = self.pipeline.text_groups([sample_request(sample) for sample in some])
                groups |= {sample.sample_index: group for sample, group in zip(some, found, strict=True)}
            except Exception as error:  # one of these prompts; alone in its batch, it fails and says so
                log.debug("The text lengths of %d samples are unknown: %s", len(some), error)
                groups |= {sample.sample_index: f"sample {sample.sample_index}" for sample in some}
            self._heartbeat()
        return groups

    # From a batch to images.

    def _start(self, batch: GenerateBatch, mode: GenerationMode = GenerationMode.DEFAULT) -> _RunningBatch:
        """Hand a batch to the device; an exception, which would hold on to memory, is gone when this returns."""
        started, calls, failure = time.monotonic(), [], None
        self.send(workers.BatchStarted((*self.on_device, *batch.indices)))
        try:
            calls = self._calls(batch.samples, batch.batch_size, mode)
        except PipelineError:
            raise
        except Exception as error:
            failure = self._explain(error)
        return _RunningBatch(batch, started, calls, failure)

    def _collect(self, running: _RunningBatch) -> list[GeneratedImage]:
        """Return the images of a batch; if it fails, each sample is tried once more alone, at the same batch size."""
        images, failure = self._wait(running)
        if failure is None:
            return images
        for sample in running.batch.samples:
            started = time.monotonic()
            again, failure = self._wait(self._start(running.batch._replace(samples=(sample,))))
            images += again
            if failure is not None:
                self._record_failure(sample, failure, time.monotonic() - started)
        return images

    def _wait(self, running: _RunningBatch) -> tuple[list[GeneratedImage], str | None]:
        """Return images, or the reason why there are none."""
        if running.failure is not None:
            return [], running.failure
        found: list[tuple[Sample, np.ndarray, dict[str, Any]]] = []
        try:
            for call in running.calls:
                found += [(sample, image, self._extra_fields(sample, call, running)) for sample, image in call.images()]
        except Exception as error:
            return [], self._explain(error)
        has_negative_prompt = any(sample.negative_prompt for sample, *_ in found)
        if has_negative_prompt and (why := self.pipeline.ignores_negative_prompts()):
            self.send(workers.WorkerNote(f"Negative prompts have no effect: {why}."))
        # A batch that waited for the one before it was not being generated yet.
        seconds = (time.monotonic() - max(running.started, self.last_end)) / len(found)
        self.last_end = time.monotonic()
        return [
            GeneratedImage(sample, image, seconds, extra, self.exact.pop(sample, None) if self.exact else None)
            for sample, image, extra in found
        ], None

    def _extra_fields(self, sample: Sample, call: _Call, running: _RunningBatch) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if call.batch_size != running.batch.recorded_batch_size:
            fields["batch_size"] = call.batch_size
        if call.pending.gpu_busy is not None:
            fields["gpu_busy"] = round(call.pending.gpu_busy, 4)
        if truncation := self.pipeline.truncation(sample.prompt):
            fields |= {PROMPT_TRUNCATED: True, PROMPT_TOKENS: truncation}
        if sample in self.inputs:
            fields[INPUT_FILES] = self.inputs[sample].files
        return fields

    def _calls(self, samples: tuple[Sample, ...], batch_size: int, mode: GenerationMode) -> list[_Call]:
        """Start as many pipeline calls as needed: tried twice when memory is short, then in halves where allowed."""
        requests = padded_requests(samples, batch_size, self.inputs)
        size = (samples[0].height, samples[0].width)
        for _ in range(2):
            try:
                pending = self.pipeline.generate_async(requests, size, self._heartbeat, mode)
                return [_Call(samples, batch_size, pending)]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            _free_memory()
        if not self.settings.allow_batch_change or batch_size == 1:
            raise _out_of_memory_error(self.label, samples[0], batch_size)
        half = batch_size // 2
        self.send(workers.WorkerNote(f"GPU {self.label} is out of memory: batch size {half} instead of {batch_size}."))
        return [call for part in split_by_slot(samples, half) for call in self._calls(part, half, mode)]

    # From images to files.

    def _save(self, images: Sequence[GeneratedImage], save: Iterator[list[SavedImage]]) -> None:
        """Save images and add their lines to the ledger."""
        recorded = 0
        with explain_write_errors(self.output.root):
            self.shard.check_not_deleted()
            try:
                for saved in save:
                    self.shard.check_not_deleted()
                    self.shard.append(b"".join(image.line for image in saved))
                    recorded += len(saved)
                    self.send(workers.SamplesFinished({image.sample_index: image.failure for image in saved}))
                    self._report_compilation()
            except FileNotFoundError:
                self.processes.close()
                for image in images[recorded:]:  # without a ledger they would make the next command refuse the folder
                    (self.output.root / image.sample.file).unlink(missing_ok=True)
                self.shard.check_not_deleted()  # whose message is the better one
                raise

    def _report_compilation(self) -> None:
        summarize, self.compile_summary = self.compile_summary, None
        if summarize and (note := summarize()):
            self.send(workers.WorkerNote(note))

    def _record_failure(self, sample: Sample, reason: str, seconds: float) -> None:
        with explain_write_errors(self.output.root):
            self.shard.failed(sample, reason, self.label, seconds)
        self.send(workers.SamplesFinished({sample.sample_index: reason}))

    # The device.

    def _largest_batch(self, request: MeasureBatchSize) -> int:
        """Double the batch size until it fills the GPU or its memory; 1 on a CPU, where the process would be killed."""
        if not self.pipeline.supports_batching() or self.device.type == "cpu":
            return 1
        sample, fitting, batch_size = request.sample, 1, 1
        limit = _MEMORY_TO_USE * torch.cuda.get_device_properties(self.device).total_memory
        most = batch_size_limit(sample.height, sample.width, self.settings.num_frames)
        while batch_size <= most:
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                requests, size = [sample_request(sample)] * batch_size, (sample.height, sample.width)
                self.pipeline.generate(requests, size, self._heartbeat, GenerationMode.MEMORY_PROBE)
            except Exception as error:
                if not is_out_of_memory(error) or batch_size == 1:
                    raise
                break
            finally:
                _free_memory()
            if torch.cuda.max_memory_reserved(self.device) > limit and batch_size > 1:
                break
            fitting, batch_size = batch_size, batch_size * 2
        return fitting

    def _explain(self, error: Exception) -> str:
        """Describe an error; end the process if the device is broken: after some CUDA errors every further call fails."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception:
                log.error("GPU %s does not work any more: %s", self.label, describe_error(error))
                os._exit(STATUS_BROKEN_DEVICE)
        return describe_error(error)


def sample_request(sample: Sample, inputs: LoadedInputs | None = None) -> SampleRequest:
    """Return what a pipeline needs to know of a sample; text encoders and memory probes need no image inputs."""
    return SampleRequest(sample.prompt, sample.negative_prompt, sample.seed, inputs)


def padded_requests(
    samples: Sequence[Sample], batch_size: int, inputs: Mapping[Sample, LoadedInputs]
) -> list[SampleRequest]:
    """Return the requests of a batch, each in its sample's slot; the first sample fills slots that nobody has."""
    requests = [sample_request(samples[0], inputs.get(samples[0]))] * batch_size
    for sample in samples:
        requests[batch_slot(sample.row, sample.copy, batch_size)] = sample_request(sample, inputs.get(sample))
    return requests


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _out_of_memory_error(label: str, sample: Sample, batch_size: int) -> PipelineError:
    if batch_size == 1:
        return PipelineError(
            f"GPU {label} ran out of memory with one image, {sample.file}: {sample.width} x {sample.height} pixels.",
            "It is too large, or another program uses memory; it was tried twice. All saved images are intact.",
            "Make it smaller or remove its row, or free memory and run the same command again to resume.",
        )
    return PipelineError(
        f"GPU {label} ran out of memory at batch size {batch_size}.",
        "Another program may use some of the memory; it was tried twice. All saved images are intact.",
        "Run the same command again to resume, or add --allow_batch_change to resume with smaller batches "
        "(whose images differ in their last bits and are marked in the ledger).",
    )
