"""Features of many items, on every device at hand, kept in a cache under the hash of what they were computed from."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from muralist.data.images import BrokenImage, decode, read_image_file, stored_shape
from muralist.errors import UserError
from muralist.evaluate.cache import CPU, Cache, Item
from muralist.evaluate.crew import extract_together
from muralist.evaluate.extraction import BATCH, content, extract
from muralist.evaluate.extractors import Extractor
from muralist.machine import usable_cores
from muralist.runfolder import no_space

log = logging.getLogger("muralist")
_SILENCE = 10.0  # seconds between lines of progress


@dataclass
class Features:
    """Rows in the order of the items, without those that could not be read."""

    rows: np.ndarray  # [N, D] float32
    kept: list[int]
    unreadable: dict[int, str] = field(default_factory=dict)
    computed: int = 0
    remembered: int = 0

    def part(self, start: int, end: int) -> Features:
        """Those of some of the items, numbered from 0."""
        places = [place for place, index in enumerate(self.kept) if start <= index < end]
        unreadable = {index - start: why for index, why in self.unreadable.items() if start <= index < end}
        return Features(self.rows[places], [self.kept[place] - start for place in places], unreadable)


def hash_files(paths: Sequence[Path]) -> list[Item]:
    """An item for each file, by its content; the file's header tells the size."""

    def item(path: Path) -> Item:
        data = read_image_file(path)
        shape = None
        with suppress(BrokenImage):
            shape = stored_shape(data)
        return Item(hashlib.sha256(data).digest(), path, shape)

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(item, paths))


def look_at(items: Sequence[Item]) -> Features:
    """No features, but which pictures can be decoded: for where nothing is computed that would tell."""

    def fault(item: Item) -> str | None:
        data = content(item)
        assert isinstance(data, bytes)
        try:
            decode(data)
        except BrokenImage as error:
            return error.reason
        return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        unreadable = {index: why for index, why in enumerate(pool.map(fault, items)) if why}
    kept = [index for index in range(len(items)) if index not in unreadable]
    return Features(np.zeros((len(kept), 0), np.float32), kept, unreadable)


def hash_texts(texts: Sequence[str]) -> list[Item]:
    """An item for each prompt."""
    return [Item(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), text) for text in texts]


def device_kind(devices: dict[str, str]) -> str:
    """What computes: features of other kinds differ in their last bits."""
    names = {CPU if name == "cpu" else torch.cuda.get_device_name(torch.device(name)) for name in devices.values()}
    return " and ".join(sorted(names))


def compute(
    extractor: Extractor,
    items: Sequence[Item],
    devices: dict[str, str],
    cache_folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Features of all items: from the cache what is there, the rest shared among the devices."""
    cache = Cache(cache_folder, extractor, device_kind(devices))
    wanted = {item.key for item in items}
    found = cache.read(wanted)
    missing = list({item.key: item for item in items if item.key not in found}.values())
    broken: dict[bytes, str] = {}
    if missing:
        kind = torch.device(next(iter(devices.values()))).type
        batches = [missing[start : start + BATCH[kind]] for start in range(0, len(missing), BATCH[kind])]
        if kind == "cpu" and min(len(devices), len(batches)) == 1:
            broken = _extract_here(extractor, cache, batches, progress)
        else:  # a process even for one GPU: the driver may hang, or end it
            broken = extract_together(extractor, cache, batches, devices, progress)
        found = cache.read(wanted)
        if lost := next((item for item in missing if item.key not in found and item.key not in broken), None):
            raise UserError(f"The features of {lost.content} are missing.", fix="Run the same command again.")
    kept = [index for index, item in enumerate(items) if item.key in found]
    rows = np.stack([found[items[index].key] for index in kept]) if kept else np.zeros((0, extractor.width), np.float32)
    unreadable = {index: broken[item.key] for index, item in enumerate(items) if item.key not in found}
    computed = len(missing) - len(broken)
    return Features(rows, kept, unreadable, computed, len(wanted) - len(missing))


def _extract_here(
    extractor: Extractor, cache: Cache, batches: Sequence[list[Item]], progress: Callable[[int, int], None]
) -> dict[bytes, str]:
    """On the CPU, in this process: which spares the start of another."""
    done, total = 0, sum(map(len, batches))
    broken: dict[bytes, str] = {}
    left = iter(batches)
    for finished in extract(extractor, cache, lambda waits: next(left, None), torch.device("cpu")):
        done += finished.items
        broken |= finished.broken
        progress(done, total)
    return broken


def compute_aloud(
    extractor: Extractor, items: Sequence[Item], devices: dict[str, str], cache: Path, what: str
) -> Features:
    """`compute`, with a line of progress now and then."""
    begun = said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SILENCE:
            said = now
            log.info("%s: %s of %s, %.1f a second.", what, f"{done:,}", f"{total:,}", done / (now - begun))

    try:
        found = compute(extractor, items, devices, cache, progress)
    except OSError as error:
        raise no_space(error, cache) from None
    log.info("%s: features of %s computed, of %s remembered.", what, f"{found.computed:,}", f"{found.remembered:,}")
    return found


def at_least_two(found: Features, folder: str | None) -> None:
    """Refuse a set of which no statistics can be had."""
    if len(found.kept) < 2:
        first = next(iter(found.unreadable.values()), "")
        raise UserError(
            f"Fewer than two images of {folder} can be read.",
            f"{len(found.unreadable):,} are broken, the first because: {first}." if first else "",
            "Check that they were copied completely.",
        )
