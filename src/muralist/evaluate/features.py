"""Features of many items, on every device at hand, kept in a cache under the hash of what they were computed from.

An item's features are the same to the last bit whichever process computes them, in whichever batch: batches have one
shape, padded where items are missing; a CPU process computes in one thread; and a device whose results depend on the place
in a batch is found out at the start and computes one item at a time.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muralist.data.images import BrokenImage
from muralist.errors import UserError
from muralist.evaluate.extractors import Extractor, Loaded
from muralist.machine import usable_cores

_BATCH = {"cpu": 1, "cuda": 64}  # a CPU is no faster with more
_DECODING_AHEAD = 2  # batches


@dataclass(frozen=True)
class Item:
    """A picture's file or a prompt, and the SHA-256 of its content."""

    key: bytes
    content: Path | str


@dataclass
class Features:
    """Rows in the order of the items, without those that could not be read."""

    rows: np.ndarray  # [N, D] float32
    kept: list[int]
    unreadable: dict[int, str] = field(default_factory=dict)
    computed: int = 0
    remembered: int = 0

    def part(self, start: int, end: int) -> Features:
        """Those of some of the items, numbered from 0."""
        places = [place for place, index in enumerate(self.kept) if start <= index < end]
        unreadable = {index - start: why for index, why in self.unreadable.items() if start <= index < end}
        return Features(self.rows[places], [self.kept[place] - start for place in places], unreadable)


class Cache:
    """Records of a fixed length, appended by each process to a file of its own; a torn or damaged one does not count."""

    def __init__(self, folder: Path, extractor: Extractor, device_kind: str) -> None:
        made_with = "/".join((extractor.digest, device_kind, torch.__version__))
        self.folder = folder / f"{extractor.name}-{hashlib.sha256(made_with.encode()).hexdigest()[:12]}"
        self.record = np.dtype([("key", "u1", 32), ("row", "<f4", extractor.width), ("check", "<u4")])

    def read(self, wanted: set[bytes]) -> dict[bytes, np.ndarray]:
        """All whole records about what is wanted."""
        found = {}
        for path in sorted(self.folder.glob("*.bin")):
            records = np.fromfile(path, self.record, count=path.stat().st_size // self.record.itemsize)
            for record in records:
                key = record["key"].tobytes()
                if key in wanted and record["check"] == _check(key, record["row"]):
                    found[key] = record["row"]
        return found

    @contextmanager
    def writer(self) -> Iterator[Callable[[Sequence[bytes], np.ndarray], None]]:
        """A function that appends records to a new file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while (path := self.folder / f"{os.getpid()}-{number}.bin").exists():
            number += 1
        with path.open("xb", buffering=0) as file:

            def write(keys: Sequence[bytes], rows: np.ndarray) -> None:
                records = np.zeros(len(keys), self.record)
                records["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
                records["row"] = rows
                records["check"] = [_check(key, row) for key, row in zip(keys, rows, strict=True)]
                data = records.tobytes()
                if file.write(data) < len(data):
                    raise OSError(28, os.strerror(28), str(path))

            yield write
        if not path.stat().st_size:
            path.unlink()


def _check(key: bytes, row: np.ndarray) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(key))


def hash_files(paths: Sequence[Path]) -> list[Item]:
    """An item for each file, by its content."""

    def item(path: Path) -> Item:
        try:
            with path.open("rb") as file:
                return Item(hashlib.file_digest(file, "sha256").digest(), path)
        except OSError as error:
            raise UserError(f"The image {path} could not be read: {error.strerror}.") from None

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(item, paths))


def hash_texts(texts: Sequence[str]) -> list[Item]:
    """An item for each prompt."""
    return [Item(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), text) for text in texts]


def device_kind(devices: dict[str, str]) -> str:
    """What computes: features of other kinds differ in their last bits."""
    first = next(iter(devices.values()))
    return "cpu" if first == "cpu" else torch.cuda.get_device_name(torch.device(first))


def compute(
    extractor: Extractor,
    items: Sequence[Item],
    devices: dict[str, str],
    cache_folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Features of all items: from the cache what is there, the rest shared among the devices."""
    cache = Cache(cache_folder, extractor, device_kind(devices))
    wanted = {item.key for item in items}
    found = cache.read(wanted)
    missing = list({item.key: item for item in items if item.key not in found}.values())
    broken: dict[bytes, str] = {}
    if missing:
        shares = _shares(missing, devices)
        if len(shares) == 1:
            label = next(iter(shares))
            done = 0
            for number, said in _work(extractor, cache, shares[label], torch.device(devices[label])):
                done += number
                broken |= said
                progress(done, len(missing))
        else:
            broken = _share_out(extractor, cache, shares, devices, progress)
        found = cache.read(wanted)
        if lost := next((item for item in missing if item.key not in found and item.key not in broken), None):
            raise UserError(f"The features of {lost.content} are missing.", fix="Run the same command again.")
    kept = [index for index, item in enumerate(items) if item.key in found]
    rows = np.stack([found[items[index].key] for index in kept]) if kept else np.zeros((0, extractor.width), np.float32)
    unreadable = {index: broken[item.key] for index, item in enumerate(items) if item.key not in found}
    computed = len(missing) - len(broken)
    return Features(rows, kept, unreadable, computed, len(wanted) - len(missing))


def _shares(missing: Sequence[Item], devices: dict[str, str]) -> dict[str, list[Item]]:
    """Items of each device that gets any: neighbours together, batches in turn."""
    labels = list(devices)
    size = _BATCH[torch.device(devices[labels[0]]).type]
    shares: dict[str, list[Item]] = {}
    for number, start in enumerate(range(0, len(missing), size)):
        shares.setdefault(labels[number % len(labels)], []).extend(missing[start : start + size])
    return shares


def _share_out(
    extractor: Extractor,
    cache: Cache,
    shares: dict[str, list[Item]],
    devices: dict[str, str],
    progress: Callable[[int, int], None],
) -> dict[bytes, str]:
    """One process per device; the first that fails ends all, and what was computed stays in the cache."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes: dict[Connection, Any] = {}
    broken: dict[bytes, str] = {}
    done, total = 0, sum(map(len, shares.values()))
    try:
        for label, share in shares.items():
            ours, theirs = context.Pipe(duplex=False)
            arguments = (extractor, cache, share, devices[label], len(shares), theirs)
            process = context.Process(target=_worker, args=arguments, name=f"muralist-evaluate-{label}", daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        listening = set(processes)
        while listening:
            for pipe in wait(list(listening)):
                assert isinstance(pipe, Connection)
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    said = UserError(_obituary(processes[pipe]), fix="The same command again goes on from here.")
                if said is None:
                    listening.discard(pipe)
                elif isinstance(said, BaseException):
                    raise said
                else:
                    done += said[0]
                    broken |= said[1]
                    progress(done, total)
        for process in processes.values():
            process.join()
        return broken
    finally:
        for process in processes.values():
            process.kill()


def _obituary(process: Any) -> str:
    process.join(5)
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended unexpectedly"
    return f"A process that computes features {how}."


def _worker(
    extractor: Extractor, cache: Cache, share: list[Item], device: str, processes: int, pipe: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears Ctrl+C and ends its processes
    try:
        for said in _work(extractor, cache, share, torch.device(device), processes):
            pipe.send(said)
        pipe.send(None)
    except (UserError, OSError) as error:
        pipe.send(error)


def _work(
    extractor: Extractor, cache: Cache, items: Sequence[Item], device: torch.device, processes: int = 1
) -> Iterator[tuple[int, dict[bytes, str]]]:
    """Compute and keep; after each batch, how many items are done and which of them cannot be read."""
    with torch.inference_mode(), _exact(device), cache.writer() as write:
        loaded = extractor.load(device)
        size = 0
        decoders = max(1, usable_cores() // processes)
        with ThreadPoolExecutor(decoders) as pool:
            step = _BATCH[device.type]
            batches = [items[start : start + step] for start in range(0, len(items), step)]
            ahead: list[Any] = []
            for number, batch in enumerate(batches):
                while len(ahead) < _DECODING_AHEAD and number + len(ahead) < len(batches):
                    ahead.append([pool.submit(_prepared, loaded, item) for item in batches[number + len(ahead)]])
                prepared = [future.result() for future in ahead.pop(0)]
                broken = {item.key: row for item, row in zip(batch, prepared, strict=True) if isinstance(row, str)}
                good = [(item.key, row) for item, row in zip(batch, prepared, strict=True) if not isinstance(row, str)]
                if good:
                    rows = [row for _, row in good]
                    size = size or _batch_size(loaded, rows[0], step)
                    write([key for key, _ in good], _in_batches(loaded, rows, size))
                yield len(batch), broken


def _prepared(loaded: Loaded, item: Item) -> Tensor | str:
    # Each thread has its own modes: these pixels are computed outside the worker's.
    with torch.inference_mode():
        try:
            return loaded.prepare(item.content)
        except BrokenImage as error:
            return error.reason


def _in_batches(loaded: Loaded, rows: Sequence[Tensor], size: int) -> np.ndarray:
    """Features of rows, in batches of one shape."""
    made = []
    for start in range(0, len(rows), size):
        part = list(rows[start : start + size])
        batch = torch.stack(part + [part[-1]] * (size - len(part)))
        made.append(loaded.compute(batch)[: len(part)].float().cpu().numpy())
    return np.concatenate(made)


def _batch_size(loaded: Loaded, row: Tensor, size: int) -> int:
    """The usual number of items at once, or 1 where a row's features change with its place and its neighbours."""
    if size == 1:
        return 1
    other = row.roll(1, -1)
    first = loaded.compute(torch.stack([row] + [other] * (size - 1)))[0]
    last = loaded.compute(torch.stack([other] * (size // 2) + [row] * (size - size // 2)))[-1]
    return size if torch.equal(first, last) else 1


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Full float32, the same kernels every time, one thread on a CPU: then results do not depend on who computes."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    matmul = torch.backends.cuda.matmul.allow_tf32
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with cudnn:
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = matmul
