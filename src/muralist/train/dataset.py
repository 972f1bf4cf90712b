"""The data of a run: training images, held-out images, and multi-resolution buckets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.core.run_dir import atomic_write
from muralist.data import sampler
from muralist.data.loader import fits_on_device, free_device_memory, image_bytes, num_loader_workers
from muralist.data.packed import LatentSource
from muralist.data.source import ConcatSource, Source, cache_in_memory, contents_of, short_hash
from muralist.data.sources import open_held_out, open_source
from muralist.data.sources.hydit_index import IndexSource
from muralist.models.spec import families_with, find_family
from muralist.settings import TrainSettings
from muralist.train.distributed import World

_CAPTIONS_CHECKED = 32  # images
NO_CAPTIONS = (
    "None of the images that were checked has a caption: the model will learn images, but not to follow a prompt. "
    "Set --caption to the name of a column or to a text such as 'A photo of {label}', or write the caption of "
    "image.jpg into image.txt beside it."
)


@dataclass(frozen=True)
class TrainingData:
    """Training images and held-out images of a run."""

    source: Source
    split: sampler.Split
    held_out: Source | None
    held_out_indices: np.ndarray
    facts: dict[str, Any]  # fingerprint and size, which checkpoints store to notice that the data changed
    found: str = ""  # images, classes, missing captions and skipped files, for the run summary
    buckets: sampler.Buckets | None = None  # with --multireso; held-out images have one size, as in all other runs
    weighted: sampler.WeightedOrder | None = None  # with --data_weights; of any seed

    def order(self, seed: int, total_batch: int) -> sampler.SampleOrder:
        """The order of images: sample index to position."""
        if self.weighted:
            return replace(self.weighted, seed=seed)
        if self.buckets is None:
            return sampler.ShuffledOrder(seed, self.split.training_size)
        return sampler.BucketSampler.build(seed, self.buckets.of_image[self._trained_on], total_batch)

    def bucket_lines(self, total_batch: int) -> list[str]:
        """Lines of the run summary about the buckets."""
        return self.buckets.summary(self._trained_on, total_batch) if self.buckets else []

    def share_lines(self, paths: list[str]) -> list[str]:
        """Lines of the run summary about the shares of several data sets."""
        if self.weighted is None:
            return []
        rows = zip(paths, self.weighted.counts, self.weighted.sizes, strict=True)
        return [f"shares     {path}: {count:,} samples per epoch from {size:,} images" for path, count, size in rows]

    @property
    def largest(self) -> int:
        """Index of an image of the largest size."""
        return self.buckets.largest if self.buckets else 0

    def bytes_on(self, device: torch.device, settings: TrainSettings, steps: range, total: int, ranks: int) -> int:
        """Bytes of the training images if they are to be kept on each rank's device for these steps, else 0."""
        if self.latents or self.buckets:
            return 0
        count = self.split.training_size
        needed = image_bytes(count, settings.model.img_size)
        full_epoch = len(steps) * total >= ranks * count  # every rank reads each image once on average
        return needed if fits_on_device(settings.data.cache, needed, free_device_memory(device), full_epoch) else 0

    @property
    def _trained_on(self) -> sampler.Indices:
        return self.split.training_index(np.arange(self.split.training_size))

    @property
    def latents(self) -> LatentSource | None:
        """The source, if it was encoded ahead of training."""
        return self.source if isinstance(self.source, LatentSource) else None


def open_data(settings: TrainSettings) -> TrainingData:
    """Open the data set; val/loss uses its own validation split, or a fixed fraction of the images is held out."""
    path, img_size = settings.data.path or "", settings.model.img_size
    source = open_source(path, img_size, settings.data.caption, settings.data.cameras)
    parts = source.sources if isinstance(source, ConcatSource) else [source]
    if settings.model.enable_condition and not source.label_names:
        without = [name for name, part in zip(settings.data.paths, parts, strict=True) if not part.label_names]
        raise UserError(
            f"--enable_condition needs labels, and {' '.join(without)} has none.",
            "Labels are the names of sub-folders or a column label; captions are not labels.",
            "Put the images into one sub-folder per class, or leave --enable_condition out.",
        )
    if len(parts) > 1 and find_family(settings.model.name).uses_captions:
        _refuse_labels_among_captions(dict(zip(settings.data.paths, parts, strict=True)))
    if isinstance(source, LatentSource):
        _check_latents(source, settings)
    found = describe_source(source, settings)
    size = min(len(source), settings.data.max_samples or len(source))
    if settings.data.multireso:
        sampler.check_measurable(source, " ".join(settings.data.paths))
    else:
        source = cache_in_memory(source, size, img_size, num_loader_workers(settings.data))
    own = _open_own_held_out(settings) if settings.data.val_fraction > 0 else None
    split = sampler.split_held_out(size, 0.0 if own else settings.data.val_fraction)
    if not split.training_size:
        raise UserError(
            f"--val_fraction {settings.data.val_fraction:g} holds out all {size:,} images: none are left to train on.",
            fix="Give a smaller one; 0 holds none out.",
        )
    held_out = own or (source if len(split.held_out) else None)
    indices = sampler.split_held_out(len(own), 1.0).held_out if own else split.held_out
    facts = {"fingerprint": source.fingerprint(), "samples": split.training_size}
    weighted = None
    if settings.data.weights:
        ends = split.training_positions(np.cumsum([len(part) for part in parts]))
        sizes = tuple(int(count) for count in np.diff(ends, prepend=0))
        if 0 in sizes:
            empty = settings.data.paths[sizes.index(0)]
            raise UserError(f"--data_weights: {empty} has no training image.", fix="Leave it out of --data_path.")
        weighted = sampler.WeightedOrder(settings.seed, sizes, tuple(settings.data.weights))
    return TrainingData(source, split, held_out, indices, facts, found, weighted=weighted)


def _refuse_labels_among_captions(parts: dict[str, Source]) -> None:
    """Refuse a data set with labels and no captions beside one with captions: its images would have empty prompts."""
    captioned = {
        path: any(caption.strip() for caption in _captions(part, np.arange(min(len(part), _CAPTIONS_CHECKED))))
        for path, part in parts.items()
    }
    labeled = [path for path, part in parts.items() if part.label_names and not captioned[path]]
    if any(captioned.values()) and labeled:
        raise UserError(
            f"{labeled[0]} has class labels and no captions, and {max(captioned, key=captioned.__getitem__)} has captions.",
            "This model is trained on captions: images without one would have an empty prompt.",
            f"Write captions for {labeled[0]} (image.txt beside image.jpg), or train on it alone with "
            "--caption 'A photo of {label}'.",
        )


def describe_source(source: Source, settings: TrainSettings) -> str:
    """Say what was found at the data path, and what of it this run does not use."""
    images, classes, contents = len(source), source.label_names, contents_of(source)
    text = f"{images:,} image{'s' * (images != 1)}"
    uses_captions = find_family(settings.model.name).uses_captions
    if classes:
        unused = "" if settings.model.enable_condition or uses_captions else " (not used without --enable_condition)"
        text += f", {len(classes):,} class{'es' * (len(classes) != 1)}: {format_list(classes)}{unused}"
    if contents.uncaptioned is not None and uses_captions:
        text += f"; {contents.uncaptioned:,} without captions" if contents.uncaptioned else ", all with captions"
    elif contents.uncaptioned is not None and contents.uncaptioned < images:
        text += f"; captions, which {settings.model.name} does not use"
    if contents.skipped:
        kinds = sorted(contents.skipped.items(), key=lambda pair: (-pair[1], pair[0]))
        count = sum(contents.skipped.values())
        words = format_list([f"{number:,} {kind}" for kind, number in kinds])
        text += f"; {count:,} file{'s' * (count != 1)} skipped: {words}"
    return text


def has_captions(data: TrainingData) -> bool:
    """Whether any of some evenly chosen training images has a caption; reading all may take hours."""
    return bool(some_captions(data, 1))


def some_captions(data: TrainingData, count: int = 8) -> list[str]:
    """Return up to `count` different captions of some evenly chosen training images."""
    size = data.split.training_size
    chosen = data.split.training_index(np.unique(np.linspace(0, size - 1, _CAPTIONS_CHECKED).astype(np.int64)))
    found = iter(data.latents.read_latents(chosen)[2]) if data.latents else _captions(data.source, chosen)
    captions: dict[str, None] = {}
    for caption in found:
        if caption.strip():
            captions[caption] = None
        if len(captions) == count:
            break
    return list(captions)


def _captions(source: Source, indices: np.ndarray) -> Iterator[str]:
    for index in indices:
        with suppress(UserError):  # a broken image is reported when training reads it
            yield source.read(int(index)).caption


def _open_own_held_out(settings: TrainSettings) -> Source | None:
    try:
        model, data = settings.model, settings.data
        return open_held_out(data.path or "", model.img_size, model.enable_condition, data.caption, data.cameras)
    except UserError as error:
        fix = f"{error.fix} Or give --val_fraction 0 to train without held-out images.".strip()
        raise UserError(error.what, error.why, fix) from None


def with_buckets(data: TrainingData, settings: TrainSettings, world: World, cache: Path) -> TrainingData:
    """Assign each image to a size bucket, by its shape or as a multi-resolution index says.

    The main process measures the shapes and writes them into the file `cache`, for the other ranks and the next start.
    """
    source, count, (base, _) = data.source, data.split.source_size, settings.model.size
    assert isinstance(source, sampler.MeasurableSource), "checked by open_data"
    if isinstance(source, IndexSource) and source.groups:
        buckets = sampler.Buckets.of_index(source, count)
    else:
        sizes = sampler.bucket_sizes(base, settings.data.reso_step or sampler.default_step(base))
        skip = settings.data.on_broken == "skip"
        shapes = _shared_shapes(source, count, world, cache, data.facts["fingerprint"], skip)
        buckets = sampler.Buckets.assign(sizes, sampler.nearest_size(shapes, sizes))
    divided = cache_in_memory(sampler.BucketedSource(source, buckets), count, base, num_loader_workers(settings.data))
    facts = data.facts | {"buckets": short_hash(*map(str, buckets.sizes), buckets.of_image)}
    return replace(data, source=divided, buckets=buckets, facts=facts)


def _shared_shapes(
    source: sampler.MeasurableSource, count: int, world: World, cache: Path, fingerprint: str, skip_broken: bool
) -> np.ndarray:
    if world.is_main:
        if (shapes := _read_shapes(cache, count, fingerprint)) is None:
            shapes = sampler.measure_shapes(source, count, lambda: world.all_reduce_max(1), skip_broken)
            file = io.BytesIO()
            np.savez_compressed(file, shapes=shapes, fingerprint=fingerprint)
            atomic_write(cache, file.getvalue())
        world.all_reduce_max(0)
        return shapes
    while world.all_reduce_max(0):
        pass  # the main process takes part regularly: one long wait could exceed the timeout
    shapes = _read_shapes(cache, count, fingerprint)
    if shapes is None:  # the folder is not shared with the main process
        shapes = sampler.measure_shapes(source, count, skip_broken=skip_broken)
    return shapes


def _read_shapes(cache: Path, count: int, fingerprint: str) -> np.ndarray | None:
    """Read the shapes that an earlier start measured, if the data are still the same."""
    try:
        with np.load(cache, allow_pickle=False) as file:
            shapes, found = file["shapes"], str(file["fingerprint"])
    except Exception:  # damaged files make NumPy, zipfile and zlib raise almost anything; the images are measured again
        return None
    plausible = shapes.shape == (count, 2) and shapes.dtype == np.int32 and (shapes > 0).all()
    return shapes if found == fingerprint and plausible else None


def _check_latents(source: LatentSource, settings: TrainSettings) -> None:
    family = find_family(settings.model.name)
    folder = family.folder(settings)
    if not family.supports_latents or folder is None:
        raise UserError(
            f"{source.folder} holds latents, and {settings.model.name} is trained on pixels.",
            fix=f"Pack the data set without --encode, or train --model {families_with('supports_latents')}.",
        )
    if settings.data.cache == "device":
        raise UserError(
            f"--cache device is for images, and {source.folder} holds latents.", fix="Leave --cache device out."
        )
    family.check_latents(source, folder, settings.data.random_flip)
