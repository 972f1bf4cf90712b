"""Features of many items, computed on every device and cached under the hash of their content."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from muralist.core.errors import UserError
from muralist.core.hardware import available_cpus
from muralist.core.run_dir import disk_write_error
from muralist.data.decode import ImageDecodeError, decode_pixels
from muralist.evaluate.encoders import Encoder
from muralist.evaluate.extraction import BATCH, extract
from muralist.evaluate.feature_cache import CPU, FeatureCache, FeatureItem
from muralist.evaluate.workers import extract_together

log = logging.getLogger("muralist")
_LOG_INTERVAL = 10.0  # seconds between lines of progress
Progress = Callable[[int, int], None]
"""Called with the number of finished items and their total."""


@dataclass
class Features:
    """Features of the readable items, in the order of the items."""

    rows: np.ndarray  # [N, D] float32
    indices: list[int]
    """The item of each row."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Why an item has no row, by its index."""
    computed: int = 0
    cached: int = 0

    def split(self, count: int) -> tuple[Features, Features]:
        """Split into the features of the first `count` items and those of the others."""
        place = sum(index < count for index in self.indices)
        first = {index: why for index, why in self.unreadable.items() if index < count}
        rest = {index - count: why for index, why in self.unreadable.items() if index >= count}
        return (
            Features(self.rows[:place], self.indices[:place], first),
            Features(self.rows[place:], [index - count for index in self.indices[place:]], rest),
        )

    def require_two(self, folder: str | None) -> None:
        """Refuse a set that is too small for statistics."""
        if len(self.indices) < 2:
            first = next(iter(self.unreadable.values()), "")
            raise UserError(
                f"Fewer than two images of {folder} can be read.",
                f"{len(self.unreadable):,} are broken, the first because: {first}." if first else "",
                "Check that they were copied completely.",
            )


def find_unreadable(items: Sequence[FeatureItem]) -> Features:
    """Decode every image without an encoder: where no metric reads the images, the report still names broken ones."""

    def problem(item: FeatureItem) -> str | None:
        data = item.read()
        assert isinstance(data, bytes)
        try:
            decode_pixels(data)
        except ImageDecodeError as error:
            return error.reason
        return None

    with ThreadPoolExecutor(available_cpus()) as pool:
        unreadable = {index: why for index, why in enumerate(pool.map(problem, items)) if why}
    indices = [index for index in range(len(items)) if index not in unreadable]
    return Features(np.zeros((len(indices), 0), np.float32), indices, unreadable)


def device_kind(devices: dict[str, str]) -> str:
    """Return the model names of the devices: other models compute features with other last bits."""
    names = {CPU if name == "cpu" else torch.cuda.get_device_name(torch.device(name)) for name in devices.values()}
    return " and ".join(sorted(names))


def compute_features(
    encoder: Encoder,
    items: Sequence[FeatureItem],
    devices: dict[str, str],
    cache_dir: Path,
    what: str = "images",
    progress: Progress | None = None,
) -> Features:
    """Return the features of all items: cached ones from disk, the rest computed on all devices."""
    cache = FeatureCache(cache_dir, encoder, device_kind(devices))
    keys = {item.key for item in items}
    found = cache.read(keys)
    missing = list({item.key: item for item in items if item.key not in found}.values())
    broken: dict[bytes, str] = {}
    if missing:
        try:
            broken = _compute_missing(encoder, missing, devices, cache, _logged(what, progress))
        except OSError as error:
            raise disk_write_error(error, cache_dir) from None
        found = cache.read(keys)
        if lost := next((item for item in missing if item.key not in found and item.key not in broken), None):
            raise UserError(f"The features of {lost.content} are missing.", fix="Run the same command again.")
    indices = [index for index, item in enumerate(items) if item.key in found]
    rows = np.stack([found[items[i].key] for i in indices]) if indices else np.zeros((0, encoder.width), np.float32)
    unreadable = {index: broken[item.key] for index, item in enumerate(items) if item.key not in found}
    features = Features(rows, indices, unreadable, len(missing) - len(broken), len(keys) - len(missing))
    log.info("%s: features of %s computed, of %s cached.", what, f"{features.computed:,}", f"{features.cached:,}")
    return features


def _logged(what: str, progress: Progress | None) -> Progress:
    """Log the progress now and then, and pass it on."""
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOG_INTERVAL:
            last = now
            log.info("%s: %s of %s, %.1f per second.", what, f"{done:,}", f"{total:,}", done / (now - start))
        if progress:
            progress(done, total)

    return report


def _compute_missing(
    encoder: Encoder, items: Sequence[FeatureItem], devices: dict[str, str], cache: FeatureCache, progress: Progress
) -> dict[bytes, str]:
    """Compute and cache features; returns why some items cannot be decoded, by key."""
    kind = torch.device(next(iter(devices.values()))).type
    batches = [items[start : start + BATCH[kind]] for start in range(0, len(items), BATCH[kind])]
    if kind != "cpu" or min(len(devices), len(batches)) > 1:
        # Even a single GPU gets its own process: a driver may hang, or kill the process.
        return extract_together(encoder, cache, batches, devices, progress)
    broken: dict[bytes, str] = {}
    done, remaining = 0, iter(batches)
    for finished in extract(encoder, cache, lambda waits: next(remaining, None), torch.device("cpu")):
        done += finished.items
        broken |= finished.broken
        progress(done, len(items))
    return broken
