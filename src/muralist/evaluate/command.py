"""`muralist evaluate` and `muralist stats`: image folders to report.json and its page, or to reference statistics."""

from __future__ import annotations

import logging
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from muralist import __version__
from muralist.core.errors import UserError
from muralist.core.hardware import select_devices, share_devices
from muralist.core.run_dir import atomic_open, atomic_write_json, disk_write_error
from muralist.data.sources import EMBEDDED
from muralist.evaluate import encoders, inception, metrics
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import ClipEncoder, Dinov2Encoder, Encoder, InceptionEncoder
from muralist.evaluate.features import (
    Features,
    compute_features,
    device_kind,
    find_unreadable,
    hash_files,
    hash_texts,
)
from muralist.evaluate.inputs import (
    ExactPairs,
    ImageFile,
    Statistics,
    dataset_images,
    find_images,
    match_prompts,
    read_ledger,
    read_statistics,
)
from muralist.evaluate.report import METRICS, REPORT, MetricInfo, group_by_reason, write_report
from muralist.models.hub import find_model
from muralist.settings import EvaluateSettings, StatsSettings

log = logging.getLogger("muralist")
_UNREADABLE_LOGGED = 5  # report.json names all of them
_SIZES_REPORTED = 10


def evaluate(settings: EvaluateSettings) -> int:
    """Compute every metric whose inputs are there, write report.json and its page, and print the scores."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    report, page = measure(settings)
    log_warnings(report)
    for name, score in report["scores"].items():
        if score["value"] is not None:
            interval = "" if score["low"] is None else f"  ({score['low']:.6g} to {score['high']:.6g})"
            print(f"{name:<16}{score['value']:.6g}{interval}")
    print(f"The report is {Path(settings.output_dir) / REPORT}, its page {page}.")
    return 0


def log_warnings(report: dict[str, Any]) -> None:
    """Log unreadable images, warnings, and why metrics are missing."""
    unreadable = report["images"]["unreadable"]
    for line in unreadable[:_UNREADABLE_LOGGED]:
        log.warning("Left out, because it cannot be read: %s", line)
    if len(unreadable) > _UNREADABLE_LOGGED:
        log.warning("%d more cannot be read; %s names them.", len(unreadable) - _UNREADABLE_LOGGED, REPORT)
    for warning in report["warnings"]:
        log.warning("%s", warning)
    for reason, names in group_by_reason((line["metric"], line["reason"]) for line in report["missing"]).items():
        log.warning("No %s: %s", names, reason)


def measure(settings: EvaluateSettings) -> tuple[dict[str, Any], Path]:
    """Compute every metric whose inputs are there; returns the content of report.json and the path of its page."""
    report, output = Evaluation(settings).run(), Path(settings.output_dir)
    try:
        atomic_write_json(output / REPORT, report)
    except OSError as error:
        raise disk_write_error(error, output / REPORT) from None
    return report, write_report([output], output / "report")


class Evaluation:
    """One call of `muralist evaluate`, checked as far as possible before anything is computed."""

    def __init__(self, settings: EvaluateSettings) -> None:
        """Find all inputs; a path that does not exist is an error."""
        self.settings = settings
        folder, self.output = Path(settings.images), Path(settings.output_dir)
        self.images = find_images(folder, "--images", self.output)
        self.reference: list[ImageFile] | Statistics | None = None
        if settings.reference is not None:
            path = Path(settings.reference)
            is_file = path.suffix == ".npz"
            self.reference = read_statistics(path) if is_file else find_images(path, "--reference", self.output)
        self.ledger = read_ledger(folder)
        table = match_prompts(settings.prompts_csv, self.images) if settings.prompts_csv else {}
        self.prompts = self.ledger.prompts | table
        weights, reason = inception.find_weights(settings.inception_weights)
        self.inception = InceptionEncoder.from_file(weights) if weights else None
        self.classifier = inception.load_classifier(weights) if weights else None
        # Encoders of images and of prompts.
        self.clip = (
            ClipEncoder.from_checkpoint(find_model(settings.clip_path, "--clip_path")) if settings.clip_path else None
        )
        self.dinov2 = (
            Dinov2Encoder.from_checkpoint(find_model(settings.dinov2_path, "--dinov2_path"))
            if settings.dinov2_path
            else None
        )
        self.devices = share_devices(select_devices(settings.gpu_ids))
        self.metrics_device = next(iter(self.devices.values()))
        self.warnings: list[str] = []
        self.scores: dict[str, dict[str, Any]] = {}
        self.clip_scores: list[float | None] | None = None  # of each readable image; None where its prompt is unknown
        no_weights = f"{reason} The other metrics are computed without it."
        reasons = {name: self._why_missing(name, metric, no_weights) for name, metric in METRICS.items()}
        self.missing = {name: why for name, why in reasons.items() if why}
        self.output.mkdir(parents=True, exist_ok=True)

    def _why_missing(self, name: str, metric: MetricInfo, no_weights: str) -> str:
        """Say which input of a metric is missing; empty where all are there."""
        reference, path = self.reference, self.settings.reference
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
            if name == "clip_score" and not any(file.name in self.prompts for file in self.images):
                return "no prompt is known for any image; give --prompts_csv."
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

    def run(self) -> dict[str, Any]:
        """Compute all metrics, and return the report."""
        started = time.monotonic()
        items = hash_files(self.images)
        reference_items = hash_files(self.reference) if isinstance(self.reference, list) else []
        sets: tuple[Features, Features] | None = None
        for name, encoder, score in (
            ("inception", self.inception, self._score_inception),
            ("clip", self.clip and self.clip[0], self._score_clip),
            ("dinov2", self.dinov2, self._score_dinov2),
        ):
            if encoder and any(m.encoder == name and key not in self.missing for key, m in METRICS.items()):
                sets = self._split(self._features(encoder, [*items, *reference_items]), len(items))
                score(*sets)
        images, reference = sets or self._split(find_unreadable([*items, *reference_items]), len(items))
        if isinstance(self.reference, list):
            for index, why in reference.unreadable.items():
                self.warnings.append(f"{self.reference[index]} of the reference is left out: {why}.")
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
        prompts = [self.prompts.get(self.images[index].name) for index in images.indices]
        unknown = {"value": None, "low": None, "high": None}
        scores = {name: self.scores.get(name, unknown | {"note": self.missing.get(name, "")}) for name in METRICS}
        return {
            "fid": scores["fid"]["value"],
            "kid": scores["kid"]["value"],
            "scores": scores,
            "missing": [{"metric": name, "reason": self.missing[name]} for name in METRICS if name in self.missing],
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
            },
            "settings": self.settings.model_dump() | self._protocol(),
            "per_image": {
                "file": [names[index] for index in images.indices],
                "prompt": prompts if any(prompt is not None for prompt in prompts) else None,
                "clip_score": self.clip_scores,
            },
            "failures": self.ledger.failures,
            "speed": self.ledger.speed,
            "distance_to_exact_mode": to_exact,
            "warnings": self.warnings,
            "versions": _versions(self.devices),
            "seconds": round(time.monotonic() - started, 3),
        }

    def _features(self, encoder: Encoder, items: Sequence[FeatureItem], what: str = "images") -> Features:
        return compute_features(encoder, items, self.devices, self.output / "features", what)

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

    def _score_inception(self, images: Features, reference: Features) -> None:
        rows, seed, device = images.rows, self.settings.seed, self.metrics_device
        if self.reference is not None:
            if isinstance(self.reference, Statistics):
                moments, real = self.reference.moments, self.reference.features
            else:
                moments, real = metrics.compute_moments(reference.rows), reference.rows
            count = self._reference_count(reference)
            self._warn_if_few("FID", inception.FEATURES, len(rows), count, " KID does not have this bias.")
            fid = metrics.frechet_distance(metrics.compute_moments(rows), moments, rows, real)
            self._add("fid", fid, inception.RESIZING)
            if real is not None:
                self._add("kid", metrics.kid(rows, real, seed, device), "100 subsets of at most 1,000 images")
                estimates, (images_used, reference_used) = metrics.neighbor_metrics(rows, real, seed, device)
                for name, estimate in estimates.items():
                    k = 3 if name in ("precision", "recall") else 5
                    self._add(
                        name, estimate, f"k = {k}, of {images_used:,} images and {reference_used:,} of the reference"
                    )
        if self.classifier is not None:
            self._score_classes(rows, self.classifier)

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
            f"{inception.RESIZING}"
        )
        self._add("inception_score", metrics.inception_score(rows, classifier), note)

    def _score_clip(self, images: Features, reference: Features) -> None:
        assert self.clip
        name = f"CLIP {Path(self.settings.clip_path or '').name}"
        if "cmmd" not in self.missing:
            cmmd = metrics.cmmd(images.rows, reference.rows, self.metrics_device)
            self._add("cmmd", cmmd, f"{name}, Gaussian kernel of width 10")
        if "clip_score" in self.missing:
            return
        prompts = [self.prompts.get(self.images[index].name) for index in images.indices]
        known = [(place, prompt) for place, prompt in enumerate(prompts) if prompt is not None]
        if not known:
            self.missing["clip_score"] = "no image that can be read has a prompt."
            return
        texts = [prompt for _, prompt in known]
        embeddings = self._features(self.clip[1], hash_texts(texts), "prompts").rows
        values = metrics.clip_scores(images.rows[[place for place, _ in known]], embeddings)
        if truncated := self.clip[1].count_truncated(texts):
            self.warnings.append(
                f"{truncated:,} prompts are longer than the {encoders.TEXT_LENGTH} tokens CLIP reads, "
                "and are truncated."
            )
        if len(known) < len(prompts):
            without = len(prompts) - len(known)
            self.warnings.append(f"{without:,} of {len(prompts):,} images have no known prompt and no CLIP score.")
        note = f"{name}, 100 x cosine, {len(values):,} images with prompts"
        self._add("clip_score", metrics.mean_estimate(values), note)
        self.clip_scores = [None] * len(prompts)
        for (place, _), value in zip(known, values.tolist(), strict=True):
            self.clip_scores[place] = value

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
        distance = metrics.frechet_distance(metrics.compute_moments(rows), metrics.compute_moments(real), rows, real)
        self._add("fd_dinov2", distance, f"DINOv2 {self.dinov2.size}, class token; {encoders.DINOV2_RESIZING}")

    def _warn_if_few(self, title: str, width: int, images: int, reference: int | None, hint: str = "") -> None:
        for name, number in (("images", images), ("reference images", reference)):
            if number is not None and number < width:
                self.warnings.append(
                    f"{number:,} {name} are fewer than the {width:,} features of {title}: the covariance is singular, "
                    f"which biases {title} upward; compare it only with values of as many images.{hint}"
                )

    def _add(self, name: str, estimate: metrics.MetricEstimate, note: str) -> None:
        low, high = estimate.interval(self.settings.seed) or (None, None)
        note = f"{note}; 95% interval by a bootstrap of the influence function" if low is not None else note
        self.scores[name] = {"value": estimate.value, "low": low, "high": high, "note": note}

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
        protocol: dict[str, Any] = {"resizing": inception.RESIZING, "resamples": metrics.RESAMPLES}
        protocol["features"] = f"{precision}; statistics in float64"
        if self.dinov2:
            protocol |= {"dinov2": self.dinov2.size, "dinov2_resizing": encoders.DINOV2_RESIZING}
        used = (self.inception, self.clip and self.clip[0], self.dinov2)
        return protocol | {f"{encoder.name}_sha256": encoder.sha256 for encoder in used if encoder}


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
    features = compute_features(InceptionEncoder.from_file(weights), items, devices, cache)
    for index, why in features.unreadable.items():
        log.warning("%s is left out: %s.", items[index].content, why)
    features.require_two(settings.source)
    arrays = {"number": np.array(len(features.rows), np.int64)} | _statistics_arrays(features.rows, "")
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
