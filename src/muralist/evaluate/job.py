"""`muralist evaluate` and `muralist stats`: from folders of pictures to report.json, or to reference statistics."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data.sources import EMBEDDED
from muralist.errors import UserError
from muralist.evaluate import metrics
from muralist.evaluate.cache import Item
from muralist.evaluate.data_pictures import data_pictures
from muralist.evaluate.dinov2 import Dinov2Features
from muralist.evaluate.evaluation import METRICS, Evaluation
from muralist.evaluate.extractors import InceptionFeatures
from muralist.evaluate.features import at_least_two, compute_aloud, hash_files
from muralist.evaluate.inception_weights import find_weights
from muralist.evaluate.inputs import find_images
from muralist.evaluate.report import write_report
from muralist.evaluate.results import REPORT
from muralist.machine import choose_devices
from muralist.runfolder import no_space, write_atomically, write_json
from muralist.settings import EvaluateSettings, StatsSettings

log = logging.getLogger("muralist")
_NAMED = 5  # unreadable images on the terminal; the report has all


def evaluate(settings: EvaluateSettings) -> int:
    """Compute every metric that can be computed, write report.json and its page, and say what came out."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    report, page = measure(settings)
    unreadable = report["images"]["unreadable"]
    for line in unreadable[:_NAMED]:
        log.warning("Left out, because it cannot be read: %s", line)
    if len(unreadable) > _NAMED:
        log.warning("%d more cannot be read; %s names them.", len(unreadable) - _NAMED, REPORT)
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
            print(f"{name:<16}{score['value']:.6g}{between}")
    print(f"The report is {Path(settings.output_dir) / REPORT}, and the page to look at {page}.")
    return 0


def measure(settings: EvaluateSettings) -> tuple[dict[str, Any], Path]:
    """Compute every metric that can be computed; returns what report.json now holds, and its page."""
    report = Evaluation.prepare(settings).run()
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
    items = _items(settings)
    dinov2 = Dinov2Features.of(Path(settings.dinov2_path)) if settings.dinov2_path else None
    cache = output.with_name(f"{output.name}.features")
    devices = choose_devices(settings.gpu_ids)
    found = compute_aloud(InceptionFeatures.of(weights), items, devices, cache, "images")
    for index, why in found.unreadable.items():
        log.warning("%s is left out: %s.", items[index].content, why)
    at_least_two(found, settings.source)
    held = {"number": np.array(len(found.rows), np.int64)} | _held(found.rows, "")
    if dinov2:
        rows = compute_aloud(dinov2, items, devices, cache, "images").rows
        held |= _held(rows, "dinov2_") | {"dinov2_sha256": np.array(dinov2.digest)}
    data = io.BytesIO()
    np.savez(data, **held)  # type: ignore[arg-type]  # its own flag has another type
    try:
        write_atomically(output, data.getvalue())
    except OSError as error:
        raise no_space(error, output) from None
    shutil.rmtree(cache, ignore_errors=True)
    print(f"{output}: statistics of {len(found.rows):,} images.")
    return 0


def _items(settings: StatsSettings) -> list[Item]:
    """The pictures of a folder as they are, or those of a data set as training sees them."""
    if settings.img_size is not None:
        found = data_pictures(settings.source, settings.img_size, settings.max_samples)
        return [Item(key, picture) for key, picture in found]
    if settings.max_samples is not None or settings.source == EMBEDDED:
        raise UserError(
            "Without --img_size, SOURCE is a folder whose pictures are taken as they are, and all of them.",
            fix="Give --img_size as in training: then SOURCE is anything that train reads.",
        )
    return hash_files(find_images(Path(settings.source), "SOURCE"))


def _held(rows: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
    """Statistics of features, and the features, under the names that a file has them by."""
    moments = metrics.moments(rows)
    return {f"{prefix}mu": moments.mean, f"{prefix}sigma": moments.covariance, f"{prefix}features": rows}
