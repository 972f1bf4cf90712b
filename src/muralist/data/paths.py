"""Paths that are missing, and where the relative paths that a file holds start from."""

from __future__ import annotations

from pathlib import Path

from muralist.errors import UserError, nearest


def start_of_paths(file: Path, relative: str) -> Path:
    """Return the folder that a relative path in a file starts from: the file's own, unless only another fits.

    HunyuanDiT writes paths as seen from the folder it is run in (`./dataset/porcelain/images/0.png`), so that one and the
    folders above the file are tried too.
    """
    own = file.absolute().parent
    for folder in (own, Path.cwd(), *own.parents):
        if (folder / relative).exists():
            return folder
    return own


def check_exists(path: Path, what: str, fix: str) -> None:
    """Refuse a path that is missing, with the name that was probably meant; `what` says what should be there."""
    if path.exists():
        return
    parent = path.absolute().parent
    missing = path.absolute()
    while not parent.is_dir():
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
