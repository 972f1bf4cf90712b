"""`muralist evaluate` and `muralist stats`: image folders to report.json and its page, or to reference statistics."""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist import __version__
from muralist.core.errors import UserError, closest_match
from muralist.core.formatting import format_list
from muralist.core.hardware import select_devices, share_devices
from muralist.core.run_dir import atomic_open, atomic_write_json, disk_write_error
from muralist.core.worker_pool import ProcessPool
from muralist.data.sources import EMBEDDED
from muralist.evaluate import encoders, inception, metrics
from muralist.evaluate.decoders import CACHE_DIR, FeatureItem
from muralist.evaluate.encoders import ClipEncoder, Dinov2Encoder, Encoder, InceptionEncoder
from muralist.evaluate.features import (
    Features,
    FeatureWorkers,
    compute_features,
    device_kind,
    find_unreadable,
    hash_files,
    hash_texts,
    start_ahead,
)
from muralist.evaluate.geneval import read_layout, read_metadata_table, write_layout
from muralist.evaluate.inputs import (
    ExactPairs,
    ImageFile,
    Statistics,
    TableColumns,
    dataset_images,
    find_images,
    match_table,
    read_ledger,
    read_statistics,
)
from muralist.evaluate.page import write_report
from muralist.evaluate.report import (
    METRICS,
    REPORT,
    MetricInfo,
    MetricScore,
    format_score,
    group_by_reason,
    score_decimals,
)
from muralist.evaluate.scores import SCORES, needs, open_scores, requested_scores, write_scores
from muralist.models.hub import find_model
from muralist.settings import EvaluateSettings, StatsSettings

log = logging.getLogger("muralist")
_UNREADABLE_LOGGED = 5  # report.json names all of them
_SIZES_REPORTED = 10
_CATEGORY_COLUMNS = ("category", "challenge", "tag")
_MAX_CATEGORIES = 100
_ALIASES = {"clip": "clip_score", "dinov2": "fd_dinov2", "fdd": "fd_dinov2", "is": "inception_score"}


def evaluate(settings: EvaluateSettings, pool: ProcessPool | None = None) -> int:
    """Compute the chosen metrics, or all whose inputs are there, write report.json and its page, and print the scores.

    `pool` holds processes of `workers_before_torch`.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    if settings.dry_run:
        evaluation = Evaluation(settings)
        plan = evaluation.plan()
        print(f"Scores to be computed: {', '.join(plan['metrics']) or 'none'}.")
        for reason, names in group_by_reason((line["metric"], line["reason"]) for line in plan["missing"]).items():
            print(f"No {names}: {reason}")
        count = len(evaluation.images)  # run_full_evaluation.sh takes a line that begins with "No" for a missing score
        print(f"{settings.images} holds {f'{count:,} images now' if count else 'no images yet'}.")
        return 0
    report, page = measure_and_log(settings, pool)
    scores = {name: MetricScore.model_validate(score) for name, score in report["scores"].items()}
    for name, score in scores.items():
        if score.value is not None:
            value, interval = format_score(score, score_decimals([score]))
            print(f"{name:<16}{value}{'  (' + ' to '.join(interval) + ')' if interval else ''}")
    print(f"The report is {Path(settings.output_dir) / REPORT}, its page {page}.")
    if all(score.value is None for score in scores.values()) and not settings.geneval_layout:
        reason = "Each score lacks an input: a reference, weights, prompts or more images; the reasons are above."
        raise UserError("Nothing was measured.", reason, "`muralist evaluate --help` names the flags.")
    return 0


def measure_and_log(settings: EvaluateSettings, pool: ProcessPool | None = None) -> tuple[dict[str, Any], Path]:
    """Do what `measure` does, log why metrics are missing before it and what went wrong after it."""
    evaluation = Evaluation(settings, pool)
    known = dict(evaluation.missing)
    _log_missing(known)
    report, page = evaluation.write()
    _log_missing({name: why for name, why in evaluation.missing.items() if name not in known})
    _log_warnings(report)
    return report, page


def _log_missing(missing: dict[str, str]) -> None:
    for reason, names in group_by_reason(missing.items()).items():
        log.warning("No %s: %s", names, reason)


def _log_warnings(report: dict[str, Any]) -> None:
    unreadable = report["images"]["unreadable"]
    for line in unreadable[:_UNREADABLE_LOGGED]:
        log.warning("Left out, because it cannot be read: %s", line)
    if len(unreadable) > _UNREADABLE_LOGGED:
        log.warning("%d more cannot be read; %s names them.", len(unreadable) - _UNREADABLE_LOGGED, REPORT)
    for warning in report["warnings"]:
        log.warning("%s", warning)


def measure(settings: EvaluateSettings) -> tuple[dict[str, Any], Path]:
    """Compute the metrics; returns the content of report.json and the path of its page."""
    return Evaluation(settings).write()


def chosen_metrics(names: Sequence[str]) -> list[str]:
    """Return the metrics that --metrics names, in the order of the report; all of them without a name."""
    chosen = [_ALIASES.get(name, name) for name in (written.lower().replace("-", "_") for written in names)]
    for written, name in zip(names, chosen, strict=True):
        if name not in METRICS:
            hint = closest_match(written, [*METRICS, *_ALIASES])
            raise UserError(f"--metrics names an unknown score: {written}.", hint, f"There are {', '.join(METRICS)}.")
    return [name for name in METRICS if name in chosen or not chosen]


class Evaluation:
    """One call of `muralist evaluate`, checked as far as possible before anything is computed."""

    def __init__(self, settings: EvaluateSettings, pool: ProcessPool | None = None) -> None:
        """Find and check all inputs; a path that does not exist is an error, and so is a named metric without inputs."""
        self.settings, self.pool = settings, pool
        self.metrics = chosen_metrics(settings.metrics)
        self.resizing = inception.RESIZING[settings.resize]
        folder, self.output = Path(settings.images), Path(settings.output_dir)
        if self.output.exists() and not self.output.is_dir():
            raise UserError(
                f"--output_dir {self.output} is not a folder.", fix="Give a folder for report and features."
            )
        self.cache_dir = self.output / CACHE_DIR
        self.images = find_images(folder, "--images", self.output, may_be_absent=settings.dry_run)
        self.reference: list[ImageFile] | Statistics | None = None
        if settings.reference is not None:
            path = Path(settings.reference)
            is_file = path.suffix == ".npz"
            self.reference = read_statistics(path) if is_file else find_images(path, "--reference", self.output)
        self.ledger = read_ledger(folder)
        table = TableColumns()
        if settings.prompts_csv:
            table = match_table(settings.prompts_csv, self.images, self.ledger.prompts)
        beside = read_layout(self.images)
        self.prompts = self.ledger.prompts | beside.prompts | table.prompts  # by file name, or by path
        self.table_columns = beside.others | table.others
        self.table_rows = table.rows
        self.geneval = read_metadata_table(settings) if settings.geneval_layout else []
        self.category_columns = self._find_category_columns()
        scores = [name for name in self.metrics if name in SCORES] if settings.metrics else requested_scores(settings)
        self.image_scores = open_scores(settings, scores)
        self.metrics = [name for name in self.metrics if name not in SCORES or name in self.image_scores]
        needed = {METRICS[name].encoder for name in self.metrics}
        weights, reason = inception.find_weights(settings.inception_weights) if "inception" in needed else (None, "")
        self.inception = InceptionEncoder.from_file(weights, resize=settings.resize) if weights else None
        self.classifier = inception.load_classifier(weights) if weights else None
        # Encoders of images and of prompts.
        self.clip = (
            ClipEncoder.from_checkpoint(find_model(settings.clip_path, "--clip_path"))
            if settings.clip_path and "clip" in needed
            else None
        )
        self.dinov2 = (
            Dinov2Encoder.from_checkpoint(find_model(settings.dinov2_path, "--dinov2_path"))
            if settings.dinov2_path and "dinov2" in needed
            else None
        )
        self.devices = share_devices(select_devices(settings.gpu_ids))
        self.metrics_device = next(iter(self.devices.values()))
        self.warnings: list[str] = []
        if table.ambiguous:
            self.warnings.append(
                f"Several rows of {settings.prompts_csv} with other prompts share the id of {table.ambiguous[0]}; so it is "
                f"for {len(table.ambiguous):,} of {len(self.images):,} images, whose prompts the table does not tell."
            )
        self.scores: dict[str, dict[str, Any]] = {}
        self.breakdowns: dict[str, dict[str, Any]] = {}
        # Scores of each readable image, by metric; None where a score does not apply, such as without a prompt.
        self.per_image: dict[str, list[float | None]] = {}
        no_weights = f"{reason} The other metrics are computed without it."
        reasons = {name: self._why_missing(name, METRICS[name], no_weights) for name in self.metrics}
        self.missing = {name: why for name, why in reasons.items() if why}
        if settings.metrics and self.missing:
            name, why = next(iter(self.missing.items()))
            raise UserError(
                f"--metrics names {name}, which cannot be computed.",
                f"The reason: {why}",
                f"Leave {name} out to go on without it.",
            )
        self._check_resizing()

    def _why_missing(self, name: str, metric: MetricInfo, no_weights: str) -> str:
        """Say which input of a metric is missing; empty where all are there."""
        reference, path = self.reference, self.settings.reference
        # Before images are generated, their prompts are taken for granted.
        prompt_is_known = not self.images or any(_look_up(self.prompts, file) is not None for file in self.images)
        if metric.encoder == "score":
            if name not in self.image_scores:
                return needs(name)
            return self._no_prompt() if SCORES[name].needs_prompts and not prompt_is_known else ""
        if metric.reference and reference is None:
            return "it compares two sets, and no --reference was given."
        if metric.encoder == "inception":
            if self.inception is None:
                return no_weights
            if isinstance(reference, Statistics) and reference.features is None and metric.reference == "features":
                return f"{path} holds a mean and a covariance, which suffice for FID alone."
            if name == "inception_score" and self.classifier is None:
                file = self.inception.source.name
                return f"it needs Inception's classifier, which {file} lacks; {inception.PYTORCH_FID_NAME} holds it."
        elif metric.encoder == "clip":
            if self.clip is None:
                return "it needs a CLIP model; give its folder as --clip_path."
            if isinstance(reference, Statistics) and metric.reference == "images":
                return "it needs the images of the reference, and only statistics were given."
            if name == "clip_score" and not prompt_is_known:
                return self._no_prompt()
        elif metric.encoder == "dinov2":
            if self.dinov2 is None:
                return (
                    f"it needs a DINOv2 model, {encoders.DINOV2_REPORTED} for values to publish; "
                    "give its folder as --dinov2_path."
                )
            if isinstance(reference, Statistics):
                fix = "`muralist stats --dinov2_path` writes them."
                if reference.dinov2_features is None:
                    return f"{path} holds no DINOv2 features; {fix}"
                if reference.dinov2_sha256 != self.dinov2.sha256:
                    return f"{path} holds features of another DINOv2 than --dinov2_path names; {fix}"
        return ""

    def _no_prompt(self) -> str:
        table = self.settings.prompts_csv
        if table is None:
            return "no prompt is known for any image; give --prompts_csv."
        first = self.images[0].name
        return f"no row of {table} belongs to an image: row ID has the files ID.* and ID_seedN.*; {first} has no row."

    def _find_category_columns(self) -> list[str]:
        """Return the columns of categories; one that the user names must be in the table."""
        names = [name.strip().lower() for name in self.settings.category_column]
        for name in names if self.images else ():
            if name not in self.table_columns:
                raise UserError(
                    f"--category_column {name} is not a column of the prompt table.",
                    closest_match(name, self.table_columns),
                    f"Its further columns are {', '.join(self.table_columns)}."
                    if self.table_columns
                    else "Give a table with such a column as --prompts_csv.",
                )
        return names or [name for name in _CATEGORY_COLUMNS if name in self.table_columns]

    def _categories(self, cells: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
        """Average the scores of images over each category of each column, in the order of their names."""
        found: dict[str, dict[str, Any]] = {}
        for column in self.category_columns:
            names = [None if cell is None else str(cell) for cell in cells[column]]
            counts = Counter(name for name in names if name)
            if len(counts) > _MAX_CATEGORIES:
                self.warnings.append(
                    f"The column {column} has {len(counts):,} values, too many for categories: it is left out."
                )
                continue
            found[column] = {}
            for category in sorted(counts):
                scores = {}
                for metric, values in self.per_image.items():
                    pairs = zip(names, values, strict=True)
                    known = np.array([value for name, value in pairs if name == category and value is not None])
                    if len(known):
                        estimate = metrics.mean_estimate(known)
                        low, high = estimate.interval(self.settings.seed) or (None, None)
                        scores[metric] = {"value": estimate.value, "low": low, "high": high}
                found[column][category] = {"count": counts[category], "scores": scores}
        return found

    def _check_resizing(self) -> None:
        """Refuse reference statistics of images that were resized in another way."""
        if not isinstance(self.reference, Statistics) or self.inception is None:
            return
        path, asked, used = self.settings.reference, self.settings.resize, self.reference.resize
        if used is None and asked != "pytorch-fid":
            self.warnings.append(
                f"{path} does not say how its images were resized: FID is right only if it was {asked} too."
            )
        elif used not in (None, asked):
            raise UserError(
                f"{path} holds statistics of images resized as {used} does, and --resize is {asked}.",
                "Their distance would measure the resizing.",
                f"Add --resize {used}, or write other statistics with `muralist stats --resize {asked}`.",
            )

    def plan(self) -> dict[str, Any]:
        """Return which metrics will be computed, and which not and why, as far as it is known before the images."""
        computed = [name for name in self.metrics if name not in self.missing]
        return {"metrics": computed, "missing": self._missing_lines()}

    def _missing_lines(self) -> list[dict[str, str]]:
        return [{"metric": name, "reason": self.missing[name]} for name in self.metrics if name in self.missing]

    def _wants(self, name: str) -> bool:
        return name in self.metrics and name not in self.missing

    def write(self) -> tuple[dict[str, Any], Path]:
        """Compute the metrics, write report.json and its page; returns the report and the path of the page."""
        self.output.mkdir(parents=True, exist_ok=True)
        report = self.run()
        try:
            atomic_write_json(self.output / REPORT, report)
        except OSError as error:
            raise disk_write_error(error, self.output / REPORT) from None
        return report, write_report([self.output], self.output / "report")

    def run(self) -> dict[str, Any]:
        """Compute all metrics, and return the report."""
        started = time.monotonic()
        used = [
            (encoder, score)
            for name, encoder, score in (
                ("inception", self.inception, self._score_inception),
                ("clip", self.clip and self.clip[0], self._score_clip),
                ("dinov2", self.dinov2, self._score_dinov2),
            )
            if encoder and any(METRICS[key].encoder == name and self._wants(key) for key in self.metrics)
        ]
        sets: tuple[Features, Features] | None = None
        if torch.device(self.metrics_device).type == "cuda":
            threading.Thread(target=_start_linear_algebra, args=(self.metrics_device,), daemon=True).start()
        with start_ahead(used[0][0], self.devices, self.cache_dir, self.pool) if used else nullcontext() as workers:
            items = hash_files(self.images)
            reference_items = hash_files(self.reference) if isinstance(self.reference, list) else []
            for encoder, score in used:
                ahead = workers if encoder is used[0][0] else None
                both = self._features(encoder, [*items, *reference_items], workers=ahead)
                sets = self._split(both, len(items))
                score(*sets)
        images, reference = sets or self._split(find_unreadable([*items, *reference_items]), len(items))
        if isinstance(self.reference, list):
            for index, why in reference.unreadable.items():
                self.warnings.append(f"{self.reference[index]} of the reference is left out: {why}.")
        prompts = [_look_up(self.prompts, self.images[index]) for index in images.indices]
        self._score_images([items[index] for index in images.indices], prompts)
        to_exact = self._compare_with_exact_mode(self.ledger.exact_pairs) if self.ledger.exact_pairs else {}
        sizes, reference_sizes = _count_sizes(items, images), _count_sizes(reference_items, reference)
        if len(sizes) > 1:
            named = " and ".join(size for size, _ in sizes.most_common(2))
            self.warnings.append(
                f"The images have {len(sizes):,} sizes, most often {named} (height x width): "
                "each is resized on its own."
            )
        folder = Path(self.settings.images)
        names = [path.relative_to(folder).as_posix() for path in self.images]
        readable = [names[index] for index in images.indices]
        others = {
            name: [_look_up(cells, self.images[index]) for index in images.indices]
            for name, cells in self.table_columns.items()
        }
        write_scores(self.output, readable, prompts, self.per_image, others)
        categories = self._categories(others) | {name: parts for name, parts in self.breakdowns.items() if parts}
        if self.settings.geneval_layout:
            files = [self.images[index] for index in images.indices]
            count = write_layout(Path(self.settings.geneval_layout), self.geneval, files, self.table_rows)
            log.info("%s images are in GenEval's folders, %s.", f"{count:,}", self.settings.geneval_layout)
        unknown = {"value": None, "low": None, "high": None}
        scores = {name: self.scores.get(name, unknown | {"note": self.missing.get(name, "")}) for name in self.metrics}
        return {
            "fid": scores.get("fid", unknown)["value"],
            "kid": scores.get("kid", unknown)["value"],
            "scores": scores,
            "missing": self._missing_lines(),
            "images": {
                "folder": str(folder),
                "count": len(images.indices),
                "unreadable": [f"{names[index]}: {why}" for index, why in images.unreadable.items()],
                "sizes": _most_common(sizes),
            },
            "reference": {
                "path": self.settings.reference,
                "count": self._reference_count(reference),
                "sizes": _most_common(reference_sizes),
                "sha256": self._reference_sha256(reference_items),
            },
            "generation": self.ledger.generation,
            "settings": self.settings.model_dump(exclude={"dry_run"}) | self._protocol(),
            "categories": categories,
            "per_image": {
                "file": readable,
                "prompt": prompts if any(prompt is not None for prompt in prompts) else None,
                "clip_score": self.per_image.get("clip_score"),
            },
            "failures": self.ledger.failures,
            "speed": self.ledger.speed,
            "distance_to_exact_mode": to_exact,
            "warnings": self.warnings,
            "versions": _versions(self.devices),
            "seconds": round(time.monotonic() - started, 3),
        }

    def _features(
        self,
        encoder: Encoder,
        items: Sequence[FeatureItem],
        what: str = "images",
        workers: FeatureWorkers | None = None,
    ) -> Features:
        return compute_features(encoder, items, self.devices, self.cache_dir, what, workers=workers)

    def _split(self, both: Features, images: int) -> tuple[Features, Features]:
        """Split the features of images and reference, which are computed together so that processes start once."""
        of_images, of_reference = both.split(images)
        of_images.require_two(self.settings.images)
        if isinstance(self.reference, list):
            of_reference.require_two(self.settings.reference)
        return of_images, of_reference

    def _reference_count(self, reference: Features) -> int | None:
        if isinstance(self.reference, Statistics):
            return self.reference.count
        return len(reference.indices) if self.reference is not None else None

    def _reference_sha256(self, items: Sequence[FeatureItem]) -> str | None:
        """Return a hash by which the page tells whether two evaluations have the same reference."""
        if isinstance(self.reference, Statistics):
            moments = self.reference.moments
            return hashlib.sha256(moments.mean.tobytes() + moments.covariance.tobytes()).hexdigest()
        return hashlib.sha256(b"".join(item.key for item in items)).hexdigest() if items else None

    def _score_inception(self, images: Features, reference: Features) -> None:
        rows, seed, device = images.rows, self.settings.seed, self.metrics_device
        if any(self._wants(name) for name in ("fid", "kid", *metrics.NEIGHBORS)):
            if isinstance(self.reference, Statistics):
                moments, real = self.reference.moments, self.reference.features
            else:
                moments, real = metrics.compute_moments(reference.rows), reference.rows
            if self._wants("fid"):
                count = self._reference_count(reference)
                self._warn_if_few("FID", inception.FEATURES, len(rows), count, " KID does not have this bias.")
                fid = metrics.frechet_distance(metrics.compute_moments(rows), moments, rows, real, device)
                self._add("fid", fid, self.resizing)
            if real is not None and self._wants("kid"):
                self._add("kid", metrics.kid(rows, real, seed, device), "100 subsets of at most 1,000 images")
            if real is not None and (wanted := [name for name in metrics.NEIGHBORS if self._wants(name)]):
                self._score_neighbors(wanted, rows, real)
        if self.classifier is not None and self._wants("inception_score"):
            self._score_classes(rows, self.classifier)

    def _score_neighbors(self, wanted: Sequence[str], rows: np.ndarray, real: np.ndarray) -> None:
        few = min(len(rows), len(real))
        if few < inception.FEATURES:
            side = "images" if few == len(rows) else "reference images"
            titles = format_list([METRICS[name].title for name in wanted])
            self.warnings.append(
                f"{few:,} {side} are few for {titles}: the distance to the nearest neighbors grows as images get "
                "fewer, and these scores with it; compare them only with values of as many images on both sides."
            )
        estimates, counts = metrics.neighbor_metrics(rows, real, self.settings.seed, self.metrics_device)
        for name in wanted:
            note = f"k = {metrics.NEIGHBORS[name]}, of {counts[0]:,} images and {counts[1]:,} of the reference"
            self._add(name, estimates[name], note)

    def _score_classes(self, rows: np.ndarray, classifier: np.ndarray) -> None:
        classes, splits = len(classifier), metrics.SPLITS
        if len(rows) < splits:
            self.missing["inception_score"] = f"it is the mean over {splits} splits, and there are {len(rows)} images."
            return
        if len(rows) < splits * classes:
            self.warnings.append(
                f"{len(rows):,} images are few for the Inception score: each of its {splits} splits has fewer than the "
                f"{classes:,} classes, which biases it downward; compare it only with scores of as many images."
            )
        note = (
            f"mean of {splits} splits, shuffled; {classes:,} classes, logits without bias, as torch-fidelity; "
            f"{self.resizing}"
        )
        self._add("inception_score", metrics.inception_score(rows, classifier), note)

    def _score_clip(self, images: Features, reference: Features) -> None:
        assert self.clip
        name = f"CLIP {Path(self.settings.clip_path or '').name}"
        if self._wants("cmmd"):
            cmmd = metrics.cmmd(images.rows, reference.rows, self.metrics_device)
            self._add("cmmd", cmmd, f"{name}, Gaussian kernel of width 10")
            if (size := self.clip[0].size) != encoders.CMMD_REPORTED:
                self.warnings.append(
                    f"CMMD is computed with CLIP {size}: published values use {encoders.CMMD_REPORTED} "
                    "(openai/clip-vit-large-patch14-336) and are not comparable."
                )
        if not self._wants("clip_score"):
            return
        prompts = [_look_up(self.prompts, self.images[index]) for index in images.indices]
        known = [(place, prompt) for place, prompt in enumerate(prompts) if prompt is not None]
        if not known:
            self.missing["clip_score"] = "no image that can be read has a prompt."
            return
        texts = [prompt for _, prompt in known]
        embeddings = self._features(self.clip[1], hash_texts(texts), "prompts").rows
        values = metrics.clip_scores(images.rows[[place for place, _ in known]], embeddings)
        self.warnings += encoders.truncation_warnings(self.clip[1].count_truncated(texts), encoders.TEXT_LENGTH, "CLIP")
        if len(known) < len(prompts):
            without = len(prompts) - len(known)
            self.warnings.append(f"{without:,} of {len(prompts):,} images have no known prompt and no CLIP score.")
        of_all = np.full(len(prompts), np.nan)
        of_all[[place for place, _ in known]] = values
        self._add_mean("clip_score", of_all, f"{name}, 100 x cosine, {len(values):,} images with prompts")

    def _score_images(self, items: Sequence[FeatureItem], prompts: Sequence[str | None]) -> None:
        """Compute the scores of single images."""
        for key, score in self.image_scores.items():
            if key in self.missing:
                continue
            info = SCORES[key]
            places = [place for place, prompt in enumerate(prompts) if prompt is not None or not info.needs_prompts]
            texts = [prompts[place] or "" for place in places]
            of_all = np.full(len(items), np.nan)
            if places:
                of_all[places] = score.values([items[place] for place in places], texts, self._features)
            if not np.isfinite(of_all).any():
                self.missing[key] = f"{info.title} applies to no image that can be read: {score.applies_to}."
                continue
            count = int(np.isfinite(of_all).sum())
            if count < len(items):
                self.warnings.append(
                    f"{len(items) - count:,} of {len(items):,} images have no {info.title}, which applies to "
                    f"{score.applies_to}."
                )
            of_items = [items[place] for place in places]
            said = score.warnings(of_items, texts)
            self.warnings += [text for text in said if text not in self.warnings]  # two scores share the questions
            self._add_mean(key, of_all, f"{score.note}; mean of {count:,} images")
            for heading, parts in score.breakdown(of_items, texts, of_all[places], self._features).items():
                self.breakdowns[heading] = {name: self._part(key, *part) for name, part in parts.items()}

    def _part(self, key: str, points: np.ndarray, questions: np.ndarray) -> dict[str, Any]:
        """Return the score of a part of a benchmark, a quotient of sums, as `_categories` does."""
        value = float(points.sum() / questions.sum())
        estimate = metrics.MetricEstimate(value, ((points - value * questions) / questions.mean(),))
        low, high = estimate.interval(self.settings.seed) or (None, None)
        return {"count": int((questions > 0).sum()), "scores": {key: {"value": value, "low": low, "high": high}}}

    def _add_mean(self, name: str, values: np.ndarray, note: str) -> None:
        """Add the mean of the images' scores; NaN where an image has none."""
        self._add(name, metrics.mean_estimate(values[np.isfinite(values)]), note)
        self.per_image[name] = [float(value) if np.isfinite(value) else None for value in values]

    def _score_dinov2(self, images: Features, reference: Features) -> None:
        assert self.dinov2
        rows, real = images.rows, reference.rows
        if isinstance(self.reference, Statistics):
            assert self.reference.dinov2_features is not None
            real = self.reference.dinov2_features
        if self.dinov2.size != encoders.DINOV2_REPORTED:
            self.warnings.append(
                f"FD-DINOv2 is computed with {self.dinov2.size}: published values use {encoders.DINOV2_REPORTED} "
                "and are not comparable."
            )
        self._warn_if_few("FD-DINOv2", self.dinov2.width, len(rows), len(real))
        both = metrics.compute_moments(rows), metrics.compute_moments(real)
        distance = metrics.frechet_distance(*both, rows, real, self.metrics_device)
        self._add("fd_dinov2", distance, f"DINOv2 {self.dinov2.size}, class token; {encoders.DINOV2_RESIZING}")

    def _warn_if_few(self, title: str, width: int, images: int, reference: int | None, hint: str = "") -> None:
        for name, number in (("images", images), ("reference images", reference)):
            if number is not None and number < width:
                self.warnings.append(
                    f"{number:,} {name} are fewer than the {width:,} features of {title}: the covariance is singular, "
                    f"which biases {title} upward; compare it only with values of as many images.{hint}"
                )

    def _add(self, name: str, estimate: metrics.MetricEstimate, note: str) -> None:
        interval = estimate.interval(self.settings.seed)
        least = METRICS[name].minimum  # rounding, and the linear influence function, may leave the range of a metric
        low, high = (float(max(end, least)) for end in interval) if interval else (None, None)
        if interval:
            exact = estimate.is_share and estimate.value in (0, 1)
            note += f"; 95% interval {'of a binomial share' if exact else 'by a bootstrap of the influence function'}"
        self.scores[name] = {"value": float(max(estimate.value, least)), "low": low, "high": high, "note": note}

    def _compare_with_exact_mode(self, pairs: ExactPairs) -> dict[str, Any]:
        """Compare images of `generate --preset fast` or `faster` with the same rows in exact mode."""
        found: dict[str, Any] = {
            "pictures": len(pairs.fast),
            "psnr_db": {"mean": round(float(np.mean(pairs.psnr)), 2), "worst": min(pairs.psnr)},
        }
        summary = (
            f"The images were generated in fast mode: {found['psnr_db']['mean']:.1f} dB PSNR (worst "
            f"{found['psnr_db']['worst']:.1f} dB) to exact mode on the {len(pairs.fast)} rows generated in both modes"
        )
        if self.inception and (rows := self._pair_features(self.inception, pairs)):
            paired, unpaired = metrics.paired_distances(*rows)
            found["inception_distance"] = round(paired, 4)
            found["inception_distance_of_two_pictures"] = round(unpaired, 4)
            if found["inception_distance_of_two_pictures"]:
                share = 100 * found["inception_distance"] / found["inception_distance_of_two_pictures"]
                summary += f"; their Inception features differ by {share:.0f}% of the distance between two images"
        if self.clip and (rows := self._pair_features(self.clip[0], pairs)):
            texts = self._features(self.clip[1], hash_texts(pairs.prompts), "prompts").rows
            fast, exact = (round(float(metrics.clip_scores(part, texts).mean()), 3) for part in rows)
            found["clip_score"] = {"fast": fast, "exact": exact}
            summary += f"; CLIP score {fast:.2f}, in exact mode {exact:.2f}"
        self.warnings.append(f"{summary}.")
        return found

    def _pair_features(self, encoder: Encoder, pairs: ExactPairs) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the features of both sides; None where an image cannot be read."""
        both = self._features(encoder, hash_files([*pairs.fast, *pairs.exact]), "images of both modes")
        return None if both.unreadable else (both.rows[: len(pairs.fast)], both.rows[len(pairs.fast) :])

    def _protocol(self) -> dict[str, Any]:
        """Return how the scores were computed, beyond the settings."""
        tf32 = bool(self.inception and self.inception.tf32) and "cpu" not in self.devices.values()
        precision = "float32, Inception's convolutions in TF32" if tf32 else "float32"
        protocol: dict[str, Any] = {"resizing": self.resizing, "resamples": metrics.RESAMPLES}
        protocol["features"] = f"{precision}; statistics in float64"
        if self.dinov2:
            protocol |= {"dinov2": self.dinov2.size, "dinov2_resizing": encoders.DINOV2_RESIZING}
        used = (self.inception, self.clip and self.clip[0], self.dinov2)
        protocol |= {f"{encoder.name}_sha256": encoder.sha256 for encoder in used if encoder}
        return protocol | {f"{key}_sha256": score.sha256 for key, score in self.image_scores.items()}


def _look_up(cells: Mapping[str, Any], file: ImageFile) -> Any:
    """Return what is known about an image by its path, which is needed where names repeat, or by its name."""
    return cells.get(str(file), cells.get(file.name))


def _start_linear_algebra(device: str) -> None:
    """Load the GPU libraries of the metrics while other processes compute features."""
    with suppress(RuntimeError):  # met again, and reported, where it matters
        torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=device))


def _count_sizes(items: Sequence[FeatureItem], features: Features) -> Counter[str]:
    """Count the readable images by size, height first."""
    shapes = [items[index].shape for index in features.indices]
    return Counter(f"{shape[0]} x {shape[1]}" for shape in shapes if shape)


def _most_common(sizes: Counter[str]) -> dict[str, int]:
    named = dict(sizes.most_common(_SIZES_REPORTED))
    others = sizes.total() - sum(named.values())
    return named | ({"others": others} if others else {})


def _versions(devices: dict[str, str]) -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "numpy", "transformers", "pillow")}
    return {"muralist": __version__, "python": platform.python_version(), **packages, "device": device_kind(devices)}


def stats(settings: StatsSettings) -> int:
    """Write the reference statistics of a folder or data set; an interrupted command resumes from its feature cache."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    output = Path(settings.output)
    if output.suffix != ".npz":
        raise UserError(f"-o {output} does not end in .npz.", fix="Give a name such as stats.npz.")
    weights, reason = inception.find_weights(settings.inception_weights)
    if weights is None:
        raise UserError(reason)
    items = _stats_items(settings)
    dinov2 = (
        Dinov2Encoder.from_checkpoint(find_model(settings.dinov2_path, "--dinov2_path"))
        if settings.dinov2_path
        else None
    )
    cache = output.with_name(f"{output.name}.features")
    devices = share_devices(select_devices(settings.gpu_ids))
    encoder = InceptionEncoder.from_file(weights, resize=settings.resize)
    features = compute_features(encoder, items, devices, cache)
    for index, why in features.unreadable.items():
        log.warning("%s is left out: %s.", items[index].content, why)
    features.require_two(settings.source)
    arrays = {"number": np.array(len(features.rows), np.int64), "resize": np.array(settings.resize)}
    arrays |= _statistics_arrays(features.rows, "")
    if dinov2:
        rows = compute_features(dinov2, items, devices, cache).rows
        arrays |= _statistics_arrays(rows, "dinov2_") | {"dinov2_sha256": np.array(dinov2.sha256)}
    try:
        with atomic_open(output) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # savez declares its flags among the arrays
    except OSError as error:
        raise disk_write_error(error, output) from None
    shutil.rmtree(cache, ignore_errors=True)
    print(f"{output}: statistics of {len(features.rows):,} images.")
    return 0


def _stats_items(settings: StatsSettings) -> list[FeatureItem]:
    """Return the images of a folder unchanged, or those of a data set as training crops them."""
    if settings.img_size is not None:
        images = dataset_images(settings.source, settings.img_size, settings.max_samples)
        return [FeatureItem(key, image) for key, image in images]
    if settings.max_samples is not None or settings.source == EMBEDDED:
        raise UserError(
            "Without --img_size, SOURCE is a folder, and all its images are used unchanged.",
            fix="Give --img_size as in training: then SOURCE is anything that train reads.",
        )
    return hash_files(find_images(Path(settings.source), "SOURCE"))


def _statistics_arrays(rows: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
    moments = metrics.compute_moments(rows)
    return {f"{prefix}mu": moments.mean, f"{prefix}sigma": moments.covariance, f"{prefix}features": rows}
