"""report.json read back, tolerant of missing fields and strict about damaged ones; and what each metric means."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from muralist.core.errors import UserError
from muralist.core.run_dir import exists

REPORT = "report.json"
_SEED = re.compile(r"_seed(\d+)$")  # generate names images ID_seedN


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)


class MetricScore(_Model):
    """A value and its confidence interval."""

    value: Number = None
    low: Number = None
    high: Number = None
    note: str | None = None

    @property
    def has_interval(self) -> bool:
        """Return whether both ends of the interval are known."""
        return self.low is not None and self.high is not None


class Missing(_Model):
    """A metric that was not computed."""

    metric: str = ""
    reason: str = ""


class Images(_Model):
    """The evaluated images."""

    folder: str | None = None
    count: int | None = None
    unreadable: list[Any] = []
    sizes: dict[str, int] = {}  # counts by height and width


class Reference(_Model):
    """The images they were compared with."""

    path: str | None = None
    count: int | None = None
    sizes: dict[str, int] = {}


class PerImage(_Model):
    """Columns with one entry per image."""

    file: list[str] = []
    prompt: list[str | None] | None = None
    clip_score: list[Number] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> PerImage:
        for name in ("prompt", "clip_score"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.file):
                raise ValueError(f"{len(self.file)} files but {len(column)} of {name}")
        return self


class Failure(_Model):
    """A prompt whose image could not be generated."""

    id: str | None = None
    seed: str | None = None
    prompt: str | None = None
    error: str | None = None
    gpu: str | None = None


class Speed(_Model):
    """The throughput of one GPU."""

    images: int | None = None
    images_per_second: Number = None
    gpu_busy: Number = None


class Report(_Model):
    """The content of report.json."""

    fid: Number = None
    scores: dict[str, MetricScore | None] = {}
    missing: list[Missing] = []
    images: Images = Images()
    reference: Reference | None = None
    settings: dict[str, Any] = {}
    per_image: PerImage = PerImage()
    failures: list[Failure] = []
    speed: dict[str, Speed] = {}
    warnings: list[str] = []
    versions: dict[str, Any] = {}
    seconds: Number = None


class EvaluationRun:
    """A report under a name that tells it from others."""

    def __init__(self, name: str, folder: Path, report: Report) -> None:
        self.name, self.folder, self.report = name, folder, report
        self.files = report.per_image.file
        self.clip_scores: Sequence[float | None] = report.per_image.clip_score or [None] * len(self.files)
        self.prompts = [prompt or "" for prompt in report.per_image.prompt or [""] * len(self.files)]
        self.scores = {name: score for name, score in report.scores.items() if score and score.value is not None}
        if report.fid is not None and "fid" not in self.scores:
            self.scores["fid"] = MetricScore(value=report.fid)

    @property
    def images_per_second(self) -> float:
        """Return the throughput of all GPUs together."""
        return sum(speed.images_per_second or 0.0 for speed in self.report.speed.values())

    def path(self, index: int) -> Path:
        """Return the path of an image; its folder is relative to where evaluate ran, or to the evaluation."""
        folder = Path(self.report.images.folder or ".")
        near = self.folder / folder / self.files[index]
        return near if exists(near) else folder / self.files[index]

    def key(self, index: int) -> tuple[str, str]:
        """Return the prompt and seed, by which the same row is found in other runs."""
        stem = Path(self.files[index]).stem
        seed = _SEED.search(stem)
        return self.prompts[index] or stem, seed[1] if seed else stem


def read_runs(folders: Sequence[Path]) -> list[EvaluationRun]:
    """Read some evaluations; each is named by as much of its path as tells it from the others."""
    reports = [_read(folder) for folder in folders]
    names = _names([folder.absolute() for folder in folders])
    return [EvaluationRun(*run) for run in zip(names, folders, reports, strict=True)]


def _read(folder: Path) -> Report:
    path = folder / REPORT
    fix = "Give folders that `muralist evaluate` wrote."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no {REPORT}.", fix=fix) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", fix=fix) from None
    except (ValueError, RecursionError) as error:
        reason = f"It is not JSON: {error}."
        raise UserError(f"{path} is damaged.", reason, "Run the evaluation again.") from error
    try:
        return Report.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where} is invalid: {first['msg']}."
        raise UserError(f"{path} is damaged, or not a report of an evaluation.", reason, fix) from None


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [[part for part in folder.parts if part != folder.anchor] for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {'/'.join(part)}" for number, part in enumerate(parts, start=1)]


class MetricInfo(NamedTuple):
    """What a metric needs and what it means."""

    encoder: Literal["inception", "clip", "dinov2"]
    """Whose features it is computed from."""
    reference: Literal["", "moments", "features", "images"]
    """What it needs of the reference; statistics of other tools hold moments alone."""
    higher_is_better: bool
    title: str
    meaning: str


METRICS = {
    "fid": MetricInfo(
        "inception", "moments", False, "FID",
        "Distance from the reference in Inception's features; 0: the same. Fewer images, larger.",
    ),
    "kid": MetricInfo(
        "inception", "features", False, "KID",
        "Distance in the same features that does not grow with fewer images; about 0: the same.",
    ),
    "precision": MetricInfo(
        "inception", "features", True, "Precision",
        "Share of the images that look like reference images: quality.",
    ),
    "recall": MetricInfo(
        "inception", "features", True, "Recall",
        "Share of the reference images that look like one of the images: variety.",
    ),
    "density": MetricInfo(
        "inception", "features", True, "Density",
        "Precision that outliers disturb less; about 1 for real images.",
    ),
    "coverage": MetricInfo(
        "inception", "features", True, "Coverage",
        "Share of the reference images with one of the images close by.",
    ),
    "clip_score": MetricInfo("clip", "", True, "CLIP score", "How well images match their prompts, by CLIP."),
    "cmmd": MetricInfo(
        "clip", "images", False, "CMMD",
        "Distance in CLIP's features, which agrees better with human judgment than FID; 0: the same.",
    ),
    "fd_dinov2": MetricInfo(
        "dinov2", "features", False, "FD-DINOv2",
        "FID's distance in DINOv2's features, which agree better with human judgment; 0: the same.",
    ),
    "inception_score": MetricInfo(
        "inception", "", True, "Inception score",
        "Confidence and diversity of Inception's classes; uses no reference.",
    ),
}  # fmt: skip


def metric_title(metric: str) -> str:
    """Return the name that the page shows."""
    return METRICS[metric].title if metric in METRICS else metric


def available_metrics(runs: Sequence[EvaluationRun]) -> list[str]:
    """Return the metrics that at least one run has, known ones first."""
    found = dict.fromkeys(metric for run in runs for metric in run.scores)
    return [metric for metric in METRICS if metric in found] + [metric for metric in found if metric not in METRICS]


class BestRun(NamedTuple):
    """The run with the best score of a metric."""

    run: int
    clear: bool  # its interval overlaps with no other


def find_best(metric: str, runs: Sequence[EvaluationRun]) -> BestRun | None:
    """Return the run with the best score, unless it is unknown, alone or tied."""
    scores = [(run.scores[metric], number) for number, run in enumerate(runs) if metric in run.scores]
    if metric not in METRICS or len(scores) < 2:
        return None
    sign = -1 if METRICS[metric].higher_is_better else 1
    (first, number), *others = sorted(scores, key=lambda pair: sign * (pair[0].value or 0.0))
    if first.value == others[0][0].value:
        return None
    return BestRun(number, all(_are_disjoint(first, other) for other, _ in others))


def _are_disjoint(one: MetricScore, other: MetricScore) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low
