"""NumPy archives (.npz): all images in one uint8 array."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.image_size import Size
from muralist.data.decode import center_crop
from muralist.data.source import CaptionTemplate, LruCache, Sample, first_present, resolve_labels, short_hash

_TRAINING = (("train_x", "images", "x", "arr_0"), ("train_y", "labels", "y", "arr_1"))
_HELD_OUT = (("test_x",), ("test_y",))


class ArraySource:
    """The images of an `.npz` file: train_x and train_y (or images and labels), or test_x and test_y if `held_out`."""

    def __init__(
        self,
        path: Path,
        img_size: Size,
        known: list[str] | None = None,
        caption: str | None = None,
        held_out: bool = False,
    ) -> None:
        self.path, self.img_size, self.held_out = path, img_size, held_out
        # Every process loads the array itself: pickling it for each DataLoader worker would cost more.
        self._arrays: LruCache[np.ndarray] = LruCache(1)
        image_names, label_names = _HELD_OUT if held_out else _TRAINING
        keys = array_names(path)
        image_key = first_present(keys, image_names)
        if image_key is None:
            raise UserError(
                f"{path} has no array of images.",
                f"Its arrays are {', '.join(keys) or 'none'}.",
                f"Name the images one of {', '.join(image_names)} and the labels one of {', '.join(label_names)}.",
            )
        self._key = image_key
        self._count, *_ = self._images().shape
        if not self._count:
            raise UserError(f"The array {image_key} in {path} is empty.")
        label_key = first_present(keys, label_names)
        labels = _array(path, label_key) if label_key else None
        if labels is not None and labels.shape != (self._count,):
            raise UserError(
                f"The labels {label_key} in {path} have shape {labels.shape}, but there are {self._count:,} images.",
                fix="Give one integer per image.",
            )
        self._labels, self.label_names = resolve_labels(labels, known, f"{path}, array {label_key},")
        self._caption = CaptionTemplate.resolve_plain(caption, self.label_names, str(path))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Sample:
        """Return image `index`, center-cropped."""
        image = center_crop(Image.fromarray(self._images()[index]), self.img_size)
        label = 0 if self._labels is None else int(self._labels[index])
        caption = self._caption.format_plain("", self.label_names, label, f"image {index} of {self.path}")
        return Sample(image, label, caption)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width, which all images share."""
        _, height, width, _ = self._images().shape
        return height, width

    def fingerprint(self) -> str:
        """Hash the checksums of the arrays in the archive."""
        with open_archive(self.path) as archive:
            infos = archive.zip.infolist()  # type: ignore[union-attr]
            members = [f"{member.filename} {member.file_size} {member.CRC}" for member in infos]
        return short_hash("array", self._key, *members, *self._caption.fingerprint_parts)

    def _images(self) -> np.ndarray:
        return self._arrays.get(0, self._load_images)

    def _load_images(self, _: int) -> np.ndarray:
        images = _array(self.path, self._key)
        where = f"The array {self._key} in {self.path}"
        if images.dtype != np.uint8:
            raise UserError(f"{where} is {images.dtype}, not uint8.", fix="Store pixels as integers from 0 to 255.")
        if images.ndim != 4 or 0 in images.shape[1:] or [images.shape[1], images.shape[3]].count(3) != 1:
            raise UserError(
                f"{where} has the shape {images.shape}.",
                "Images have pixels, and one axis of 3 for the color channels.",
                "Store images as [count, height, width, 3].",
            )
        return np.ascontiguousarray(images if images.shape[3] == 3 else images.transpose(0, 2, 3, 1))


@contextmanager
def open_archive(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an .npz file."""
    fix = "Copy it again, or write it with numpy.savez as arrays of numbers."
    if path.is_file() and not zipfile.is_zipfile(path):  # NumPy would take it for a pickle and suggest to load it
        raise UserError(f"The file {path} is not an .npz archive, or is truncated.", fix=fix)
    try:
        with np.load(path, allow_pickle=False) as archive:
            yield archive
    except UserError:
        raise
    except Exception as error:  # damaged bytes make NumPy, zipfile and zlib raise nearly every type
        raise UserError(f"The file {path} could not be read as an .npz archive: {error}.", fix=fix) from error


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays of an .npz file."""
    with open_archive(path) as archive:
        return list(archive.files)


def _array(path: Path, key: str) -> np.ndarray:
    with open_archive(path) as archive:
        return archive[key]
