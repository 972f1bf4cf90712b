"""`muralist evaluate` and `muralist stats`: from folders of pictures to report.json, or to reference statistics."""

from __future__ import annotations

import io
import logging
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muralist import __version__
from muralist.errors import UserError
from muralist.evaluate import features, metrics
from muralist.evaluate.extractors import ClipFeatures, Extractor, InceptionFeatures
from muralist.evaluate.features import Features, Item, hash_files, hash_texts
from muralist.evaluate.inception import FEATURES, RESIZING
from muralist.evaluate.inception_weights import find_weights
from muralist.evaluate.inputs import Statistics, find_images, match_prompts, read_ledger, read_statistics
from muralist.evaluate.metrics import Estimate
from muralist.evaluate.report import write_report
from muralist.evaluate.results import REPORT
from muralist.machine import choose_devices
from muralist.runfolder import no_space, write_atomically, write_json
from muralist.settings import EvaluateSettings, StatsSettings

log = logging.getLogger("muralist")
METRICS = ("fid", "kid", "precision", "recall", "density", "coverage", "clip_score", "cmmd")
_FROM_INCEPTION = METRICS[:6]
_PATIENCE = 10.0  # seconds between lines of progress


def evaluate(settings: EvaluateSettings) -> int:
    """Compute every metric that can be computed, write report.json and its page, and say what came out."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    report, page = measure(settings)
    for warning in report["warnings"]:
        log.warning("%s", warning)
    reasons: dict[str, list[str]] = {}
    for line in report["missing"]:
        reasons.setdefault(line["reason"], []).append(line["metric"])
    for reason, missing in reasons.items():
        log.warning("No %s: %s", ", ".join(missing), reason)
    for name in METRICS:
        score = report["scores"][name]
        if score["value"] is not None:
            between = "" if score["low"] is None else f"  ({score['low']:.6g} to {score['high']:.6g})"
            print(f"{name:<12}{score['value']:.6g}{between}")
    print(f"The report is {Path(settings.output_dir) / REPORT}, and the page to look at {page}.")
    return 0


def measure(settings: EvaluateSettings) -> tuple[dict[str, Any], Path]:
    """Compute every metric that can be computed; returns what report.json now holds, and its page."""
    report = _Evaluation.prepare(settings).run()
    output = Path(settings.output_dir)
    try:
        write_json(output / REPORT, report)
    except OSError as error:
        raise no_space(error, output / REPORT) from None
    return report, write_report([output], output / "report")


def stats(settings: StatsSettings) -> int:
    """Write the reference statistics of a folder; interrupted, the same command goes on."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    output = Path(settings.output)
    if output.suffix != ".npz":
        raise UserError(f"-o {output} does not end in .npz.", fix="Call it stats.npz, say.")
    weights, reason = find_weights(settings.inception_weights)
    if weights is None:
        raise UserError(reason)
    files = find_images(Path(settings.source), "SOURCE")
    cache = output.with_name(f"{output.name}.features")
    extractor, devices = InceptionFeatures.of(weights), choose_devices(settings.gpu_ids)
    found = _compute(extractor, hash_files(files), devices, cache, "images")
    for index, why in found.unreadable.items():
        log.warning("%s is left out: %s.", files[index], why)
    _at_least_two(found, settings.source)
    moments = metrics.moments(found.rows)
    data = io.BytesIO()
    np.savez(data, mu=moments.mean, sigma=moments.covariance, features=found.rows, number=np.int64(len(found.rows)))
    try:
        write_atomically(output, data.getvalue())
    except OSError as error:
        raise no_space(error, output) from None
    shutil.rmtree(cache, ignore_errors=True)
    print(f"{output}: statistics of {len(found.rows):,} images.")
    return 0


@dataclass
class _Evaluation:
    """One call of `muralist evaluate`, checked as far as it can be before anything is computed."""

    settings: EvaluateSettings
    images: list[Path]
    reference: list[Path] | Statistics | None
    prompts: dict[str, str]
    inception: InceptionFeatures | None
    clip: tuple[ClipFeatures, ClipFeatures] | None
    devices: dict[str, str]
    told: Any
    missing: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, settings: EvaluateSettings) -> _Evaluation:
        """Find everything; what is named and not there is an error now, not after an hour."""
        folder, output = Path(settings.images), Path(settings.output_dir)
        images = find_images(folder, "--images", output)
        reference: list[Path] | Statistics | None = None
        if settings.reference is not None:
            place = Path(settings.reference)
            is_file = place.suffix == ".npz"
            reference = read_statistics(place) if is_file else find_images(place, "--reference", output)
        told = read_ledger(folder)
        table = match_prompts(settings.prompts_csv, images) if settings.prompts_csv else {}
        prompts = told.prompts | table
        weights, reason = find_weights(settings.inception_weights) if reference is not None else (None, "")
        inception = InceptionFeatures.of(weights) if weights else None
        clip = ClipFeatures.both(Path(settings.clip_path)) if settings.clip_path else None
        devices = choose_devices(settings.gpu_ids)
        made = cls(settings, images, reference, prompts, inception, clip, devices, told)
        made._find_missing(reason)
        output.mkdir(parents=True, exist_ok=True)
        return made

    def _find_missing(self, weights_reason: str) -> None:
        no_reference = "it compares two sets, and no --reference was given."
        no_clip = "it needs a CLIP model; give the folder of one as --clip_path."
        if self.reference is None:
            self.missing |= dict.fromkeys(_FROM_INCEPTION, no_reference)
        elif self.inception is None:
            self.missing |= dict.fromkeys(_FROM_INCEPTION, f"{weights_reason} CLIP score and CMMD go on without it.")
        elif isinstance(self.reference, Statistics) and self.reference.features is None:
            only = f"{self.settings.reference} holds a mean and a covariance, which serve FID alone."
            self.missing |= dict.fromkeys(_FROM_INCEPTION[1:], only)
        if self.clip is None:
            self.missing |= {"clip_score": no_clip, "cmmd": no_reference if self.reference is None else no_clip}
            return
        if not any(file.name in self.prompts for file in self.images):
            self.missing["clip_score"] = "no prompt is known of any image; give --prompts_csv."
        if self.reference is None:
            self.missing["cmmd"] = no_reference
        elif isinstance(self.reference, Statistics):
            self.missing["cmmd"] = "it needs the reference's images, and only statistics were given."

    def run(self) -> dict[str, Any]:
        """Compute, and return the report."""
        started = time.monotonic()
        items = hash_files(self.images)
        reference_items = hash_files(self.reference) if isinstance(self.reference, list) else []
        unreadable: dict[int, str] = {}
        reference_count = self.reference.count if isinstance(self.reference, Statistics) else None
        if self.inception:
            found, reference = self._features(self.inception, items, reference_items)
            unreadable = found.unreadable
            reference_count = self._score_inception(found, reference, reference_count)
        scores = None
        if self.clip:
            found, reference = self._features(self.clip[0], items, reference_items)
            unreadable = found.unreadable
            scores = self._score_clip(found, reference)
        if self.inception is None and isinstance(self.reference, list):
            reference_count = len(self.reference)
        kept = [index for index in range(len(self.images)) if index not in unreadable]
        return self._report(kept, unreadable, reference_count, scores, time.monotonic() - started)

    def _features(
        self, extractor: Extractor, items: list[Item], reference_items: list[Item]
    ) -> tuple[Features, Features]:
        """Of the images and of the reference, in one go: processes start once."""
        together = items + reference_items
        found = _compute(extractor, together, self.devices, Path(self.settings.output_dir) / "features", "images")
        images, reference = found.part(0, len(items)), found.part(len(items), len(together))
        _at_least_two(images, self.settings.images)
        if reference_items:
            _at_least_two(reference, self.settings.reference)
        return images, reference

    def _score_inception(self, found: Features, reference: Features, count: int | None) -> int | None:
        if isinstance(self.reference, Statistics):
            real, real_rows = self.reference.moments, self.reference.features
            count = len(real_rows) if real_rows is not None else count
        else:
            self._note_unreadable(reference)
            real_rows = reference.rows
            real, count = metrics.moments(real_rows), len(real_rows)
        rows, seed, device = found.rows, self.settings.seed, next(iter(self.devices.values()))
        for name, number in (("images", len(rows)), ("reference images", count)):
            if number is not None and number < FEATURES:
                self.warnings.append(
                    f"{number:,} {name} are fewer than the {FEATURES:,} features of FID: the covariance is singular, FID "
                    "comes out too high, and compares only with FIDs of as many images. KID does not have this bias."
                )
        self._keep("fid", metrics.frechet(metrics.moments(rows), real, rows, real_rows), RESIZING)
        if real_rows is None:
            return count
        self._keep("kid", metrics.kid(rows, real_rows, seed, device), "100 subsets of at most 1,000 images")
        near = metrics.neighbourhood(rows, real_rows, seed, device)
        used = f"of {near.used[0]:,} images and {near.used[1]:,} of the reference"
        for name, k in (("precision", 3), ("recall", 3), ("density", 5), ("coverage", 5)):
            self._keep(name, getattr(near, name), f"k = {k}, {used}")
        return count

    def _score_clip(self, found: Features, reference: Features) -> list[float | None] | None:
        """CLIP score and CMMD; returns the score of every readable image, None where no prompt is known."""
        assert self.clip
        name = f"CLIP {Path(self.settings.clip_path or '').name}"
        if "cmmd" not in self.missing:
            if not self.inception:
                self._note_unreadable(reference)
            device = next(iter(self.devices.values()))
            self._keep("cmmd", metrics.cmmd(found.rows, reference.rows, device), f"{name}, Gaussian kernel of width 10")
        if "clip_score" in self.missing:
            return None
        texts = [self.prompts.get(self.images[index].name) for index in found.kept]
        with_prompt = [place for place, text in enumerate(texts) if text is not None]
        if not with_prompt:
            self.missing["clip_score"] = "no image that can be read has a prompt."
            return None
        prompts = [text for text in texts if text is not None]
        words = _compute(
            self.clip[1], hash_texts(prompts), self.devices, Path(self.settings.output_dir) / "features", "prompts"
        )
        values = metrics.clip_scores(found.rows[with_prompt], words.rows)
        if cut := self.clip[1].count_cut(prompts):
            self.warnings.append(
                f"{cut:,} prompts are longer than the 77 tokens CLIP reads: it saw only their beginning."
            )
        if len(with_prompt) < len(texts):
            without = len(texts) - len(with_prompt)
            self.warnings.append(f"{without:,} of {len(texts):,} images have no known prompt and no CLIP score.")
        self._keep("clip_score", metrics.mean_of(values), f"{name}, 100 x cosine, {len(values):,} images with prompts")
        scores: list[float | None] = [None] * len(texts)
        for place, value in zip(with_prompt, values.tolist(), strict=True):
            scores[place] = value
        return scores

    def _note_unreadable(self, reference: Features) -> None:
        assert isinstance(self.reference, list)
        for index, why in reference.unreadable.items():
            self.warnings.append(f"{self.reference[index]} of the reference is left out: {why}.")

    def _keep(self, name: str, estimate: Estimate, note: str) -> None:
        low, high = estimate.interval(self.settings.seed) or (None, None)
        note = f"{note}; 95% by a bootstrap of each image's influence" if low is not None else note
        self.scores[name] = {"value": estimate.value, "low": low, "high": high, "note": note}

    def _report(
        self,
        kept: list[int],
        unreadable: dict[int, str],
        reference_count: int | None,
        clip_scores: list[float | None] | None,
        seconds: float,
    ) -> dict[str, Any]:
        folder = Path(self.settings.images)
        names = [path.relative_to(folder).as_posix() for path in self.images]
        prompts = [self.prompts.get(self.images[index].name) for index in kept]
        scores = {
            name: self.scores.get(name, {"value": None, "low": None, "high": None, "note": self.missing.get(name, "")})
            for name in METRICS
        }
        how = {"resizing": RESIZING, "features": "float32; statistics in float64", "resamples": metrics.RESAMPLES}
        if self.inception:
            how["inception_sha256"] = self.inception.digest
        if self.clip:
            how["clip_sha256"] = self.clip[0].digest
        return {
            "fid": scores["fid"]["value"],
            "kid": scores["kid"]["value"],
            "scores": scores,
            "missing": [{"metric": name, "reason": self.missing[name]} for name in METRICS if name in self.missing],
            "images": {
                "folder": str(folder),
                "count": len(kept),
                "unreadable": [f"{names[index]}: {why}" for index, why in unreadable.items()],
            },
            "reference": {"path": self.settings.reference, "count": reference_count},
            "settings": self.settings.model_dump() | how,
            "per_image": {
                "file": [names[index] for index in kept],
                "prompt": prompts if any(prompt is not None for prompt in prompts) else None,
                "clip_score": clip_scores,
            },
            "failures": self.told.failures,
            "speed": self.told.speed,
            "warnings": self.warnings,
            "versions": _versions(self.devices),
            "seconds": round(seconds, 3),
        }


def _at_least_two(found: Features, folder: str | None) -> None:
    if len(found.rows) < 2:
        first = next(iter(found.unreadable.values()), "")
        raise UserError(
            f"Fewer than two images of {folder} can be read.",
            f"{len(found.unreadable):,} are broken, the first because: {first}." if first else "",
            "Check that they were copied completely.",
        )


def _compute(extractor: Extractor, items: list[Item], devices: dict[str, str], cache: Path, what: str) -> Features:
    """Features, with a line of progress now and then."""
    begun = said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _PATIENCE:
            said = now
            log.info("%s: %s of %s, %.1f a second.", what, f"{done:,}", f"{total:,}", done / (now - begun))

    try:
        found = features.compute(extractor, items, devices, cache, progress)
    except OSError as error:
        raise no_space(error, cache) from None
    log.info("%s: features of %s computed, of %s remembered.", what, f"{found.computed:,}", f"{found.remembered:,}")
    return found


def _versions(devices: dict[str, str]) -> dict[str, str]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "numpy", "transformers", "pillow")}
    device = features.device_kind(devices)
    return {"muralist": __version__, "python": platform.python_version(), **packages, "device": device}
