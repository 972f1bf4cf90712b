"""Files under the board's root: the only way from an address to a path, and reading of files that grow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
PAGES = {".html": "text/html; charset=utf-8"}
_BLOCK = 4 << 20  # bytes that are read at once
_FINGERPRINT = 256  # bytes before the offset, by which a file is recognized


class NotFound(Exception):
    """A requested path is missing or not under the root; the answer does not reveal which."""


class BoardRoot:
    """The folder that the board shows; nothing outside it is read."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))

    def resolve(self, relative: str) -> Path:
        """Return the real path of a file or folder under the root; links are resolved first, so that none leads out."""
        try:
            path = Path(os.path.realpath(self.path / relative, strict=True))
        except (OSError, ValueError):  # ValueError: a NUL character
            raise NotFound from None
        if not path.is_relative_to(self.path):
            raise NotFound
        return path

    def folder(self, relative: str) -> Path:
        """Return a folder under the root."""
        path = self.resolve(relative)
        if not path.is_dir():
            raise NotFound
        return path

    def file(self, relative: str, media_types: dict[str, str]) -> tuple[Path, str]:
        """Return a file under the root with one of these suffixes, and its media type; hidden files are not served."""
        path = self.resolve(relative)
        media_type = media_types.get(path.suffix.lower())
        hidden = any(part.startswith(".") for part in path.relative_to(self.path).parts)
        if media_type is None or hidden or not path.is_file():
            raise NotFound
        return path, media_type

    def relative(self, path: Path) -> str:
        """Return the name by which the page requests a path."""
        return path.relative_to(self.path).as_posix()


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file; a link, which may lead out of the root, is refused, and a pipe does not block."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read_regular(path: Path | str, limit: int) -> bytes:
    """Read the beginning of a file that is not a link."""
    with open_regular(path) as file:
        return file.read(limit)


def is_real_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def list_matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], os.DirEntry[str]]]:
    """Return the entries of a folder whose names match; none where the folder is a link or cannot be read."""
    if not is_real_folder(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return [(match, entry) for entry in entries if (match := pattern.fullmatch(entry.name))]
    except OSError:
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
                end = data.rfind(b"\n") + 1
                if not end:
                    if len(data) < block:
                        return  # the last line is still being written
                    block *= 2
                    continue
                offset, self.offset = self.offset, self.offset + end
                self._fingerprint = data[max(0, end - _FINGERPRINT) : end]
                yield offset, data[:end]


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
    found: list[bytes] = []
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for number in range(count):
                offset = size * number // count
                file.seek(max(0, offset - 1))
                data = file.read(longest)
                begin = 0 if offset == 0 else data.find(b"\n") + 1
                line, end, _ = data[begin:].partition(b"\n")
                if end and line and (begin or offset == 0) and (not found or line != found[-1]):
                    found.append(line)
    except OSError:
        pass
    return found
