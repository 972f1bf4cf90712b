"""From generated images to files and lines of the ledger, in the threads of a worker or in processes of its own.

The threads of one process wait for the interpreter and save fewer small images than a GPU makes. The processes import this
module: it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.run_dir import atomic_write
from muralist.core.worker_pool import TaskPool
from muralist.generate import output_dir
from muralist.generate.output_dir import PSNR, OutputDir, done_line, failed_line
from muralist.generate.plan import Sample
from muralist.generate.workers import GenerationJob

log = logging.getLogger("muralist")

_MANY_IMAGES = 64  # in a batch: images are small, and many batches pay for starting processes once
_MOST_PROCESSES = 8
_LARGEST_CHUNK = 32  # images
_PSNR_EQUAL = 99.0  # dB for equal images, whose PSNR is infinite


class GeneratedImage(NamedTuple):
    """An image to save."""

    sample: Sample
    pixels: np.ndarray  # uint8 [H, W, 3], or a clip [F, H, W, 3]
    seconds: float  # that it took
    extra: dict[str, Any]  # fields of its line in the ledger that not every image has
    exact: np.ndarray | None = None  # in fast mode: the same image in exact mode


class SavedImage(NamedTuple):
    """The line of a sample in the ledger; its file is written, unless there is a reason why the sample failed."""

    sample_index: int
    line: bytes
    failure: str | None


def save_image(image: GeneratedImage, job: GenerationJob, label: str) -> SavedImage:
    """Encode an image and write its file; an image that cannot be encoded is a failed sample."""
    sample, pixels, seconds, extra, exact = image
    try:
        data = output_dir.encode_image(pixels, sample, job.metadata, job.settings)
        exact_data = output_dir.encode_image(exact, sample, {}, job.settings) if exact is not None else b""
    except Exception as error:
        reason = describe_error(error)
        return SavedImage(sample.sample_index, failed_line(sample, reason, label, seconds, job.digest), reason)
    path = job.output_dir / sample.file
    # Flushing takes longer than encoding a small image; the ledger tells a truncated one.
    atomic_write(path, data, flush=False)
    if exact is not None:
        atomic_write(OutputDir(job.output_dir).exact / sample.file, exact_data, flush=False)
        extra = extra | {PSNR: round(psnr(pixels, exact), 2)}
    line = done_line(sample, path, hashlib.sha256(data).hexdigest(), label, seconds, job.digest, extra)
    return SavedImage(sample.sample_index, line, None)


def save_images(images: Sequence[GeneratedImage], job: GenerationJob, label: str) -> Iterator[list[SavedImage]]:
    """Save images in this thread."""
    for image in images:
        yield [save_image(image, job, label)]


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of uint8 images, in dB."""
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return _PSNR_EQUAL if error == 0 else min(_PSNR_EQUAL, 10 * math.log10(255**2 / error))


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    text = f"{' '.join(str(error).split()):.300}"
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


class SaveProcesses:
    """Processes that save the images of a worker, started by the first batch that is worth it."""

    def __init__(self, job: GenerationJob, label: str) -> None:
        self._job, self._label = job, label
        self._processes = min(_MOST_PROCESSES, max(2, job.cpus // 2))
        self._pool: TaskPool | None = None
        self._lock = threading.Lock()
        self._can_start = True

    def accept(self, count: int) -> bool:
        """Return whether processes save a batch of so many images faster than threads."""
        return self._can_start and self._job.cpus > 2 and count >= _MANY_IMAGES

    def save(self, images: Sequence[GeneratedImage]) -> Iterator[list[SavedImage]]:
        """Save images and yield them in order, some at a time; `TaskProcessExited` if a process exits."""
        try:
            pool = self._start()
        except OSError as failure:  # such as a limit on processes
            log.warning("Threads save the images, which is slower: no process could be started (%s).", failure)
            self._can_start = False
            yield from save_images(images, self._job, self._label)
            return
        size = min(_LARGEST_CHUNK, -(-len(images) // (2 * self._processes)))
        chunks = [images[start : start + size] for start in range(0, len(images), size)]
        for number in [pool.submit(chunk) for chunk in chunks]:
            saved, error = pool.result(number)
            yield saved
            if error:
                raise error

    def _start(self) -> TaskPool:
        with self._lock:
            if self._pool is None:
                arguments, work = (self._job, self._label), "saves images"
                self._pool = TaskPool("muralist-save", work, _save_chunk, arguments, self._processes, _describe_chunk)
            return self._pool

    def close(self) -> None:
        """End the processes: images that were not yielded may have files or not."""
        with self._lock:  # several threads may find that the folder was deleted
            pool, self._pool = self._pool, None
            if pool:
                pool.close()


def _save_chunk(
    images: Sequence[GeneratedImage], job: GenerationJob, label: str
) -> tuple[list[SavedImage], OSError | None]:
    """Run in a process: save images until one cannot be written."""
    saved: list[SavedImage] = []
    try:
        for image in images:
            saved.append(save_image(image, job, label))
    except OSError as error:
        return saved, error
    return saved, None


def _describe_chunk(images: Sequence[GeneratedImage]) -> str:
    return f"{len(images)} images, from {images[0].sample.file} to {images[-1].sample.file}"
