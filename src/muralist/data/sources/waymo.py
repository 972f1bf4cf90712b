"""The Waymo Open Dataset, version 2: its columns, cameras and folders.

A component is a folder of Parquet files, one per drive: {training,validation,testing}/{component}/{segment}.parquet.
Images are in the component camera_image, in the column `[CameraImageComponent].image`, as JPEG files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muralist.core.errors import UserError, closest_match

COMPONENT = "camera_image"
IMAGE_COLUMN = "[CameraImageComponent].image"
CAMERA_COLUMN = "key.camera_name"
DEFAULT_CAPTION = "A driving scene seen by the {camera} camera"

_SEGMENT_COLUMN = "key.segment_context_name"  # in every component
_CAMERAS = {1: "front", 2: "front left", 3: "front right", 4: "side left", 5: "side right"}


def is_waymo(columns: list[str]) -> bool:
    """Return whether a file with these columns belongs to the data set."""
    return _SEGMENT_COLUMN in columns or IMAGE_COLUMN in columns


def image_column(path: Path, columns: list[str]) -> str:
    """Return the column of images; other components of the data set have none, or only masks."""
    if IMAGE_COLUMN not in columns:
        raise UserError(
            f"The file {path} belongs to the Waymo Open Dataset, but holds no camera images.",
            f"Its columns are {', '.join(columns)}.",
            f"Give the files of the component {COMPONENT}, whose images are in {IMAGE_COLUMN}.",
        )
    if CAMERA_COLUMN not in columns:
        raise UserError(f"The file {path} has no column {CAMERA_COLUMN}.", f"Its columns are {', '.join(columns)}.")
    return IMAGE_COLUMN


def camera_name(camera: object, where: str) -> str:
    """Return the name of a camera, such as `front left`."""
    # The published schema says int8; a file of keypoints in Waymo's own repository has the number as text.
    name = _CAMERAS.get(int(str(camera))) if str(camera).isdecimal() else None
    if name is None:
        raise UserError(
            f"The {CAMERA_COLUMN} in {where} is {camera!r:.60}.",
            f"Known are {', '.join(f'{number} ({known})' for number, known in _CAMERAS.items())}.",
        )
    return name


def camera_numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of cameras given by Waymo's names, such as FRONT_LEFT."""
    known = {name.upper().replace(" ", "_"): number for number, name in _CAMERAS.items()}
    numbers = []
    for name in names:
        if (written := name.upper().replace("-", "_").replace(" ", "_")) not in known:
            raise UserError(
                f"There is no camera {name}.", f"There are {', '.join(known)}.", closest_match(written, known)
            )
        numbers.append(known[written])
    return numbers


def no_cameras(where: str) -> UserError:
    """Return the error for --cameras on a data set without cameras."""
    return UserError(
        f"--cameras selects cameras of the Waymo Open Dataset, and {where} does not belong to it.",
        "A packed folder does not store cameras.",
        "Leave --cameras out, or give it to `muralist pack`.",
    )


def validation_folder(folder: Path) -> Path | None:
    """Return the validation folder that belongs to a training folder."""
    sibling = folder.parent.parent / "validation" / folder.name
    is_training = folder.name == COMPONENT and folder.parent.name == "training"
    return sibling if is_training and sibling.is_dir() else None
