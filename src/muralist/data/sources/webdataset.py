"""WebDataset archives: tar files whose members are grouped into samples by name."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np

from muralist.core.errors import UserError
from muralist.core.image_size import Size
from muralist.data.decode import IMAGE_EXTENSIONS, ImageDecodeError, decode_cropped, read_image_shape
from muralist.data.source import (
    CAPTION_FIELDS,
    LABEL_FIELDS,
    CaptionTemplate,
    LruCache,
    Sample,
    SourceContents,
    check_caption,
    first_present,
    parse_label,
    resolve_labels,
    sample_files,
    short_hash,
)
from muralist.data.tar_members import tar_members

_MAX_OPEN_FILES = 64
_HEADER_BYTES = 1 << 16  # enough of nearly every image file to hold its size
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MAX_FILES = 1_000_000  # more than any folder of archives holds


def expand_ranges(pattern: str) -> list[Path]:
    """Expand the ranges in a pattern such as `data-{0000..0012}.tar`, keeping leading zeros."""
    start, *pieces = _RANGE.split(pattern)  # after the start, for each range: first, last, and the text that follows
    choices, count = [[start]], 1
    for first, last, text in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        count *= max(0, int(last) + 1 - int(first))
        if not 0 < count <= _MAX_FILES:
            what = "is empty" if count == 0 else f"stands for more than {_MAX_FILES:,} files"
            raise UserError(
                f"The range {{{first}..{last}}} in {pattern} {what}.",
                fix="Give the smallest and the largest number that the files have.",
            )
        choices.append([f"{value:0{len(first)}}{text}" for value in range(int(first), int(last) + 1)])
    return [Path("".join(parts)) for parts in product(*choices)]


class WebDatasetSource:
    """The samples of tar files: opening lists the members once, and reading seeks to them."""

    def __init__(
        self, paths: list[Path], img_size: Size, known: list[str] | None = None, caption: str | None = None
    ) -> None:
        import pyarrow

        self.paths, self.img_size = paths, img_size
        place = str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
        offsets: list[tuple[int, int, int]] = []  # tar file, offset, size
        names: list[bytes] = []
        captions: list[str] = []
        labels: list[int] = []
        skipped: Counter[str] = Counter()
        for tar, path in enumerate(paths):
            for sample in _samples(path, skipped):
                offsets.append((tar, sample.offset, sample.size))
                names.append(os.fsencode(sample.name))
                captions.append(sample.caption)
                if sample.label is not None:
                    labels.append(sample.label)
                if len(labels) not in (0, len(offsets)):
                    raise UserError(
                        f"Some samples of {place} have a label (.cls) and others none; "
                        f"the first change is at {sample.name} in {path}."
                    )
        if not offsets:
            raise UserError(f"There are no images in {place}.", f"Looked for members {' '.join(IMAGE_EXTENSIONS)}.")
        self._labels, self.label_names = resolve_labels(np.array(labels, dtype=np.int64), known, place)
        self._caption = CaptionTemplate.resolve_plain(caption, self.label_names, place)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._names = pyarrow.array(names, pyarrow.large_binary())
        self._captions = pyarrow.array(captions, pyarrow.large_string())
        self._files: LruCache[IO[bytes]] = LruCache(_MAX_OPEN_FILES)
        is_known = self._caption.is_always_there or (self.label_names and "label" in self._caption.columns)
        self.contents = SourceContents(0 if is_known else sum(not text.strip() for text in captions), skipped)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Sample:
        """Decode the image of sample `index`."""
        data, name = self._bytes(index)
        label = 0 if self._labels is None else int(self._labels[index])
        caption = self._caption.format_plain(self._captions[index].as_py(), self.label_names, label, name)
        return Sample(decode_cropped(data, self.img_size, name), label, caption)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of sample `index`, from its first bytes if they suffice."""
        try:
            return read_image_shape(*self._bytes(index, _HEADER_BYTES))
        except ImageDecodeError:
            return read_image_shape(*self._bytes(index))

    def fingerprint(self) -> str:
        """Hash names and offsets of all images, captions, labels, and excerpts of the files."""
        labels = b"" if self._labels is None else self._labels
        samples = sample_files(len(self.paths), self.paths.__getitem__)
        return short_hash(
            "tar", self._names, self._offsets, self._captions, labels, samples, *self._caption.fingerprint_parts
        )

    def _bytes(self, index: int, limit: int | None = None) -> tuple[bytes, str]:
        """Return the image file of a sample, or its first `limit` bytes, and its name."""
        tar, offset, size = (int(value) for value in self._offsets[index])
        size = min(size, limit or size)
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


@dataclass
class _Members:
    """The members of a tar file that share a key."""

    name: str = ""
    offset: int = 0
    size: int = 0
    caption: str = ""
    label: int | None = None


def _samples(path: Path, skipped: Counter[str]) -> Iterator[_Members]:
    """Yield the samples of a tar file that have an image, in the order of their first members; count skipped members."""
    samples: dict[str, _Members] = {}
    for member, descriptor in tar_members(path):
        _add_member(samples, member, descriptor, path, skipped)
    return (sample for sample in samples.values() if sample.name)


def _add_member(
    samples: dict[str, _Members], member: tarfile.TarInfo, descriptor: int, path: Path, skipped: Counter[str]
) -> None:
    folder, _, base = member.name.rpartition("/")
    key, _, kind = base.partition(".")
    if not key:  # a hidden file
        return
    kind = f".{kind.lower()}"
    sample = samples.setdefault(f"{folder}/{key}", _Members())
    where = f"{member.name} in {path}"
    if kind in IMAGE_EXTENSIONS:
        if sample.name:
            raise UserError(f"{path} holds two images of one name, {sample.name} and {member.name}.")
        sample.name, sample.offset, sample.size = member.name, member.offset_data, member.size
        return
    if kind not in (".cls", ".txt", ".json"):
        skipped[kind] += 1
        return
    try:
        text = os.pread(descriptor, member.size, member.offset_data).decode()
        fields = json.loads(text) if kind == ".json" else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid text: {error}.") from error
    if kind == ".cls":
        sample.label = parse_label(text.strip(), where)
    elif kind == ".txt":
        sample.caption = check_caption(text.strip(), where)
    elif isinstance(fields, dict):
        # A .txt or .cls beside the .json was written for this purpose and wins, whichever comes first.
        if (field := first_present(fields, CAPTION_FIELDS)) and not sample.caption:
            sample.caption = check_caption(fields[field], where)
        if (field := first_present(fields, LABEL_FIELDS)) and sample.label is None:
            sample.label = parse_label(fields[field], where)
