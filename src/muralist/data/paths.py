"""Where the relative paths that a file holds start from."""

from __future__ import annotations

from pathlib import Path


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
