"""What each metric means; report.json read back; and its page: one HTML file of one or several evaluations.

The markup is in static/report.html, where jinja2 escapes every prompt, name and other text.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from muralist.core.errors import UserError
from muralist.core.formatting import format_duration
from muralist.core.images import thumbnail
from muralist.core.run_dir import atomic_write, check_exists, exists
from muralist.data.decode import read_image_file
from muralist.data.tar_members import find_member

REPORT = "report.json"
_SEED = re.compile(r"_seed(\d+)$")  # generate names images ID_seedN


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


class Report(_Model):
    """The content of report.json; any field may be missing, and none may be damaged."""

    fid: Number = None
    scores: dict[str, MetricScore | None] = {}
    missing: list[dict[str, str]] = []  # metric and reason
    images: _ImageSet = _ImageSet()
    reference: _ImageSet | None = None
    settings: dict[str, Any] = {}
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
        self.clip_scores: Sequence[float | None] = report.per_image.clip_score or [None] * len(self.files)
        self.prompts = [prompt or "" for prompt in report.per_image.prompt or [""] * len(self.files)]
        self.scores = {name: score for name, score in report.scores.items() if score and score.value is not None}
        if report.fid is not None and "fid" not in self.scores:
            self.scores["fid"] = MetricScore(value=report.fid)

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


PAGE = "index.html"
IMAGES_PER_RUN = 200
_MAX_IMAGES = 600
_MAX_BYTES = 3_300_000  # of all thumbnails, before base64 adds a third: with plotly, the page stays below 10 MB
_MAX_EXTREMES = 12
_MAX_ROWS = 50
_MAX_FAILURES = 300
_MAX_UNREADABLE = 50
_MAX_TEXT = 1000  # characters of a prompt or an error message
_MAX_LABEL = 24
_MAX_FOLDERS_UP = 4
_SIDES_AND_QUALITIES = ((448, 82), (320, 80), (256, 75), (192, 70), (128, 60), (96, 40), (48, 20))
_HISTOGRAM_BINS = 30
_STATIC = Path(__file__).parent / "static"
_PALETTE = Path(__file__).parents[1] / "core" / "static" / "palette.css"
Chart = dict[str, Any]
T = TypeVar("T")


def write_report(folders: Sequence[Path], destination: Path) -> Path:
    """Write the page of one or several evaluations into a folder, and return its path."""
    runs = read_runs([Path(folder) for folder in folders])
    text = render(runs, select_images(runs), destination)
    atomic_write(destination / PAGE, text.encode(errors="replace"))  # a prompt may hold half a surrogate pair
    return destination / PAGE


def render(runs: Sequence[EvaluationRun], selection: ImageSelection, destination: Path) -> str:
    """Return the HTML of the page."""
    environment = Environment(
        loader=FileSystemLoader(_STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": _format_value, "truncated": _truncate, "duration": format_duration}
    environment.globals |= {"metric_title": metric_title, "metrics": METRICS, "find_best": find_best}
    thumbnails, images = _page_images(runs, selection, destination)
    scored = {metric for run in runs for metric in run.scores}
    metrics = [metric for metric in METRICS if metric in scored] + sorted(scored - METRICS.keys())
    reports = [run.report for run in runs]
    charts = [_score_chart(metric, runs) for metric in metrics] if len(runs) > 1 else []
    clip_chart, speed_chart = _clip_chart(runs), _speed_chart(runs)
    charts += [chart for chart in (clip_chart, speed_chart) if chart]
    return environment.get_template("report.html").render(
        runs=runs,
        selection=selection,
        images=images,
        available_metrics=metrics,
        warnings=_group([report.warnings for report in reports]),
        comparable=len({(report.reference and report.reference.path, report.images.count) for report in reports}) == 1,
        missing=_group([_missing_by_reason(run) for run in runs]),
        failures=[report.failures[: _MAX_FAILURES // len(runs)] for report in reports],
        max_unreadable=_MAX_UNREADABLE,
        settings=_settings_table(runs),
        thumbnails=thumbnails,
        charts=charts,
        clip_chart=charts.index(clip_chart) if clip_chart else None,
        speed_chart=charts.index(speed_chart) if speed_chart else None,
        style=_PALETTE.read_text(encoding="utf-8") + (_STATIC / "report.css").read_text(encoding="utf-8"),
        script=(_STATIC / "report.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
    )


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


class ImageSelection(NamedTuple):
    """The images on the page, by their indices in each run."""

    shown: list[list[int]]
    best: list[list[int]]
    worst: list[list[int]]
    rows: list[tuple[int, ...]]
    """One image of each run, all of the same prompt and seed."""


def select_images(runs: Sequence[EvaluationRun]) -> ImageSelection:
    """Select the best and worst images of each run, rows that all runs share, and others evenly spaced."""
    limit = max(1, min(IMAGES_PER_RUN, _MAX_IMAGES // len(runs)))
    rows = _evenly_spaced(_shared_rows(runs), min(_MAX_ROWS, limit // 4))
    shown, best, worst = [], [], []
    for position, run in enumerate(runs):
        scores = [(score, index) for index, score in enumerate(run.clip_scores) if score is not None]
        ranked = [index for _, index in sorted(scores)]
        count = min(_MAX_EXTREMES, limit // 4, len(ranked) // 2)  # no image is among both
        worst.append(ranked[:count])
        best.append(ranked[::-1][:count])
        fixed = {*best[-1], *worst[-1], *(row[position] for row in rows)}
        others = [index for index in range(len(run.files)) if index not in fixed]
        shown.append(sorted({*fixed, *_evenly_spaced(others, limit - len(fixed))}))
    return ImageSelection(shown, best, worst, rows)


def _shared_rows(runs: Sequence[EvaluationRun]) -> list[tuple[int, ...]]:
    if len(runs) < 2:
        return []
    by_key = [{run.key(index): index for index in reversed(range(len(run.files)))} for run in runs]
    first, *others = by_key
    keys = [key for key in reversed(first) if all(key in other for other in others)]
    return [tuple(indices[key] for indices in by_key) for key in keys]


def _evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    count = min(count, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def _page_images(
    runs: Sequence[EvaluationRun], selection: ImageSelection, destination: Path
) -> tuple[list[str], dict[tuple[int, int], dict[str, Any]]]:
    """Return the thumbnails as data URIs, and the selected images by run and index."""
    places = [(number, index) for number, shown in enumerate(selection.shown) for index in shown]
    paths = [runs[number].path(index) for number, index in places]
    thumbnails: list[str] = []
    images = {}
    for (number, index), path, data in zip(places, paths, encode_thumbnails(paths), strict=True):
        run = runs[number]
        file, prompt, score = run.files[index], run.prompts[index], run.clip_scores[index]
        about = [run.name] if len(runs) > 1 else []
        about += [file] if score is None else [file, f"CLIP score {_format_value(score)}"]
        images[number, index] = {
            "file": file,
            "prompt": prompt,
            "score": score,
            "about": " · ".join(about),
            "search_text": f"{prompt} {file}"[:_MAX_TEXT].lower(),
            "thumbnail": None if data is None else len(thumbnails),  # the page holds each thumbnail once
            "original": _relative_address(path, destination),
        }
        thumbnails += [] if data is None else [data]
    return thumbnails, images


def encode_thumbnails(paths: Sequence[Path]) -> list[str | None]:
    """Return each image as a data URI of bounded size, or None if it cannot be read."""
    bound = _MAX_BYTES // max(1, len(paths))
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda path: _encode_thumbnail(path, bound), paths))


def _encode_thumbnail(path: Path, bound: int) -> str | None:
    try:
        file = io.BytesIO(read_image_file(path))
    except UserError:
        return None
    if (image := thumbnail(file, _SIDES_AND_QUALITIES[0][0])) is None:
        return None
    for side, quality in _SIDES_AND_QUALITIES:
        image.thumbnail((side, side))
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=quality)
        if buffer.tell() <= bound:
            break
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _relative_address(path: Path, destination: Path) -> str | None:
    """Return the address of an image, unless it is too far away to be moved together with the page."""
    relative = Path(os.path.relpath(path.absolute(), destination.absolute()))
    if relative.parts.count("..") > _MAX_FOLDERS_UP:
        return None
    return "/".join(quote(part, safe="", errors="replace") for part in relative.parts)


def _group(texts: Sequence[Sequence[T]]) -> list[tuple[list[int], T]]:
    """Return every text once, with the numbers of the runs that have it; no numbers if all have it."""
    grouped = []
    for text in dict.fromkeys(text for of_run in texts for text in of_run):
        numbers = [number for number, of_run in enumerate(texts) if text in of_run]
        grouped.append(([] if len(numbers) == len(texts) else numbers, text))
    return grouped


def _missing_by_reason(run: EvaluationRun) -> list[tuple[str, str]]:
    pairs = ((metric_title(line.get("metric", "")), line.get("reason", "")) for line in run.report.missing)
    return [(names, reason) for reason, names in group_by_reason(pairs).items()]


def _settings_table(runs: Sequence[EvaluationRun]) -> list[tuple[str, list[str]]]:
    """Return rows of a setting's dotted name and its value in each run."""
    columns = [_settings_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "–") for column in columns]) for name in names]


def _settings_of(run: EvaluationRun) -> dict[str, str]:
    report = run.report
    facts: dict[str, Any] = {"images": report.images.folder, "images counted": report.images.count}
    facts |= _sizes("image sizes", report.images.sizes)
    if report.reference:
        facts |= {"reference": report.reference.path, "reference images": report.reference.count}
        facts |= _sizes("reference sizes", report.reference.sizes)
    facts |= _flatten(report.settings, "") | _flatten(report.versions, "version of ")
    if report.seconds is not None:
        facts["time taken"] = format_duration(report.seconds)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _sizes(name: str, sizes: Mapping[str, int]) -> dict[str, str]:
    text = ", ".join(f"{size} ({count:,})" for size, count in sizes.items())
    return {name: text} if text else {}


def _flatten(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _format_value(value: float | None) -> str:
    if value is None:
        return "?"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:#.4g}"
    return f"{value:,.1f}" if abs(value) < 1e6 and (value == 0 or abs(value) > 1) else f"{value:.2e}"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _score_chart(metric: str, runs: Sequence[EvaluationRun]) -> Chart:
    """Return a bar for each run, with its interval."""
    scores = [run.scores.get(metric, MetricScore()) for run in runs]
    names = _chart_labels(runs)
    bars = {
        "type": "bar",
        "x": list(range(len(runs))),
        "customdata": names,
        "y": [score.value for score in scores],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [_difference(score.value, score.high) for score in scores],
            "arrayminus": [_difference(score.low, score.value) for score in scores],
            "thickness": 1.5,
        },
        "hovertemplate": "%{customdata}: %{y:.4g}<extra></extra>",
    }
    # Bars are placed by number, because two long names may become the same label.
    ticks = {"tickvals": bars["x"], "ticktext": names, "showgrid": False, "zeroline": False}
    return {"data": [bars], "layout": {"showlegend": False, "xaxis": ticks}, "style": "bars"}


def _clip_chart(runs: Sequence[EvaluationRun]) -> Chart | None:
    """Return histograms of the images' CLIP scores."""
    scores = [[score for score in run.clip_scores if score is not None] for run in runs]
    if not any(scores):
        return None
    edges = np.histogram_bin_edges(np.concatenate(scores), _HISTOGRAM_BINS)  # the same for all runs
    step = edges[1] - edges[0]
    centers = np.arange(-1, len(edges)) * step + (edges[0] + step / 2)  # with an empty bin on both sides
    traces = []
    for name, of_run in zip(_chart_labels(runs), scores, strict=True):
        if of_run:
            percent = np.pad(100 * np.histogram(of_run, edges)[0] / len(of_run), 1)
            x, y = centers.round(4).tolist(), percent.round(3).tolist()
            traces.append({"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "fill": "tozeroy"})
    axes = {
        "xaxis": {"title": {"text": "CLIP score of an image"}},
        "yaxis": {"title": {"text": "% of the images"}, "rangemode": "tozero"},
    }
    return {"data": traces, "layout": {"showlegend": len(runs) > 1, **axes}, "style": "steps"}


def _speed_chart(runs: Sequence[EvaluationRun]) -> Chart | None:
    """Return the images per second of every GPU."""
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": [f"GPU {html.escape(gpu)}" for gpu in run.report.speed],
            "y": [speed.get("images_per_second") for speed in run.report.speed.values()],
            "hovertemplate": "%{x}: %{y:.3g} images/s<extra></extra>",
        }
        for name, run in zip(_chart_labels(runs), runs, strict=True)
        if run.report.speed
    ]
    if not traces:
        return None
    layout = {"barmode": "group", "showlegend": len(runs) > 1, "xaxis": {"showgrid": False}}
    layout["yaxis"] = {"title": {"text": "images per second"}}
    return {"data": traces, "layout": layout, "style": "traces"}


def _chart_labels(runs: Sequence[EvaluationRun]) -> list[str]:
    short = [run.name if len(run.name) <= _MAX_LABEL else f"…{run.name[1 - _MAX_LABEL :]}" for run in runs]
    return [html.escape(name) for name in short]  # plotly interprets labels as a subset of HTML


def _difference(low: float | None, high: float | None) -> float:
    return 0.0 if low is None or high is None else max(0.0, high - low)
