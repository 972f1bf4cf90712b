"""Packing a data set: every image decoded and cropped once, so that training never waits for a decoder."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from muralist.data.bar import bar
from muralist.data.encoded import open_packed
from muralist.data.images import BrokenImage, Size, height_width, size_words
from muralist.data.manifest import HELD_OUT_FOLDER, Manifest, is_packed, read_manifest
from muralist.data.packed_rows import RowWriter
from muralist.data.packed_source import PackedSource
from muralist.data.sources import Source, open_held_out, open_source
from muralist.errors import UserError
from muralist.machine import usable_cores
from muralist.words import duration

__all__ = ["Chunk", "Facts", "Kind", "PackReport", "PackedSource", "pack", "write_pack"]

_CHUNK_BYTES = 8 * 2**20  # what a worker sends back at once
_MOST_CHUNK_ROWS = 128
_LOCK = "lock"
_LESS_SPACE = "Free some space, choose another place, or pack at a smaller --img_size."
_OTHER_KIND = (
    "What is kept of the images differs: pixels there and latents here, another model, or other settings of it."
)


@dataclass(frozen=True)
class PackReport:
    """What a pack came to; `broken` images, of both parts, are named in broken.txt."""

    destination: Path
    images: int
    held_out: int
    captions: int | None  # distinct ones of both parts, where they are embedded
    broken: int
    bytes: int
    seconds: float
    finished_before: bool  # the very same pack was there already, and nothing was done

    def __str__(self) -> str:
        held_out = f", {self.held_out:,} held out" if self.held_out else ""
        done = "is this pack already" if self.finished_before else f"packed in {duration(self.seconds)}"
        captions = "" if self.captions is None else f", {self.captions:,} distinct captions"
        text = f"{self.destination} {done}: {self.images:,} images{held_out}{captions}, {self.bytes / 1e6:,.0f} MB."
        if self.broken:
            text += f"\nBroken images left out: {self.broken:,}; {self.destination / 'broken.txt'} names them."
        return text


class Chunk(NamedTuple):
    """Consecutive images of a source, less the broken ones."""

    asked: int
    images: np.ndarray  # uint8 [rows, H * W * 3]
    labels: np.ndarray
    captions: list[str]
    broken: list[tuple[str, str]]


class Facts(NamedTuple):
    """What every manifest says of the part that was packed."""

    img_size: Size
    label_names: list[str]
    broken: int
    source: str
    source_fingerprint: str


class Writer(Protocol):
    """Writes one part of a data set."""

    def add(self, chunk: Chunk) -> None:
        """Append the images of a chunk."""

    def close(self, facts: Facts) -> Manifest | None:
        """Write what is left; returns the manifest, or nothing where there was no image."""


class Kind(Protocol):
    """What is kept of an image."""

    row_bytes: int  # at least, of one image

    def made(self, manifest: Manifest) -> bool:
        """Whether a finished pack holds just what this kind would."""

    def writer(self, folder: Path, images: int) -> Writer:
        """Begin a part of so many images, the broken ones included, in a folder."""


def pack(
    source_path: str,
    destination: str | Path,
    img_size: Size,
    workers: int | None = None,
    progress: bool = True,
    caption: str | None = None,
    cameras: Sequence[str] = (),
) -> PackReport:
    """Pack the pixels of a data set."""
    return write_pack(source_path, destination, img_size, _Pixels(img_size), workers, progress, caption, cameras)


def write_pack(
    source_path: str,
    destination: str | Path,
    img_size: Size,
    kind: Kind,
    workers: int | None = None,
    progress: bool = True,
    caption: str | None = None,
    cameras: Sequence[str] = (),
) -> PackReport:
    """Pack a data set, and the part it holds out, into a folder; the bytes do not depend on the number of workers.

    The folder appears under its name when it is complete. Broken images are left out and named in broken.txt.
    """
    started = time.monotonic()
    height, width = height_width(img_size)
    img_size = height if height == width else (height, width)
    destination = Path(destination).expanduser().resolve()
    if destination.is_relative_to(Path(source_path).expanduser().resolve()):
        raise UserError(f"{destination} lies inside the data set {source_path} itself.", fix="Choose another place.")
    parts = {"": open_source(source_path, img_size, caption, cameras)}
    if held_out := open_held_out(source_path, img_size, caption=caption, cameras=cameras):
        parts[HELD_OUT_FOLDER] = held_out
    finished_before = _is_finished(destination, parts, img_size, kind)
    if not finished_before:
        check_space(destination, sum(map(len, parts.values())) * (kind.row_bytes + 64))
        with _workplace(destination) as workplace:
            for name, source in parts.items():
                label = "Packing" if not name else "Packing the held-out part"
                with bar(label, len(source), progress) as advance:
                    _pack_part(
                        source, source_path, workplace / name, img_size, kind, workers or usable_cores(), advance
                    )
    manifests = {name: read_manifest(destination / name) for name in parts}
    captions = [manifest.captions for manifest in manifests.values() if manifest.captions is not None]
    return PackReport(
        destination,
        manifests[""].images,
        manifests[HELD_OUT_FOLDER].images if HELD_OUT_FOLDER in manifests else 0,
        sum(captions) if captions else None,
        sum(manifest.broken for manifest in manifests.values()),
        sum(manifest.bytes for manifest in manifests.values()),
        time.monotonic() - started,
        finished_before,
    )


def _pack_part(
    source: Source,
    source_path: str,
    folder: Path,
    img_size: Size,
    kind: Kind,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    folder.mkdir(exist_ok=True)
    writer = kind.writer(folder, len(source))
    broken: list[tuple[str, str]] = []
    for chunk in _chunks(source, img_size, workers):
        writer.add(chunk)
        broken += chunk.broken
        advance(chunk.asked)
    manifest = writer.close(Facts(img_size, list(source.label_names), len(broken), source_path, source.fingerprint()))
    if manifest is None:
        raise UserError(
            f"All {len(broken):,} images of {source_path} are broken.", f"The first: {': '.join(broken[0])}."
        )
    if broken:
        lines = "".join(f"{_one_line(name)}\t{_one_line(reason)}\n" for name, reason in broken)
        (folder / "broken.txt").write_text(lines, encoding="utf-8", errors="surrogateescape")
    manifest.write(folder)


def _chunks(source: Source, img_size: Size, workers: int) -> Iterator[Chunk]:
    """Read a whole source in order, decoding in several processes."""
    count = len(source)
    rows = min(_MOST_CHUNK_ROWS, max(1, _CHUNK_BYTES // _row_bytes(img_size)), -(-count // workers))
    spans = [range(first, min(first + rows, count)) for first in range(0, count, rows)]
    if workers == 1 or len(spans) == 1:
        yield from (_read(source, span) for span in spans)
        return
    # Fresh processes rather than forked ones: a fork would copy locks that Arrow's and rich's threads may hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(spans)), context, _start_worker, (source,)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for span in spans:
                waiting.append(pool.submit(_read_in_worker, span))
                if len(waiting) > 2 * workers:  # so that chunks do not pile up when the disk is slower than the workers
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that decodes images was killed.", "The memory may be short.", "Use fewer workers."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read(source: Source, span: range) -> Chunk:
    items, broken = [], []
    for index in span:
        try:
            items.append(source.read(index))
        except BrokenImage as error:
            broken.append((error.name, error.reason))
    images = np.array([item.image.reshape(-1) for item in items], dtype=np.uint8)
    labels = np.array([item.label for item in items], dtype=np.int32)
    return Chunk(len(span), images, labels, [item.caption for item in items], broken)


_source_of_worker: Source


def _start_worker(source: Source) -> None:
    global _source_of_worker
    _source_of_worker = source
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches every process; the packing one ends the others


def _read_in_worker(span: range) -> Chunk:
    return _read(_source_of_worker, span)


class _Pixels:
    """Keeps the pixels."""

    def __init__(self, img_size: Size) -> None:
        self.row_bytes = _row_bytes(img_size)

    def made(self, manifest: Manifest) -> bool:
        """Any pack of pixels: the size and the source are compared anyway."""
        return type(manifest) is Manifest

    def writer(self, folder: Path, images: int) -> _PixelWriter:
        """Begin a part."""
        return _PixelWriter(folder, self.row_bytes)


class _PixelWriter:
    """Writes pixels, label and caption."""

    def __init__(self, folder: Path, width: int) -> None:
        import pyarrow

        columns = {"image": pyarrow.binary(width), "label": pyarrow.int32(), "caption": pyarrow.string()}
        self._rows = RowWriter(folder, columns)

    def add(self, chunk: Chunk) -> None:
        """Append the images of a chunk."""
        self._rows.add(chunk.images, chunk.labels.tolist(), chunk.captions)

    def close(self, facts: Facts) -> Manifest | None:
        """Write what is left."""
        files = self._rows.close()
        return Manifest(rows_per_batch=self._rows.rows_per_batch, files=files, **facts._asdict()) if files else None


@contextmanager
def _workplace(destination: Path) -> Iterator[Path]:
    """Give a folder beside the destination to work in, which takes its name at the end or vanishes."""
    folder = destination.with_name(f".{destination.name}.packing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("a") as lock:
            _take(lock.fileno(), folder, destination)
            try:
                for leftover in folder.iterdir():  # of a pack that was killed
                    if leftover.is_dir():
                        shutil.rmtree(leftover)
                    elif leftover.name != _LOCK:
                        leftover.unlink()
                yield folder
                folder.rename(destination)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            # Not before: whoever finds no lock under the old name must not find the folder there either.
            (destination / _LOCK).unlink()
    except OSError as error:
        raise UserError(f"Packing into {destination} failed: {error}.") from error


def _take(lock: int, folder: Path, destination: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = (folder / _LOCK).exists() and (folder / _LOCK).stat().st_ino == os.fstat(lock).st_ino
    except BlockingIOError:
        taken = False
    except OSError:
        taken = True  # some network disks have no locks; then two packs into one place are the user's to avoid
    if not taken:
        raise UserError(f"Another process is packing into {destination}.", fix="Wait for it, or choose another place.")


def _is_finished(destination: Path, parts: dict[str, Source], img_size: Size, kind: Kind) -> bool:
    """Say whether the destination holds this very pack; anything else there is refused."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    if not is_packed(destination):
        raise UserError(f"{destination} exists and is not empty.", fix="Choose another place, or remove it.")
    manifest = read_manifest(destination)
    for name, source in parts.items():
        packed = read_manifest(destination / name).source_fingerprint if is_packed(destination / name) else None
        same_size = height_width(manifest.img_size) == height_width(img_size)
        if not (same_size and kind.made(manifest) and packed == source.fingerprint()):
            reason = "The images have changed since, or are others." if kind.made(manifest) else _OTHER_KIND
            raise UserError(
                f"{destination} holds another pack: of {manifest.source} at {size_words(manifest.img_size)} pixels.",
                reason if same_size else "",
                "Choose another place, or remove it.",
            )
        open_packed(destination / name, img_size)  # its files must all be there
    return True


def check_space(destination: Path, needed: int, fix: str = _LESS_SPACE) -> None:
    """Refuse to go on where a disk cannot hold so many bytes more."""
    place = next(parent for parent in destination.parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"The packed images need {needed / 1e9:,.1f} GB, but {place} has {free / 1e9:,.1f} GB free.",
            fix=fix,
        )


def _row_bytes(img_size: Size) -> int:
    height, width = height_width(img_size)
    return height * width * 3


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
