"""The page to look at: one file that needs no network, for one evaluation or several side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from muralist.errors import UserError
from muralist.evaluate.page import Picture, page
from muralist.evaluate.results import REPORT, read_runs
from muralist.evaluate.thumbnails import choose, encode
from muralist.runfolder import write_atomically

PAGE = "index.html"
_FOLDERS_UP = 4  # a picture further away does not travel with the page


def write_report(folders: Sequence[Path], destination: Path) -> Path:
    """Write the page of one or several evaluations into a folder and return where it is."""
    if not folders:
        raise UserError("There is nothing to report on.", fix=f"Give folders that hold a {REPORT}.")
    runs = read_runs([Path(folder) for folder in folders])
    choice = choose(runs)
    places = [(number, index) for number, shown in enumerate(choice.shown) for index in shown]
    paths = [runs[number].path(index) for number, index in places]
    pictures = {
        place: Picture(thumbnail, _address(path, destination))
        for place, path, thumbnail in zip(places, paths, encode(paths), strict=True)
    }
    text = page(runs, choice, pictures, _style(), _static("report.js"), _plotly())
    write_atomically(destination / PAGE, text.encode(errors="replace"))  # a prompt may hold half a character
    return destination / PAGE


def _address(path: Path, destination: Path) -> str | None:
    """Return where the page finds the original, if that is near."""
    relative = Path(os.path.relpath(path.absolute(), destination.absolute()))
    if relative.parts.count("..") > _FOLDERS_UP:
        return None
    return "/".join(quote(part, safe="", errors="replace") for part in relative.parts)


def _style() -> str:
    return (Path(__file__).parents[1] / "look" / "palette.css").read_text(encoding="utf-8") + _static("report.css")


def _static(name: str) -> str:
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
