"""WebDataset shards of `--shards`: finished images go into tar files of consecutive samples, with an index beside them.

    00000.tar        the first N samples in the order of the table, each KEY.png (or .jpg, .webp), KEY.json and KEY.txt
    index.parquet    one row per sample: key, tar file, offset, prompt, seed, size, SHA-256, status

Workers write single images and their lines, as without shards. Once every sample of a tar file has its image, one
process assembles it: it writes the tar file aside, appends its line to the ledger, renames the tar file and removes the
single images, in this order. Whenever it is killed, each image is in a file or in a tar file that the ledger knows. The
bytes of a tar file depend on its rows and the settings alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tarfile
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath
from typing import IO, Any

import numpy as np

from muralist.core.run_dir import atomic_open, fsync
from muralist.data.ledger_reader import (
    DONE,
    ImageFinder,
    LedgerFollower,
    TarShard,
    lines_with_offsets,
    read_lines,
    read_lines_at,
)
from muralist.data.tar_members import TAR, find_member, sample_key
from muralist.generate.output_dir import INDEX, OutputDir, append_line
from muralist.generate.plan import Plan, Sample

log = logging.getLogger("muralist")
_BLOCK = tarfile.BLOCKSIZE
_INDEX_ROWS = 1 << 16  # of a row group
_MISSING = "missing"


def tar_name(number: int) -> str:
    """Return the name of a tar file."""
    return f"{number:05d}{TAR}"


class _Cancelled(Exception):
    """The command ends before a tar file is complete."""


class _ImageLost(Exception):
    """An image was removed or changed after it was generated; the argument is its sample."""


class TarShardWriter:
    """Assembles tar files from finished images, in a thread.

    `digest` is that of the settings; `done` says which samples had an intact image when the ledger was last merged.
    """

    def __init__(self, output: OutputDir, plan: Plan, digest: str, done: np.ndarray) -> None:
        self.output, self.plan, self.digest = output, plan, digest
        per_tar = plan.samples_per_tar
        self._sealed = output.intact_tar_shards()
        self._done = done.copy()
        self._sha256 = np.zeros((len(plan), 32), np.uint8)
        for line in read_lines(output.ledger):
            self._note_sha256(line)
        self._follower = LedgerFollower(output.root)
        self._follower.skip_ledger()
        padded = np.zeros(-(-len(plan) // per_tar) * per_tar, bool)
        padded[: len(plan)] = ~self._done
        self._missing = padded.reshape(-1, per_tar).sum(1)  # samples of each tar file without an image
        complete = np.flatnonzero(self._missing == 0).tolist()
        self._complete = deque(number for number in complete if self._needs_writing(number))
        self._thread = ThreadPoolExecutor(1, "muralist-shards")
        self._cancel = threading.Event()
        self._running: Future[None] | None = None

    def poll(self) -> None:
        """Start the next tar file whose samples all have images; raise what went wrong with the one before."""
        if self._running is not None:
            if not self._running.done():
                return
            self._running.result()
        self._read_lines()
        self._running = self._thread.submit(self._write, self._complete.popleft()) if self._complete else None

    def finish(self) -> None:
        """Write every tar file whose samples all have images."""
        try:
            while self._running is not None or self._complete or self._read_lines():
                if self._running is not None:
                    self._running.result()
                self.poll()
        except BaseException:
            self.cancel()
            raise
        self._thread.shutdown()

    def cancel(self) -> None:
        """Give up the tar file that is being written; its images stay."""
        self._cancel.set()
        self._thread.shutdown()

    @property
    def incomplete(self) -> list[str]:
        """The names of the tar files that lack samples."""
        return [tar_name(number) for number in np.flatnonzero(self._missing).tolist()]

    def _range(self, number: int) -> range:
        per_tar = self.plan.samples_per_tar
        return range(number * per_tar, min(len(self.plan), (number + 1) * per_tar))

    def _needs_writing(self, number: int) -> bool:
        """Return whether samples of the plan are not in the tar file; an earlier command may have planned fewer."""
        shard = self._sealed.get(tar_name(number))
        return shard is None or shard.samples < len(self._range(number))

    def _read_lines(self) -> bool:
        """Note which samples were generated since the last call; returns whether that completed a tar file."""
        for line in self._follower.new_lines():
            index = self._note_sha256(line)
            if index is not None and not self._done[index]:
                self._done[index] = True
                number = index // self.plan.samples_per_tar
                self._missing[number] -= 1
                if not self._missing[number]:
                    self._complete.append(number)
        return bool(self._complete)

    def _note_sha256(self, line: dict[str, Any]) -> int | None:
        """Note the SHA-256 of an image; returns its sample's index, None where there is no such image."""
        index = line["index"] * self.plan.copies + line["copy"]
        is_planned = 0 <= line["copy"] < self.plan.copies and 0 <= index < len(self.plan)
        if line["status"] != DONE or not is_planned:
            return None
        with suppress(ValueError):  # not a hash: the image is generated again
            self._sha256[index] = np.frombuffer(bytes.fromhex(line["sha256"]), np.uint8)
        return index

    def _write(self, number: int) -> None:
        """Write a tar file and remove the images that it holds."""
        samples = self._range(number)
        try:
            self._seal(number, list(self.plan.samples(np.array(samples))))
        except _Cancelled:
            return
        except _ImageLost as error:
            index = error.args[0].sample_index
            self._done[index] = False
            self._missing[number] += 1
            log.warning(
                "%s was removed or changed after it was generated: %s waits for it. Run the same command again.",
                error.args[0].file, tar_name(number),
            )  # fmt: skip

    def _seal(self, number: int, samples: list[Sample]) -> None:
        path, offsets = self.output.root / tar_name(number), []
        with atomic_open(path) as file:
            hashed = _HashingFile(file)
            for sample in samples:
                if self._cancel.is_set():
                    raise _Cancelled
                data = self._read_image(path, sample)
                offsets.append(_add_sample(hashed, sample, data, self.digest))
            hashed.write(b"\0" * (2 * _BLOCK))
            hashed.write(b"\0" * (-hashed.size % tarfile.RECORDSIZE))
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
            first, last = samples[0].sample_index, samples[-1].sample_index
            digest = hashed.sha256.hexdigest()
            shard = TarShard(path.name, self.plan.copies, first, last, hashed.size, digest, status.st_mtime_ns, offsets)
            # Before the rename: a tar file that replaces a shorter one, of fewer rows, must be known at once.
            append_line(self.output.ledger, shard.line())
        fsync(self.output.root)
        self._sealed[path.name] = shard
        for sample in samples:
            (self.output.root / sample.file).unlink(missing_ok=True)

    def _read_image(self, tar: Path, sample: Sample) -> bytes:
        """Return the image of a sample: its file, or the member of the tar file that is being replaced."""
        file, expected = self.output.root / sample.file, self._sha256[sample.sample_index].tobytes()
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            member = find_member(tar / _member_names(sample)[0])
            data = member.read() if member else b""
        if hashlib.sha256(data).digest() != expected:
            file.unlink(missing_ok=True)  # so that it is generated again
            raise _ImageLost(sample)
        return data


class _HashingFile:
    """A file that knows its size and its SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def _member_names(sample: Sample) -> tuple[str, str, str]:
    file = PurePath(sample.file)
    key = sample_key(file.stem)
    return f"{key}{file.suffix}", f"{key}.json", f"{key}.txt"


def _add_sample(file: _HashingFile, sample: Sample, image: bytes, digest: str) -> int:
    """Write the members of a sample; returns the offset of its image."""
    facts: dict[str, Any] = {
        name: value for name, value in sample._asdict().items() if name not in ("sample_index", "row", "inputs")
    }
    facts |= {"inputs": sample.inputs.cells} if sample.inputs else {}
    facts |= {"index": sample.row, "settings": digest, "sha256": hashlib.sha256(image).hexdigest()}
    text = sample.prompt.encode(errors="replace")  # of lone surrogates; JSON escapes them
    contents = (image, json.dumps(facts, sort_keys=True).encode(), text)
    offset = 0
    for name, data in zip(_member_names(sample), contents, strict=True):
        member = tarfile.TarInfo(name)
        member.size = len(data)  # time and owner are 0, the mode is 0o644
        file.write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict"))
        offset = offset or file.size
        file.write(data + b"\0" * (-len(data) % _BLOCK))
    return offset


def write_index(output: OutputDir) -> None:
    """Write index.parquet from the ledger: the same bytes for the same images, whoever generated them."""
    import pyarrow
    from pyarrow import parquet

    text, integer = pyarrow.string(), pyarrow.int64()
    schema = pyarrow.schema(
        [("key", text), ("tar", text), ("offset", integer), ("bytes", integer), ("file", text), ("index", integer),
         ("copy", integer), ("id", text), ("prompt", text), ("negative_prompt", text), ("seed", integer),
         ("width", integer), ("height", integer), ("sha256", text), ("status", text)]
    )  # fmt: skip
    finder = ImageFinder(output.root)
    with atomic_open(output.root / INDEX) as file, parquet.ParquetWriter(file, schema) as writer:
        rows: list[dict[str, Any]] = []
        for line in _last_lines(output.ledger):
            rows.append(_index_row(line, finder))
            if len(rows) == _INDEX_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows = []
        if rows:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _last_lines(ledger: Path) -> Iterator[dict[str, Any]]:
    """Yield the last line about each sample, in the order of the table."""
    places = [(line["index"], line["copy"], offset) for offset, line in lines_with_offsets(ledger)]
    if not places:
        return
    found = np.array(places, np.int64)
    found = found[np.lexsort(found.T[::-1])]
    is_last = np.append((found[1:, :2] != found[:-1, :2]).any(1), True)
    yield from read_lines_at(ledger, found[is_last, 2].tolist())


def _index_row(line: dict[str, Any], finder: ImageFinder) -> dict[str, Any]:
    names = ("index", "copy", "id", "prompt", "negative_prompt", "seed", "width", "height", "status")
    row = {name: line.get(name) for name in names}
    for name in ("id", "prompt", "negative_prompt"):
        row[name] = str(row[name] or "").encode(errors="replace").decode()  # of lone surrogates
    row |= {"key": sample_key(PurePath(line["file"]).stem), "file": line["file"]}
    if line["status"] == DONE:
        row |= {"bytes": line["bytes"], "sha256": line["sha256"]}
        if shard := finder.shard(line):
            number = line["index"] * shard.copies + line["copy"] - shard.first
            row |= {"tar": shard.name, "offset": shard.offsets[number]}
        elif finder.path(line) is None:
            row["status"] = _MISSING
    return row
