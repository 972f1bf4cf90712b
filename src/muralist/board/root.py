"""The folder that is looked into: every path that comes from outside passes through here."""

from __future__ import annotations

import os
from pathlib import Path

PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
PAGES = {".html": "text/html; charset=utf-8"}


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
        """A file under the root with one of these endings, and what it is."""
        path = self.inside(relative)
        kind = kinds.get(path.suffix.lower())
        if kind is None or not path.is_file():
            raise NotHere
        return path, kind

    def relative(self, path: Path) -> str:
        """The name by which the page asks for a path again."""
        return path.relative_to(self.path).as_posix()
