"""The images of a run: what is trained on, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from muralist.data.cache import cached
from muralist.data.loader import loader_processes
from muralist.data.sources import Source, open_held_out, open_source
from muralist.data.stream import Split, split
from muralist.errors import UserError
from muralist.settings import TrainSettings

_LOOKED_AT = 32  # images, for captions


@dataclass(frozen=True)
class Data:
    """The images of a run: what is trained on and what is held out."""

    source: Source
    split: Split
    held_out: Source | None
    held_out_indices: np.ndarray
    facts: dict[str, Any]
    """What a checkpoint remembers of the data, to tell whether it changed."""


def open_data(settings: TrainSettings) -> Data:
    """Open the source; its own held-out part serves for val/loss if it has one, else a fixed part of it is held out."""
    path, img_size = settings.data.path or "", settings.model.img_size
    source = open_source(path, img_size, settings.data.caption, settings.data.cameras)
    if settings.model.enable_condition and not source.label_names:
        raise UserError(
            f"--enable_condition needs labels, and {' '.join(settings.data.paths)} has none.",
            "Several data sets have labels together only if their classes are the same."
            if len(settings.data.paths) > 1
            else "",
            "Put the images into one sub-folder per class, or leave --enable_condition out.",
        )
    size = min(len(source), settings.data.max_samples or len(source))
    source = cached(source, size, img_size, loader_processes(settings.data))
    own = _open_own_held_out(settings) if settings.data.val_fraction > 0 else None
    parts = split(size, 0.0 if own else settings.data.val_fraction)
    held_out = own or (source if len(parts.held_out) else None)
    indices = split(len(own), 1.0).held_out if own else parts.held_out
    return Data(source, parts, held_out, indices, {"fingerprint": source.fingerprint(), "samples": parts.training_size})


def has_captions(data: Data) -> bool:
    """Whether any of some training images has one; they are chosen evenly, since reading all may take hours."""
    size = data.split.training_size
    for index in data.split.training_index(np.unique(np.linspace(0, size - 1, _LOOKED_AT).astype(np.int64))):
        try:
            if data.source.read(int(index)).caption.strip():
                return True
        except UserError:
            continue  # a broken image is named when training comes to it
    return False


def _open_own_held_out(settings: TrainSettings) -> Source | None:
    try:
        model, data = settings.model, settings.data
        return open_held_out(data.path or "", model.img_size, model.enable_condition, data.caption, data.cameras)
    except UserError as error:
        way_out = "Or give --val_fraction 0 to train without held-out images."
        raise UserError(error.what, error.why, f"{error.fix} {way_out}".strip()) from None
