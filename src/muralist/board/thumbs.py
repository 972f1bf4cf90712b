"""Small copies of pictures, made once and kept in a cache of the board's own, outside the folders that are looked at."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from muralist.machine import usable_cores, user_cache
from muralist.runfolder import write_atomically
from muralist.thumbnails import small_picture

SIDES = (96, 192, 384)
_MOST_BYTES = 512 << 20
_SMALL_FILE = 96 << 10
_MOST_FACTS = 32


class Thumbnail(NamedTuple):
    """What is sent: bytes, or the file as it is."""

    kind: str
    data: bytes | None  # None: the picture itself is small enough


class Thumbnails:
    """Makes and keeps them; at most one per core is made at once."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or _usual_cache()
        self._turns = threading.Semaphore(usable_cores())
        self._checked = False

    def get(self, path: Path, side: int) -> Thumbnail | None:
        """A picture that fits into a square of this side; None where it cannot be read."""
        status = path.stat()
        if status.st_size <= _SMALL_FILE and _fits(path, side):
            return Thumbnail("", None)
        name = hashlib.sha256(f"{path}\n{status.st_mtime_ns}\n{status.st_size}\n{side}".encode()).hexdigest()
        kept = self.cache / name[:2] / f"{name[2:]}.webp"
        with suppress(OSError):
            return Thumbnail("image/webp", kept.read_bytes())
        with self._turns:
            picture = small_picture(path, side)
        if picture is None:
            return None
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=82, method=2)
        self._keep(kept, buffer.getvalue())
        return Thumbnail("image/webp", buffer.getvalue())

    def _keep(self, path: Path, data: bytes) -> None:
        if not self._checked:
            self._checked = True
            self.shrink()
        with suppress(OSError):  # a cache that cannot be written only makes the page slower
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)

    def shrink(self, most_bytes: int = _MOST_BYTES) -> None:
        """Remove the oldest thumbnails until the rest fits; done when the first new one is kept."""
        files = []
        for path in self.cache.glob("??/*.webp"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= most_bytes:
                return
            with suppress(OSError):
                path.unlink()
                total -= size


def facts(path: Path) -> dict[str, str | int]:
    """Size of a picture, and what the program that made it wrote into it: prompt, seed, step."""
    try:
        with Image.open(path) as image:
            texts = [(str(key), value[:2000]) for key, value in image.info.items() if isinstance(value, str)]
            return {**dict(texts[:_MOST_FACTS]), "width": image.width, "height": image.height}
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return {}


def _fits(path: Path, side: int) -> bool:
    try:
        with Image.open(path) as image:  # reads the header only
            return max(image.size) <= side
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def _usual_cache() -> Path:
    """The user's cache folder, else one that goes with the machine's temporary files."""
    folder = user_cache() / "board"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="muralist-board-"))
