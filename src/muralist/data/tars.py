"""WebDataset archives: tar files whose members are grouped into samples by name."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from muralist.data.captions import Caption
from muralist.data.fields import (
    CAPTION_FIELDS,
    LABEL_FIELDS,
    caption_text,
    label_number,
    pick,
    sample_files,
    settle_labels,
    short_hash,
)
from muralist.data.images import EXTENSIONS as IMAGE_EXTENSIONS
from muralist.data.images import BrokenImage, Size, read_cropped, stored_shape
from muralist.data.item import Item
from muralist.data.recent import Recent
from muralist.errors import UserError

_MOST_OPEN_FILES = 64
_HEADER_BYTES = 1 << 16  # enough of nearly every image file to tell its size
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_FILES = 1_000_000  # more than any folder of archives holds


def expand_ranges(pattern: str) -> list[Path]:
    """Write out the ranges of numbers in a pattern such as `data-{0000..0012}.tar`, keeping their leading zeros."""
    return [Path(name) for name in _expanded(pattern)]


def _expanded(pattern: str) -> list[str]:
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    if int(first) > int(last):
        raise UserError(f"The range {match.group()} in {pattern} is empty.", fix="Put the smaller number first.")
    count = int(last) + 1 - int(first)
    rest = _expanded(pattern[match.end() :]) if count <= _MOST_FILES else []
    if count * len(rest) > _MOST_FILES or not rest:
        raise UserError(
            f"The range {match.group()} in {pattern} stands for more than {_MOST_FILES:,} files.",
            fix="Give the range of numbers that the files have.",
        )
    start, numbers = pattern[: match.start()], range(int(first), int(last) + 1)
    return [f"{start}{number:0{len(first)}}{end}" for number in numbers for end in rest]


class TarSource:
    """The samples of tar files, read in place: members are found once, at opening, and then read by position."""

    def __init__(
        self, paths: list[Path], img_size: Size, known: list[str] | None = None, caption: str | None = None
    ) -> None:
        import pyarrow

        self.paths, self.img_size = paths, img_size
        places: list[tuple[int, int, int]] = []
        names: list[bytes] = []
        captions: list[str] = []
        labels: list[int] = []
        for tar, path in enumerate(paths):
            for sample in _samples(path):
                places.append((tar, sample.offset, sample.size))
                names.append(os.fsencode(sample.name))
                captions.append(sample.caption)
                if sample.label is not None:
                    labels.append(sample.label)
                if len(labels) not in (0, len(places)):
                    raise UserError(
                        f"Some samples of {_range_of(paths)} have a label (.cls) and others none; "
                        f"the first change is at {sample.name} in {path}."
                    )
        if not places:
            raise UserError(
                f"There are no images in {_range_of(paths)}.", f"Looked for members {' '.join(IMAGE_EXTENSIONS)}."
            )
        self._labels, self.label_names = settle_labels(np.array(labels, dtype=np.int64), known, _range_of(paths))
        self._caption = Caption.settle_own(caption, self.label_names, _range_of(paths))
        self._places = np.array(places, dtype=np.int64)
        self._names = pyarrow.array(names, pyarrow.large_binary())
        self._captions = pyarrow.array(captions, pyarrow.large_string())
        self._files: Recent[IO[bytes]] = Recent(_MOST_OPEN_FILES)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Item:
        """Decode the image of sample `index`."""
        data, name = self._bytes(index)
        label = 0 if self._labels is None else int(self._labels[index])
        caption = self._caption.own_text(self._captions[index].as_py(), self.label_names, label, name)
        return Item(read_cropped(data, self.img_size, name), label, caption)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of sample `index`, from its first bytes if they tell."""
        try:
            return stored_shape(*self._bytes(index, _HEADER_BYTES))
        except BrokenImage:
            return stored_shape(*self._bytes(index))

    def fingerprint(self) -> str:
        """Hash the names and places of all images, what is said of them, and samples of the files."""
        labels = b"" if self._labels is None else self._labels
        samples = sample_files(len(self.paths), self.paths.__getitem__)
        return short_hash("tar", self._names, self._places, self._captions, labels, samples, *self._caption.hashed)

    def _bytes(self, index: int, most: int | None = None) -> tuple[bytes, str]:
        """Return the image file of a sample, or the beginning of it, and its name."""
        tar, offset, size = (int(value) for value in self._places[index])
        size = min(size, most or size)
        data = os.pread(self._files.get(tar, self._open).fileno(), size, offset)
        name = f"{os.fsdecode(self._names[index].as_py())} in {self.paths[tar]}"
        if len(data) < size:
            raise UserError(f"The image {name} could not be read: the file has become shorter since it was opened.")
        return data, name

    def _open(self, tar: int) -> IO[bytes]:
        try:
            return self.paths[tar].open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"The file {self.paths[tar]} could not be read: {error.strerror}.") from error


class _Sample:
    """What one tar file says about one key."""

    def __init__(self) -> None:
        self.name = ""
        self.offset = self.size = 0
        self.caption = ""
        self.label: int | None = None


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield the samples of a tar file that have an image, in the order of their first members."""
    samples: dict[str, _Sample] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            length = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep a kilobyte for every member
                if member.isfile() or member.size < 0:  # the archive would be read again from there, for ever
                    if not 0 <= member.size <= length - member.offset_data:
                        raise tarfile.ReadError(f"{member.name!r:.80} is said to have {member.size:,} bytes")
                    _add_member(samples, member, file.fileno(), path)
    # The last three: on damaged headers, tarfile lets numbers and texts raise what they like.
    except (OSError, tarfile.TarError, ValueError, OverflowError, IndexError) as error:
        raise UserError(
            f"The tar file {path} could not be read: {error}.",
            fix="If it is compressed, unpack it to a plain .tar; if it is cut short, fetch it again.",
        ) from error
    return (sample for sample in samples.values() if sample.name)


def _add_member(samples: dict[str, _Sample], member: tarfile.TarInfo, descriptor: int, path: Path) -> None:
    folder, _, base = member.name.rpartition("/")
    key, _, kind = base.partition(".")
    if not key:  # a hidden file
        return
    kind = f".{kind.lower()}"
    sample = samples.setdefault(f"{folder}/{key}", _Sample())
    where = f"{member.name} in {path}"
    if kind in IMAGE_EXTENSIONS:
        if sample.name:
            raise UserError(f"{path} holds two images of one name, {sample.name} and {member.name}.")
        sample.name, sample.offset, sample.size = member.name, member.offset_data, member.size
        return
    if kind not in (".cls", ".txt", ".json"):
        return
    try:
        text = os.pread(descriptor, member.size, member.offset_data).decode()
        fields = json.loads(text) if kind == ".json" else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid text: {error}.") from error
    if kind == ".cls":
        sample.label = label_number(text.strip(), where)
    elif kind == ".txt":
        sample.caption = caption_text(text.strip(), where)
    elif isinstance(fields, dict):
        # A .txt or .cls beside the .json was written for exactly this purpose and wins, whichever comes first.
        if (field := pick(fields, CAPTION_FIELDS)) and not sample.caption:
            sample.caption = caption_text(fields[field], where)
        if (field := pick(fields, LABEL_FIELDS)) and sample.label is None:
            sample.label = label_number(fields[field], where)


def _range_of(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
