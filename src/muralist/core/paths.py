"""Checks of paths, and the base of relative paths in files."""

from __future__ import annotations

import os
from pathlib import Path

from muralist.core.errors import UserError, closest_match


def exists(path: Path) -> bool:
    """Return whether a path exists; False for names too long for the disk, where `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Return whether a file exists; likewise without raising."""
    return os.path.isfile(path)  # noqa: PTH113


def base_dir_of(file: Path, relative: str) -> Path:
    """Return the base folder of a relative path inside a file: the file's folder, unless the path exists elsewhere only.

    HunyuanDiT writes paths relative to its working directory (`./dataset/porcelain/images/0.png`), so the current folder
    and the parents of the file are tried too.
    """
    own = file.absolute().parent
    for folder in (own, Path.cwd(), *own.parents):
        if exists(folder / relative):
            return folder
    return own


def check_exists(path: Path, what: str, fix: str) -> None:
    """Raise if a path does not exist, with the closest existing name; `what` names the kind of input."""
    if exists(path):
        return
    parent = path.absolute().parent
    missing = path.absolute()
    while not os.path.isdir(parent):  # noqa: PTH112
        parent, missing = parent.parent, parent
    is_last = path.absolute() == missing
    why = f"{parent} has no entry {path.name}." if is_last else f"The folder {missing} does not exist."
    raise UserError(
        f"The {what} {path} was not found.",
        f"{why} {closest_match(missing.name, (entry.name for entry in parent.iterdir()))}".strip(),
        fix,
    )
