"""The kinds of data sets that can be trained on, and how a path tells which kind it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from muralist.data import waymo
from muralist.data.arrays import ArraySource, has_held_out
from muralist.data.arrow import ArrowSource
from muralist.data.columns import ColumnSource
from muralist.data.encoded import open_packed
from muralist.data.folder import HELD_OUT_NAMES, FolderSource
from muralist.data.hydit_index import open_index
from muralist.data.images import EXTENSIONS as IMAGE_EXTENSIONS
from muralist.data.images import Size
from muralist.data.item import Item
from muralist.data.manifest import HELD_OUT_FOLDER, is_packed
from muralist.data.parquet import ParquetSource
from muralist.data.paths import check_exists
from muralist.data.several import SeveralSources
from muralist.data.tables import TableSource
from muralist.data.tars import TarSource, expand_ranges
from muralist.errors import UserError


class Source(Protocol):
    """A data set: pictures by number, every one already of the size asked for."""

    label_names: list[str]  # empty when the source has no classes

    def __len__(self) -> int: ...

    def read(self, index: int) -> Item:
        """Return picture `index`."""
        ...

    def fingerprint(self) -> str:
        """Return a short text that changes when the data set does, so that a resumed run can tell."""
        ...


Known = list[str] | None  # the classes of the training part, when a held-out part is opened

EMBEDDED = "driving_world"  # the data set that comes with the program
_FILES: dict[str, Callable[[Path, Size, Known, str | None], Source]] = {
    ".csv": TableSource,
    ".tsv": TableSource,
    ".jsonl": TableSource,
    ".npz": ArraySource,
    ".json": open_index,
}
# Several such files make one data set. Tar files first: img2dataset writes a .parquet of mere metadata beside each.
_SHARDS: dict[str, Callable[[list[Path], Size, Known, str | None], Source]] = {
    ".tar": TarSource,
    ".parquet": ParquetSource,
    ".arrow": ArrowSource,
}


def open_source(
    path: str | Sequence[str], img_size: Size, caption: str | None = None, cameras: Sequence[str] = ()
) -> Source:
    """Open the data set at a path, or the embedded one by its name; `caption` is a column or a template (captions.py).

    Several paths are one data set, in their order. Of Waymo's files some `cameras` may be chosen.
    """
    if not isinstance(path, str):
        return SeveralSources([open_source(one, img_size, caption, cameras) for one in path])
    if path == EMBEDDED:
        from muralist.data.driving_world import DrivingWorld

        return _by_cameras(DrivingWorld(img_size, caption=caption), cameras, path)
    return _by_cameras(_open(Path(path).expanduser(), img_size, None, caption), cameras, path)


def open_held_out(
    path: str | Sequence[str],
    img_size: Size,
    same_classes: bool = True,
    caption: str | None = None,
    cameras: Sequence[str] = (),
) -> Source | None:
    """Open the part that the data set itself holds out from training, with the same classes; None if there is none.

    That is the test_x of an .npz file, the val... or test... files beside train... files in a folder, the folder val,
    validation or test beside a folder train, Waymo's validation part, and what a packed folder holds out. Of several data
    sets, those that hold out something do.
    """
    if not isinstance(path, str):
        parts = [open_held_out(one, img_size, same_classes, caption, cameras) for one in path]
        return SeveralSources(found) if (found := [part for part in parts if part is not None]) else None
    held_out = _open_held_out(path, img_size, same_classes, caption)
    return held_out and _by_cameras(held_out, cameras, path)


def _open_held_out(path: str, img_size: Size, same_classes: bool, caption: str | None) -> Source | None:
    if path == EMBEDDED:
        from muralist.data.driving_world import DrivingWorld

        # Far behind the scenes that are trained on.
        return DrivingWorld(img_size, samples=512, first=1_000_000, caption=caption)

    def known() -> Known:
        return open_source(path, img_size).label_names if same_classes else None

    place = Path(path).expanduser()
    if is_packed(place):
        held_out = place / HELD_OUT_FOLDER
        return open_packed(held_out, img_size, caption) if is_packed(held_out) else None
    if place.suffix.lower() == ".npz":
        return ArraySource(place, img_size, known(), caption, held_out=True) if has_held_out(place) else None
    if not place.is_dir():
        return None
    for suffix, kind in _SHARDS.items():
        if shards := _shards(place, suffix, held_out=True):
            return kind(shards, img_size, known(), caption)
    if sibling := waymo.validation_folder(place.absolute()):
        return _open(sibling, img_size, known(), caption)
    if place.absolute().name == "train":
        for name in HELD_OUT_NAMES:
            if (sibling := place.absolute().parent / name).is_dir():
                return _open(sibling, img_size, known(), caption)
    return None


def _by_cameras(source: Source, cameras: Sequence[str], path: str) -> Source:
    if cameras and not isinstance(source, ColumnSource):
        raise waymo.no_cameras(path)
    if cameras and isinstance(source, ColumnSource):
        source.keep_cameras(cameras)
    return source


def read_batch(source: Source, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read pictures by number: uint8 [B, H, W, 3], labels int64 [B], captions."""
    if gather := getattr(source, "read_batch", None):
        return gather(indices)
    items = [source.read(int(index)) for index in indices]
    labels = np.array([item.label for item in items], dtype=np.int64)
    return np.stack([item.image for item in items]), labels, [item.caption for item in items]


def _open(path: Path, img_size: Size, known: Known, caption: str | None) -> Source:
    shards = expand_ranges(str(path))
    for shard in shards:
        check_exists(
            shard,
            "data set",
            "Give a folder, a file, or the name driving_world for the embedded data set.",
        )
    if path.is_dir():
        return _open_folder(path, img_size, known, caption)
    suffix = shards[0].suffix.lower()
    if suffix in _SHARDS:
        return _SHARDS[suffix](shards, img_size, known, caption)
    if suffix in _FILES and len(shards) == 1:
        return _FILES[suffix](path, img_size, known, caption)
    raise UserError(
        f"{path} is not a kind of file that holds a data set.",
        fix=f"Give a folder of images or a file that ends in {' '.join([*_FILES, *_SHARDS])}.",
    )


def _open_folder(folder: Path, img_size: Size, known: Known, caption: str | None) -> Source:
    if is_packed(folder):
        return open_packed(folder, img_size, caption)
    for suffix, kind in _SHARDS.items():
        if not (shards := _shards(folder, suffix, held_out=False)):
            continue
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix.lower() in IMAGE_EXTENSIONS):
                raise UserError(
                    f"{folder} holds both {suffix} files ({shards[0].name}) and {entry.name}.",
                    f"Either could be the data set: the {suffix} files, or the images and class folders.",
                    "Move one of them elsewhere.",
                )
        return kind(shards, img_size, known, caption)
    return FolderSource(folder, img_size, known, caption)


def _shards(folder: Path, suffix: str, held_out: bool) -> list[Path]:
    """List the files of a folder that end in `suffix`: all, or one part where their names begin with train, val, test."""
    files = sorted(path for path in folder.glob("[!.]*") if path.suffix.lower() == suffix and path.is_file())
    parts = {part: [path for path in files if path.name.lower().startswith(part)] for part in ("train", "val", "test")}
    if held_out:
        return (parts["val"] or parts["test"]) if parts["train"] else []
    return parts["train"] or files
