"""The images of a run: what is trained on, and what is held out."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist.data.buckets import (
    BucketedSource,
    Buckets,
    BucketStream,
    MeasurableSource,
    bucket_sizes,
    default_step,
    measurable,
    measure,
    nearest_size,
)
from muralist.data.cache import cached
from muralist.data.encoded import EncodedSource
from muralist.data.fields import short_hash
from muralist.data.hydit_index import IndexSource
from muralist.data.loader import loader_processes
from muralist.data.on_device import free_memory, lies_on_device, picture_bytes
from muralist.data.sources import Source, open_held_out, open_source
from muralist.data.stream import Numbers, Order, Split, Stream, split
from muralist.errors import UserError
from muralist.models import variants
from muralist.runfolder import write_atomically
from muralist.settings import TrainSettings
from muralist.train.distributed import Engine

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
    buckets: Buckets | None = None
    """With --multireso: the size of each picture. Held-out ones are shown at the size of all other runs."""

    def order(self, seed: int, total_batch: int) -> Order:
        """Which image is sample n of a run with this total batch."""
        if self.buckets is None:
            return Stream(seed, self.split.training_size)
        return BucketStream.divide(seed, self.buckets.of_picture[self._trained_on], total_batch)

    def bucket_lines(self, total_batch: int) -> list[str]:
        """What the contract says of the buckets."""
        return self.buckets.lines(self._trained_on, total_batch) if self.buckets else []

    @property
    def largest(self) -> int:
        """The number of a picture that takes as much memory as any."""
        return self.buckets.largest if self.buckets else 0

    def bytes_on(
        self, device: torch.device, settings: TrainSettings, steps: range, total_batch: int, ranks: int
    ) -> int:
        """Bytes of the training pictures if they are to lie on each rank's device for these steps, else 0."""
        if self.encoded or self.buckets:
            return 0
        count = self.split.training_size
        needed = picture_bytes(count, settings.model.img_size)
        whole_epoch = len(steps) * total_batch >= ranks * count  # every rank reads all of them once
        return needed if lies_on_device(settings.data.cache, needed, free_memory(device), whole_epoch) else 0

    @property
    def _trained_on(self) -> Numbers:
        return self.split.training_index(np.arange(self.split.training_size))

    @property
    def encoded(self) -> EncodedSource | None:
        """The source, where it holds what a model's frozen parts made."""
        return self.source if isinstance(self.source, EncodedSource) else None


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
    if isinstance(source, EncodedSource):
        _check_encoded(source, settings)
    size = min(len(source), settings.data.max_samples or len(source))
    if settings.data.multireso:
        measurable(source, " ".join(settings.data.paths))
    else:
        source = cached(source, size, img_size, loader_processes(settings.data))
    own = _open_own_held_out(settings) if settings.data.val_fraction > 0 else None
    parts = split(size, 0.0 if own else settings.data.val_fraction)
    if not parts.training_size:
        raise UserError(
            f"--val_fraction {settings.data.val_fraction:g} holds out all {size:,} images: none are left to train on.",
            fix="Give a smaller one; 0 holds none out.",
        )
    held_out = own or (source if len(parts.held_out) else None)
    indices = split(len(own), 1.0).held_out if own else parts.held_out
    return Data(source, parts, held_out, indices, {"fingerprint": source.fingerprint(), "samples": parts.training_size})


def has_captions(data: Data) -> bool:
    """Whether any of some training images has one; they are chosen evenly, since reading all may take hours."""
    size = data.split.training_size
    chosen = data.split.training_index(np.unique(np.linspace(0, size - 1, _LOOKED_AT).astype(np.int64)))
    if data.encoded:
        return any(caption.strip() for caption in data.encoded.gather(chosen).captions)
    for index in chosen:
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


def in_buckets(data: Data, settings: TrainSettings, engine: Engine, remembered: Path) -> Data:
    """The same data with pictures of several sizes, by their shapes or as a multi-resolution index has them.

    The main process looks at the shapes and leaves them in the file `remembered`, for the others and for the next start.
    """
    source, count, (base, _) = data.source, data.split.source_size, settings.model.size
    assert isinstance(source, MeasurableSource), "open_data has looked"
    if isinstance(source, IndexSource) and source.groups:
        buckets = Buckets.of_index(source, count)
    else:
        sizes = bucket_sizes(base, settings.data.reso_step or default_step(base))
        shapes = _shapes_for_all(source, count, engine, remembered, data.facts["fingerprint"])
        buckets = Buckets.divide(sizes, nearest_size(shapes, sizes))
    divided = cached(BucketedSource(source, buckets), count, base, loader_processes(settings.data))
    facts = data.facts | {"buckets": short_hash(*map(str, buckets.sizes), buckets.of_picture)}
    return replace(data, source=divided, buckets=buckets, facts=facts)


def _shapes_for_all(
    source: MeasurableSource, count: int, engine: Engine, remembered: Path, fingerprint: str
) -> np.ndarray:
    if engine.is_main:
        if (shapes := _recall(remembered, count, fingerprint)) is None:
            shapes = measure(source, count, meanwhile=lambda: engine.largest(1))
            file = io.BytesIO()
            np.savez_compressed(file, shapes=shapes, fingerprint=fingerprint)
            write_atomically(remembered, file.getvalue())
        engine.largest(0)
        return shapes
    while engine.largest(0):  # a sign of life of the main process; to wait for its end at once could take too long
        pass
    shapes = _recall(remembered, count, fingerprint)
    return measure(source, count) if shapes is None else shapes  # it has no part in a folder of another machine


def _recall(remembered: Path, count: int, fingerprint: str) -> np.ndarray | None:
    """The shapes as an earlier start of this run found them, if the data are still the same."""
    try:
        with np.load(remembered, allow_pickle=False) as file:
            shapes, found = file["shapes"], str(file["fingerprint"])
    except (
        Exception
    ):  # what damaged bytes make NumPy, zipfile and zlib raise has no end; the pictures are looked at again
        return None
    whole = shapes.shape == (count, 2) and shapes.dtype == np.int32 and (shapes > 0).all()
    return shapes if found == fingerprint and whole else None


def _check_encoded(source: EncodedSource, settings: TrainSettings) -> None:
    model = settings.model
    if not variants.is_hunyuan(model.name):
        raise UserError(
            f"{source.folder} holds latents for HunyuanDiT, and {model.name} is trained on pixels.",
            fix="Pack the data set without --encode, or train --model HunyuanDiT.",
        )
    if settings.data.cache == "device":
        raise UserError(
            f"--cache device is for pictures, and {source.folder} holds latents.", fix="Leave --cache device out."
        )
    from muralist.models.frozen import check_encoded
    from muralist.models.hunyuan_family import small_folder

    check_encoded(source, Path(model.path) if model.path else small_folder(settings), settings.data.random_flip)
