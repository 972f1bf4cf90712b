"""Open a data set: finds the kind of source that reads a path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from muralist.core.errors import UserError
from muralist.core.image_size import Size
from muralist.core.run_dir import check_exists
from muralist.data.decode import IMAGE_EXTENSIONS
from muralist.data.packed import HELD_OUT_FOLDER, is_packed, open_packed
from muralist.data.source import ConcatSource, Source
from muralist.data.sources.arrays import ArraySource, array_names
from muralist.data.sources.columnar import ArrowSource, ParquetSource, select_cameras, waymo_validation_folder
from muralist.data.sources.files import HELD_OUT_NAMES, FolderSource, TableSource
from muralist.data.sources.hydit_index import open_index
from muralist.data.sources.webdataset import WebDatasetSource, expand_ranges

Known = list[str] | None
"""The classes of the training set, when its held-out set is opened."""

EMBEDDED = "driving_world"
"""The data set that ships with muralist."""

_FILES: dict[str, Callable[[Path, Size, Known, str | None], Source]] = {
    ".csv": TableSource,
    ".tsv": TableSource,
    ".jsonl": TableSource,
    ".npz": ArraySource,
    ".json": open_index,
}
# Several such files make one data set. Tar files first: img2dataset writes a .parquet of metadata beside each.
_SHARDS: dict[str, Callable[[list[Path], Size, Known, str | None], Source]] = {
    ".tar": WebDatasetSource,
    ".parquet": ParquetSource,
    ".arrow": ArrowSource,
}


def open_source(
    path: str | Sequence[str], img_size: Size, caption: str | None = None, cameras: Sequence[str] = ()
) -> Source:
    """Open the data set at a path, or the embedded one by name.

    Several paths are one data set, in their order. `caption` is a column or a template (CaptionTemplate); `cameras`
    selects among the cameras of the Waymo Open Dataset.
    """
    if not isinstance(path, str):
        return ConcatSource([open_source(one, img_size, caption, cameras) for one in path])
    if path == EMBEDDED:
        source = _embedded()(img_size, caption=caption)
    else:
        source = _open(Path(path).expanduser(), img_size, None, caption)
    return select_cameras(source, cameras, path)


def open_held_out(
    path: str | Sequence[str],
    img_size: Size,
    same_classes: bool = True,
    caption: str | None = None,
    cameras: Sequence[str] = (),
) -> Source | None:
    """Open the part that the data set itself holds out from training, with the same classes; None if there is none.

    That is the test_x of an .npz file, the val... or test... files beside train... files in a folder, the folder val,
    validation or test beside a folder train, Waymo's validation set, and the held-out part of a packed folder.
    """
    if not isinstance(path, str):
        parts = [open_held_out(one, img_size, same_classes, caption, cameras) for one in path]
        found = [part for part in parts if part is not None]
        known = open_source(path, img_size).label_names if found and same_classes else None
        return ConcatSource(found, known) if found else None
    held_out = _open_held_out(path, img_size, same_classes, caption)
    return held_out and select_cameras(held_out, cameras, path)


def _open_held_out(path: str, img_size: Size, same_classes: bool, caption: str | None) -> Source | None:
    if path == EMBEDDED:
        return _embedded()(img_size, samples=512, first=1_000_000, caption=caption)  # far beyond the training scenes

    def known() -> Known:
        return open_source(path, img_size).label_names if same_classes else None

    place = Path(path).expanduser()
    if is_packed(place):
        held_out = place / HELD_OUT_FOLDER
        return open_packed(held_out, img_size, caption) if is_packed(held_out) else None
    if place.suffix.lower() == ".npz":
        return ArraySource(place, img_size, known(), caption, held_out=True) if "test_x" in array_names(place) else None
    if not place.is_dir():
        return None
    for suffix, kind in _SHARDS.items():
        if shards := _shards(place, suffix, held_out=True):
            return kind(shards, img_size, known(), caption)
    sibling = waymo_validation_folder(place.absolute())
    if place.absolute().name == "train":
        beside = (place.absolute().parent / name for name in HELD_OUT_NAMES)
        sibling = next((folder for folder in beside if folder.is_dir()), None)
    return _open(sibling, img_size, known(), caption) if sibling else None


def _embedded() -> Callable[..., Source]:
    # Named by a string because `demo` is a layer above `data`.
    return import_module("muralist.demo.driving_world").DrivingWorld


def _open(path: Path, img_size: Size, known: Known, caption: str | None) -> Source:
    shards = expand_ranges(str(path))
    for shard in shards:
        check_exists(shard, "data set", f"Give a folder, a file, or the name {EMBEDDED} for the embedded data set.")
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
            if entry.name.startswith(".") or entry.name == HELD_OUT_FOLDER:
                continue
            if entry.is_dir() or entry.suffix.lower() in IMAGE_EXTENSIONS:
                raise UserError(
                    f"{folder} holds both {suffix} files ({shards[0].name}) and {entry.name}.",
                    f"Either could be the data set: the {suffix} files, or the images and class folders.",
                    "Move one of them elsewhere.",
                )
        return kind(shards, img_size, known, caption)
    return FolderSource(folder, img_size, known, caption)


def _shards(folder: Path, suffix: str, held_out: bool) -> list[Path]:
    """List the files that end in `suffix`: all, or one part where their names begin with train, val or test."""
    files = sorted(path for path in folder.glob("[!.]*") if path.suffix.lower() == suffix and path.is_file())
    parts = {part: [path for path in files if path.name.lower().startswith(part)] for part in ("train", "val", "test")}
    if held_out:
        return (parts["val"] or parts["test"]) if parts["train"] else []
    return parts["train"] or files
