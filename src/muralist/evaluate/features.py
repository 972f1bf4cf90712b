"""Features of many items: decoded ahead, computed in batches and cached, all at the same time, on every device.

The features of an item are cached under the hash of its content. They are the same to the last bit whichever process
computes them, in whichever batch: batches have one shape, padded where items are missing; a CPU process computes in one
thread; a device whose results depend on the position in a batch is detected at the start and computes one item at a
time. One process per device computes; the others finish the batches of one that fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import queue
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_list, loading_progress
from muralist.core.hardware import available_cpus
from muralist.core.run_dir import disk_write_error
from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited
from muralist.data.decode import ImageDecodeError, decode_pixels, read_image_file, read_image_shape
from muralist.data.tar_members import TarImage
from muralist.evaluate.decoders import DecoderPool, FeatureItem, PairItem, PendingDecode, start_workers
from muralist.evaluate.encoders import GPU_BATCH, Encoder, LoadedEncoder, Row

log = logging.getLogger("muralist")
_REVISION = "2"  # raised whenever features are computed differently, even if only their last bits change
BATCH = {"cpu": 1, "cuda": GPU_BATCH}  # larger batches are no faster on a CPU
DECODING_AHEAD = 6  # batches: every core of a large machine has images to decode, and the next ones when it is done
_HASHED_AT_ONCE = 32  # files of one task
_MAX_BYTES_AHEAD = 2 << 30  # of decoded pixels: fewer batches of large photographs are decoded ahead
TIMEOUT = 600.0  # seconds without a finished batch, after which a process is killed; more for gigabytes of weights
_SLOWEST_READ = 20e6  # bytes per second of weights
_POLL = 1.0  # seconds
_EXIT_SECONDS = 10.0  # for processes that have nothing left to do
_LOG_INTERVAL = 10.0  # seconds between lines of progress
_NAMES_SHOWN = 3

Batch = Sequence[FeatureItem]
NextBatch = Callable[[bool], Batch | None]
"""Return the next batch. None: there is none yet, or, if the argument (wait) is true, there are no more."""


def hash_files(paths: Sequence[Path | TarImage]) -> list[FeatureItem]:
    """Return an item for each image file."""

    def item(path: Path | TarImage) -> FeatureItem:
        data = read_image_file(path)
        shape = None
        with suppress(ImageDecodeError):
            shape = read_image_shape(data)
        return FeatureItem(hashlib.sha256(data).digest(), path, shape)

    parts = [paths[start : start + _HASHED_AT_ONCE] for start in range(0, len(paths), _HASHED_AT_ONCE)]
    with ThreadPoolExecutor(available_cpus()) as pool:  # a task costs as much as a small file
        return [found for of_part in pool.map(lambda part: [*map(item, part)], parts) for found in of_part]


def hash_texts(texts: Sequence[str]) -> list[FeatureItem]:
    """Return an item for each prompt."""
    return [FeatureItem(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), text) for text in texts]


def pair_items(images: Sequence[FeatureItem], texts: Sequence[str]) -> list[PairItem]:
    """Return an item for each image and its text."""
    return [
        PairItem(hashlib.sha256(image.key + of_text.key).digest(), image.content, image.shape, image, text)
        for image, of_text, text in zip(images, hash_texts(texts), texts, strict=True)
    ]


class FeatureCache:
    """Fixed-length records (key, features, CRC-32), appended by each process to its own file.

    Truncated and damaged records are ignored, so that their features are computed again.
    """

    def __init__(self, folder: Path, encoder: Encoder, device_kind: str) -> None:
        versions = [version(name) for name in ("torch", "pillow", "transformers")]
        precision = ("TF32",) if encoder.tf32 and device_kind != "cpu" else ()
        variant = (encoder.variant,) if encoder.variant else ()
        identity = "/".join((encoder.sha256, device_kind, *versions, _REVISION, *precision, *variant))
        self.folder = folder / f"{encoder.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.record = np.dtype([("key", "u1", 32), ("row", "<f4", encoder.width), ("check", "<u4")])
        self._file: IO[bytes] | None = None

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

    def append(self, keys: Sequence[bytes], rows: np.ndarray) -> None:
        """Append records to a file that no other process has."""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = (self.folder / f"{os.getpid()}-{number}.bin" for number in count())
            self._file = next(path for path in names if not path.exists()).open("xb")
        records = np.zeros(len(keys), self.record)
        records["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        records["row"] = rows
        records["check"] = [_crc32(key, row) for key, row in zip(keys, rows, strict=True)]
        self._file.write(records.tobytes())
        self._file.flush()

    def close(self) -> None:
        """Close this process's file."""
        if self._file:
            self._file.close()


def _crc32(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(key))


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
        stack.callback(cache.close)
        cores = max(1, available_cpus() // processes)
        # Started before the weights are read, so that they are ready by then.
        decoders = stack.enter_context(DecoderPool(cores, DECODING_AHEAD)) if encoder.takes_pixels_on(device) else None
        with loading_progress(f"the weights of {encoder.name}", encoder.source):
            loaded = encoder.load(device)
        prepare = stack.enter_context(_preparing(loaded, cores, decoders))
        batch_size = 0
        ahead: deque[tuple[Batch, PendingDecode]] = deque()
        computing: tuple[list[bytes], Callable[[], np.ndarray] | None, FinishedBatch] | None = None
        while True:
            idle = computing is None  # otherwise the computed batch is written before anything is waited for
            while _may_decode_ahead(ahead) and (batch := next_batch(idle and not ahead)) is not None:
                ahead.append((batch, prepare(batch)))
            if idle and not ahead:
                return
            previous, computing = computing, None
            if ahead:
                batch, pending = ahead.popleft()
                inputs = dict(zip([item.key for item in batch], pending.rows(), strict=True))
                broken = {key: row for key, row in inputs.items() if isinstance(row, str)}
                good = {key: row for key, row in inputs.items() if not isinstance(row, str)}
                rows = None
                if good:
                    row = next(iter(good.values()))
                    largest = min(BATCH[device.type], loaded.max_batch or GPU_BATCH)
                    batch_size = batch_size or _safe_batch_size(encoder.name, loaded, row, largest)
                    rows = _compute_padded(loaded, list(good.values()), batch_size)
                pending.release()
                computing = list(good), rows, FinishedBatch(len(batch), broken)
            if previous:
                keys, rows, finished = previous
                if rows:
                    cache.append(keys, rows())
                yield finished


def _may_decode_ahead(ahead: Sequence[tuple[Batch, PendingDecode]]) -> bool:
    return len(ahead) < DECODING_AHEAD and sum(pending.size for _, pending in ahead) < _MAX_BYTES_AHEAD


@contextmanager
def _preparing(
    loaded: LoadedEncoder, cores: int, decoders: DecoderPool | None
) -> Iterator[Callable[[Batch], PendingDecode]]:
    """Yield a function that prepares a batch in threads, or in processes where image files only need to be decoded."""
    with ThreadPoolExecutor(cores) as pool:

        def prepare(batch: Batch) -> PendingDecode:
            if decoders and all(isinstance(item.content, Path | TarImage) for item in batch):
                return decoders.decode(batch)
            futures = [pool.submit(_prepare_item, loaded, item) for item in batch]
            return PendingDecode(lambda: [future.result() for future in futures])

        yield prepare


def _prepare_item(loaded: LoadedEncoder, item: FeatureItem) -> Row | str:
    with torch.inference_mode():  # which is per thread
        try:
            return loaded.prepare(item.read())
        except ImageDecodeError as error:
            return error.reason


def _compute_padded(loaded: LoadedEncoder, inputs: Sequence[Row], batch_size: int) -> Callable[[], np.ndarray]:
    """Compute features in batches of one shape; the result waits for them, but not for kernels launched later."""
    parts = []
    for start in range(0, len(inputs), batch_size):
        part = list(inputs[start : start + batch_size])
        batch = loaded.stack(part + [part[-1]] * (batch_size - len(part)))
        parts.append(loaded.compute(batch)[: len(part)].float())
    features = torch.cat(parts)
    if not features.is_cuda:
        return features.numpy
    copy = torch.empty(features.shape, dtype=features.dtype, pin_memory=True).copy_(features, non_blocking=True)
    copied = torch.cuda.current_stream(features.device).record_event()

    def wait() -> np.ndarray:
        copied.synchronize()
        return copy.numpy()

    return wait


def _safe_batch_size(name: str, loaded: LoadedEncoder, row: Row, size: int) -> int:
    """Return `size`, or 1 where an item's features change with its position or its neighbors in the batch."""
    if size == 1:
        return 1
    other = tuple(part.roll(1, -1) for part in row) if isinstance(row, tuple) else row.roll(1, -1)
    alike = loaded.compute(loaded.stack([row] * size))
    mixed = loaded.compute(loaded.stack([row, other] * (size // 2)))[::2]
    same = torch.equal(alike, alike[:1].expand_as(alike)) and torch.equal(mixed, alike[: len(mixed)])
    if same:
        return size
    log.warning(
        "%s computes batches of 1 instead of %d on this device, where features depend on the position in a batch. "
        "The results stay exact, but take longer; pass --gpu_ids to use other GPUs.",
        name, size,
    )  # fmt: skip
    return 1


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


class FeatureWorkers:
    """One process per device; they load the weights while their caller finds out what is to be computed."""

    def __init__(
        self, encoder: Encoder, cache: FeatureCache, devices: dict[str, str], pool: ProcessPool | None = None
    ) -> None:
        """Start the processes, or use those of `pool` if it has one for each device."""
        self.encoder, self.labels = encoder, list(devices)
        started = pool is not None and set(pool.arguments) == set(devices)
        self._pool = pool if pool and started else start_workers(devices)
        for label, device in devices.items():
            self._pool.send(label, pickle.dumps((encoder, cache, device, len(devices))))
        self._grace = 0.0

    def extract(self, batches: Sequence[Batch]) -> Iterator[FinishedBatch]:
        """Compute and cache batches, and tell the processes to end, which takes a while on a GPU."""
        source = self.encoder.source
        files = source.iterdir() if source.is_dir() else [source]
        size = sum(file.stat().st_size for file in files if file.is_file())
        scheduler = _Scheduler(self._pool, self.labels, deque(batches), size / _SLOWEST_READ)
        finished = scheduler.run()
        with loading_progress(f"the weights of {self.encoder.name}", source):
            yield next(finished)
        yield from finished
        for label in scheduler.pending:
            self._pool.send(label, None)
        self._grace = _EXIT_SECONDS

    def __enter__(self) -> FeatureWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close(self._grace)


def start_ahead(
    encoder: Encoder, devices: dict[str, str], cache_dir: Path, pool: ProcessPool | None = None
) -> FeatureWorkers | nullcontext[None]:
    """Start the processes of `compute_features`, unless this process will do, or some features are cached already.

    `pool` holds processes of `start_workers`, which are used if they are as many as needed.
    """
    if not _needs_processes(devices):
        return nullcontext()
    cache = FeatureCache(cache_dir, encoder, device_kind(devices))
    return nullcontext() if any(cache.folder.glob("*.bin")) else FeatureWorkers(encoder, cache, devices, pool)


class _Scheduler:
    """Hands batches to processes, and those of a lost process to the others."""

    def __init__(self, pool: ProcessPool, labels: list[str], waiting: deque[Batch], loading: float) -> None:
        """`loading` is the longest time in seconds that reading the weights may take."""
        self.pool, self.waiting, self.loading = pool, waiting, loading
        # Batches that a process has and has not finished, in its order.
        self.pending: dict[str, deque[Batch]] = {label: deque() for label in labels}

    def run(self) -> Iterator[FinishedBatch]:
        """Yield every batch when it is finished."""
        while self.waiting or any(self.pending.values()):
            self._hand_out()
            for label, message in self.pool.receive(_POLL):
                if label not in self.pending:
                    continue
                match message:
                    case FinishedBatch():
                        self.pending[label].popleft()
                        yield message
                    case WorkerExited(reason):
                        self._lose(label, reason)
                    case BaseException():
                        raise message
                    case str():
                        self.pool.kill(label)
                        self._lose(label, f"failed: {message}")
            for label in [label for label, batches in self.pending.items() if batches]:
                timeout = TIMEOUT + self.loading
                if self.pool.silence(label) > timeout:
                    self.pool.kill(label)
                    self._lose(label, f"finished nothing for {timeout:.0f} s and was killed")

    def _hand_out(self) -> None:
        """Give batches in turn, so that each process has one before any has several."""
        for depth in range(1, DECODING_AHEAD + 2):
            for label, batches in self.pending.items():
                while self.waiting and len(batches) < depth:
                    if not batches:
                        self.pool.reset_silence(label)
                    batches.append(self.waiting.popleft())
                    self.pool.send(label, batches[-1])

    def _lose(self, label: str, how: str) -> None:
        batches = self.pending.pop(label)
        what = f"Process {label}, which computes features, {how}."
        if not self.pending:
            names = [str(item.content) for batch in list(batches)[:1] for item in batch]
            busy = f" It was busy with {format_list(names, _NAMES_SHOWN)}." if names else ""
            raise UserError(what, f"No other process is left.{busy}", "Run the same command again to resume.")
        self.waiting.extendleft(reversed(batches))
        log.warning("%s The others take over its share.", what)


def work(inbox: Inbox, send: Send, encoder: Encoder, cache: FeatureCache, device: str, processes: int) -> None:
    """Run in a worker process: batches come through the inbox, None at the end; what is finished goes back."""
    stopped = False

    def next_batch(waits: bool) -> Batch | None:
        nonlocal stopped
        if not stopped:
            with suppress(queue.Empty):
                batch = inbox.get(block=waits)
                stopped = batch is None
                return batch
        return None

    try:
        for finished in extract(encoder, cache, next_batch, torch.device(device), processes):
            send(finished)
    except (UserError, OSError) as error:  # the other processes would meet it as well
        send(error)
    except Exception as error:
        send(f"{type(error).__name__}: {first_line(error)}")


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

    def aligned(self, count: int) -> np.ndarray:
        """Return a row for each of `count` items, float64 [N, D]; NaN where an item has none."""
        rows = np.full((count, self.rows.shape[1]), np.nan)
        rows[self.indices] = self.rows
        return rows

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
        try:
            decode_pixels(item.read())
        except ImageDecodeError as error:
            return error.reason
        return None

    with ThreadPoolExecutor(available_cpus()) as pool:
        unreadable = {index: why for index, why in enumerate(pool.map(problem, items)) if why}
    indices = [index for index in range(len(items)) if index not in unreadable]
    return Features(np.zeros((len(indices), 0), np.float32), indices, unreadable)


def device_kind(devices: dict[str, str]) -> str:
    """Return the model names of the devices: other models compute features with other last bits."""
    names = {name if name == "cpu" else torch.cuda.get_device_name(torch.device(name)) for name in devices.values()}
    return " and ".join(sorted(names))


def compute_features(
    encoder: Encoder,
    items: Sequence[FeatureItem],
    devices: dict[str, str],
    cache_dir: Path,
    what: str = "images",
    progress: Callable[[int, int], None] | None = None,
    workers: FeatureWorkers | None = None,
) -> Features:
    """Return the features of all items: cached ones from disk, the rest computed on all devices.

    `progress` is called with the number of finished items and their total. `workers` are those of `start_ahead`.
    """
    cache = FeatureCache(cache_dir, encoder, device_kind(devices))
    keys = {item.key for item in items}
    found = cache.read(keys)
    missing = list({item.key: item for item in items if item.key not in found}.values())
    broken: dict[bytes, str] = {}
    done, started = 0, time.monotonic()
    logged = started
    try:
        with closing(_compute(encoder, missing, devices, cache, workers)) as batches:
            for finished in batches:
                done += finished.items
                broken |= finished.broken
                now = time.monotonic()
                if now - logged >= _LOG_INTERVAL:
                    logged, speed = now, done / (now - started)
                    log.info("%s: %s of %s, %.1f per second.", what, f"{done:,}", f"{len(missing):,}", speed)
                if progress:
                    progress(done, len(missing))
    except OSError as error:
        raise disk_write_error(error, cache_dir) from None
    found = cache.read(keys) if missing else found
    if lost := next((item for item in missing if item.key not in found and item.key not in broken), None):
        raise UserError(f"The features of {lost.content} are missing.", fix="Run the same command again.")
    indices = [index for index, item in enumerate(items) if item.key in found]
    rows = np.stack([found[items[i].key] for i in indices]) if indices else np.zeros((0, encoder.width), np.float32)
    unreadable = {index: broken[item.key] for index, item in enumerate(items) if item.key not in found}
    features = Features(rows, indices, unreadable, len(missing) - len(broken), len(keys) - len(missing))
    log.info("%s: features of %s computed, of %s cached.", what, f"{features.computed:,}", f"{features.cached:,}")
    return features


def _compute(
    encoder: Encoder,
    items: Sequence[FeatureItem],
    devices: dict[str, str],
    cache: FeatureCache,
    workers: FeatureWorkers | None,
) -> Generator[FinishedBatch]:
    """Compute and cache features, in this process or in several."""
    if not items:
        return
    size = BATCH[torch.device(next(iter(devices.values()))).type]
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    used = {label: devices[label] for label in list(devices)[: len(batches)]}
    if workers or _needs_processes(used):
        with nullcontext(workers) if workers else FeatureWorkers(encoder, cache, used) as processes:
            yield from processes.extract(batches)
    else:
        remaining = iter(batches)
        yield from extract(encoder, cache, lambda waits: next(remaining, None), torch.device("cpu"))


def _needs_processes(devices: dict[str, str]) -> bool:
    """Even a single GPU gets its own process: a driver may hang, or kill the process."""
    return "cpu" not in devices.values() or len(devices) > 1
