"""Images in folders: one sub-folder per class, or all in one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from muralist.data import waymo
from muralist.data.fields import sample_files, short_hash
from muralist.data.folder_captions import METADATA_NAMES, TEXT_SUFFIX, FolderCaptions
from muralist.data.images import EXTENSIONS, Size, read_cropped, stored_shape
from muralist.data.item import Item
from muralist.errors import UserError, nearest

HELD_OUT_NAMES = ("val", "validation", "test")  # of a folder beside one called train


class FolderSource:
    """The images below a folder, sorted by class and name; `known` fixes the classes of a held-out folder."""

    def __init__(self, path: Path, img_size: Size, known: list[str] | None = None, caption: str | None = None) -> None:
        import pyarrow

        self.path, self.img_size = path, img_size
        listing = _list(path)
        class_names = sorted({name.split(os.sep, 1)[0] for name in listing.images if os.sep in name})
        _check_layout(path, listing, class_names)
        names = sorted(listing.images, key=lambda name: name.replace(os.sep, "\0"))  # class by class
        self.label_names = class_names if known is None else known
        if known and not class_names:
            raise UserError(f"{path} has no sub-folders, but the images to train on are in {len(known)} class folders.")
        if unknown := sorted(set(class_names) - set(known)) if known else []:
            raise UserError(
                f"{path} has a class folder {unknown[0]}, which the images to train on do not have.",
                nearest(unknown[0], self.label_names),
                "Both parts need the same class names.",
            )
        number = {name: label for label, name in enumerate(self.label_names)}
        self._labels = np.array([number.get(name.split(os.sep, 1)[0], 0) for name in names], dtype=np.int64)
        self._captions = FolderCaptions(path, names, listing.texts, listing.tables, bool(class_names), caption)
        # Arrow keeps a million names in one block, which loader processes share; a list they would each copy.
        self._names = pyarrow.array([os.fsencode(name) for name in names], pyarrow.large_binary())

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Item:
        """Decode image `index`, and read its caption."""
        label = int(self._labels[index])
        caption = self._captions.text(index, self._name(index), self.label_names[label] if self.label_names else None)
        return Item(read_cropped(self._path_of(index), self.img_size), label, caption)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of image `index` in its file."""
        return stored_shape(self._path_of(index))

    def fingerprint(self) -> str:
        """Hash all names, and samples of the files and of the captions."""
        captions = self._captions.hashed(self._name)
        return short_hash("folder", self._names, sample_files(len(self), self._path_of), *captions)

    def _name(self, index: int) -> str:
        return os.fsdecode(self._names[index].as_py())

    def _path_of(self, index: int) -> Path:
        return self.path / self._name(index)


class _Listing:
    """What lies below a folder: images, texts and metadata tables by their paths relative to it, how many other files of
    each kind, and empty sub-folders.
    """

    def __init__(self) -> None:
        self.images: list[str] = []
        self.texts: set[str] = set()
        self.tables: list[str] = []
        self.others: Counter[str] = Counter()
        self.without_images: list[str] = []


def _list(folder: Path) -> _Listing:
    listing = _Listing()
    _walk(folder, "", listing, frozenset())
    return listing


def _walk(folder: Path, prefix: str, listing: _Listing, parents: frozenset[tuple[int, int]]) -> None:
    before = len(listing.images)
    try:
        status = (folder / prefix).stat()
        entries = list(os.scandir(folder / prefix))
    except OSError as error:
        raise UserError(f"The folder {folder / prefix} could not be read: {error.strerror}.") from error
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise UserError(f"The folder {folder / prefix} is a link to a folder that it lies in.", fix="Remove the link.")
    for entry in entries:
        name = os.path.join(prefix, entry.name)  # noqa: PTH118  (a million Path objects would take seconds)
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            _walk(folder, name, listing, parents | {identity})
        elif entry.name.lower().endswith(EXTENSIONS):
            listing.images.append(name)
        elif entry.name.endswith(TEXT_SUFFIX):
            listing.others[TEXT_SUFFIX] += 1
            listing.texts.add(name)
        else:
            listing.others[Path(entry.name).suffix or entry.name] += 1
            if entry.name in METADATA_NAMES:
                listing.tables.append(name)
    if len(listing.images) == before:
        listing.without_images.append(prefix)


def _check_layout(path: Path, listing: _Listing, class_names: list[str]) -> None:
    if not listing.images:
        found = ", ".join(f"{count} x {kind}" for kind, count in listing.others.most_common(5)) or "no files at all"
        fix = (
            "Give a folder of images, a CSV/TSV/JSONL table, .tar, .parquet, .arrow or .npz files, or a packed folder."
        )
        if (path / waymo.COMPONENT).is_dir():
            fix = f"Give {path / waymo.COMPONENT}, which holds the pictures of the Waymo Open Dataset."
        raise UserError(f"There are no images in {path}.", f"Looked for {' '.join(EXTENSIONS)} and found {found}.", fix)
    loose = next((name for name in listing.images if os.sep not in name), None)
    if loose and class_names:
        raise UserError(
            f"{path} holds both images ({loose}) and sub-folders of images ({class_names[0]}).",
            "Sub-folders are classes, and an image outside them would have none.",
            "Move the images into a class folder, or the sub-folders elsewhere.",
        )
    if "train" in class_names and set(class_names) <= {"train", *HELD_OUT_NAMES}:
        raise UserError(
            f"{path} holds the parts of a data set ({', '.join(class_names)}), not classes.",
            fix=f"Give {path / 'train'}; the part to hold out is found beside it.",
        )
    empty = [name for name in listing.without_images if name and os.sep not in name]
    if class_names and empty:
        raise UserError(
            f"The class folder {path / min(empty)} has no images.",
            f"Looked for {' '.join(EXTENSIONS)}.",
            "Remove the folder, or put images of the class into it.",
        )
