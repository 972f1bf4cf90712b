"""`muralist pack`: decode and crop every image of a data set once, so that training never waits for a decoder."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.formatting import Advance, format_duration, progress_bar
from muralist.core.hardware import available_cpus
from muralist.core.image_size import Size, format_size, height_width
from muralist.core.run_dir import hold_lock
from muralist.data.decode import ImageDecodeError
from muralist.data.packed import HELD_OUT_FOLDER, Manifest, RowWriter, is_packed, open_packed, read_manifest
from muralist.data.source import Source
from muralist.data.sources import open_held_out, open_source

_CHUNK_BYTES = 8 * 2**20  # sent by a worker at once
_MAX_CHUNK_ROWS = 128


@dataclass(frozen=True)
class PackReport:
    """The result of a pack; broken images, of both parts, are listed in broken.txt."""

    destination: Path
    images: int
    held_out: int
    captions: int | None  # distinct captions of both parts, where they are embedded
    broken: int
    bytes: int
    seconds: float
    finished_before: bool  # the same pack existed already, and nothing was done

    def __str__(self) -> str:
        held_out = f", {self.held_out:,} held out" if self.held_out else ""
        done = "is this pack already" if self.finished_before else f"packed in {format_duration(self.seconds)}"
        captions = "" if self.captions is None else f", {self.captions:,} distinct captions"
        text = f"{self.destination} {done}: {self.images:,} images{held_out}{captions}, {self.bytes / 1e6:,.0f} MB."
        if self.broken:
            text += f"\nBroken images left out: {self.broken:,}; {self.destination / 'broken.txt'} lists them."
        return text


class Chunk(NamedTuple):
    """Consecutive images of a source, without the broken ones."""

    size: int  # with the broken ones
    images: np.ndarray  # uint8 [rows, H * W * 3]
    labels: np.ndarray
    captions: list[str]
    broken: list[tuple[str, str]]  # name and reason


class PackFormat:
    """Writes the parts of a data set, the training images and the held-out ones, as pixels, labels and captions."""

    def __init__(self, image_bytes: int) -> None:
        self.image_bytes = image_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one image, at least."""
        return self.image_bytes

    def matches(self, manifest: Manifest) -> bool:
        """Return whether a finished pack has the same content."""
        return type(manifest) is Manifest

    def open(self, folder: Path, images: int) -> None:
        """Begin a part with this number of images, the broken ones included."""
        import pyarrow

        columns = {"image": pyarrow.binary(self.row_bytes), "label": pyarrow.int32(), "caption": pyarrow.string()}
        self.rows = RowWriter(folder, columns)

    def add(self, chunk: Chunk) -> None:
        """Append the images of a chunk."""
        self.rows.add(chunk.images, chunk.labels.tolist(), chunk.captions)

    def close(self, metadata: dict[str, Any]) -> Manifest | None:
        """Write the remaining rows; returns the manifest with `metadata`, or None if there was no image."""
        files = self.rows.close()
        return Manifest(rows_per_batch=self.rows.rows_per_batch, files=files, **metadata) if files else None


def pack(
    source_path: str,
    destination: str | Path,
    img_size: Size,
    workers: int | None = None,
    progress: bool = True,
    caption: str | None = None,
    cameras: Sequence[str] = (),
    format: PackFormat | None = None,
) -> PackReport:
    """Pack a data set and its held-out part into a folder, as pixels or in another format.

    The bytes do not depend on the number of workers. The folder appears under its name when it is complete. Broken
    images are left out and listed in broken.txt.
    """
    started = time.monotonic()
    height, width = height_width(img_size)
    img_size = height if height == width else (height, width)
    format = format or PackFormat(height * width * 3)
    destination = Path(destination).expanduser().resolve()
    if destination.is_relative_to(Path(source_path).expanduser().resolve()):
        raise UserError(f"{destination} lies inside the data set {source_path} itself.", fix="Choose another place.")
    parts = {"": open_source(source_path, img_size, caption, cameras)}
    if held_out := open_held_out(source_path, img_size, caption=caption, cameras=cameras):
        parts[HELD_OUT_FOLDER] = held_out
    finished_before = _is_finished(destination, parts, img_size, format)
    if not finished_before:
        _check_space(destination, sum(map(len, parts.values())) * (format.row_bytes + 64))
        with _work_folder(destination) as work_folder:
            for name, source in parts.items():
                folder, label = work_folder / name, "Packing the held-out part" if name else "Packing"
                folder.mkdir(exist_ok=True)
                metadata = {
                    "img_size": img_size,
                    "label_names": list(source.label_names),
                    "source": source_path,
                    "source_fingerprint": source.fingerprint(),
                }
                with progress_bar(label, len(source), progress) as advance:
                    chunks = _read_chunks(source, height * width * 3, workers or available_cpus())
                    format.open(folder, len(source))
                    _write_part(format, chunks, folder, metadata, advance)
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


def _write_part(
    format: PackFormat, chunks: Iterator[Chunk], folder: Path, metadata: dict[str, Any], advance: Advance
) -> None:
    broken: list[tuple[str, str]] = []
    for chunk in chunks:
        format.add(chunk)
        broken += chunk.broken
        advance(chunk.size)
    manifest = format.close(metadata | {"broken": len(broken)})
    if manifest is None:
        what = f"All {len(broken):,} images of {metadata['source']} are broken."
        raise UserError(what, f"The first: {': '.join(broken[0])}.")
    if broken:
        lines = ["\t".join(map(_one_line, image)) + "\n" for image in broken]
        (folder / "broken.txt").write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    manifest.write(folder)


def _read_chunks(source: Source, image_bytes: int, workers: int) -> Iterator[Chunk]:
    """Read a source in order, decoding in several processes."""
    count = len(source)
    rows = min(_MAX_CHUNK_ROWS, max(1, _CHUNK_BYTES // image_bytes), -(-count // workers))
    spans = [range(first, min(first + rows, count)) for first in range(0, count, rows)]
    if workers == 1 or len(spans) == 1:
        yield from (_read(source, span) for span in spans)
        return
    # Spawned, not forked: a fork would copy locks that Arrow's and rich's threads may hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(spans)), context, _start_worker, (source,)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for span in spans:
                waiting.append(pool.submit(_read_in_worker, span))
                if len(waiting) > 2 * workers:  # chunks must not pile up when the disk is slower than the workers
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that decodes images was killed.",
                "Most often the machine runs out of memory.",
                "Run the same command with a smaller --num_workers.",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read(source: Source, span: range) -> Chunk:
    samples, broken = [], []
    for index in span:
        try:
            samples.append(source.read(index))
        except ImageDecodeError as error:
            broken.append((error.name, error.reason))
    images = np.array([sample.image.reshape(-1) for sample in samples], dtype=np.uint8)
    labels = np.array([sample.label for sample in samples], dtype=np.int32)
    return Chunk(len(span), images, labels, [sample.caption for sample in samples], broken)


_worker_source: Source


def _start_worker(source: Source) -> None:
    global _worker_source
    _worker_source = source
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches every process; the main one ends the workers


def _read_in_worker(span: range) -> Chunk:
    return _read(_worker_source, span)


@contextmanager
def _work_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder beside the destination, which is renamed to it at the end, or deleted after an error."""
    folder, lock = (destination.with_name(f".{destination.name}.{end}") for end in ("packing", "lock"))
    what, fix = f"Another process is packing into {destination}", "Wait for it, or choose another place."
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(lock, lambda owner: UserError(f"{what}: {owner}.", fix=fix)):
            shutil.rmtree(folder, ignore_errors=True)  # of a pack that was killed
            try:
                folder.mkdir()
                yield folder
                folder.rename(destination)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(f"Packing into {destination} failed: {error}.") from error


def _is_finished(destination: Path, parts: dict[str, Source], img_size: Size, format: PackFormat) -> bool:
    """Return whether the destination holds this pack; any other content is refused."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    if not is_packed(destination):
        raise UserError(f"{destination} exists and is not empty.", fix="Choose another place, or remove it.")
    manifest = read_manifest(destination)
    for name, source in parts.items():
        packed = read_manifest(destination / name).source_fingerprint if is_packed(destination / name) else None
        same_size = height_width(manifest.img_size) == height_width(img_size)
        if not (same_size and format.matches(manifest) and packed == source.fingerprint()):
            reason = "The images have changed since, or come from elsewhere."
            if not format.matches(manifest):
                reason = "It has pixels instead of latents or the reverse, or latents of other encoders or settings."
            raise UserError(
                f"{destination} holds another pack: of {manifest.source} at {format_size(manifest.img_size)} pixels.",
                reason if same_size else "",
                "Choose another place, or remove it.",
            )
        open_packed(destination / name, img_size)  # raises if files are missing
    return True


def _check_space(destination: Path, needed: int) -> None:
    place = next(parent for parent in destination.parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"The packed images need {needed / 1e9:,.1f} GB, but {place} has {free / 1e9:,.1f} GB free.",
            fix="Free some space, choose another place, or pack at a smaller --img_size.",
        )


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
