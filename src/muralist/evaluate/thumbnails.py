"""Which pictures a page shows, and those pictures small enough to be part of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from muralist.evaluate.results import Run
from muralist.thumbnails import small_picture

T = TypeVar("T")
PICTURES_PER_RUN = 200
_PICTURES = 600
_BYTES = 3_300_000  # of all pictures, before base64 adds a third; with the charts' program the page stays below 10 MB
_EXTREMES = 12
_ROWS = 50
_SIDES_AND_QUALITIES = ((448, 82), (320, 80), (256, 75), (192, 70), (128, 60), (96, 40), (48, 20))


class Choice(NamedTuple):
    """Pictures of the runs by their numbers there."""

    shown: list[list[int]]  # for each run
    best: list[list[int]]
    worst: list[list[int]]
    rows: list[tuple[int, ...]]  # one of each run, all made from one prompt and seed


def choose(runs: Sequence[Run]) -> Choice:
    """Choose pictures evenly over each run, and its best and worst, and those that can be shown side by side."""
    limit = max(1, min(PICTURES_PER_RUN, _PICTURES // len(runs)))
    few = min(_EXTREMES, limit // 4)
    rows = _evenly(_shared(runs), min(_ROWS, limit // 4))
    shown, best, worst = [], [], []
    for position, run in enumerate(runs):
        scores = [(score, index) for index, score in enumerate(run.clip_scores) if score is not None]
        ordered = [index for _, index in sorted(scores)]
        count = min(few, len(ordered) // 2)  # none is both
        worst.append(ordered[:count])
        best.append(ordered[::-1][:count])
        fixed = {*best[-1], *worst[-1], *(row[position] for row in rows)}
        others = [index for index in range(len(run.files)) if index not in fixed]
        shown.append(sorted({*fixed, *_evenly(others, limit - len(fixed))}))
    return Choice(shown, best, worst, rows)


def encode(paths: Sequence[Path]) -> list[str | None]:
    """Each picture as a data URI of bounded size; None stands for one that cannot be read."""
    bound = _BYTES // max(1, len(paths))
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda path: _encode(path, bound), paths))


def _encode(path: Path, bound: int) -> str | None:
    if (picture := small_picture(path, _SIDES_AND_QUALITIES[0][0])) is None:
        return None
    for side, quality in _SIDES_AND_QUALITIES:
        picture.thumbnail((side, side))
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=quality)
        if buffer.tell() <= bound:
            break
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _shared(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    if len(runs) < 2:
        return []
    places = [{run.key(index): index for index in reversed(range(len(run.files)))} for run in runs]
    first, *others = places
    keys = [key for key in reversed(first) if all(key in other for other in others)]
    return [tuple(place[key] for place in places) for key in keys]


def _evenly(items: Sequence[T], count: int) -> list[T]:
    count = min(count, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]
