"""Thumbnails, cached outside the folders that are shown, and the grids of training samples."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from muralist.board.files import list_matching, read_regular
from muralist.core.hardware import available_cpus, cache_dir
from muralist.core.images import IMAGE_FORMATS, thumbnail
from muralist.core.run_dir import atomic_write

SIDES = (96, 192, 384)
_MAX_CACHE_BYTES = 512 << 20
_SMALL_FILE = 96 << 10
_MAX_FACTS = 32


class Thumbnail(NamedTuple):
    """A response: encoded bytes, or the file itself."""

    media_type: str
    data: bytes | None  # None: the image file itself is small enough


class Thumbnails:
    """Creates and caches thumbnails; at most one per core is created at a time."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or _default_cache()
        self._slots = threading.Semaphore(available_cpus())
        self._shrunk = False

    def get(self, path: Path, side: int) -> Thumbnail | None:
        """Return an image that fits into a square of this side; None where it cannot be read."""
        status = path.stat()
        if status.st_size <= _SMALL_FILE and 0 < max(_image_size(path)) <= side:
            return Thumbnail("", None)
        name = hashlib.sha256(f"{path}\n{status.st_mtime_ns}\n{status.st_size}\n{side}".encode()).hexdigest()
        cached = self.cache / name[:2] / f"{name[2:]}.webp"
        with suppress(OSError):
            return Thumbnail("image/webp", cached.read_bytes())
        with self._slots:
            image = thumbnail(path, side)
        if image is None:
            return None
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=82, method=2)
        self._store(cached, buffer.getvalue())
        return Thumbnail("image/webp", buffer.getvalue())

    def _store(self, path: Path, data: bytes) -> None:
        if not self._shrunk:
            self._shrunk = True
            self.shrink()
        with suppress(OSError):  # without a cache the page is only slower
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data)

    def shrink(self, max_bytes: int = _MAX_CACHE_BYTES) -> None:
        """Remove the oldest thumbnails until the rest fits; called once, before the first new one is cached."""
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


def image_facts(path: Path) -> dict[str, str | int]:
    """Return the size of an image and its text fields, such as prompt, seed and step."""
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            texts = [(str(key), value[:2000]) for key, value in image.info.items() if isinstance(value, str)]
            return {**dict(texts[:_MAX_FACTS]), "width": image.width, "height": image.height}
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return {}


def _image_size(path: Path) -> tuple[int, int]:
    facts = image_facts(path)  # reads the header only
    return int(facts.get("width", 0)), int(facts.get("height", 0))


def _default_cache() -> Path:
    """Return the user's cache folder, or a temporary one where it cannot be written."""
    folder = cache_dir() / "board"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="muralist-board-"))


_STEP = re.compile(r"step_(\d+)")
_SAMPLE = re.compile(r"gpu_(\d+)_sample(?:_(\d+))?\.png")
_ERROR = re.compile(r"gpu_(\d+)_error\.txt")
_MAX_PROMPT = 2000  # characters
_MAX_SAMPLES = 400_000  # of all runs in memory
_MTIME_RESOLUTION = 2.0  # seconds


class _Checkpoint(NamedTuple):
    """The samples of one checkpoint."""

    mtime: int = -1
    samples: Sequence[tuple[str, str]] = ()  # file and prompt
    errors: Sequence[tuple[str, str]] = ()  # GPU and reason


class SampleGrids:
    """The samples of recently viewed runs; a checkpoint whose folder has not changed is not read again."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, dict[int, _Checkpoint]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, samples: Path) -> dict[str, Any]:
        """Return prompts, steps, and for each step the file of each prompt, or null."""
        with self._lock:
            before = self._known.pop(samples, {})
            folders = [
                (int(match[1]), Path(entry.path))
                for match, entry in list_matching(samples, _STEP)
                if entry.is_dir(follow_symlinks=False)
            ]
            checkpoints = {step: _read_checkpoint(folder, before.get(step)) for step, folder in sorted(folders)}
            self._known[samples] = checkpoints
            while len(self._known) > 1 and sum(map(_count_samples, self._known.values())) > _MAX_SAMPLES:
                self._known.popitem(last=False)
        return _arrange(checkpoints)


def _count_samples(checkpoints: dict[int, _Checkpoint]) -> int:
    return sum(len(checkpoint.samples) for checkpoint in checkpoints.values())


def _read_checkpoint(folder: Path, before: _Checkpoint | None) -> _Checkpoint:
    try:
        mtime = folder.stat().st_mtime_ns
        if before is not None and before.mtime == mtime:
            return before
        names = set(os.listdir(folder))  # noqa: PTH208  # a Path for each of many files would be slow
    except OSError:
        return _Checkpoint()
    if time.time() - mtime / 1e9 < _MTIME_RESOLUTION:
        mtime = -1  # files written right now may not change the modification time
    found = sorted((int(match[1]), int(match[2] or 1), name) for name in names if (match := _SAMPLE.fullmatch(name)))
    samples = []
    for _, _, name in found:
        prompt_file = name.replace("_sample", "_prompt", 1).replace(".png", ".txt")
        if prompt_file in names:  # written after the image: without it, the image may be incomplete
            samples.append((name, _read_text(f"{folder}/{prompt_file}")))
    errors = [(match[1], _read_text(f"{folder}/{name}")) for name in sorted(names) if (match := _ERROR.fullmatch(name))]
    return _Checkpoint(mtime, samples, errors)


def _read_text(path: str) -> str:
    try:
        return read_regular(path, 4 * _MAX_PROMPT).decode(errors="replace").strip()[:_MAX_PROMPT]
    except OSError:
        return ""


def _arrange(checkpoints: dict[int, _Checkpoint]) -> dict[str, Any]:
    """Arrange samples by prompt; a prompt with several samples per checkpoint has as many rows."""
    rows: dict[tuple[str, int], int] = {}
    columns: list[tuple[int, dict[int, str], Sequence[tuple[str, str]]]] = []
    for step, checkpoint in checkpoints.items():
        repeats: dict[str, int] = {}
        files: dict[int, str] = {}
        for name, prompt in checkpoint.samples:
            repeats[prompt] = repeats.get(prompt, 0) + 1
            files[rows.setdefault((prompt, repeats[prompt]), len(rows))] = name
        if files or checkpoint.errors:
            columns.append((step, files, checkpoint.errors))
    return {
        "prompts": [prompt for prompt, _ in rows],
        "steps": [step for step, _, _ in columns],
        "files": [[files.get(row) for row in range(len(rows))] for _, files, _ in columns],
        "errors": [
            {"step": step, "gpu": gpu, "reason": reason} for step, _, errors in columns for gpu, reason in errors
        ],
    }
