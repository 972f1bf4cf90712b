"""The sentences before and after a command: what it is about to do, and what came of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from muralist.core.formatting import format_duration
from muralist.data.ledger_reader import read_lines
from muralist.generate.ledger import PROMPT_TRUNCATED, PSNR
from muralist.generate.output_dir import OutputDir
from muralist.generate.plan import Plan
from muralist.settings import GenerateSettings

log = logging.getLogger("muralist")
INTERRUPTED = 130
"""Exit status of a command that was interrupted."""


def noun(settings: GenerateSettings, count: int = 0) -> str:
    """Return what is generated: image, images, clip or clips."""
    return f"{'clip' if settings.num_frames > 1 else 'image'}{'' if count == 1 else 's'}"


def describe_job(
    settings: GenerateSettings,
    identity: Mapping[str, Any],
    plan: Plan,
    todo: np.ndarray,
    labels: list[str],
    on_cpu: bool,
) -> str:
    """Describe what is about to happen."""
    sizes = plan.distinct_sizes(todo)
    size = "{} x {}".format(*sizes[0]) if len(sizes) == 1 else f"of {len(sizes)} sizes"
    kind = ("CPU process", "CPU processes") if on_cpu else ("GPU", "GPUs")
    guidance = f"guidance {settings.guidance_scale:g}"
    if "guidance_interval" in identity:
        guidance += " between {:g} and {:g}".format(*settings.guidance_interval)
    if "preset" in identity:
        guidance += f"; {identity['preset']}"
    elif settings.cfg_truncation_step is not None:
        guidance += f" for {settings.cfg_truncation_step} steps"
    last = ", the official last step" if settings.official_last_step else ""
    frames = f" of {settings.num_frames} frames" if settings.num_frames > 1 else ""
    weights = f", {settings.weights}" if "weights" in identity else ""
    return (
        f"{len(todo):,} {noun(settings, len(todo))}{frames}, {size}, from {settings.prompts_csv} with "
        f"{identity['model']} ({settings.dtype}{weights}, {settings.num_inference_steps} steps, {guidance}{last}) "
        f"on {len(labels)} {kind[len(labels) > 1]}: {' '.join(labels)}. Loading the model."
    )


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    planned: int
    attempted: int
    missing: int
    seconds: float
    first_image_after: float | None  # seconds
    interrupted: bool


def summarize(outcome: Outcome, settings: GenerateSettings, output: OutputDir) -> int:
    """Log what came of a command; returns its exit status."""
    attempted, missing = outcome.attempted, outcome.missing
    made = attempted - missing
    speed = f", {made / outcome.seconds:.2f} images/s with loading" if made > 0 else ""
    first = f", the first after {outcome.first_image_after:.1f} s" if outcome.first_image_after else ""
    total = f"{outcome.planned - missing:,} of {outcome.planned:,} {noun(settings)} are in {settings.output_dir}"
    text = f"{total} ({format_duration(outcome.seconds)}{speed}{first})."
    if outcome.interrupted:
        log.warning("Interrupted. %s Run the same command again to resume.", text)
        return INTERRUPTED
    if not attempted:
        text = f"Nothing to do: {text}"
    if missing:
        log.warning(
            "%s %s missing: failed_prompts_gpu*.txt give the reasons; run the same command to try again.",
            text,
            f"{missing:,}",
        )
        return 1
    log.info("%s", text)
    for sentence in _measurements(output) if attempted else ():
        log.info("%s", sentence)
    return 0


def _measurements(output: OutputDir) -> Iterator[str]:
    """Yield what the ledger says of truncated prompts, GPU use and the distance to exact mode."""
    busy: list[float] = []
    distances: list[float] = []
    truncated: set[Any] = set()
    for line in read_lines(output.ledger):
        if isinstance(share := line.get("gpu_busy"), float):
            busy.append(share)
        if isinstance(psnr := line.get(PSNR), int | float) and math.isfinite(psnr):
            distances.append(psnr)
        if line.get(PROMPT_TRUNCATED) is True:
            truncated.add(line.get("index"))
    if truncated:
        prompts = f"{len(truncated):,} prompts are" if len(truncated) > 1 else "One prompt is"
        yield (
            f"{prompts} longer than a text encoder of this model reads; the rest was ignored "
            f'("{PROMPT_TRUNCATED}" in ledger.jsonl).'
        )
    if busy:
        yield f"The GPU was busy for {100 * sum(busy) / len(busy):.1f}% of the time after its first batch."
    if distances:
        yield (
            f"Fast mode: PSNR {np.mean(distances):.1f} dB (worst {min(distances):.1f} dB) to exact mode on "
            f"{len(distances)} image{'s' if len(distances) > 1 else ''}; the exact ones are in {output.exact}."
        )
