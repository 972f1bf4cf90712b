"""Items to encode, identified by the hash of their content, and the cache of their features on disk."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from muralist.core.hardware import available_cpus
from muralist.data.decode import ImageDecodeError, read_image_file, read_image_shape, read_unchanged_image
from muralist.evaluate.encoders import Encoder
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
