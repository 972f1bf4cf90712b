"""Files under the board's root: the only way from an address to a path, files that grow, and thumbnails."""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from PIL import Image
from pydantic_core import from_json

from muralist.core.errors import UserError
from muralist.core.hardware import available_cpus, cache_dir
from muralist.core.images import IMAGE_FORMATS, read_metadata, thumbnail
from muralist.core.run_dir import atomic_write
from muralist.data.decode import read_image_file
from muralist.data.tar_members import TAR, TarImage, find_member

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
PAGES = {".html": "text/html; charset=utf-8"}
_BLOCK = 4 << 20  # bytes that are read at once
_FINGERPRINT = 256  # bytes before the offset, by which a file is recognized
_MTIME_RESOLUTION = 2_000_000_000  # nanoseconds after which another change has another modification time


class NotFound(Exception):
    """A requested path is missing or not under the root; the answer does not reveal which."""


class BoardRoot:
    """The folder that the board shows; nothing outside it is read."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))

    def resolve(self, relative: str) -> Path:
        """Return the real path of a file or folder under the root that is not hidden; links are resolved first."""
        try:
            path = Path(os.path.realpath(self.path / relative, strict=True))
        except (OSError, ValueError):  # ValueError: a NUL character
            raise NotFound from None
        if not path.is_relative_to(self.path) or "/." in f"/{self.relative(path)}".removesuffix("/."):
            raise NotFound
        return path

    def folder(self, relative: str) -> Path:
        """Return a folder under the root."""
        path = self.resolve(relative)
        if not path.is_dir():
            raise NotFound
        return path

    def file(self, relative: str, media_types: dict[str, str]) -> tuple[Path, str]:
        """Return a file under the root with one of these suffixes, and its media type."""
        path = self.resolve(relative)
        media_type = media_types.get(path.suffix.lower())
        if media_type is None or not path.is_file():
            raise NotFound
        return path, media_type

    def image(self, relative: str) -> tuple[Path | TarImage, str]:
        """Return an image under the root, in a tar file perhaps (`00000.tar/000001_seed42.png`), and its media type."""
        tar, dot, member = relative.partition(f"{TAR}/")
        if not dot:
            return self.file(relative, IMAGES)
        with suppress(UserError):  # a damaged tar file
            path, _ = self.file(f"{tar}{TAR}", {TAR: ""})
            media_type = IMAGES.get(Path(member).suffix.lower())
            if media_type and (found := find_member(path / member)):
                return found, media_type
        raise NotFound

    def relative(self, path: Path) -> str:
        """Return the name by which the page requests a path."""
        return path.relative_to(self.path).as_posix()


def version_of(path: Path) -> int:
    """Return a file's or folder's modification time in nanoseconds, by which what was read of it is cached.

    Right after a change it is the current time instead: the next change might have the same modification time.
    """
    changed, now = path.stat().st_mtime_ns, time.time_ns()
    return now if now - changed < _MTIME_RESOLUTION else changed


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file; a link, which may lead out of the root, is refused, and a pipe does not block."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read_regular(path: Path | str, limit: int) -> bytes:
    """Read the beginning of a file that is not a link."""
    with open_regular(path) as file:
        return file.read(limit)


def read_object(path: Path, limit: int = 1 << 20) -> dict[str, Any]:
    """Read a JSON object; empty where the file is missing, a link or damaged."""
    try:
        content = from_json(read_regular(path, limit))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_real_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def list_matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], os.DirEntry[str]]]:
    """Return the entries of a folder whose names match; none where the folder is a link or cannot be read."""
    with suppress(OSError):
        if is_real_folder(folder):
            with os.scandir(folder) as entries:
                return [(match, entry) for entry in entries if (match := pattern.fullmatch(entry.name))]
    return []


class GrowingFile:
    """Reads the complete lines added to a file since the last call, and detects that it was replaced or truncated."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.size = path, 0, 0
        self._fingerprint = b""

    def is_unchanged(self) -> bool:
        """Return whether the file still begins with what was read: a resumed run truncates its files."""
        try:
            with open_regular(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
                file.seek(max(0, self.offset - len(self._fingerprint)))
                return file.read(len(self._fingerprint)) == self._fingerprint
        except OSError:
            self.size = 0
            return self.offset == 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of complete lines, each with its offset in the file."""
        try:
            file = open_regular(self.path)
        except OSError:
            return
        with file:
            self.size = os.fstat(file.fileno()).st_size
            block = _BLOCK
            while self.offset < self.size:
                file.seek(self.offset)
                data = file.read(block)
                if end := data.rfind(b"\n") + 1:
                    offset, self.offset = self.offset, self.offset + end
                    self._fingerprint = data[max(0, end - _FINGERPRINT) : end]
                    yield offset, data[:end]
                elif len(data) < block:
                    return  # the last line is still being written
                else:
                    block *= 2


def read_tail(path: Path, limit: int = 8192) -> bytes:
    """Read the end of a file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)
    except OSError:
        return b""


def last_line(text: bytes) -> bytes:
    """Return the last complete line; empty where there is none."""
    return text.rpartition(b"\n")[0].rpartition(b"\n")[2]


def sample_lines(path: Path, count: int, longest: int = 2048) -> list[bytes]:
    """Return some lines evenly spaced over a file of any length, with one seek for each."""
    found: dict[bytes, None] = {}
    with suppress(OSError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(count):
            offset = size * number // count
            file.seek(max(0, offset - 1))
            data = file.read(longest)
            rest = data if offset == 0 else data.partition(b"\n")[2]
            line, end, _ = rest.partition(b"\n")
            if end and line:
                found[line] = None
    return list(found)


SIDES = (96, 192, 384)
_MAX_CACHE_BYTES = 512 << 20
_SMALL_FILE = 96 << 10
_MAX_FACTS = 32


class Thumbnails:
    """Creates thumbnails, at most one per core at a time, and caches them outside the folders that are shown."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or cache_dir() / "board"
        self._slots = threading.Semaphore(available_cpus())
        self.shrink()

    def get(self, path: Path | TarImage, side: int) -> tuple[bytes, str] | None:
        """Return an image that fits into a square of this side, and its media type; None where it cannot be read."""
        status = (path if isinstance(path, Path) else path.tar).stat()
        size = status.st_size if isinstance(path, Path) else path.size
        if size <= _SMALL_FILE:
            facts = image_facts(path)
            if facts and max(facts["width"], facts["height"]) <= side:
                return read_image_file(path), IMAGES[Path(path.name).suffix.lower()]
        name = hashlib.sha256(f"{path}\n{status.st_mtime_ns}\n{status.st_size}\n{side}".encode()).hexdigest()
        cached = self.cache / name[:2] / f"{name[2:]}.webp"
        with suppress(OSError):
            return cached.read_bytes(), "image/webp"
        with self._slots:
            image = thumbnail(path if isinstance(path, Path) else io.BytesIO(path.read()), side)
        if image is None:
            return None
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=82, method=2)
        with suppress(OSError):  # without a cache the page is only slower
            cached.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(cached, buffer.getvalue())
        return buffer.getvalue(), "image/webp"

    def shrink(self, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        """Remove the oldest thumbnails until the rest fits."""
        files = []
        for path in self.cache.glob("??/*.webp"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= max_bytes:
                return
            with suppress(OSError):
                path.unlink()
                total -= size


def image_facts(path: Path | TarImage) -> dict[str, Any]:
    """Return the size of an image and its text fields, such as prompt, seed and step; reads the header only."""
    try:
        file = path if isinstance(path, Path) else io.BytesIO(path.read())
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            texts = [(name, value[:2000]) for name, value in read_metadata(image).items()]
            return {**dict(texts[:_MAX_FACTS]), "width": image.width, "height": image.height}
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return {}
