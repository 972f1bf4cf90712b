"""The interface of a data source, and the parts that sources share: labels, captions, fingerprints, caches."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from muralist.core.errors import UserError, closest_match
from muralist.core.image_size import Size, height_width

CAPTION_FIELDS = ("caption", "text", "prompt", "text_zh")
LABEL_FIELDS = ("label", "class")

_FIELD = re.compile(r"\{([^{}]*)\}")
_MAX_CLASSES = 1_000_000  # larger numbers are identifiers that were taken for labels
_SAMPLED_BLOCKS = 256
_BLOCK_BYTES = 4096
_MAX_CACHED_BYTES = 1 << 30


class Sample(NamedTuple):
    """An image, uint8 [H, W, 3], its class (0 when the source has none) and its caption ("" when none)."""

    image: np.ndarray
    label: int
    caption: str


class Source(Protocol):
    """A data set: images by index, each already cropped to the requested size."""

    label_names: list[str]
    """The classes; empty when the source has none."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Return sample `index`."""
        ...

    def fingerprint(self) -> str:
        """Return a short text that changes when the data set does; a resumed run compares it."""
        ...


class SourceContents(NamedTuple):
    """What opening a source found besides its images; sources that know it have an attribute `contents`."""

    uncaptioned: int | None = None  # images without a caption; None if unknown
    skipped: Mapping[str, int] = {}  # files that were left out, by kind


class ConcatSource:
    """Several data sets, one after the other; they have classes if all of them do, and classes of one name are one."""

    def __init__(self, sources: Sequence[Source], known: Sequence[str] | None = None) -> None:
        """`known` are the classes of the training set, when its held-out set is opened."""
        self.sources = list(sources)
        all_names = dict.fromkeys(name for source in self.sources for name in source.label_names)
        have_classes = all(source.label_names for source in self.sources)
        self.label_names = [*(all_names if known is None else known)] if have_classes else []
        numbers = {name: number for number, name in enumerate(self.label_names)}
        # A class has one number: where names differ, the number of a name is another one in each data set.
        self._labels = [[numbers[name] for name in source.label_names] if numbers else [] for source in self.sources]
        self.starts = np.cumsum([0, *map(len, self.sources)])
        found = [contents_of(source) for source in self.sources]
        counts = [one.uncaptioned for one in found if one.uncaptioned is not None]
        skipped = sum((Counter(one.skipped) for one in found), Counter[str]())
        self.contents = SourceContents(sum(counts) if len(counts) == len(found) else None, skipped)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> Sample:
        """Return sample `index`, counted through all data sets."""
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        sample = self.sources[part].read(index - int(self.starts[part]))
        return sample._replace(label=self._labels[part][sample.label] if self.label_names else 0)

    def fingerprint(self) -> str:
        """Hash the fingerprints in order."""
        return short_hash("several", *(source.fingerprint() for source in self.sources))


def contents_of(source: Source) -> SourceContents:
    """Return what opening a source found besides its images."""
    contents: SourceContents = getattr(source, "contents", SourceContents())
    return contents


class CachedSource:
    """A source that keeps all samples it has read."""

    def __init__(self, source: Source) -> None:
        self.source, self.label_names = source, source.label_names
        self._samples: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        """Return sample `index`, from memory if it was read before."""
        if index not in self._samples:
            self._samples[index] = self.source.read(index)
        return self._samples[index]

    def fingerprint(self) -> str:
        """Return the fingerprint of the source."""
        return self.source.fingerprint()


def cache_in_memory(source: Source, samples: int, img_size: Size, workers: int) -> Source:
    """Cache a small source that this process reads itself; each loader worker would keep its own copy."""
    height, width = height_width(img_size)
    if workers or samples * height * width * 3 > _MAX_CACHED_BYTES or getattr(source, "memory_mapped", False):
        return source
    return CachedSource(source)


def read_batch(source: Source, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read samples by index: uint8 [B, H, W, 3], labels int64 [B], captions."""
    if gather := getattr(source, "read_batch", None):
        return gather(indices)
    samples = [source.read(int(index)) for index in indices]
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    return np.stack([sample.image for sample in samples]), labels, [sample.caption for sample in samples]


def first_present(found: Container[str], wanted: tuple[str, ...]) -> str | None:
    """Return the first wanted field that is present: the order of `wanted` is the order of preference."""
    return next((name for name in wanted if name in found), None)


# -- labels


def parse_label(value: object, where: str) -> int:
    """Return the label found at `where`, which must be an integer from 0 up."""
    try:
        if not isinstance(value, int | str) or isinstance(value, bool):
            raise ValueError
        label = int(value)
    except ValueError as error:
        raise UserError(
            f"The label {value!r:.60} in {where} is not an integer.",
            fix="Number the classes from 0 up, or sort the images into one folder per class.",
        ) from error
    _check_range(label, label, where)
    return label


def resolve_labels(
    labels: np.ndarray | None, known: list[str] | None, where: str
) -> tuple[np.ndarray | None, list[str]]:
    """Check labels and name their classes; `known` are the training set's classes, for a held-out set."""
    if known == []:
        return None, []
    if labels is None or labels.size == 0:
        if known:
            raise UserError(f"{where} has no labels, but the training images have {len(known)} classes.")
        return None, []
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"The labels in {where} are not integers but {labels.dtype}.")
    largest = int(labels.max())
    _check_range(int(labels.min()), largest, where)
    if known is None:
        return labels.astype(np.int64), [str(label) for label in range(largest + 1)]
    if largest >= len(known):
        raise UserError(
            f"{where} has a label {largest}, but the training images have the {len(known)} classes "
            f"0 to {len(known) - 1}."
        )
    return labels.astype(np.int64), known


def _check_range(smallest: int, largest: int, where: str) -> None:
    if smallest < 0 or largest >= _MAX_CLASSES:
        raise UserError(
            f"{where} has the label {smallest if smallest < 0 else largest}; labels are from 0 to {_MAX_CLASSES - 1:,}.",
            "Other numbers are usually identifiers of images, not classes.",
        )


# -- captions


def check_caption(value: object, where: str, what: str = "caption") -> str:
    """Return the caption found at `where`, which must be text; a missing one is empty. `what` is its name in errors."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"The {what} in {where} is not text but {value!r:.60}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The {what} in {where} is not valid Unicode.", f"It holds half a character: {error}."
        ) from error
    return value


@dataclass(frozen=True)
class CaptionTemplate:
    """Makes the caption of a sample from its columns."""

    text: str  # with names of columns between { and }
    rule: str | None = None  # as the user gave it

    @classmethod
    def resolve(cls, rule: str | None, columns: Iterable[str], where: str, default: str = "") -> CaptionTemplate:
        """Check a rule against the columns of a source.

        One word is the name of a column; several words are a template such as `A photo of {label}`. None takes the
        column called caption or the like, or else the template `default`.
        """
        columns = list(columns)
        if rule is None:
            found = first_present(columns, CAPTION_FIELDS)
            return cls(f"{{{found}}}") if found else cls(default, default or None)
        if not rule.strip():
            raise UserError("The caption is empty.", fix="Give the name of a column or a template, or leave it out.")
        is_name = rule in columns or not re.search(r"[{}\s]", rule)
        text = f"{{{rule}}}" if is_name else rule
        if re.search("[{}]", rest := _FIELD.sub("", text)):
            raise UserError(
                f"The caption template {rule!r} has an unpaired brace, near {rest.strip()!r}.",
                fix="Put the name of each column between { and }.",
            )
        return cls(_FIELD.sub(lambda field: f"{{{_match_column(field[1], columns, where, rule)}}}", text), rule)

    @classmethod
    def resolve_plain(cls, rule: str | None, label_names: list[str], where: str) -> CaptionTemplate:
        """Check a rule for a source without columns, which knows only a sample's caption and class."""
        return cls.resolve(rule, ["caption", *(["label"] if label_names else [])], where)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the template uses."""
        return tuple(_FIELD.findall(self.text))

    @property
    def is_always_there(self) -> bool:
        """Whether the caption has text whatever the columns hold."""
        return bool(_FIELD.sub("", self.text).strip())

    @property
    def fingerprint_parts(self) -> tuple[str, ...]:
        """The template's part of a fingerprint; empty for the default, so that old fingerprints stay valid."""
        return () if self.rule is None else ("caption", self.rule)

    def format(self, row: Mapping[str, object], where: str) -> str:
        """Make the caption of one sample from its columns."""
        return _FIELD.sub(lambda field: self.format_cell(row.get(field[1]), where), self.text)

    def format_plain(self, caption: str, label_names: list[str], label: int, where: str) -> str:
        """Make the caption of one sample of a source without columns."""
        return self.format({"caption": caption, "label": label_names[label] if label_names else None}, where)

    def format_cell(self, value: object, where: str) -> str:
        """Return the text of a cell; numbers count as text only in columns that the user names."""
        if self.rule is not None and isinstance(value, int | float):
            return "" if value != value else str(value)  # pandas writes missing values as NaN
        return check_caption(value, where)


def _match_column(name: str, columns: list[str], where: str, rule: str) -> str:
    """Return the column of a name, also if its case differs."""
    if name in columns:
        return name
    alike = [column for column in columns if column.casefold() == name.strip().casefold()]
    if len(alike) == 1:
        return alike[0]
    what = f"a caption of one word, {rule!r}, names a column" if rule == name else f"the caption {rule!r} uses it"
    raise UserError(
        f"There is no column {name!r} in {where}, and {what}.",
        f"Its columns are {', '.join(columns) or 'none'}. {closest_match(name, columns)}".strip(),
        "Name one of them, or write a template such as 'A photo of {label}'.",
    )


# -- fingerprints and caches


def short_hash(*parts: Any) -> str:
    """Hash texts, bytes and Arrow or NumPy arrays to 16 hexadecimal digits; each part is hashed with its length."""
    digest = hashlib.sha256()
    for part in parts:
        if hasattr(part, "buffers"):  # an Arrow array: its buffers, because a million Python strings take seconds
            pieces = [memoryview(buffer) for buffer in part.buffers() if buffer is not None]
        else:
            pieces = [memoryview(part.encode(errors="surrogateescape") if isinstance(part, str) else part)]
        for piece in pieces:
            digest.update(piece.nbytes.to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest()[:16]


def sample_files(count: int, path_of: Callable[[int], Path]) -> bytes:
    """Return sizes and excerpts of evenly chosen files: enough to notice other data, in less than a second."""
    indices = range(0, count, -(-count // _SAMPLED_BLOCKS))
    blocks = _SAMPLED_BLOCKS // len(indices)
    pieces: list[bytes] = []
    for path in map(path_of, indices):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                pieces.append(size.to_bytes(8, "little"))
                for block in range(blocks):
                    pieces.append(os.pread(file.fileno(), _BLOCK_BYTES, size * (2 * block + 1) // (2 * blocks)))
        except OSError as error:
            raise UserError(f"The file {path} could not be read: {error.strerror}.") from error
    return b"".join(pieces)


Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Keeps the values used last. Unlike with `functools.lru_cache`, its owner can be pickled: the copy is empty."""

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self._values: dict[Any, Value] = {}

    def get(self, key: Any, make: Callable[[Any], Value]) -> Value:
        """Return the value of a key, made by `make` if it is not cached."""
        value = self._values.pop(key) if key in self._values else make(key)
        if len(self._values) >= self.maxsize:
            del self._values[next(iter(self._values))]
        self._values[key] = value  # the last one in the dictionary is the one used last
        return value

    def __reduce__(self) -> tuple[type[LruCache[Value]], tuple[int]]:
        return type(self), (self.maxsize,)
