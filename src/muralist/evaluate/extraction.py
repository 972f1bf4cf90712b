"""Feature extraction in one process: decode ahead, compute in batches, cache the rows; all three at the same time.

The features of an item are cached under the hash of its content. They are the same to the last bit whichever process
computes them, in whichever batch: batches have one shape, padded where items are missing; a CPU process computes in one
thread; a device whose results depend on the position in a batch is detected at the start and computes one item at a
time.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.core.formatting import loading_progress
from muralist.core.hardware import available_cpus
from muralist.data.decode import ImageDecodeError, read_image_file, read_image_shape, read_unchanged_image
from muralist.evaluate.decoders import DecodeRequest, DecoderPool, PendingDecode
from muralist.evaluate.encoders import GPU_BATCH, Encoder, LoadedEncoder
from muralist.evaluate.inputs import DatasetImage

CPU = "cpu"  # as a kind of device
_REVISION = "2"  # raised whenever features are computed differently, even if only their last bits change


@dataclass(frozen=True)
class FeatureItem:
    """An image file, an image of a data set or a prompt, and the SHA-256 of its content."""

    key: bytes
    content: Path | DatasetImage | str
    shape: tuple[int, int] | None = None
    """Height and width of an image file whose header can be read."""

    def read(self) -> bytes | str:
        """Return the prompt, or the bytes of the image file; a file that changed since it was hashed is an error."""
        if isinstance(self.content, str):
            return self.content
        if isinstance(self.content, DatasetImage):
            return self.content.file_bytes()
        return read_unchanged_image(self.content, self.key)


def hash_files(paths: Sequence[Path]) -> list[FeatureItem]:
    """Return an item for each image file."""

    def item(path: Path) -> FeatureItem:
        data = read_image_file(path)
        shape = None
        with suppress(ImageDecodeError):
            shape = read_image_shape(data)
        return FeatureItem(hashlib.sha256(data).digest(), path, shape)

    with ThreadPoolExecutor(available_cpus()) as pool:
        return list(pool.map(item, paths))


def hash_texts(texts: Sequence[str]) -> list[FeatureItem]:
    """Return an item for each prompt."""
    return [FeatureItem(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), text) for text in texts]


class FeatureCache:
    """Fixed-length records (key, features, CRC-32), appended by each process to its own file.

    Truncated and damaged records are ignored, so that their features are computed again.
    """

    def __init__(self, folder: Path, encoder: Encoder, device_kind: str) -> None:
        versions = [version(name) for name in ("torch", "pillow", "transformers")]
        precision = ("TF32",) if encoder.tf32 and device_kind != CPU else ()
        identity = "/".join((encoder.sha256, device_kind, *versions, _REVISION, *precision))
        self.folder = folder / f"{encoder.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.record = np.dtype([("key", "u1", 32), ("row", "<f4", encoder.width), ("check", "<u4")])

    def read(self, keys: set[bytes]) -> dict[bytes, np.ndarray]:
        """Return the features of all intact records with one of these keys."""
        found = {}
        for path in sorted(self.folder.glob("*.bin")):
            records = np.fromfile(path, self.record, count=path.stat().st_size // self.record.itemsize)
            for record in records:
                key = record["key"].tobytes()
                if key in keys and record["check"] == _crc32(key, record["row"]):
                    found[key] = record["row"]
        return found

    @contextmanager
    def writer(self) -> Iterator[Callable[[Sequence[bytes], np.ndarray], None]]:
        """Open a new file, and yield a function that appends records to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while (path := self.folder / f"{os.getpid()}-{number}.bin").exists():
            number += 1
        with path.open("xb", buffering=0) as file:

            def write(keys: Sequence[bytes], rows: np.ndarray) -> None:
                records = np.zeros(len(keys), self.record)
                records["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
                records["row"] = rows
                records["check"] = [_crc32(key, row) for key, row in zip(keys, rows, strict=True)]
                data = records.tobytes()
                if file.write(data) < len(data):
                    raise OSError(28, os.strerror(28), str(path))

            yield write
        if not path.stat().st_size:
            path.unlink()


def _crc32(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(key))


BATCH = {"cpu": 1, "cuda": GPU_BATCH}  # larger batches are no faster on a CPU
DECODING_AHEAD = 6  # batches: every core of a large machine has images to decode, and the next ones when it is done
_MAX_BYTES_AHEAD = 2 << 30  # of decoded pixels: fewer batches of large photographs are decoded ahead

Batch = Sequence[FeatureItem]
NextBatch = Callable[[bool], Batch | None]
"""Return the next batch. None: there is none yet, or, if the argument (wait) is true, there are no more."""


class FinishedBatch(NamedTuple):
    """A batch whose features are cached; `broken` holds why items cannot be decoded, by key."""

    items: int
    broken: dict[bytes, str]


def extract(
    encoder: Encoder, cache: FeatureCache, next_batch: NextBatch, device: torch.device, processes: int = 1
) -> Iterator[FinishedBatch]:
    """Compute and cache batches; while a GPU computes one, the previous one is written and the next one prepared."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and pinned memory belong to the current device
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_reproducible())
        write = stack.enter_context(cache.writer())
        with loading_progress(f"the weights of {encoder.name}", encoder.source):
            loaded = encoder.load(device)
        prepare = stack.enter_context(_preparing(loaded, max(1, available_cpus() // processes)))
        batch_size = 0
        ahead: deque[tuple[Batch, PendingDecode]] = deque()
        computing: tuple[list[bytes], _DeviceRows | None, FinishedBatch] | None = None
        while True:
            idle = computing is None  # otherwise the computed batch is written before anything is waited for
            while _may_decode_ahead(ahead) and (batch := next_batch(idle and not ahead)) is not None:
                ahead.append((batch, prepare(batch)))
            if idle and not ahead:
                return
            previous, computing = computing, None
            if ahead:
                batch, pending = ahead.popleft()
                inputs = pending.rows()
                good = [(item.key, row) for item, row in zip(batch, inputs, strict=True) if not isinstance(row, str)]
                broken = {item.key: row for item, row in zip(batch, inputs, strict=True) if isinstance(row, str)}
                if good:
                    batch_size = batch_size or _safe_batch_size(loaded, good[0][1], BATCH[device.type])
                rows = _compute_padded(loaded, [row for _, row in good], batch_size) if good else None
                pending.release()
                computing = [key for key, _ in good], rows, FinishedBatch(len(batch), broken)
            if previous:
                keys, rows, finished = previous
                if rows:
                    write(keys, rows.to_numpy())
                yield finished


def _may_decode_ahead(ahead: Sequence[tuple[Batch, PendingDecode]]) -> bool:
    return len(ahead) < DECODING_AHEAD and sum(pending.size for _, pending in ahead) < _MAX_BYTES_AHEAD


@contextmanager
def _preparing(loaded: LoadedEncoder, cores: int) -> Iterator[Callable[[Batch], PendingDecode]]:
    """Yield a function that prepares a batch in threads, or in processes where image files only need to be decoded."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(cores))
        decoders: DecoderPool | None = None

        def prepare(batch: Batch) -> PendingDecode:
            nonlocal decoders
            files = [
                DecodeRequest(item.content, item.key, item.shape) for item in batch if isinstance(item.content, Path)
            ]
            if not loaded.takes_pixels or len(files) < len(batch):
                futures = [pool.submit(_prepare_item, loaded, item) for item in batch]
                return PendingDecode(lambda: [future.result() for future in futures], lambda: None)
            decoders = decoders or stack.enter_context(DecoderPool(cores, DECODING_AHEAD))
            return decoders.decode(files)

        yield prepare


def _prepare_item(loaded: LoadedEncoder, item: FeatureItem) -> Tensor | str:
    with torch.inference_mode():  # which is per thread
        try:
            return loaded.prepare(item.read())
        except ImageDecodeError as error:
            return error.reason


class _DeviceRows:
    """Features on their way from the device to the host."""

    def __init__(self, features: Tensor) -> None:
        self._event = torch.cuda.Event() if features.is_cuda else None
        self._rows = features
        if self._event:
            self._rows = torch.empty(features.shape, dtype=features.dtype, pin_memory=True)
            self._rows.copy_(features, non_blocking=True)
            self._event.record(torch.cuda.current_stream(features.device))

    def to_numpy(self) -> np.ndarray:
        """Wait for this copy, not for kernels launched after it."""
        if self._event:
            self._event.synchronize()
        return self._rows.numpy()


def _compute_padded(loaded: LoadedEncoder, inputs: Sequence[Tensor], batch_size: int) -> _DeviceRows:
    """Compute features in batches of one shape."""
    features = []
    for start in range(0, len(inputs), batch_size):
        part = list(inputs[start : start + batch_size])
        batch = loaded.stack(part + [part[-1]] * (batch_size - len(part)))
        features.append(loaded.compute(batch)[: len(part)].float())
    return _DeviceRows(torch.cat(features))


def _safe_batch_size(loaded: LoadedEncoder, row: Tensor, size: int) -> int:
    """Return `size`, or 1 where an item's features change with its position or its neighbors in the batch."""
    if size == 1:
        return 1
    other = row.roll(1, -1)
    alike = loaded.compute(loaded.stack([row] * size))
    mixed = loaded.compute(loaded.stack([row, other] * (size // 2)))[::2]
    same = torch.equal(alike, alike[:1].expand_as(alike)) and torch.equal(mixed, alike[: len(mixed)])
    return size if same else 1


@contextmanager
def _reproducible() -> Iterator[None]:
    """Compute in float32 (unless the encoder allows TF32) with deterministic kernels and one CPU thread.

    Beside a GPU, more threads would only compete with the processes that decode.
    """
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
