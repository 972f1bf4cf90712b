"""Items whose features are computed, the start of the processes that compute them, and processes that decode images.

Many cores feed one GPU; the threads of one process would share an interpreter, and pixels sent through pipes would be
copied by the process that feeds the GPU. The processes that decode import this module, and the command imports it before
torch: it imports nothing heavy.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.hardware import requested_processes
from muralist.core.worker_pool import Inbox, ProcessPool, Send, TaskPool
from muralist.data.decode import ImageDecodeError, decode_pixels, read_unchanged_image
from muralist.data.tar_members import TarImage

if TYPE_CHECKING:
    from torch import Tensor

    from muralist.evaluate.inputs import DatasetImage

CACHE_DIR = "features"
"""The folder of cached features in the output of an evaluation."""
_KEPT = 256 << 20  # bytes of a buffer that is kept for the next batch: 64 images of more than a million pixels
_CHUNK = 8  # images of one message


@dataclass(frozen=True)
class FeatureItem:
    """An image file, perhaps in a tar file, an image of a data set or a prompt, and the SHA-256 of its content."""

    key: bytes
    content: Path | TarImage | DatasetImage | str
    shape: tuple[int, int] | None = None
    """Height and width of an image file whose header can be read."""

    @property
    def size(self) -> int:
        """The bytes of its pixels."""
        return 3 * self.shape[0] * self.shape[1] if self.shape else 0

    def read(self) -> Any:
        """Return the prompt, or the bytes of the image file; a file that changed since it was hashed is an error."""
        if isinstance(self.content, str):
            return self.content
        if isinstance(self.content, Path | TarImage):
            return read_unchanged_image(self.content, self.key)
        return self.content.file_bytes()


@dataclass(frozen=True)
class PairItem(FeatureItem):
    """An image and a text about it, such as its prompt or a question; the key is that of both."""

    image: FeatureItem | None = None
    text: str = ""

    def read(self) -> tuple[Any, str]:
        """Return the bytes of the image file, and the text."""
        assert self.image
        return self.image.read(), self.text


def start_workers(labels: Iterable[str]) -> ProcessPool:
    """Start processes that compute features: they import torch at once, and first receive the arguments of `work`."""
    pool = ProcessPool("muralist-evaluate", _receive_and_work, dict.fromkeys(labels, ()))
    for label in pool.arguments:
        pool.start(label)
    return pool


def _receive_and_work(inbox: Inbox, send: Send) -> None:
    from muralist.evaluate.features import work

    # Bytes, because the thread that listens would import what they name while this one still imports torch.
    work(inbox, send, *pickle.loads(inbox.get()))


@contextmanager
def workers_before_torch(gpu_ids: Sequence[int], output: Path) -> Iterator[ProcessPool | None]:
    """Start the processes of an evaluation before this process imports torch, which takes seconds in each.

    None where one CPU process computes, or where some features are cached already, and perhaps all.
    """
    labels = [] if any((output / CACHE_DIR).glob("*/*.bin")) else _expected_labels(gpu_ids)
    pool = start_workers(labels) if labels else None
    try:
        yield pool
    finally:
        if pool:
            pool.close(0.0)


def _expected_labels(gpu_ids: Sequence[int]) -> list[str]:
    """Return what `share_devices(select_devices(gpu_ids))` will probably name; empty for a single CPU process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [entry for entry in (named or "").split(",") if entry]
    gpus = 0 if named == "" else len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus = gpus and (len(visible) or gpus)
    processes = requested_processes() or 0
    devices = gpu_ids or range(gpus or processes or len(visible))
    labels = range(processes) if processes > len(devices) else devices
    return [str(label) for label in labels] if gpus or len(labels) > 1 else []


class SharedMemory:
    """A file without a name that grows as needed, mapped here and written by other processes."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _nameless_file() if descriptor is None else descriptor
        self._bytes = np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Callable[[Any], SharedMemory], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)

    def view(self, size: int) -> np.ndarray:
        """Return the first bytes; earlier, smaller views go on showing the same memory."""
        if size > len(self._bytes):
            os.ftruncate(self.descriptor, size)
            self._bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        return self._bytes[:size]

    def write(self, pixels: np.ndarray, start: int) -> None:
        """Write pixels without mapping the memory."""
        view = np.ascontiguousarray(pixels).reshape(-1).data
        while view:
            written = os.pwrite(self.descriptor, view, start)
            view, start = view[written:], start + written

    def shrink(self) -> None:
        """Free the memory of unusually large batches; nobody may look at earlier views any more."""
        if len(self._bytes) > _KEPT:
            os.ftruncate(self.descriptor, 0)
            self._bytes = np.empty(0, np.uint8)

    def close(self) -> None:
        """Close the file; views stay valid."""
        self._bytes = np.empty(0, np.uint8)
        os.close(self.descriptor)


def _received(descriptor: Any) -> SharedMemory:
    return SharedMemory(descriptor.detach())


def _nameless_file() -> int:
    """Prefer a memfd to /dev/shm, of which containers often have only 64 MB."""
    try:
        return os.memfd_create("muralist")
    except (AttributeError, OSError):  # some builds of Python lack the call, and a kernel may refuse it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class _Chunk(NamedTuple):
    """Some images of a batch: each with the place of its pixels in one of the shared memories."""

    memory: int
    items: Sequence[FeatureItem]
    starts: Sequence[int]


def _decode_chunk(chunk: _Chunk, *memories: SharedMemory) -> list[np.ndarray | str | UserError | None]:
    """Run in a process: decode images."""
    memory = memories[chunk.memory]
    return [_decode(*place, memory) for place in zip(chunk.items, chunk.starts, strict=True)]


def _decode(item: FeatureItem, start: int, memory: SharedMemory) -> np.ndarray | str | UserError | None:
    """Write the pixels of an image; return them if there is no place for them, or why there are none."""
    try:
        pixels = decode_pixels(item.read())
    except ImageDecodeError as error:
        return error.reason
    except UserError as error:
        return error
    if pixels.shape[:2] != item.shape:  # rare: the header tells another size than the image has
        return pixels
    memory.write(pixels, start)
    return None


@dataclass
class PendingDecode:
    """A batch that other processes or threads prepare."""

    rows: Callable[[], list[Any]]
    """Waits for each item's row, such as pixels, uint8 [H, W, 3], or the reason why there is none."""
    release: Callable[[], None] = lambda: None
    """Call it when nobody reads the rows any more: their memory is used again."""
    size: int = 0
    """Bytes of memory that the batch holds."""


class DecoderPool:
    """Processes that decode batches ahead of the one that wants them."""

    def __init__(self, processes: int, ahead: int) -> None:
        self._memories = [SharedMemory() for _ in range(ahead)]
        self._unused = list(range(ahead))
        name, work = "muralist-decode", "decodes images"
        self._pool = TaskPool(name, work, _decode_chunk, tuple(self._memories), processes, _describe_chunk)

    def decode(self, items: Sequence[FeatureItem]) -> PendingDecode:
        """Start a batch; up to `ahead` batches may be started and not released."""
        memory = self._unused.pop()
        *starts, size = accumulate((item.size for item in items), initial=0)
        pixels = self._memories[memory].view(size)
        chunks = [
            _Chunk(memory, items[first : first + _CHUNK], starts[first : first + _CHUNK])
            for first in range(0, len(items), _CHUNK)
        ]
        numbers = [self._pool.submit(chunk) for chunk in chunks]

        def release() -> None:
            self._memories[memory].shrink()
            self._unused.append(memory)

        def rows() -> list[Any]:
            answers = [answer for number in numbers for answer in self._pool.result(number)]
            return [_to_row(*found, pixels) for found in zip(items, answers, starts, strict=True)]

        return PendingDecode(rows, release, size)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()
        for memory in self._memories:
            memory.close()


def _describe_chunk(chunk: _Chunk) -> str:
    return ", ".join(str(item.content) for item in chunk.items)


def _to_row(item: FeatureItem, answer: Any, start: int, pixels: np.ndarray) -> Tensor | str:
    import torch  # not in the processes that decode

    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, str):
        return answer
    if answer is None:
        assert item.shape
        answer = pixels[start : start + item.size].reshape(*item.shape, 3)
    return torch.from_numpy(answer)
