"""Image inputs of a row of the prompt table: the columns `image`, `mask`, `control_image` and `strength`."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, decode_image, read_image_file, read_image_shape
from muralist.data.source import check_caption

IMAGE_COLUMNS = ("image", "mask", "control_image")
STRENGTH = "strength"
INPUT_COLUMNS = (*IMAGE_COLUMNS, STRENGTH)
_FIX = "Correct the file or the row, and run the same command again."


class ImageInputs(NamedTuple):
    """The image inputs of a row as the table writes them; None stands for an empty cell or a column that is not used."""

    image: str | None = None
    mask: str | None = None
    control_image: str | None = None
    strength: float | None = None
    folder: str = ""  # of the table: paths are relative to it

    @property
    def cells(self) -> dict[str, Any]:
        """What the row says, without empty cells and without the place of the table, which may move."""
        return {name: value for name in INPUT_COLUMNS if (value := getattr(self, name)) is not None}

    def keep(self, columns: tuple[str, ...]) -> ImageInputs:
        """Return the inputs of some columns only."""
        unused: dict[str, Any] = {name: None for name in INPUT_COLUMNS if name not in columns}
        return self._replace(**unused)

    def path(self, column: str) -> Path:
        """Return the file of a column."""
        written = getattr(self, column)
        if written is None:
            raise UserError(f"The row has no {column}.", fix="Give the path of an image in that column.")
        return Path(self.folder, written)


@dataclass(frozen=True)
class LoadedInputs:
    """The decoded image inputs of a row; two are equal if the bytes of their files are."""

    digests: tuple[tuple[str, str], ...]  # column and SHA-256
    strength: float | None
    images: dict[str, Image.Image] = field(compare=False, repr=False)  # RGB, by column
    files: dict[str, dict[str, Any]] = field(compare=False, repr=False)
    """Size, hash and modification time of each file, as the ledger records them for its own images."""


def parse_inputs(cells: dict[str, object], where: str, folder: str) -> ImageInputs:
    """Read the image inputs from the cells of a row."""
    paths = {name: check_caption(cells[name], where, name).strip() for name in IMAGE_COLUMNS if _is_given(cells, name)}
    strength = _parse_strength(cells[STRENGTH], where) if _is_given(cells, STRENGTH) else None
    return ImageInputs(**{name: text for name, text in paths.items() if text}, strength=strength, folder=folder)


def load_inputs(inputs: ImageInputs, columns: tuple[str, ...]) -> LoadedInputs:
    """Read and decode the images of some columns, or raise a UserError that names the file."""
    images: dict[str, Image.Image] = {}
    files: dict[str, dict[str, Any]] = {}
    for column in columns:
        path = _checked(inputs.path(column))
        changed = path.stat().st_mtime_ns  # before reading: a file that is replaced meanwhile is hashed when resuming
        data = read_image_file(path)
        files[column] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "changed": changed}
        try:
            images[column] = decode_image(data, str(path))
        except ImageDecodeError as error:
            raise ImageDecodeError(error.name, error.reason, _FIX) from error
    digests = tuple((column, record["sha256"]) for column, record in files.items())
    return LoadedInputs(digests, inputs.strength, images, files)


def read_input_shape(inputs: ImageInputs, column: str) -> tuple[int, int]:
    """Return height and width of an input, from the header of its file."""
    try:
        return read_image_shape(_checked(inputs.path(column)))
    except ImageDecodeError as error:
        raise ImageDecodeError(error.name, error.reason, _FIX) from error


def _checked(path: Path) -> Path:
    """Refuse what is not a plain file: a device or a pipe in its place could be read forever."""
    try:
        if path.is_file():
            return path
        reason = "is not a plain file" if path.exists() else "does not exist"
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = f"cannot be opened: {error}"
    raise UserError(f"The input {path} {reason}.", fix=f"Paths are relative to the table's folder. {_FIX}")


def _is_given(cells: dict[str, object], name: str) -> bool:
    value = cells.get(name)
    return value is not None and value == value  # pandas writes missing values as NaN


def _parse_strength(value: object, where: str) -> float | None:
    if isinstance(value, str) and not value.strip():
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= 1:
        raise UserError(
            f"The strength {value!r:.60} in {where} is not a number above 0 and at most 1.",
            fix="Leave the cell empty to use the pipeline's own strength.",
        )
    return number
