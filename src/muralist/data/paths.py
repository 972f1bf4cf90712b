"""Paths that are missing, and where the relative paths that a file holds start from."""

from __future__ import annotations

import os
from pathlib import Path

from muralist.errors import UserError, nearest


def exists(path: Path) -> bool:
    """Say whether something is there. A name that no disk can hold is not, where `Path.exists` would raise an error."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Say likewise whether a file is there."""
    return os.path.isfile(path)  # noqa: PTH113


def start_of_paths(file: Path, relative: str) -> Path:
    """Return the folder that a relative path in a file starts from: the file's own, unless only another fits.

    HunyuanDiT writes paths as seen from the folder it is run in (`./dataset/porcelain/images/0.png`), so that one and the
    folders above the file are tried too.
    """
    own = file.absolute().parent
    for folder in (own, Path.cwd(), *own.parents):
        if exists(folder / relative):
            return folder
    return own


def check_exists(path: Path, what: str, fix: str) -> None:
    """Refuse a path that is missing, with the name that was probably meant; `what` says what should be there."""
    if exists(path):
        return
    parent = path.absolute().parent
    missing = path.absolute()
    while not os.path.isdir(parent):  # noqa: PTH112
        parent, missing = parent.parent, parent
    if path.absolute() == missing:
        why = f"There is no {path.name} in {parent}."
    else:
        why = f"Already the folder {missing} is missing."
    raise UserError(
        f"The {what} {path} was not found.",
        f"{why} {nearest(missing.name, (entry.name for entry in parent.iterdir()))}".strip(),
        fix,
    )
