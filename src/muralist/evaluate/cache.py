"""What has features, and where those are kept: under the hash of the content they were computed from."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from muralist.evaluate.data_pictures import DataPicture
from muralist.evaluate.extractors import Extractor

CPU = "cpu"  # as a kind of device
_HOW = "2"  # another number where features are computed in another way, be it that only their last bits differ


@dataclass(frozen=True)
class Item:
    """A picture's file, a picture of a data set or a prompt, and the SHA-256 of its content."""

    key: bytes
    content: Path | DataPicture | str
    shape: tuple[int, int] | None = None
    """Height and width of a picture whose header can be read."""


class Cache:
    """Records of a fixed length, appended by each process to a file of its own; a torn or damaged one does not count."""

    def __init__(self, folder: Path, extractor: Extractor, device_kind: str) -> None:
        versions = [version(name) for name in ("torch", "pillow", "transformers")]
        rounded = ("TF32",) if extractor.tf32 and device_kind != CPU else ()
        made_with = "/".join((extractor.digest, device_kind, *versions, _HOW, *rounded))
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
