"""A loaded pipeline in a process of its own, which generates what its caller asks for.

The process is set up like a worker of `muralist generate`, so that images have the same bytes; the caller's process, a
notebook for example, keeps its threads, its random state and its settings of torch.
"""

from __future__ import annotations

import gc
import logging
import threading
import traceback
import weakref
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.hardware import check_gpu_ids, select_devices
from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited
from muralist.data.image_inputs import LoadedInputs, load_inputs
from muralist.generate.model_info import ModelInfo, inspect_model
from muralist.generate.plan import Sample, batch_slot, split_by_slot
from muralist.generate.workers import prepare_process
from muralist.settings import GenerateSettings

if TYPE_CHECKING:
    from muralist.generate.pipeline import Pipeline

log = logging.getLogger("muralist")
_LABEL = "0"
_POLL = 1.0  # seconds


class _Call(NamedTuple):
    """Generate samples with resolved settings and the model's class for their inputs, in batches of `batch_size`."""

    number: int
    settings: GenerateSettings
    model: ModelInfo
    samples: tuple[Sample, ...]
    batch_size: int


class _Cancel:
    """Nobody waits for the last call any more."""


class _Cancelled(Exception):
    """Ends a call at its next denoising step."""


class _Loaded:
    """The model is on its device."""


class _Images(NamedTuple):
    """Images of a call by sample index, and the prompts among them that a text encoder did not read to their end."""

    call: int
    images: dict[int, np.ndarray]
    truncated: list[str]


class _Failed(NamedTuple):
    """A call, or loading the model (None), failed."""

    call: int | None
    error: Exception


def select_device(wanted: str | None) -> str:
    """Return the device of a pipeline: the wanted one, else the first GPU, else the CPU."""
    if wanted is None:
        return next(iter(select_devices([]).values()))
    kind, _, index = wanted.partition(":")
    if kind == "cpu" and not index:
        return kind
    if kind != "cuda" or not (index or "0").isdecimal():
        raise UserError(f"device is {wanted!r:.60}: expected cpu, cuda or cuda:N.")
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"device is {wanted}, and torch sees no GPU here.", fix="Leave device out to use the CPU.")
    check_gpu_ids([int(index or 0)], torch.cuda.device_count(), None)
    return f"cuda:{int(index or 0)}"


class PipelineProcess:
    """The process that holds the model at `settings.model_path`; it ends with this object, or by `close`."""

    def __init__(self, settings: GenerateSettings, device: str | None) -> None:
        """Load the model and wait until it is loaded."""
        self.settings, self.model = settings, inspect_model(settings)
        self.device = select_device(device)
        self._pool = ProcessPool("muralist-pipeline", _serve, {_LABEL: (settings, self.model, self.device)})
        self.close = weakref.finalize(self, self._pool.close, 0.0)  # the process holds nothing that could be lost
        self._lock = threading.Lock()
        self._numbers = count()
        try:
            self._pool.start(_LABEL)
            while not isinstance(self._receive(None), _Loaded):
                pass
        except BaseException:
            self.close()
            raise

    def generate(
        self, settings: GenerateSettings, model: ModelInfo, samples: Sequence[Sample], batch_size: int
    ) -> list[np.ndarray]:
        """Return the images of samples: uint8 [H, W, 3] each, or clips [F, H, W, 3].

        They have the bytes of `muralist generate --batch_size N` for the same rows. If their image inputs need another
        class of the model's family than the call before, the model is loaded again.
        """
        images: dict[int, np.ndarray] = {}
        with self._lock:
            if not self.close.alive:
                raise UserError("The pipeline is closed.", fix="Load it again with muralist.load_pipeline.")
            number = next(self._numbers)
            self._pool.send(_LABEL, _Call(number, settings, model, tuple(samples), batch_size))
            try:
                while len(images) < len(samples):
                    message = self._receive(number)
                    if isinstance(message, _Images):
                        images |= message.images
                        for prompt in message.truncated:
                            log.warning("Longer than a text encoder of this model reads, and truncated: %.60r", prompt)
            except BaseException:
                self._pool.send(_LABEL, _Cancel())
                raise
        return [images[sample.sample_index] for sample in samples]

    def _receive(self, call: int | None) -> object:
        """Return the next message about a call; raise what it failed with."""
        while True:
            for _, message in self._pool.receive(_POLL):
                if isinstance(message, WorkerExited):
                    self.close()
                    raise UserError(
                        f"The process of the pipeline {message.reason}.",
                        "Most often the machine ran out of memory.",
                        "Load the pipeline again; smaller images or batches need less memory.",
                    )
                if isinstance(message, _Failed) and message.call == call:
                    raise message.error
                if isinstance(message, _Loaded) or (isinstance(message, _Images) and message.call == call):
                    return message


def _serve(inbox: Inbox, send: Send, settings: GenerateSettings, model: ModelInfo, device: str) -> None:
    """Run in the process: load the model, then answer calls."""
    own_device = prepare_process(device)
    from muralist.core import compile_cache
    from muralist.generate.pipeline import load_pipeline, make_deterministic

    loaded = settings.model_copy(update=model.resolved)
    pipeline: Pipeline | None
    try:
        make_deterministic(own_device)
        compile_cache.use_compile_cache()
        pipeline = load_pipeline(settings, own_device, model)
    except Exception as error:
        send(_Failed(None, _for_caller(error)))
        return
    send(_Loaded())
    while True:
        call = inbox.get()
        if not isinstance(call, _Call):
            continue
        try:
            if pipeline is None or call.model.pipeline_class != model.pipeline_class:
                pipeline = None  # its memory is needed
                gc.collect()
                model, loaded = call.model, settings.model_copy(update=call.model.resolved)
                pipeline = load_pipeline(settings, own_device, model)
            if call.settings != loaded:
                pipeline.configure(call.settings)
                loaded = call.settings
            _generate(pipeline, call, inbox, send)
        except _Cancelled:
            continue
        except Exception as error:
            send(_Failed(call.number, _for_caller(error, call.batch_size)))


def _generate(pipeline: Pipeline, call: _Call, inbox: Inbox, send: Send) -> None:
    from muralist.generate.worker import padded_requests, sample_request

    def stop_if_cancelled() -> None:
        if not inbox.empty():
            raise _Cancelled

    batch_size = call.batch_size if pipeline.supports_batching() else 1
    texts = pipeline.text_groups([sample_request(sample) for sample in call.samples])
    strengths = [sample.inputs and sample.inputs.strength for sample in call.samples]
    sizes = [(sample.height, sample.width) for sample in call.samples]
    shapes = list(zip(sizes, strengths, texts, strict=True))
    for shape in dict.fromkeys(shapes):
        size = shape[0]
        same = [sample for sample, own in zip(call.samples, shapes, strict=True) if own == shape]
        for batch in split_by_slot(same, batch_size):
            requests = padded_requests(batch, batch_size, _load_inputs(batch, call.model))
            pipeline.prepare(requests)
            pixels = pipeline.generate(requests, size, stop_if_cancelled)
            slots = {sample.sample_index: pixels[batch_slot(sample.row, sample.copy, batch_size)] for sample in batch}
            truncated = [sample.prompt for sample in batch if pipeline.truncation(sample.prompt)]
            send(_Images(call.number, slots, truncated))


def _load_inputs(samples: Sequence[Sample], model: ModelInfo) -> dict[Sample, LoadedInputs]:
    return {
        sample: load_inputs(sample.inputs, model.inputs.images_of(sample.inputs))
        for sample in samples
        if model.inputs and sample.inputs
    }


def _for_caller(error: Exception, batch_size: int = 0) -> Exception:
    """Return the error that the caller gets; a bug keeps the traceback of this process as its text."""
    from muralist.kernels.cuda_graphs import is_out_of_memory

    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        what = f"at batch size {batch_size}" if batch_size else "while the model was loaded"
        return UserError(
            f"The device ran out of memory {what}.",
            "Another program may use some of it.",
            "Use a smaller batch_size, a smaller size, or cpu_offload=True.",
        )
    return RuntimeError("".join(traceback.format_exception(error)))
