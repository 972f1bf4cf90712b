"""What each metric means; report.json and scores.parquet read back; and what evaluations say about each other."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from muralist.core.errors import UserError, first_line
from muralist.core.run_dir import check_exists, exists
from muralist.data.tar_members import find_member
from muralist.evaluate.scores import SCORES, SCORES_FILE

REPORT = "report.json"
_SEED = re.compile(r"_seed(\d+)$")  # generate names images ID_seedN
_MAX_DECIMALS = 6
_SHARED_PROMPTS = 0.9  # of each run: a few rows may fail


class MetricInfo(NamedTuple):
    """What a metric needs and what it means."""

    encoder: Literal["inception", "clip", "dinov2", "score"]
    """Whose features it is computed from; score: an entry of `SCORES`, the mean of a score of single images."""
    reference: Literal["", "moments", "features", "images"]
    """What it needs of the reference; statistics of other tools hold moments alone."""
    higher_is_better: bool
    title: str
    meaning: str
    minimum: float = -math.inf
    """The least possible value."""


METRICS = {
    "fid": MetricInfo(
        "inception", "moments", False, "FID",
        "Distance from the reference in Inception's features; 0: the same. Fewer images, larger.", 0,
    ),
    "kid": MetricInfo(
        "inception", "features", False, "KID",
        "Distance in the same features that does not grow with fewer images; about 0: the same.",
    ),
    "precision": MetricInfo(
        "inception", "features", True, "Precision",
        "Share of the images that look like reference images: quality.", 0,
    ),
    "recall": MetricInfo(
        "inception", "features", True, "Recall",
        "Share of the reference images that look like one of the images: variety.", 0,
    ),
    "density": MetricInfo(
        "inception", "features", True, "Density",
        "Precision that outliers disturb less; about 1 for real images.", 0,
    ),
    "coverage": MetricInfo(
        "inception", "features", True, "Coverage",
        "Share of the reference images with one of the images close by.", 0,
    ),
    "clip_score": MetricInfo("clip", "", True, "CLIP score", "How well images match their prompts, by CLIP.", 0),
    "cmmd": MetricInfo(
        "clip", "images", False, "CMMD",
        "Distance in CLIP's features, which agrees better with human judgment than FID; 0: the same.", 0,
    ),
    "fd_dinov2": MetricInfo(
        "dinov2", "features", False, "FD-DINOv2",
        "FID's distance in DINOv2's features, which agree better with human judgment; 0: the same.", 0,
    ),
    "inception_score": MetricInfo(
        "inception", "", True, "Inception score",
        "Confidence and diversity of Inception's classes; uses no reference.", 0,
    ),
    **{key: MetricInfo("score", "", True, score.title, score.meaning) for key, score in SCORES.items()},
}  # fmt: skip


def group_by_reason(missing: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the names of missing metrics by their reason: several often lack the same file."""
    names: dict[str, list[str]] = {}
    for name, reason in missing:
        names.setdefault(reason, []).append(name)
    return {reason: ", ".join(of_reason) for reason, of_reason in names.items()}


def metric_title(metric: str) -> str:
    """Return the name that the page shows."""
    return METRICS[metric].title if metric in METRICS else metric


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


class _ImageSet(_Model):
    """The evaluated images (in `folder`) or the reference (at `path`)."""

    folder: str | None = None
    path: str | None = None
    count: int | None = None
    sha256: str | None = None
    unreadable: list[Any] = []
    sizes: dict[str, int] = {}  # counts by height and width


class _PerImage(_Model):
    """Columns with one entry per image."""

    file: list[str] = []
    prompt: list[str | None] | None = None
    clip_score: list[Number] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> _PerImage:
        for name in ("prompt", "clip_score"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.file):
                raise ValueError(f"{len(self.file)} files but {len(column)} of {name}")
        return self


class CategoryScores(_Model):
    """The images whose prompts have one value in a column of the prompt table, and the means of their scores."""

    count: int = 0
    scores: dict[str, MetricScore] = {}


class Report(_Model):
    """The content of report.json; any field may be missing, and none may be damaged."""

    fid: Number = None
    scores: dict[str, MetricScore | None] = {}
    missing: list[dict[str, str]] = []  # metric and reason
    images: _ImageSet = _ImageSet()
    reference: _ImageSet | None = None
    generation: dict[str, Any] = {}  # model, steps, guidance, ... of the ledger
    settings: dict[str, Any] = {}
    categories: dict[str, dict[str, CategoryScores]] = {}  # by column and value
    per_image: _PerImage = _PerImage()
    failures: list[dict[str, str | None]] = []  # id, seed, prompt, error and gpu
    speed: dict[str, dict[str, Number]] = {}  # images_per_second, by GPU
    warnings: list[str] = []
    versions: dict[str, Any] = {}
    seconds: Number = None


class EvaluationRun:
    """A report under a name that tells it from others."""

    def __init__(self, name: str, folder: Path, report: Report) -> None:
        self.name, self.folder, self.report = name, folder, report
        self.files = report.per_image.file
        self.prompts = [prompt or "" for prompt in report.per_image.prompt or [""] * len(self.files)]
        self.scores = {name: score for name, score in report.scores.items() if score and score.value is not None}
        if report.fid is not None and "fid" not in self.scores:
            self.scores["fid"] = MetricScore(value=report.fid)
        columns = _read_columns(folder, self.files)
        if report.per_image.clip_score:
            columns.setdefault("clip_score", list(report.per_image.clip_score))
        # A prompt table may have a column that is called like a score, such as aesthetic.
        self.per_image: dict[str, list[float | None]] = {
            key: [_finite(value) if isinstance(value, float) else None for value in columns[key]]
            for key in METRICS
            if key in columns and key in self.scores
        }
        """Scores of each image, by metric; None where a score does not apply."""
        self.categories: dict[str, list[str | None]] = {
            column: [None if cell is None else str(cell) for cell in columns[column]]
            for column in report.categories
            if column in columns
        }
        """The category of each image, by column of the prompt table."""

    @property
    def model(self) -> str:
        """Return the model that the ledger names, or the folder of the images."""
        model = self.report.generation.get("model")
        folder = self.report.images.folder
        return model if isinstance(model, str) and model else Path(folder).name if folder else self.name

    @property
    def data(self) -> str:
        """Return a short name of the reference, or of the prompts; empty where neither is known."""
        reference = self.report.reference and self.report.reference.path
        path = reference or self.report.settings.get("prompts_csv")
        return Path(path).name.removesuffix(".npz").removesuffix(".csv") if isinstance(path, str) else ""

    @property
    def images_per_second(self) -> float:
        """Return the throughput of all GPUs together."""
        return sum(speed.get("images_per_second") or 0.0 for speed in self.report.speed.values())

    def path(self, index: int) -> Path:
        """Return the path of an image; its folder is relative to where evaluate ran, or to the evaluation."""
        folder = Path(self.report.images.folder or ".")
        near = self.folder / folder / self.files[index]
        return near if exists(near) or find_member(near) else folder / self.files[index]

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


def _read_columns(folder: Path, files: Sequence[str]) -> dict[str, list[Any]]:
    """Read scores.parquet; nothing where it is missing, as in an evaluation of 0.1.0, or is about other images."""
    path = folder / SCORES_FILE
    if not exists(path):
        return {}
    from pyarrow import parquet

    try:
        columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except Exception as error:  # pyarrow raises nearly any exception on damaged bytes
        why = f"The reader reported: {first_line(error)}."
        raise UserError(f"{path} is damaged.", why, "Run the evaluation again.") from None
    return columns if columns.pop("image", None) == list(files) else {}


def _read(folder: Path) -> Report:
    path = folder / REPORT
    fix = "Give folders that `muralist evaluate` wrote."
    try:
        return Report.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        check_exists(folder, "folder", fix)
        raise UserError(f"{folder} holds no {REPORT}.", fix=fix) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", fix=fix) from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'} is invalid: {first['msg']}."
        raise UserError(f"{path} is damaged, or not a report of an evaluation.", reason, fix) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged.", f"It is not JSON: {error}.", "Run the evaluation again.") from error


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [[part for part in folder.parts if part != folder.anchor] for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {'/'.join(part)}" for number, part in enumerate(parts, start=1)]


def score_decimals(scores: Iterable[MetricScore]) -> int:
    """Return how many decimals the scores of a metric have: the narrowest interval is 6 to 60 of the last digit wide.

    Without an interval, four digits of the largest value.
    """
    known = [score for score in scores if score.value is not None]
    widths = [score.high - score.low for score in known if score.low is not None and score.high is not None]
    if widths := [width for width in widths if width > 0]:
        return min(max(-math.floor(math.log10(min(widths) / 6 * (1 + 1e-9))), 0), _MAX_DECIMALS)
    largest = max((abs(score.value or 0.0) for score in known), default=0.0)
    return min(max(3 - math.floor(math.log10(largest)), 0), _MAX_DECIMALS) if largest else 2


def format_score(score: MetricScore, decimals: int) -> tuple[str, tuple[str, str] | None]:
    """Return the texts of a value and of the ends of its interval; None where they would read the same."""
    if score.value is None:
        return "?", None
    low, high = (None if end is None else _format_decimals(end, decimals) for end in (score.low, score.high))
    return _format_decimals(score.value, decimals), (low, high) if low and high and low != high else None


def _format_decimals(value: float, decimals: int) -> str:
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # + 0.0: -0 is 0


class BestRun(NamedTuple):
    """The run with the best score of a metric."""

    run: int
    clear: bool  # its interval overlaps with no other


def find_best(metric: str, runs: Sequence[EvaluationRun]) -> BestRun | None:
    """Return the run with the best score, unless it is unknown, alone or tied, or the runs are not comparable."""
    scores = [(run.scores[metric], number) for number, run in enumerate(runs) if metric in run.scores]
    if metric not in METRICS or len(scores) < 2 or not (are_comparable(metric, runs) and share_prompts(metric, runs)):
        return None
    sign = -1 if METRICS[metric].higher_is_better else 1
    (first, number), *others = sorted(scores, key=lambda pair: sign * (pair[0].value or 0.0))
    if first.value == others[0][0].value:
        return None
    return BestRun(number, all(_are_disjoint(first, other) for other, _ in others))


def are_comparable(metric: str, runs: Sequence[EvaluationRun]) -> bool:
    """Whether all runs that have a metric used the same model for it, and the same reference and number of images."""
    return len({_measured_with(metric, run) for run in runs if metric in run.scores}) < 2


def share_prompts(metric: str, runs: Sequence[EvaluationRun]) -> bool:
    """Whether all runs that have a score of single images have it for nearly the same prompts."""
    sets = [
        {prompt for prompt, value in zip(run.prompts, run.per_image[metric], strict=True) if value is not None}
        for run in runs
        if metric in run.per_image
    ]
    shared = set.intersection(*sets) if sets else set()
    return all(len(shared) >= _SHARED_PROMPTS * len(prompts) for prompts in sets)


def _measured_with(metric: str, run: EvaluationRun) -> tuple[Any, ...]:
    report, info = run.report, METRICS.get(metric)
    if info is None:
        return ()
    weights = metric if info.encoder == "score" else info.encoder
    used: tuple[Any, ...] = (report.settings.get(f"{weights}_sha256"),)
    if info.encoder == "inception":
        used += (report.settings.get("resizing"),)
    if info.reference and report.reference:
        reference = report.reference
        used += (reference.sha256 or reference.path, reference.count)
    # A mean over images does not depend on how many there are; the other metrics do.
    return used if metric in run.per_image else (*used, report.images.count)


def _are_disjoint(one: MetricScore, other: MetricScore) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.high < other.low or other.high < one.low


class PairedComparison(NamedTuple):
    """One score of two runs on the same prompts: the mean difference and the share of prompts that the run wins."""

    run: str
    baseline: str
    metric: str
    prompts: int
    difference: MetricScore
    win_rate: MetricScore
    """Ties count half."""


def compare_runs(runs: Sequence[EvaluationRun]) -> list[PairedComparison]:
    """Compare each run with the first, prompt by prompt, in every score of single images that both have."""
    found = []
    for run in runs[1:]:
        for metric in run.per_image:
            if metric not in runs[0].per_image or not are_comparable(metric, (runs[0], run)):
                continue
            ours, baseline = (_means_by_prompt(one, metric) for one in (run, runs[0]))
            if pairs := [(ours[prompt], baseline[prompt]) for prompt in ours if prompt in baseline]:
                found.append(PairedComparison(run.name, runs[0].name, metric, len(pairs), *_paired_scores(pairs)))
    return found


def _means_by_prompt(run: EvaluationRun, metric: str) -> dict[str, float]:
    """Average the images of each prompt, which are not independent; without a prompt, the file name stands for it."""
    values: dict[str, list[float]] = defaultdict(list)
    for index, value in enumerate(run.per_image[metric]):
        if value is not None:
            values[run.prompts[index] or run.key(index)[0]].append(value)
    return {prompt: math.fsum(of_prompt) / len(of_prompt) for prompt, of_prompt in values.items()}


def _paired_scores(pairs: Sequence[tuple[float, float]]) -> tuple[MetricScore, MetricScore]:
    import numpy as np

    from muralist.evaluate.metrics import mean_estimate

    difference = np.array([ours - baseline for ours, baseline in pairs])
    scores = []
    for estimate in (mean_estimate(difference), mean_estimate((np.sign(difference) + 1) / 2, is_share=True)):
        low, high = estimate.interval(0) or (None, None)
        scores.append(MetricScore(value=estimate.value, low=low, high=high))
    return scores[0], scores[1]
