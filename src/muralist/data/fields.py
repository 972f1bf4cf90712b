"""Labels, captions and fingerprints: what all sources do alike with the words and numbers beside a picture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from muralist.errors import UserError

CAPTION_FIELDS = ("caption", "text", "prompt", "text_zh")
LABEL_FIELDS = ("label", "class")

_MOST_CLASSES = 1_000_000  # anything above is an identifier that was taken for a label
_SAMPLED_BLOCKS = 256
_BLOCK_BYTES = 4096


def pick(found: Container[str], wanted: tuple[str, ...]) -> str | None:
    """Return the first wanted field that is there, so that the order of `wanted` is the order of preference."""
    for name in wanted:
        if name in found:
            return name
    return None


def caption_text(value: object, where: str, what: str = "caption") -> str:
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


def label_number(value: object, where: str) -> int:
    """Return the label found at `where`, which must be a whole number from 0 up."""
    try:
        if not isinstance(value, int | str) or isinstance(value, bool):
            raise ValueError
        number = int(value)
    except ValueError as error:
        raise UserError(
            f"The label {value!r:.60} in {where} is not a whole number.",
            fix="Number the classes from 0 up, or sort the images into one folder per class.",
        ) from error
    _check_range(number, number, where)
    return number


def settle_labels(
    labels: np.ndarray | None, known: list[str] | None, where: str
) -> tuple[np.ndarray | None, list[str]]:
    """Check whole-number labels and name their classes; `known` are the classes of the training part, for a held-out one."""
    if known == []:
        return None, []
    if labels is None or labels.size == 0:
        if known:
            raise UserError(f"{where} has no labels, but the images to train on have {len(known)} classes.")
        return None, []
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"The labels in {where} are not whole numbers but {labels.dtype}.")
    _check_range(int(labels.min()), int(labels.max()), where)
    if known is None:
        return labels.astype(np.int64), [str(number) for number in range(int(labels.max()) + 1)]
    if int(labels.max()) >= len(known):
        raise UserError(
            f"{where} has a label {int(labels.max())}, but the images to train on have the {len(known)} classes "
            f"0 to {len(known) - 1}."
        )
    return labels.astype(np.int64), known


def short_hash(*parts: Any) -> str:
    """Hash texts, bytes and Arrow or NumPy arrays to 16 hexadecimal digits; parts do not run into each other."""
    digest = hashlib.sha256()
    for part in parts:
        if hasattr(part, "buffers"):  # an Arrow array: hashed as it lies, since a million Python strings take seconds
            pieces = [memoryview(buffer) for buffer in part.buffers() if buffer is not None]
        else:
            pieces = [memoryview(part.encode(errors="surrogateescape") if isinstance(part, str) else part)]
        for piece in pieces:
            digest.update(piece.nbytes.to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest()[:16]


def sample_files(count: int, path_of: Callable[[int], Path]) -> bytes:
    """Return the sizes and pieces of some files, evenly chosen: enough to notice other data, in less than a second."""
    numbers = range(0, count, -(-count // _SAMPLED_BLOCKS))
    blocks = _SAMPLED_BLOCKS // len(numbers)
    pieces: list[bytes] = []
    for path in map(path_of, numbers):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                pieces.append(size.to_bytes(8, "little"))
                for block in range(blocks):
                    pieces.append(os.pread(file.fileno(), _BLOCK_BYTES, size * (2 * block + 1) // (2 * blocks)))
        except OSError as error:
            raise UserError(f"The file {path} could not be read: {error.strerror}.") from error
    return b"".join(pieces)


def _check_range(smallest: int, largest: int, where: str) -> None:
    if smallest < 0:
        raise UserError(f"{where} has the label {smallest}; labels count from 0 up.")
    if largest >= _MOST_CLASSES:
        raise UserError(
            f"{where} has the label {largest}; there can be at most {_MOST_CLASSES:,} classes.",
            "Such numbers are usually identifiers of images, not classes.",
        )
