"""Members of tar files: listing, image files inside, and the names that WebDataset gives the files of a sample.

An image in a tar file has a path as if the tar file were a folder: `images/00000.tar/000001_seed42.png`.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath

from muralist.core.errors import UserError

TAR = ".tar"
_INDEXED_FILES = 8  # whose members are remembered by name


def sample_key(stem: str) -> str:
    """Return the key of a sample for the name of its image without suffix: WebDataset's keys end at the first dot."""
    return stem.replace("%", "%25").replace(".", "%2E")


def _stem_of(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


def tar_members(path: Path) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the files in an uncompressed tar file, with a descriptor from which they can be read; refuse a damaged one."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            length = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps a kilobyte for every member
                if member.isfile() or member.size < 0:  # a negative size would make tarfile loop forever
                    if not 0 <= member.size <= length - member.offset_data:
                        raise tarfile.ReadError(f"the header of {member.name!r:.80} gives it {member.size:,} bytes")
                    yield member, file.fileno()
    # The last three come from damaged headers.
    except (OSError, tarfile.TarError, ValueError, OverflowError, IndexError) as error:
        raise UserError(
            f"The tar file {path} could not be read: {error}.",
            fix="If it is compressed, unpack it to a plain .tar; if it is truncated, download it again.",
        ) from error


@dataclass(frozen=True)
class TarImage:
    """An image file in a tar file."""

    tar: Path
    member: str
    offset: int
    size: int

    @property
    def path(self) -> Path:
        """The path of the image, as if the tar file were a folder."""
        return self.tar / self.member

    @property
    def name(self) -> str:
        """The name of the image file that became this member."""
        return f"{self.stem}{PurePath(self.member).suffix}"

    @property
    def stem(self) -> str:
        """The same without suffix."""
        return _stem_of(PurePath(self.member).name.partition(".")[0])

    def relative_to(self, folder: Path) -> PurePath:
        """Return the path relative to a folder, as `Path.relative_to`."""
        return self.path.relative_to(folder)

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        try:
            with self.tar.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), self.size, self.offset)
        except OSError as error:
            raise UserError(f"The file {self.tar} could not be read: {error.strerror}.") from error
        if len(data) < self.size:
            raise UserError(f"The image {self} could not be read: the file has become shorter since it was opened.")
        return data


def tar_images(path: Path, extensions: tuple[str, ...]) -> Iterator[TarImage]:
    """Yield the image files in a tar file, without hidden ones."""
    for member, _ in tar_members(path):
        base = PurePath(member.name).name
        if base.lower().endswith(extensions) and not base.startswith("."):
            yield TarImage(path, member.name, member.offset_data, member.size)


def find_member(path: Path) -> TarImage | None:
    """Return the member of a tar file that a path names; None where it names something else."""
    parts = path.parts
    for depth, part in enumerate(parts[:-1], 1):
        tar = Path(*parts[:depth])
        if part.lower().endswith(TAR) and tar.is_file():
            status = tar.stat()
            index = _index(tar, status.st_size, status.st_mtime_ns)
            place = index.get("/".join(parts[depth:]))
            return TarImage(tar, "/".join(parts[depth:]), *place) if place else None
    return None


@lru_cache(_INDEXED_FILES)
def _index(tar: Path, size: int, changed: int) -> dict[str, tuple[int, int]]:
    """Offset and size of each member; `size` and `changed` make a rewritten tar file another one."""
    return {member.name: (member.offset_data, member.size) for member, _ in tar_members(tar)}
