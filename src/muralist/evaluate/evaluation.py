"""One evaluation: what is there to compute it from, the scores, and the report."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muralist import __version__
from muralist.evaluate import dinov2, metrics
from muralist.evaluate.cache import Item
from muralist.evaluate.dinov2 import Dinov2Features
from muralist.evaluate.extractors import ClipFeatures, Extractor, InceptionFeatures
from muralist.evaluate.fast_mode import FastMode
from muralist.evaluate.features import (
    Features,
    at_least_two,
    compute_aloud,
    device_kind,
    hash_files,
    hash_texts,
    look_at,
)
from muralist.evaluate.inception import FEATURES, RESIZING
from muralist.evaluate.inception_weights import USUAL_NAME, find_weights, load_classifier
from muralist.evaluate.inputs import Statistics, Told, find_images, match_prompts, read_ledger, read_statistics
from muralist.evaluate.metrics import SPLITS, Estimate
from muralist.machine import choose_devices
from muralist.settings import EvaluateSettings

_AGAINST_REFERENCE = ("fid", "kid", "precision", "recall", "density", "coverage")
_FROM_INCEPTION = (*_AGAINST_REFERENCE, "inception_score")
METRICS = (*_AGAINST_REFERENCE, "clip_score", "cmmd", "fd_dinov2", "inception_score")
_SIZES_NAMED = 10


@dataclass
class Evaluation:
    """One call of `muralist evaluate`, checked as far as it can be before anything is computed."""

    settings: EvaluateSettings
    images: list[Path]
    reference: list[Path] | Statistics | None
    prompts: dict[str, str]
    inception: InceptionFeatures | None
    classifier: np.ndarray | None
    clip: tuple[ClipFeatures, ClipFeatures] | None
    dinov2: Dinov2Features | None
    devices: dict[str, str]
    told: Told
    fast_mode: FastMode
    missing: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, settings: EvaluateSettings) -> Evaluation:
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
        weights, reason = find_weights(settings.inception_weights)
        made = cls(
            settings,
            images,
            reference,
            told.prompts | table,
            InceptionFeatures.of(weights) if weights else None,
            load_classifier(weights) if weights else None,
            ClipFeatures.both(Path(settings.clip_path)) if settings.clip_path else None,
            Dinov2Features.of(Path(settings.dinov2_path)) if settings.dinov2_path else None,
            choose_devices(settings.gpu_ids),
            told,
            FastMode(folder),
        )
        made._find_missing(f"{reason} The other scores go on without it.")
        output.mkdir(parents=True, exist_ok=True)
        return made

    def _find_missing(self, weights_reason: str) -> None:
        no_reference = "it compares two sets, and no --reference was given."
        no_clip = "it needs a CLIP model; give the folder of one as --clip_path."
        if self.reference is None:
            self.missing |= dict.fromkeys((*_AGAINST_REFERENCE, "cmmd", "fd_dinov2"), no_reference)
        elif self.inception is None:
            self.missing |= dict.fromkeys(_AGAINST_REFERENCE, weights_reason)
        elif isinstance(self.reference, Statistics) and self.reference.features is None:
            only = f"{self.settings.reference} holds a mean and a covariance, which serve FID alone."
            self.missing |= dict.fromkeys(_AGAINST_REFERENCE[1:], only)
        if self.inception is None:
            self.missing["inception_score"] = weights_reason
        elif self.classifier is None:
            file = self.inception.weights.name
            self.missing["inception_score"] = (
                f"it needs Inception's classifier, which {file} does not hold; {USUAL_NAME} holds it."
            )
        if self.clip is None:
            self.missing |= {"clip_score": no_clip, "cmmd": self.missing.get("cmmd", no_clip)}
        elif not any(file.name in self.prompts for file in self.images):
            self.missing["clip_score"] = "no prompt is known of any image; give --prompts_csv."
        if self.clip is not None and isinstance(self.reference, Statistics):
            self.missing["cmmd"] = "it needs the reference's images, and only statistics were given."
        if self.reference is not None and (why := self._why_no_dinov2(self.reference)):
            self.missing["fd_dinov2"] = why

    def _why_no_dinov2(self, reference: list[Path] | Statistics) -> str:
        if self.dinov2 is None:
            return (
                f"it needs a DINOv2 model, {dinov2.REPORTED} for numbers to publish; give its folder as --dinov2_path."
            )
        if not isinstance(reference, Statistics):
            return ""
        name, again = self.settings.reference, "`muralist stats --dinov2_path` writes them."
        if reference.dinov2 is None:
            return f"{name} holds no features by DINOv2, and those of Inception do not serve; {again}"
        if reference.dinov2.digest != self.dinov2.digest:
            return f"{name} holds features by another DINOv2 than --dinov2_path names; {again}"
        return ""

    def run(self) -> dict[str, Any]:
        """Compute, and return the report."""
        started = time.monotonic()
        items = hash_files(self.images)
        reference_items = hash_files(self.reference) if isinstance(self.reference, list) else []
        seen: tuple[Features, Features] | None = None
        clip_scores = None
        if self.inception and not self.missing.keys() >= set(_FROM_INCEPTION):
            seen = self._features(self.inception, items, reference_items)
            if self.reference is not None:
                self._score_inception(*seen, self.reference)
            if self.classifier is not None:
                self._score_classes(seen[0].rows, self.classifier)
        if self.clip and not self.missing.keys() >= {"clip_score", "cmmd"}:
            seen = self._features(self.clip[0], items, reference_items)
            clip_scores = self._score_clip(*seen)
        if self.dinov2 and "fd_dinov2" not in self.missing:
            seen = self._features(self.dinov2, items, reference_items)
            self._score_dinov2(self.dinov2, *seen)
        if seen is None:
            seen = self._parts(look_at([*items, *reference_items]), len(items))
        found, reference = seen
        if isinstance(self.reference, list):
            for index, why in reference.unreadable.items():
                self.warnings.append(f"{self.reference[index]} of the reference is left out: {why}.")
        if self.fast_mode:
            self.fast_mode.compare(self.inception, self.clip, self.devices, Path(self.settings.output_dir) / "features")
            self.warnings.append(self.fast_mode.sentence())
        sizes, reference_sizes = _sizes(items, found), _sizes(reference_items, reference)
        if len(sizes) > 1:
            named = " and ".join(size for size, _ in sizes.most_common(2))
            self.warnings.append(
                f"The images are of {len(sizes):,} sizes, most often {named} (height x width): each is resized by itself."
            )
        return self._report(
            found, len(reference.kept), clip_scores, (sizes, reference_sizes), time.monotonic() - started
        )

    def _features(
        self, extractor: Extractor, items: list[Item], reference_items: list[Item]
    ) -> tuple[Features, Features]:
        """Of the images and of the reference, in one go: processes start once."""
        cache = Path(self.settings.output_dir) / "features"
        found = compute_aloud(extractor, [*items, *reference_items], self.devices, cache, "images")
        return self._parts(found, len(items))

    def _parts(self, found: Features, images: int) -> tuple[Features, Features]:
        everything = len(found.kept) + len(found.unreadable)
        of_images, of_reference = found.part(0, images), found.part(images, everything)
        at_least_two(of_images, self.settings.images)
        if isinstance(self.reference, list):
            at_least_two(of_reference, self.settings.reference)
        return of_images, of_reference

    def _score_inception(self, found: Features, reference: Features, held: list[Path] | Statistics) -> None:
        rows, seed, device = found.rows, self.settings.seed, next(iter(self.devices.values()))
        if isinstance(held, Statistics):
            real, real_rows = held.moments, held.features
            count = held.count if real_rows is None else len(real_rows)
        else:
            real, real_rows, count = metrics.moments(reference.rows), reference.rows, len(reference.rows)
        self._warn_of_few("FID", FEATURES, len(rows), count, " KID does not have this bias.")
        self._keep("fid", metrics.frechet(metrics.moments(rows), real, rows, real_rows), RESIZING)
        if real_rows is None:
            return
        self._keep("kid", metrics.kid(rows, real_rows, seed, device), "100 subsets of at most 1,000 images")
        near = metrics.neighbourhood(rows, real_rows, seed, device)
        used = f"of {near.used[0]:,} images and {near.used[1]:,} of the reference"
        for name, k in (("precision", 3), ("recall", 3), ("density", 5), ("coverage", 5)):
            self._keep(name, getattr(near, name), f"k = {k}, {used}")

    def _score_classes(self, rows: np.ndarray, classifier: np.ndarray) -> None:
        classes = len(classifier)
        if len(rows) < SPLITS:
            self.missing["inception_score"] = f"it is the mean over {SPLITS} parts, and there are {len(rows)} images."
            return
        if len(rows) < SPLITS * classes:
            self.warnings.append(
                f"{len(rows):,} images are few for the Inception score: each of its {SPLITS} parts has fewer than the "
                f"{classes:,} classes, so it comes out too low, and compares only with scores of as many images."
            )
        note = (
            f"mean of {SPLITS} parts, shuffled; {classes:,} classes, logits without bias, as torch-fidelity; {RESIZING}"
        )
        self._keep("inception_score", metrics.inception_score(rows, classifier), note)

    def _score_dinov2(self, extractor: Dinov2Features, found: Features, reference: Features) -> None:
        if isinstance(self.reference, Statistics):
            assert self.reference.dinov2 is not None
            real = self.reference.dinov2.features
        else:
            real = reference.rows
        if extractor.size != dinov2.REPORTED:
            self.warnings.append(
                f"FD-DINOv2 is by {extractor.size}: published numbers are by {dinov2.REPORTED}, and do not compare with it."
            )
        self._warn_of_few("FD-DINOv2", extractor.width, len(found.rows), len(real))
        estimate = metrics.frechet(metrics.moments(found.rows), metrics.moments(real), found.rows, real)
        self._keep("fd_dinov2", estimate, f"DINOv2 {extractor.size}, class token; {dinov2.RESIZING}")

    def _warn_of_few(self, title: str, width: int, images: int, reference: int | None, more: str = "") -> None:
        for name, number in (("images", images), ("reference images", reference)):
            if number is not None and number < width:
                self.warnings.append(
                    f"{number:,} {name} are fewer than the {width:,} features of {title}: the covariance is singular, "
                    f"{title} comes out too high, and compares only with those of as many images.{more}"
                )

    def _score_clip(self, found: Features, reference: Features) -> list[float | None] | None:
        """CLIP score and CMMD; returns the score of every readable image, None where no prompt is known."""
        assert self.clip
        name = f"CLIP {Path(self.settings.clip_path or '').name}"
        if "cmmd" not in self.missing:
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
        cache = Path(self.settings.output_dir) / "features"
        words = compute_aloud(self.clip[1], hash_texts(prompts), self.devices, cache, "prompts")
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

    def _keep(self, name: str, estimate: Estimate, note: str) -> None:
        low, high = estimate.interval(self.settings.seed) or (None, None)
        note = f"{note}; 95% by a bootstrap of each image's influence" if low is not None else note
        self.scores[name] = {"value": estimate.value, "low": low, "high": high, "note": note}

    def _report(
        self,
        found: Features,
        reference_count: int | None,
        clip_scores: list[float | None] | None,
        sizes: tuple[Counter[str], Counter[str]],
        seconds: float,
    ) -> dict[str, Any]:
        folder, reference = Path(self.settings.images), self.reference
        if isinstance(reference, Statistics):
            reference_count = reference.count if reference.features is None else len(reference.features)
        names = [path.relative_to(folder).as_posix() for path in self.images]
        prompts = [self.prompts.get(self.images[index].name) for index in found.kept]
        scores = {
            name: self.scores.get(name, {"value": None, "low": None, "high": None, "note": self.missing.get(name, "")})
            for name in METRICS
        }
        return {
            "fid": scores["fid"]["value"],
            "kid": scores["kid"]["value"],
            "scores": scores,
            "missing": [{"metric": name, "reason": self.missing[name]} for name in METRICS if name in self.missing],
            "images": {
                "folder": str(folder),
                "count": len(found.kept),
                "unreadable": [f"{names[index]}: {why}" for index, why in found.unreadable.items()],
                "sizes": _most_common(sizes[0]),
            },
            "reference": {
                "path": self.settings.reference,
                "count": reference_count if reference is not None else None,
                "sizes": _most_common(sizes[1]),
            },
            "settings": self.settings.model_dump() | self._protocol(),
            "per_image": {
                "file": [names[index] for index in found.kept],
                "prompt": prompts if any(prompt is not None for prompt in prompts) else None,
                "clip_score": clip_scores,
            },
            "failures": self.told.failures,
            "speed": self.told.speed,
            "distance_to_exact_mode": self.fast_mode.report,
            "warnings": self.warnings,
            "versions": _versions(self.devices),
            "seconds": round(seconds, 3),
        }

    def _protocol(self) -> dict[str, Any]:
        """How the numbers came about, beyond what was set."""
        rounded = bool(self.inception and self.inception.tf32) and "cpu" not in self.devices.values()
        features = "float32, Inception's convolutions in TF32" if rounded else "float32"
        how = {"resizing": RESIZING, "features": f"{features}; statistics in float64", "resamples": metrics.RESAMPLES}
        if self.inception:
            how["inception_sha256"] = self.inception.digest
        if self.clip:
            how["clip_sha256"] = self.clip[0].digest
        if self.dinov2:
            how |= {
                "dinov2": self.dinov2.size,
                "dinov2_resizing": dinov2.RESIZING,
                "dinov2_sha256": self.dinov2.digest,
            }
        return how


def _sizes(items: Sequence[Item], found: Features) -> Counter[str]:
    """How many of the readable pictures have which size, height first."""
    shapes = [items[index].shape for index in found.kept]
    return Counter(f"{shape[0]} x {shape[1]}" for shape in shapes if shape)


def _most_common(sizes: Counter[str]) -> dict[str, int]:
    named = dict(sizes.most_common(_SIZES_NAMED))
    others = sizes.total() - sum(named.values())
    return named | ({"others": others} if others else {})


def _versions(devices: dict[str, str]) -> dict[str, str]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "numpy", "transformers", "pillow")}
    return {"muralist": __version__, "python": platform.python_version(), **packages, "device": device_kind(devices)}
