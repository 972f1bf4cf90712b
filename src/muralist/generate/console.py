"""What `muralist generate` prints: its plan, a progress bar for each GPU and a total, and the summary at the end."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from tqdm import tqdm

from muralist.core.formatting import format_duration
from muralist.core.run_dir import atomic_write
from muralist.data.ledger_reader import read_lines
from muralist.generate.output_dir import PROMPT_TOKENS, PROMPT_TRUNCATED, PSNR, OutputDir
from muralist.generate.plan import Plan
from muralist.settings import GenerateSettings

log = logging.getLogger("muralist")
_LINE_INTERVAL = 10.0  # seconds
_RECORD_INTERVAL = 1.0  # seconds
_BAR = "{l_bar}{bar}| {n:,}/{total:,} [{elapsed}<{remaining}{postfix}]"


class WorkerProgress(NamedTuple):
    """How far a worker is."""

    done: int = 0
    failed: int = 0
    total: int = 0
    loading: bool = False  # the model

    @property
    def finished(self) -> int:
        """Samples that are done or failed."""
        return self.done + self.failed


class ProgressLines:
    """A line on stderr every few seconds; the counts also go into a file of the output folder, if given, for the board."""

    def __init__(self, output: OutputDir | None = None) -> None:
        self._output, self._recorded = output, -_RECORD_INTERVAL
        self._shown, self._last = time.monotonic(), 0
        self._first: dict[str, tuple[float, int]] = {}  # when a worker's first images came, and how many

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        """Show how far each worker is; `unassigned` samples belong to none at the moment."""
        done, failed, total = (sum(column) for column in zip(*(worker[:3] for worker in workers.values()), strict=True))
        self._show(workers, WorkerProgress(done, failed, total + unassigned))
        is_due = time.monotonic() - self._recorded >= _RECORD_INTERVAL
        if self._output and is_due and self._output.work.is_dir():
            self._recorded = time.monotonic()
            record = {"workers": {label: worker[:3] for label, worker in workers.items()}, "unassigned": unassigned}
            with suppress(OSError):  # a full disk is reported by the first image that does not fit
                atomic_write(self._output.progress, json.dumps(record))

    def _show(self, workers: Mapping[str, WorkerProgress], total: WorkerProgress) -> None:
        rate, left = self._rate("total", total.finished), total.total - total.finished
        is_soon = time.monotonic() - self._shown < _LINE_INTERVAL
        if total.finished == self._last or (is_soon and left):
            return
        self._shown, self._last = time.monotonic(), total.finished
        speed = f", {rate:.2f} images/s, {format_duration(left / rate)} left" if rate else ""
        each = ", ".join(f"GPU {label}: {worker.finished:,}/{worker.total:,}" for label, worker in workers.items())
        counts = f"success: {total.done:,}, failed: {total.failed:,}"
        self.print(f"{total.finished:,}/{total.total:,} ({counts}){speed}; {each}")

    def _rate(self, label: str, finished: int) -> float:
        """Return images per second since the first ones came, 0 while unknown: loading the model does not count."""
        if not finished:
            return 0.0
        since, first = self._first.setdefault(label, (time.monotonic(), finished))
        return (finished - first) / max(time.monotonic() - since, 1e-3)

    def print(self, text: str) -> None:
        """Print a line for the user."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the display."""


class ProgressBars(ProgressLines):
    """Instead of lines, on a terminal: one bar per GPU and one for all, in tqdm's format."""

    def __init__(self, console: Console, output: OutputDir | None = None) -> None:
        super().__init__(output)
        self.console, self.started = console, time.monotonic()
        self.bars: list[tuple[str, WorkerProgress, float, float]] = []  # label, progress, images/s, seconds
        self.live = Live(self, console=console, refresh_per_second=4)
        self.live.start()

    def _show(self, workers: Mapping[str, WorkerProgress], total: WorkerProgress) -> None:
        rows = {f"GPU {label}": worker for label, worker in workers.items() if worker.total} | {"total": total}
        elapsed = time.monotonic() - self.started
        self.bars = [(label, row, self._rate(label, row.finished), elapsed) for label, row in rows.items()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max((len(bar[0]) for bar in self.bars), default=0)
        for label, progress, rate, elapsed in self.bars:
            status = f"success: {progress.done:,}, failed: {progress.failed:,}"
            if progress.loading:
                status = "loading the model"
            elif label == "total":
                status += f", {rate:.2f} images/s"
            line = tqdm.format_meter(
                progress.finished,
                progress.total,
                elapsed,
                ncols=options.max_width,
                prefix=f"{label:>{longest}}",
                ascii=" #",
                rate=rate or float(progress.finished == progress.total),  # a rate of 0 is shown as ?
                bar_format=_BAR,
                postfix=status,
            )
            yield Text(line, no_wrap=True)

    def print(self, text: str) -> None:
        """Print above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bars as they are."""
        self.live.stop()


def open_display(output: OutputDir) -> ProgressLines:
    """Open bars on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    is_terminal = console.is_terminal and not console.is_dumb_terminal
    return ProgressBars(console, output) if is_terminal else ProgressLines(output)


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
    origins: str = "",
    task: str = "",
) -> str:
    """Describe what is about to happen; `origins` says which settings are the model's."""
    sizes = {plan.size_of(index) for index in todo.tolist()}
    size = "{1} x {0}".format(*sizes.pop()) if len(sizes) == 1 else f"of {len(sizes)} sizes"
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
    purpose = f"{task}, " if task else ""
    weights = f", {settings.weights}" if "weights" in identity else ""
    scheduler = "".join(f", {word}" for word in (settings.scheduler, *settings.scheduler_options) if word)
    return (
        f"{len(todo):,} {noun(settings, len(todo))}{frames}, {size}, {purpose}from {plan.table.name} with "
        f"{identity['model']} ({settings.dtype}{weights}, {settings.num_inference_steps} steps, {guidance}{last}{scheduler}"
        f"{f'; {origins}' if origins else ''}) "
        f"on {len(labels)} {kind[len(labels) > 1]}: {' '.join(labels)}. Loading the model."
    )


def summarize(
    settings: GenerateSettings,
    output: OutputDir,
    planned: int,
    attempted: int,
    missing: int,
    seconds: float,
    first_image_after: float | None,
    interrupted: bool,
) -> int:
    """Log what came of a command; returns its exit status."""
    made = attempted - missing
    speed = f", {made / seconds:.2f} images/s with loading" if made > 0 else ""
    first = f", the first after {first_image_after:.1f} s" if first_image_after else ""
    total = f"{planned - missing:,} of {planned:,} {noun(settings)} are in {settings.output_dir}"
    text = f"{total} ({format_duration(seconds)}{speed}{first})."
    if interrupted:
        log.warning("Interrupted. %s Run the same command again to resume.", text)
        return INTERRUPTED
    if not attempted:
        text = f"Nothing to do: {text}"
    if missing:
        advice = "failed_prompts_gpu*.txt give the reasons; run the same command to try again."
        log.warning("%s %s missing: %s", text, f"{missing:,}", advice)
        return 1
    log.info("%s", text)
    for sentence in _measurements(output) if attempted else ():
        log.info("%s", sentence)
    return 0


def _measurements(output: OutputDir) -> Iterator[str]:
    """Yield what the ledger says of truncated prompts, GPU use and the distance to exact mode."""
    busy: list[float] = []
    distances: list[float] = []
    rows: set[int] = set()
    truncated: set[int] = set()
    limits: dict[str, Any] = {}  # tokens, by text encoder
    for line in read_lines(output.ledger):
        if isinstance(share := line.get("gpu_busy"), float):
            busy.append(share)
        if isinstance(psnr := line.get(PSNR), int | float) and math.isfinite(psnr):
            distances.append(psnr)
        rows.add(line["index"])
        if line.get(PROMPT_TRUNCATED) is True:
            truncated.add(line["index"])
            tokens = line.get(PROMPT_TOKENS)  # earlier versions did not write it
            for encoder, counts in tokens.items() if isinstance(tokens, dict) else ():
                if isinstance(counts, dict):
                    limits[f"{counts.get('class')} ({encoder})"] = counts.get("limit")
    if truncated:
        prompts = f"{len(truncated):,} of {len(rows):,} prompt{'s' if len(rows) > 1 else ''}"
        present, past = ("are", "were") if len(truncated) > 1 else ("is", "was")
        windows = ", ".join(f"to {limit} tokens by {encoder}" for encoder, limit in limits.items())
        yield (
            f"{prompts} {present} longer than a text encoder reads and {past} truncated"
            f'{f": {windows}" if windows else ""} ("{PROMPT_TRUNCATED}" in ledger.jsonl).'
        )
    if busy:
        yield f"The GPU was busy for {100 * sum(busy) / len(busy):.1f}% of the time after its first batch."
    if distances:
        yield (
            f"Fast mode: PSNR {np.mean(distances):.1f} dB (worst {min(distances):.1f} dB) to exact mode on "
            f"{len(distances)} image{'s' if len(distances) > 1 else ''}; the exact ones are in {output.exact}."
        )
