"""Images in folders: one sub-folder per class, or all in one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from muralist.core.errors import UserError, closest_match
from muralist.data.decode import IMAGE_EXTENSIONS, Size, decode_cropped, read_image_shape
from muralist.data.source import CAPTION_FIELDS, CaptionTemplate, Sample, first_present, sample_files, short_hash
from muralist.data.sources.columnar import WAYMO_COMPONENT
from muralist.data.tables import table_rows

TEXT_SUFFIX = ".txt"
METADATA_NAMES = ("metadata.csv", "metadata.jsonl")  # as the Hugging Face hub knows them

_NAME_COLUMN = "file_name"
_SAMPLED_TEXTS = 256

_Rows = dict[str, dict[str, object]]  # by image name


class FolderCaptions:
    """Makes the captions of a folder's images; text files are read only with their images."""

    def __init__(
        self, folder: Path, names: list[str], texts: set[str], tables: list[str], labelled: bool, rule: str | None
    ) -> None:
        """Take the names of images, text files and tables, all relative to the folder."""
        import pyarrow

        self.folder = folder
        self._has_text = np.array([bool(texts) and _text_name(name) in texts for name in names], dtype=bool)
        rows, columns = _read_tables(folder, tables, set(names)) if tables else ({}, [])
        known = dict.fromkeys([*columns, "caption", *(["label"] if labelled else [])])
        self._caption = CaptionTemplate.resolve(rule, known, str(folder))
        # Arrow keeps a million values in one block, which DataLoader workers share; they would each copy a dictionary.
        self._values: dict[str, Any] = {
            column: pyarrow.array(
                [self._caption.format_cell(rows.get(name, {}).get(column), str(folder / name)) for name in names],
                pyarrow.large_string(),
            )
            for column in self._caption.columns
            if column in columns
        }

    def read(self, index: int, name: str, label_name: str | None) -> str:
        """Return the caption of image `index`, which has this name."""
        cells: dict[str, object] = {column: values[index].as_py() for column, values in self._values.items()}
        where = str(self.folder / name)
        if label_name is not None:
            cells["label"] = label_name
        if self._has_text[index] and "caption" in self._caption.columns:
            cells["caption"] = self._read_text(name)
        return self._caption.format(cells, where)

    def fingerprint_parts(self, name_of: Callable[[int], str]) -> list[Any]:
        """Return the captions' part of a fingerprint: the tables, which images have text files, and some of those."""
        parts: list[Any] = list(self._caption.fingerprint_parts)
        if "caption" in self._caption.columns and self._has_text.any():
            indices = np.flatnonzero(self._has_text)
            sampled = indices[:: -(-len(indices) // _SAMPLED_TEXTS)].tolist()
            parts += ["texts", np.packbits(self._has_text), *(self._read_text(name_of(index)) for index in sampled)]
        for column, values in self._values.items():
            parts += ["column", column, values]
        return parts

    def _read_text(self, name: str) -> str:
        path = self.folder / _text_name(name)
        try:
            return path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"The caption {path} is not UTF-8 text: {error}.", fix="Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"The caption {path} could not be read: {error.strerror}.") from error


def _text_name(name: str) -> str:
    return name[: name.rfind(".")] + TEXT_SUFFIX


def _read_tables(folder: Path, tables: list[str], names: set[str]) -> tuple[_Rows, list[str]]:
    """Return the rows of metadata tables and their columns; a table deeper in the folder overrides those above."""
    rows: _Rows = {}
    columns: dict[str, None] = {}
    seen: dict[str, str] = {}
    for table in sorted(tables, key=lambda name: (name.count(os.sep), name)):
        prefix = os.path.dirname(table)  # noqa: PTH120  (names are wanted, not Path objects)
        if prefix in seen:
            raise UserError(
                f"{folder / prefix} holds both {Path(seen[prefix]).name} and {Path(table).name}.",
                "Either could describe the images.",
                "Remove one of them.",
            )
        seen[prefix] = table
        for line, row in table_rows(folder / table):
            where = f"line {line} of {folder / table}"
            file_name = row.pop(_NAME_COLUMN, None)
            if not isinstance(file_name, str):
                raise UserError(
                    f"There is no {_NAME_COLUMN} in {where}.",
                    f"Its columns are {', '.join(row) or 'none'}.",
                    f"A table of this name gives the image of each row as {_NAME_COLUMN}; rename other tables.",
                )
            name = os.path.normpath(os.path.join(prefix, file_name.strip()))  # noqa: PTH118
            if name not in names:
                raise UserError(
                    f"{where[0].upper()}{where[1:]} names {file_name}, but there is no such image.",
                    fix=f"The paths of {_NAME_COLUMN} are relative to {folder / prefix}.",
                )
            if found := first_present(row, CAPTION_FIELDS):
                row.setdefault("caption", row[found])
            columns.update(dict.fromkeys(row))
            rows[name] = row
    return rows, list(columns)


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
            raise UserError(f"{path} has no sub-folders, but the training images are in {len(known)} class folders.")
        if unknown := sorted(set(class_names) - set(known)) if known else []:
            raise UserError(
                f"{path} has a class folder {unknown[0]}, which the training images do not have.",
                closest_match(unknown[0], self.label_names),
                "Both parts need the same class names.",
            )
        label_of = {name: label for label, name in enumerate(self.label_names)}
        self._labels = np.array([label_of.get(name.split(os.sep, 1)[0], 0) for name in names], dtype=np.int64)
        self._captions = FolderCaptions(path, names, listing.texts, listing.tables, bool(class_names), caption)
        # Arrow keeps a million names in one block, which DataLoader workers share; they would each copy a list.
        self._names = pyarrow.array([os.fsencode(name) for name in names], pyarrow.large_binary())

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Sample:
        """Decode image `index`, and read its caption."""
        label = int(self._labels[index])
        caption = self._captions.read(index, self._name(index), self.label_names[label] if self.label_names else None)
        return Sample(decode_cropped(self._path_of(index), self.img_size), label, caption)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of image `index` in its file."""
        return read_image_shape(self._path_of(index))

    def fingerprint(self) -> str:
        """Hash all names, and excerpts of the files and of the captions."""
        captions = self._captions.fingerprint_parts(self._name)
        return short_hash("folder", self._names, sample_files(len(self), self._path_of), *captions)

    def _name(self, index: int) -> str:
        return os.fsdecode(self._names[index].as_py())

    def _path_of(self, index: int) -> Path:
        return self.path / self._name(index)


class _Listing:
    """The content of a folder by relative path: images, text files, metadata tables, the number of other files of each
    kind, and folders without images.
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
        elif entry.name.lower().endswith(IMAGE_EXTENSIONS):
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
        if (path / WAYMO_COMPONENT).is_dir():
            fix = f"Give {path / WAYMO_COMPONENT}, which holds the images of the Waymo Open Dataset."
        raise UserError(
            f"There are no images in {path}.", f"Looked for {' '.join(IMAGE_EXTENSIONS)} and found {found}.", fix
        )
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
            f"Looked for {' '.join(IMAGE_EXTENSIONS)}.",
            "Remove the folder, or put images of the class into it.",
        )
