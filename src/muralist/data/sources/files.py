"""Image files: those below a folder, one sub-folder per class or all in one, and those that a table names."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from muralist.core.errors import UserError, closest_match
from muralist.core.image_size import Size
from muralist.core.run_dir import base_dir_of
from muralist.data.decode import IMAGE_EXTENSIONS, decode_cropped, read_image_shape
from muralist.data.source import (
    CAPTION_FIELDS,
    LABEL_FIELDS,
    CaptionTemplate,
    Sample,
    SourceContents,
    first_present,
    parse_label,
    resolve_labels,
    sample_files,
    short_hash,
)
from muralist.data.sources.columnar import WAYMO_COMPONENT
from muralist.data.tables import table_rows

HELD_OUT_NAMES = ("val", "validation", "test")  # of a folder beside one called train
_TEXT_SUFFIX = ".txt"
_METADATA_NAMES = ("metadata.csv", "metadata.jsonl")  # as the Hugging Face hub knows them
_NAME_COLUMN = "file_name"
_IMAGE_FIELDS = ("image", "image_path", "img_path", "path", _NAME_COLUMN)
_SAMPLED_TEXTS = 256

_Rows = dict[str, dict[str, object]]  # by image name


class _FileSource(ABC):
    """Image files by their paths relative to a folder."""

    label_names: list[str]
    _labels: np.ndarray | None

    def __init__(self, start: Path, names: list[str], img_size: Size) -> None:
        import pyarrow

        self.start, self.img_size = start, img_size
        # Arrow keeps a million names in one block, which DataLoader workers share; they would each copy a list.
        self._names = pyarrow.array([os.fsencode(name) for name in names], pyarrow.large_binary())

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> Sample:
        """Decode image `index`, and read its caption."""
        label = 0 if self._labels is None else int(self._labels[index])
        return Sample(decode_cropped(self._path_of(index), self.img_size), label, self._caption_of(index, label))

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of image `index` in its file."""
        return read_image_shape(self._path_of(index))

    @abstractmethod
    def _caption_of(self, index: int, label: int) -> str:
        """Return the caption of image `index`."""

    def _name(self, index: int) -> str:
        return os.fsdecode(self._names[index].as_py())

    def _path_of(self, index: int) -> Path:
        return self.start / self._name(index)


# -- folders


class FolderSource(_FileSource):
    """The images below a folder, sorted by class and name; `known` fixes the classes of a held-out folder."""

    def __init__(self, path: Path, img_size: Size, known: list[str] | None = None, caption: str | None = None) -> None:
        import pyarrow

        listing = _Listing(path)
        class_names = sorted({name.split(os.sep, 1)[0] for name in listing.images if os.sep in name})
        _check_layout(path, listing, class_names)
        names = sorted(listing.images, key=lambda name: name.replace(os.sep, "\0"))  # class by class
        super().__init__(path, names, img_size)
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
        # Text files are read only with their images.
        self._has_text = np.array([_text_name(name) in listing.texts for name in names], dtype=bool)
        rows, columns = _read_tables(path, listing.tables, set(names))
        usable = dict.fromkeys([*columns, "caption", *(["label"] if class_names else [])])
        self._caption = CaptionTemplate.resolve(caption, usable, str(path))
        self._values: dict[str, Any] = {
            column: pyarrow.array(
                [self._caption.format_cell(rows.get(name, {}).get(column), str(path / name)) for name in names],
                pyarrow.large_string(),
            )
            for column in self._caption.columns
            if column in columns
        }
        self.contents = SourceContents(self._count_uncaptioned(bool(class_names)), listing.skipped)

    def fingerprint(self) -> str:
        """Hash all names, the captions of tables, and excerpts of images and text files."""
        parts: list[Any] = list(self._caption.fingerprint_parts)
        if "caption" in self._caption.columns and self._has_text.any():
            indices = np.flatnonzero(self._has_text)
            sampled = indices[:: -(-len(indices) // _SAMPLED_TEXTS)].tolist()
            parts += ["texts", np.packbits(self._has_text), *map(self._read_text, sampled)]
        for column, values in self._values.items():
            parts += ["column", column, values]
        return short_hash("folder", self._names, sample_files(len(self), self._path_of), *parts)

    def _caption_of(self, index: int, label: int) -> str:
        cells: dict[str, object] = {column: values[index].as_py() for column, values in self._values.items()}
        if self.label_names:
            cells["label"] = self.label_names[label]
        if self._has_text[index] and "caption" in self._caption.columns:
            cells["caption"] = self._read_text(index)
        return self._caption.format(cells, str(self._path_of(index)))

    def _count_uncaptioned(self, labeled: bool) -> int:
        """Count the images without text for their captions; text files are not opened, so empty ones count as captions."""
        if self._caption.is_always_there or (labeled and "label" in self._caption.columns):
            return 0
        captioned = self._has_text & ("caption" in self._caption.columns)
        for values in self._values.values():
            captioned = captioned | np.array([bool(value.strip()) for value in values.to_pylist()], dtype=bool)
        return int((~captioned).sum())

    def _read_text(self, index: int) -> str:
        path = self.start / _text_name(self._name(index))
        try:
            return path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"The caption {path} is not UTF-8 text: {error}.", fix="Save it as UTF-8.") from error
        except OSError as error:
            raise UserError(f"The caption {path} could not be read: {error.strerror}.") from error


def _text_name(name: str) -> str:
    return name[: name.rfind(".")] + _TEXT_SUFFIX


class _Listing:
    """The content of a folder by relative path."""

    def __init__(self, folder: Path) -> None:
        self.images: list[str] = []
        self.texts: set[str] = set()
        self.tables: list[str] = []
        self.others: Counter[str] = Counter()  # the number of other files of each kind
        self.folders: list[str] = []  # directly below this one
        self._walk(folder, "", frozenset())

    @property
    def skipped(self) -> Counter[str]:
        """Files that are neither images nor their captions, by kind."""
        captions = {_text_name(name) for name in self.images} & self.texts
        return self.others - Counter({_TEXT_SUFFIX: len(captions)}) - Counter(Path(name).suffix for name in self.tables)

    def _walk(self, folder: Path, prefix: str, parents: frozenset[tuple[int, int]]) -> None:
        try:
            status = (folder / prefix).stat()
            entries = list(os.scandir(folder / prefix))
        except OSError as error:
            raise UserError(f"The folder {folder / prefix} could not be read: {error.strerror}.") from error
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            raise UserError(
                f"The folder {folder / prefix} is a link to a folder that it lies in.", fix="Remove the link."
            )
        for entry in entries:
            name = os.path.join(prefix, entry.name)  # noqa: PTH118  (a million Path objects would take seconds)
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if not prefix:
                    self.folders.append(name)
                self._walk(folder, name, parents | {identity})
            elif entry.name.lower().endswith(IMAGE_EXTENSIONS):
                self.images.append(name)
            else:
                self.others[Path(entry.name).suffix or entry.name] += 1
                if entry.name.endswith(_TEXT_SUFFIX):
                    self.texts.add(name)
                elif entry.name in _METADATA_NAMES:
                    self.tables.append(name)


def _check_layout(path: Path, listing: _Listing, class_names: list[str]) -> None:
    looked_for = f"Looked for {' '.join(IMAGE_EXTENSIONS)}"
    if not listing.images:
        found = ", ".join(f"{count} x {kind}" for kind, count in listing.others.most_common(5)) or "no files at all"
        fix = (
            "Give a folder of images, a CSV/TSV/JSONL table, .tar, .parquet, .arrow or .npz files, or a packed folder."
        )
        if (path / WAYMO_COMPONENT).is_dir():
            fix = f"Give {path / WAYMO_COMPONENT}, which holds the images of the Waymo Open Dataset."
        raise UserError(f"There are no images in {path}.", f"{looked_for} and found {found}.", fix)
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
    if class_names and (empty := set(listing.folders) - set(class_names)):
        raise UserError(
            f"The class folder {path / min(empty)} has no images.",
            f"{looked_for}.",
            "Remove the folder, or put images of the class into it.",
        )


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


# -- tables


class TableSource(_FileSource):
    """The rows of a CSV, TSV or JSONL table with the paths of images, captions and labels.

    Paths are relative to the table's folder, or to that in which HunyuanDiT was run.
    """

    def __init__(self, path: Path, img_size: Size, known: list[str] | None = None, caption: str | None = None) -> None:
        import pyarrow

        template: CaptionTemplate | None = None
        images: list[str] = []
        captions: list[str] = []
        labels: list[int] = []
        lines: list[int] = []
        for line, row in table_rows(path):
            where = f"line {line} of {path}"
            images.append(_image(row, where))
            if label_field := first_present(row, LABEL_FIELDS):
                labels.append(parse_label(row[label_field], where))
                row.setdefault("label", labels[-1])
            # Rows of JSONL may differ in their columns: without --caption, each row has its own caption column.
            if template is None or caption is None:
                template = CaptionTemplate.resolve(caption, row, str(path))
            captions.append(template.format(row, where))
            lines.append(line)
            if len(labels) not in (0, len(images)):
                raise UserError(
                    f"Some rows of {path} have a label and others none; the first change is in line {line}."
                )
        if not images:
            raise UserError(f"The table {path} has no rows.")
        super().__init__(base_dir_of(path, images[0]), images, img_size)
        self._check_files(path, images, lines)
        self._labels, self.label_names = resolve_labels(np.array(labels, dtype=np.int64), known, str(path))
        self._captions = pyarrow.array(captions, pyarrow.large_string())
        self.contents = SourceContents(sum(not caption.strip() for caption in captions))

    def fingerprint(self) -> str:
        """Hash the rows, and excerpts of the files they name."""
        labels = b"" if self._labels is None else self._labels
        return short_hash("table", self._names, self._captions, labels, sample_files(len(self), self._path_of))

    def _caption_of(self, index: int, label: int) -> str:
        return self._captions[index].as_py()

    def _check_files(self, table: Path, images: list[str], lines: list[int]) -> None:
        """Refuse rows whose files are missing; folders are listed, because looking up a million files takes minutes."""
        present: dict[str, set[str]] = {}
        missing: list[int] = []
        for row, image in enumerate(images):
            folder = image[: image.rfind("/") + 1]
            if folder not in present:
                try:
                    present[folder] = set(os.listdir(self.start / folder))  # noqa: PTH208  (names, not Path objects)
                except (OSError, ValueError):  # ValueError: a null character
                    present[folder] = set()
            if image[len(folder) :] not in present[folder]:
                missing.append(row)
        if missing:
            raise UserError(
                f"Line {lines[missing[0]]} of {table} names {images[missing[0]]}, but there is no such file.",
                f"{len(missing):,} of {len(images):,} rows name missing files.",
                f"Image paths are relative to {self.start}.",
            )


def _image(row: dict[str, object], where: str) -> str:
    field = first_present(row, _IMAGE_FIELDS)
    if field is None:
        raise UserError(
            f"No column names the image in {where}.",
            f"Its columns are {', '.join(row) or 'none'}.",
            f"Name the column one of {', '.join(_IMAGE_FIELDS)}.",
        )
    image = row[field]
    if not isinstance(image, str) or not image.strip():
        raise UserError(f"There is no image in {where}: its {field} is {image!r:.60}.")
    return image.strip()
