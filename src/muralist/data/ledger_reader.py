"""Read a ledger: the record of every image that `muralist generate` made or failed to make."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from muralist.data.tar_members import TAR, sample_key

LEDGER = "ledger.jsonl"
"""The file in an output folder."""
WORK_DIR = ".ledger"
"""The folder beside it that exists while a command runs: a shard for each worker, and `PROGRESS`."""
PROGRESS = "progress.beat"
DONE, FAILED = "done", "failed"
PLANNED = "planned"
"""The only key of a line that gives the total number of planned samples."""
TAR_SHARD = "tar"
"""The first key of a line about a WebDataset tar file of `--shards`: its name."""
_COMMON_FIELDS = {"index": int, "copy": int, "id": str, "seed": int, "prompt": str, "file": str, "gpu": str, "key": str}
_REQUIRED_FIELDS: dict[str, list[tuple[str, type]]] = {
    DONE: list({**_COMMON_FIELDS, "bytes": int, "changed": int, "sha256": str}.items()),
    FAILED: list({**_COMMON_FIELDS, "error": str}.items()),
}
_MAX_LABEL = 100


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the intact lines of a ledger or a shard, without the header."""
    return (line for _, line in lines_with_offsets(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the header: the model and how its images were sampled; empty where there is none."""
    try:
        with path.open("rb") as file:
            settings = json.loads(file.readline())["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def lines_with_offsets(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the intact lines with their byte offsets."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            if (line := parse_line(raw)) is not None:
                yield offset, line
            offset += len(raw)


def read_lines_at(path: Path, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the lines at some byte offsets of `lines_with_offsets`."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield json.loads(file.readline())


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Parse a line about a sample; None for the header, and for truncated or malformed lines."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if is_sample_record(line) else None


def is_sample_record(line: Any) -> bool:
    """Return whether a line has every required field, each of its type."""
    try:
        if any(type(line[name]) is not kind for name, kind in _REQUIRED_FIELDS[line["status"]]):
            return False
        # The GPU becomes part of a file name, and a foreign ledger must not lead out of the folder.
        gpu, seconds = line["gpu"], line.get("seconds", 0)
        return gpu.isprintable() and "/" not in gpu and len(gpu) <= _MAX_LABEL and isinstance(seconds, int | float)
    except (KeyError, TypeError):
        return False


class LedgerFollower:
    """Reads the lines about samples that were added to the files of an output folder since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}  # bytes that were read

    def skip_ledger(self) -> None:
        """Leave out what the ledger holds now."""
        ledger = self._folder / LEDGER
        if ledger.is_file():
            self._offsets[ledger] = ledger.stat().st_size

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the new complete lines of workers and of the ledger; a merged line may come twice."""
        # The ledger last: lines are there before they leave the workers' files.
        for file in (*(self._folder / WORK_DIR).glob("*.jsonl"), self._folder / LEDGER):
            try:
                lines = file.open("rb")
            except OSError:
                continue  # merged meanwhile, or not yet there
            with lines:
                lines.seek(self._offsets.get(file, 0))
                for raw in lines:
                    if not raw.endswith(b"\n"):
                        break  # still being written
                    self._offsets[file] = self._offsets.get(file, 0) + len(raw)
                    if (line := parse_line(raw)) is not None:
                        yield line


class TarShard(NamedTuple):
    """A WebDataset tar file of consecutive samples; sample number = row x copies + copy."""

    name: str
    copies: int  # images per row
    first: int
    last: int
    bytes: int
    sha256: str
    changed: int  # modification time in nanoseconds
    offsets: list[int]  # of the images in the tar file

    @property
    def samples(self) -> int:
        """The number of its samples."""
        return self.last - self.first + 1

    def line(self) -> dict[str, Any]:
        """Return the content of its line in the ledger."""
        return {TAR_SHARD: self.name, **{name: value for name, value in self._asdict().items() if name != "name"}}


_TAR_SHARD_TYPES = {"name": str, "copies": int, "first": int, "last": int, "bytes": int, "sha256": str, "changed": int}


def read_tar_shards(folder: Path) -> Iterator[TarShard]:
    """Yield what the ledger of a folder says of its tar files; the last line that a tar file matches counts."""
    path, start = folder / LEDGER, json.dumps({TAR_SHARD: ""})[:-2].encode()
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            if raw.startswith(start) and (shard := _parse_tar_shard(raw)) is not None:
                yield shard


def _parse_tar_shard(raw: bytes) -> TarShard | None:
    try:
        line = json.loads(raw)
        shard = TarShard(line.pop(TAR_SHARD), **line)
    except (ValueError, TypeError, RecursionError):  # truncated, or another version's
        return None
    if any(type(getattr(shard, name)) is not kind for name, kind in _TAR_SHARD_TYPES.items()):
        return None
    # A foreign ledger must not lead out of the folder.
    is_name = shard.name.endswith(TAR) and PurePath(shard.name).name == shard.name
    is_range = 0 <= shard.first <= shard.last and shard.copies > 0
    is_complete = type(shard.offsets) is list and len(shard.offsets) == shard.samples
    return shard if is_name and is_range and is_complete else None


class ImageFinder:
    """Finds the image of a sample in an output folder: a file of its own, or a member of a tar file.

    The tar files are those of the ledger when the finder was made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shards = {shard.name: shard for shard in read_tar_shards(folder) if _has_size(folder / shard.name, shard.bytes)}
        self._shards = sorted(shards.values(), key=lambda shard: shard.first)
        self._firsts = [shard.first for shard in self._shards]

    def path(self, line: dict[str, Any]) -> Path | None:
        """Return the path of the image of a sample's line; None where there is none.

        The path of a member is that of the tar file, followed by the member's name; `data.decode.read_image_file` reads
        both kinds of paths.
        """
        file = self.folder / PurePath(line["file"]).name
        return file if file.is_file() else self.tar_path(line)

    def tar_path(self, line: dict[str, Any]) -> Path | None:
        """Return the path of the member, whether or not the image is a file of its own too."""
        if (shard := self.shard(line)) is None:
            return None
        file = PurePath(PurePath(line["file"]).name)
        return self.folder / shard.name / f"{sample_key(file.stem)}{file.suffix}"

    def shard(self, line: dict[str, Any]) -> TarShard | None:
        """Return the tar file of a sample."""
        if not self._shards:
            return None
        number = line["index"] * self._shards[0].copies + line["copy"]  # one number of copies for a folder
        shard = self._shards[bisect_right(self._firsts, number) - 1]
        return shard if shard.first <= number <= shard.last else None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
