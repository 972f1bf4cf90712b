"""The folder that is looked into: every path that comes from outside passes through here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
PAGES = {".html": "text/html; charset=utf-8"}


def open_plain(path: Path | str) -> IO[bytes]:
    """Open a file that is no link, which may lead out of the root, nor a pipe, on which one would wait for ever."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read_plain(path: Path | str, most: int) -> bytes:
    """The beginning of such a file."""
    with open_plain(path) as file:
        return file.read(most)


def is_plain_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


class NotHere(Exception):
    """What was asked for is not under the root, or not there at all: the answer does not tell which."""


class Root:
    """A folder, and the promise that nothing outside it is touched."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))

    def inside(self, relative: str) -> Path:
        """The real path of something under the root; links are followed first, so that none leads out."""
        try:
            path = Path(os.path.realpath(self.path / relative, strict=True))
        except (OSError, ValueError):  # ValueError: a NUL in it
            raise NotHere from None
        if not path.is_relative_to(self.path):
            raise NotHere
        return path

    def folder(self, relative: str) -> Path:
        """A folder under the root."""
        path = self.inside(relative)
        if not path.is_dir():
            raise NotHere
        return path

    def file(self, relative: str, kinds: dict[str, str]) -> tuple[Path, str]:
        """A file under the root with one of these endings, and what it is; hidden ones are not for show."""
        path = self.inside(relative)
        kind = kinds.get(path.suffix.lower())
        hidden = any(part.startswith(".") for part in path.relative_to(self.path).parts)
        if kind is None or hidden or not path.is_file():
            raise NotHere
        return path, kind

    def relative(self, path: Path) -> str:
        """The name by which the page asks for a path again."""
        return path.relative_to(self.path).as_posix()
