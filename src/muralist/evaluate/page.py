"""The page of one or several evaluations: one HTML file that needs no network.

The markup is in static/report.html, where jinja2 escapes every prompt, name and other text.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from muralist.core.formatting import format_duration
from muralist.core.images import thumbnail
from muralist.core.run_dir import atomic_write, atomic_write_json
from muralist.data.decode import read_image_file
from muralist.evaluate.report import (
    METRICS,
    EvaluationRun,
    MetricScore,
    PairedComparison,
    UserError,
    are_comparable,
    compare_runs,
    find_best,
    format_score,
    group_by_reason,
    metric_title,
    read_runs,
    score_decimals,
    share_prompts,
)

PAGE = "index.html"
COMPARISON = "comparison.json"
IMAGES_PER_RUN = 200
_MAX_IMAGES = 600
_MAX_BYTES = 6_000_000  # of all thumbnails, before base64 adds a third: the page stays below 10 MB
_MAX_EXTREMES = 12
_LEAST_PROMPTS = 6  # of a verdict: fewer agree by chance in more than 5% of all cases, and a bootstrap hides it
_MAX_ROWS = 50
_MAX_FAILURES = 300
_MAX_UNREADABLE = 50
_MAX_TEXT = 1000  # characters of a prompt or an error message
_MAX_FOLDERS_UP = 4
_MOSAIC = 16
_SIDES_AND_QUALITIES = ((448, 82), (320, 80), (256, 75), (192, 70), (128, 60), (96, 40), (48, 20))
_HISTOGRAM_BINS = 30
_STATIC = Path(__file__).parent / "static"
_PALETTE = Path(__file__).parents[1] / "core" / "static" / "palette.css"
_GROUPS = ("Distance from the reference", "Fidelity and diversity", "Prompts and preference")
T = TypeVar("T")


def write_report(folders: Sequence[Path], destination: Path) -> Path:
    """Write the page of one or several evaluations into a folder, and return its path.

    With several, comparison.json beside it holds the comparison of each with the first, prompt by prompt.
    """
    runs = read_runs([Path(folder) for folder in folders])
    comparisons = compare_runs(runs)
    text = render(runs, select_images(runs), destination, comparisons)
    atomic_write(destination / PAGE, text.encode(errors="replace"))  # a prompt may hold half a surrogate pair
    if len(runs) > 1:
        shown = [
            {name: value.model_dump(exclude={"note"}) if isinstance(value, MetricScore) else value
             for name, value in comparison._asdict().items()}
            for comparison in comparisons
        ]  # fmt: skip
        atomic_write_json(destination / COMPARISON, shown)
    return destination / PAGE


def render(
    runs: Sequence[EvaluationRun],
    selection: ImageSelection,
    destination: Path,
    comparisons: Sequence[PairedComparison] = (),
) -> str:
    """Return the HTML of the page."""
    environment = Environment(
        loader=FileSystemLoader(_STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"truncated": _truncate, "duration": format_duration, "rate": lambda value: f"{value:.3g}"}
    thumbnails, images = _page_images(runs, selection, destination)
    scored = {metric for run in runs for metric in run.scores}
    metrics = [metric for metric in METRICS if metric in scored] + sorted(scored - METRICS.keys())
    reports = [run.report for run in runs]
    per_image = _per_image_metrics(runs)
    speeds = [speed for report in reports for gpu in report.speed.values() if (speed := gpu.get("images_per_second"))]
    data = {run.data for run in runs}
    facts = [_facts(run, several=len(runs) > 1, named=len({run.model for run in runs}) > 1) for run in runs]
    return environment.get_template("report.html").render(
        runs=runs,
        data=data.pop() if len(data) == 1 else "",
        title=_title(runs),
        facts=facts,
        common_facts=[fact for fact in facts[0] if all(fact in others for others in facts)],
        selection=selection,
        images=images,
        score_groups=_score_groups(metrics, runs),
        warnings=_group([report.warnings for report in reports]),
        comparable=all(are_comparable(metric, runs) and share_prompts(metric, runs) for metric in metrics),
        missing=_group([_missing_by_reason(run) for run in runs]),
        notes=_group([_notes(run) for run in runs]),
        comparisons=[_comparison_row(comparison, runs) for comparison in comparisons],
        heat_maps=_heat_maps(runs, per_image),
        histograms=[_histogram(metric, runs, per_image[metric]) for metric in per_image],
        image_metrics={key: {"title": metric_title(key), "decimals": digits} for key, digits in per_image.items()},
        categories=_category_choices(runs),
        failures=[report.failures[: _MAX_FAILURES // len(runs)] for report in reports],
        max_unreadable=_MAX_UNREADABLE,
        fastest=max(speeds, default=0.0),
        settings=_settings_table(runs),
        thumbnails=thumbnails,
        style=_PALETTE.read_text(encoding="utf-8") + (_STATIC / "report.css").read_text(encoding="utf-8"),
        script=(_STATIC / "report.js").read_text(encoding="utf-8"),
    )


# Scores.


def _score_groups(metrics: Sequence[str], runs: Sequence[EvaluationRun]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of the table of scores under the headings of their kinds."""
    rows: dict[str, list[dict[str, Any]]] = {heading: [] for heading in (*_GROUPS, "Others")}
    for metric in metrics:
        info = METRICS.get(metric)
        if info is None:
            heading = "Others"
        elif info.reference and not info.higher_is_better:
            heading = _GROUPS[0]
        else:
            heading = _GROUPS[1] if info.reference or info.encoder == "inception" else _GROUPS[2]
        rows[heading].append(_score_row(metric, runs))
    return [(heading, of_kind) for heading, of_kind in rows.items() if of_kind]


def _score_row(metric: str, runs: Sequence[EvaluationRun]) -> dict[str, Any]:
    scores = [run.scores.get(metric) for run in runs]
    known = [score for score in scores if score]
    decimals, best = score_decimals(known), find_best(metric, runs)
    place = _scale([end for score in known for end in (score.value, score.low, score.high)])
    values = [format_score(score, decimals)[0] for score in known]
    cells: list[dict[str, Any] | None] = []
    for number, score in enumerate(scores):
        if score is None:
            cells.append(None)
            continue
        value, interval = _texts(score, decimals)
        star = ""
        if best and best.run == number and values.count(format_score(score, decimals)[0]) == 1:
            star = "best" if best.clear else "best, not clearly"
        cells.append({"value": value, "interval": interval, "star": star, "plot": _plot(score, place)})
    info = METRICS.get(metric)
    return {
        "title": metric_title(metric),
        "higher": info.higher_is_better if info else None,
        "meaning": info.meaning if info else "",
        "cells": cells,
    }


def _texts(score: MetricScore, decimals: int) -> tuple[str, tuple[str, ...] | None]:
    """Return the texts of a value and its interval, with the minus sign of mathematics."""
    value, interval = format_score(score, decimals)
    return value.replace("-", "−"), interval and tuple(end.replace("-", "−") for end in interval)


def _scale(values: Iterable[float | None], zero: bool = False) -> tuple[float, float]:
    """Return the least value of an axis and its length, with a margin; `zero` is then on the axis."""
    known = [value for value in values if value is not None] + ([0.0] if zero else [])
    low, high = min(known, default=0.0), max(known, default=0.0)
    margin = (high - low) * 0.06 or 1.0
    return low - margin, high - low + 2 * margin


def _plot(score: MetricScore, scale: tuple[float, float]) -> dict[str, float]:
    """Return where a value and its interval are on an axis, in percent."""
    value = score.value or 0.0
    ends = (value if end is None else end for end in (score.low, score.high))
    dot, low, high = (round(100 * (end - scale[0]) / scale[1], 2) for end in (value, *ends))
    return {"dot": dot, "low": low, "width": round(high - low, 2)}


def _comparison_row(comparison: PairedComparison, runs: Sequence[EvaluationRun]) -> dict[str, Any]:
    difference, wins = comparison.difference, comparison.win_rate
    value, interval = _texts(difference, score_decimals([difference]))
    percent = MetricScore(**{end: None if (share := getattr(wins, end)) is None else 100 * share
                             for end in ("value", "low", "high")})  # fmt: skip
    share, shares = format_score(percent, 0)
    scale = _scale((difference.value, difference.low, difference.high), zero=True)
    names = [run.name for run in runs]
    low, high = difference.low, difference.high
    if low is None or high is None:  # equal differences have no interval; then the prompts won decide
        low, high = (wins.low or 0.0) - 0.5, (wins.high or 1.0) - 0.5
    verdict = "within noise"
    if comparison.prompts < _LEAST_PROMPTS:
        verdict = "too few prompts"
    elif low > 0 or high < 0:
        verdict = "better" if (low > 0) == METRICS[comparison.metric].higher_is_better else "worse"
    return {
        "run": names.index(comparison.run),
        "baseline": names.index(comparison.baseline),
        "title": metric_title(comparison.metric),
        "difference": value if value.startswith("−") or not value.strip("0.") else f"+{value}",
        "interval": interval,
        "wins": f"{share}%",
        "win_interval": shares and [f"{end}%" for end in shares],
        "prompts": f"{comparison.prompts:,}",
        "verdict": verdict,
        "plot": _plot(difference, scale),
        "zero": round(-100 * scale[0] / scale[1], 2),
    }


# Categories.


def _per_image_metrics(runs: Sequence[EvaluationRun]) -> dict[str, int]:
    """Return the scores of single images, each with its decimals: three digits of the largest."""
    found = {}
    for metric in METRICS:
        values = [value for run in runs for value in run.per_image.get(metric, ()) if value is not None]
        if values:
            largest = max(map(abs, values))
            found[metric] = min(max(2 - math.floor(math.log10(largest)), 0), 4) if largest else 0
    return found


def _heat_maps(runs: Sequence[EvaluationRun], metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Return a table for each column of categories: of all scores of one run, or of one score of all runs."""
    tables = []
    for column in dict.fromkeys(column for run in runs for column in run.report.categories):
        categories = [run.report.categories.get(column, {}) for run in runs]
        names = dict.fromkeys(name for of_run in categories for name in of_run)
        places = [(metric, number) for metric in metrics for number in range(len(runs))]
        scores = {
            (metric, number): [
                found.scores.get(metric) if (found := categories[number].get(name)) else None for name in names
            ]
            for metric, number in places
        }
        for heads in [places] if len(runs) == 1 else [[p for p in places if p[0] == metric] for metric in metrics]:
            if shown := [head for head in heads if any(scores[head])]:
                # Columns of several runs share their scale; those of several scores do not.
                scales = {head: shown if len(runs) > 1 else [head] for head in shown}
                cells = {head: _heat_cells(head[0], scores[head], [scores[h] for h in scales[head]]) for head in shown}
                rows = [
                    (
                        name,
                        [of_run[name].count if name in of_run else 0 for of_run in categories],
                        [cells[h][row] for h in shown],
                    )
                    for row, name in enumerate(names)
                ]
                title = metric_title(shown[0][0]) if len(runs) > 1 else ""
                tables.append({"column": column, "title": title, "heads": shown, "rows": rows})
    return tables


def _heat_cells(
    metric: str, scores: Sequence[MetricScore | None], scale: Sequence[Sequence[MetricScore | None]]
) -> list[dict[str, Any] | None]:
    known = [score for column in scale for score in column if score and score.value is not None]
    decimals = score_decimals(known)
    values = [score.value for score in known if score.value is not None]
    # Differences within the usual interval stay pale: the colors must not show noise.
    widths = [score.high - score.low for score in known if score.low is not None and score.high is not None]
    spread = max(max(values, default=0.0) - min(values, default=0.0), *np.percentile(widths or [0.0], [50]).tolist())
    low = (max(values, default=0.0) + min(values, default=0.0) - spread) / 2
    cells: list[dict[str, Any] | None] = []
    for score in scores:
        if not score or score.value is None:
            cells.append(None)
            continue
        share = (score.value - low) / spread if spread else 0.5
        text, interval = _texts(score, decimals)
        heat = share if METRICS[metric].higher_is_better else 1 - share
        cells.append({"value": text, "interval": interval, "heat": round(6 + 64 * heat)})
    return cells


def _category_choices(runs: Sequence[EvaluationRun]) -> dict[str, list[str]]:
    """Return the categories by which images can be filtered, by column."""
    columns = dict.fromkeys(column for run in runs for column in run.categories)
    return {
        column: list(dict.fromkeys(name for run in runs for name in run.report.categories.get(column, ())))
        for column in columns
    }


def _histogram(metric: str, runs: Sequence[EvaluationRun], decimals: int) -> dict[str, Any]:
    """Return the distribution of the images' scores as outlines in a box of 100 by 40."""
    scores = [[value for value in run.per_image.get(metric, ()) if value is not None] for run in runs]
    edges = np.histogram_bin_edges(np.concatenate(scores), _HISTOGRAM_BINS)  # the same for all runs
    shares = [np.histogram(of_run, edges)[0] / len(of_run) if of_run else None for of_run in scores]
    highest = max(float(share.max()) for share in shares if share is not None)
    step = 100 / _HISTOGRAM_BINS
    outlines = []
    for share in shares:
        if share is None:
            outlines.append("")
            continue
        heights = 40 - 39 * share / highest
        steps = (f"V{height:.2f}H{(index + 1) * step:.2f}" for index, height in enumerate(heights))
        outlines.append(f"M0,40{''.join(steps)}V40")
    ends = [_texts(MetricScore(value=float(edge)), decimals)[0] for edge in (edges[0], edges[-1])]
    if ends[0] == ends[1]:  # all images have one score
        ends = ["", ends[0], ""]
    return {"title": metric_title(metric), "outlines": outlines, "ends": ends}


# Images.


class ImageSelection(NamedTuple):
    """The images on the page, by their indices in each run."""

    shown: list[list[int]]
    rows: list[tuple[int, ...]]
    """One image of each run, all of the same prompt and seed."""
    mosaic: list[int]
    """Some images of the first run."""


def select_images(runs: Sequence[EvaluationRun]) -> ImageSelection:
    """Select the best and worst images of each run, rows that all runs share, and others evenly spaced."""
    limit = max(1, min(IMAGES_PER_RUN, _MAX_IMAGES // len(runs)))
    rows = _evenly_spaced(_shared_rows(runs), min(_MAX_ROWS, limit // 4))
    shown = []
    for position, run in enumerate(runs):
        fixed = {row[position] for row in rows}
        count = min(_MAX_EXTREMES, limit // (4 * max(1, len(run.per_image))))
        for scores in run.per_image.values():
            ranked = [index for _, index in sorted((v, index) for index, v in enumerate(scores) if v is not None)]
            fixed.update((*ranked[:count], *ranked[len(ranked) - count :]) if len(ranked) > count else ranked)
        others = [index for index in range(len(run.files)) if index not in fixed]
        shown.append(sorted({*fixed, *_evenly_spaced(others, limit - len(fixed))}))
    return ImageSelection(shown, rows, _evenly_spaced(shown[0], _MOSAIC))


def _shared_rows(runs: Sequence[EvaluationRun]) -> list[tuple[int, ...]]:
    if len(runs) < 2:
        return []
    by_key = [{run.key(index): index for index in reversed(range(len(run.files)))} for run in runs]
    first, *others = by_key
    keys = [key for key in reversed(first) if all(key in other for other in others)]
    return [tuple(indices[key] for indices in by_key) for key in keys]


def _evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Take one item from each of `count` equal parts, at pseudo-random places.

    The same place in each part would be the same class again and again in a table of classes in turn.
    """
    count = min(count, len(items))
    borders = [number * len(items) // count for number in range(count + 1)] if count else [0]
    return [items[Random(low).randrange(low, high)] for low, high in pairwise(borders)]


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
        file, prompt = run.files[index], run.prompts[index]
        images[number, index] = {
            "file": file,
            "prompt": prompt,
            "scores": {key: value for key, of_run in run.per_image.items() if (value := of_run[index]) is not None},
            "categories": [f"{column}={of_run[index]}" for column, of_run in run.categories.items() if of_run[index]],
            "about": f"{run.name} · {file}" if len(runs) > 1 else file,
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


# Texts.


def _title(runs: Sequence[EvaluationRun]) -> str:
    """Return the model, both of two models, or how many runs there are."""
    models = list(dict.fromkeys(run.model for run in runs))
    if len(runs) == 1 or len(models) == 2:
        return " and ".join(models)
    return f"{models[0]}: {len(runs)} runs" if len(models) == 1 else f"{len(runs)} runs"


def _facts(run: EvaluationRun, several: bool, named: bool) -> list[str]:
    """Return what a reader wants to know about a run at once; its model, too, where several runs have several."""
    report, made = run.report, run.report.generation
    count = len(run.files) if report.images.count is None else report.images.count
    facts = [run.model] if named and run.model != run.name else []
    facts.append(_count_images(count))
    if len(report.images.sizes) == 1:  # the report has the height first
        facts.append(" × ".join(reversed(next(iter(report.images.sizes)).split(" x "))))
    for name, unit in (("num_inference_steps", "{} steps"), ("guidance_scale", "guidance {}"), ("dtype", "{}")):
        if isinstance(made.get(name), str | int | float):
            facts.append(unit.format(made[name]))
    if report.reference and report.reference.path:
        size = "" if report.reference.count is None else f" ({_count_images(report.reference.count)})"
        facts.append(f"against {report.reference.path}{size}")
    if report.seconds is not None and not several:
        facts.append(f"measured in {format_duration(report.seconds)}")
    return facts


def _count_images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


def _notes(run: EvaluationRun) -> list[tuple[str, str, str]]:
    """Return what each score means and how it was computed."""
    known = [name for name in METRICS if name in run.scores]
    return [(metric_title(name), METRICS[name].meaning, run.scores[name].note or "") for name in known]


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
    facts |= _flatten(report.generation, "generation.")
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


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
