"""CSV, TSV and JSONL tables that name image files, with captions and labels."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np

from muralist.core.errors import UserError
from muralist.core.run_dir import base_dir_of, is_file
from muralist.data.decode import Size, decode_cropped, read_image_shape
from muralist.data.source import (
    LABEL_FIELDS,
    CaptionTemplate,
    Sample,
    first_present,
    parse_label,
    resolve_labels,
    sample_files,
    short_hash,
)
from muralist.data.tables import table_rows

_IMAGE_FIELDS = ("image", "image_path", "img_path", "path", "file_name")

_LIST_FOLDER_FROM = 256  # files of one folder: from here on listing the folder is faster than looking up each


class TableSource:
    """The rows of a table; image paths are relative to its folder, or to that in which HunyuanDiT was run."""

    def __init__(self, path: Path, img_size: Size, known: list[str] | None = None, caption: str | None = None) -> None:
        import pyarrow

        self.path, self.img_size = path, img_size
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
        self._start = base_dir_of(path, images[0])
        _check_files(path, self._start, images, lines)
        self._labels, self.label_names = resolve_labels(np.array(labels, dtype=np.int64), known, str(path))
        self._images = pyarrow.array([os.fsencode(image) for image in images], pyarrow.large_binary())
        self._captions = pyarrow.array(captions, pyarrow.large_string())

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Sample:
        """Decode the image of row `index`."""
        label = 0 if self._labels is None else int(self._labels[index])
        return Sample(decode_cropped(self._path_of(index), self.img_size), label, self._captions[index].as_py())

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of the image of row `index` in its file."""
        return read_image_shape(self._path_of(index))

    def fingerprint(self) -> str:
        """Hash the rows, and excerpts of the files they name."""
        labels = b"" if self._labels is None else self._labels
        return short_hash("table", self._images, self._captions, labels, sample_files(len(self), self._path_of))

    def _path_of(self, index: int) -> Path:
        return self._start / os.fsdecode(self._images[index].as_py())


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


def _check_files(table: Path, start: Path, images: list[str], lines: list[int]) -> None:
    """Refuse rows whose files are missing; large folders are listed once instead of a lookup per row."""
    rows_of_folder: dict[str, list[int]] = defaultdict(list)
    for row, image in enumerate(images):
        rows_of_folder[image[: image.rfind("/") + 1]].append(row)
    missing: list[int] = []
    for folder, rows in rows_of_folder.items():
        where = start / folder
        if len(rows) < _LIST_FOLDER_FROM or not where.is_dir():
            missing += [row for row in rows if not is_file(start / images[row])]
        else:
            present = set(os.listdir(where))  # noqa: PTH208  (names are wanted, not Path objects)
            missing += [row for row in rows if images[row].rpartition("/")[2] not in present]
    if missing:
        first = min(missing)
        raise UserError(
            f"Line {lines[first]} of {table} names {images[first]}, but there is no such file.",
            f"{len(missing):,} of {len(images):,} rows name missing files.",
            f"Image paths are relative to {start}.",
        )
