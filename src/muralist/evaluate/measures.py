"""What the numbers of an evaluation are called and mean, and which of several is best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muralist.evaluate.results import Run


class Measure(NamedTuple):
    """A kind of score, for people."""

    title: str
    meaning: str
    higher_is_better: bool


MEASURES = {
    "fid": Measure(
        "FID", "Distance from the reference in Inception's features; 0: the same. Fewer images, larger.", False
    ),
    "kid": Measure(
        "KID", "Distance in the same features that does not grow with fewer images; about 0: the same.", False
    ),
    "fd_dinov2": Measure(
        "FD-DINOv2", "FID's distance in DINOv2's features, which agree with people more often; 0: the same.", False
    ),
    "cmmd": Measure("CMMD", "Distance in CLIP's features, which sees more of what people see; 0: the same.", False),
    "clip_score": Measure("CLIP score", "How well pictures fit their prompts, by CLIP.", True),
    "precision": Measure("Precision", "Share of the images that look like reference images: quality.", True),
    "recall": Measure("Recall", "Share of the reference images that look like one of the images: variety.", True),
    "density": Measure("Density", "Precision that outliers disturb less; about 1 for real images.", True),
    "coverage": Measure("Coverage", "Share of the reference images with one of the images close by.", True),
    "inception_score": Measure(
        "Inception score", "How sure Inception is of a class, and of how many; knows no reference.", True
    ),
}


def title(metric: str) -> str:
    """Return what people call a score."""
    return MEASURES[metric].title if metric in MEASURES else metric


def measured(runs: Sequence[Run]) -> list[str]:
    """Return the scores that at least one run has, well-known ones first."""
    found = dict.fromkeys(metric for run in runs for metric in run.scores)
    return [metric for metric in MEASURES if metric in found] + [metric for metric in found if metric not in MEASURES]


class Best(NamedTuple):
    """The best run for one score."""

    run: int
    clear: bool  # its interval touches no other's


def best(metric: str, runs: Sequence[Run]) -> Best | None:
    """Return which of several runs has the best score, if that can be said."""
    scores = [(run.scores[metric], number) for number, run in enumerate(runs) if metric in run.scores]
    if metric not in MEASURES or len(scores) < 2:
        return None
    sign = -1 if MEASURES[metric].higher_is_better else 1
    order = sorted(scores, key=lambda pair: sign * (pair[0].value or 0.0))
    first, second = order[0][0], order[1][0]
    if first.value == second.value:
        return None
    others = [score for score, _ in order[1:]]
    clear = all(_apart((first.low, first.high), (other.low, other.high)) for other in others)
    return Best(order[0][1], clear)


def _apart(one: tuple[float | None, float | None], other: tuple[float | None, float | None]) -> bool:
    (low, high), (other_low, other_high) = one, other
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return high < other_low or other_high < low
