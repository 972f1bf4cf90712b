"""`muralist sweep`: the weights, guidance scale and guidance interval of a JiT with the best FID.

Every combination generates a few images; the best one then generates the full count. sweep.json holds the scores: the
same command resumes, and a command with more values adds to them.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from muralist.core.errors import UserError
from muralist.core.formatting import format_duration
from muralist.core.hardware import select_devices
from muralist.core.run_dir import atomic_open, atomic_write, atomic_write_json, disk_write_error, is_disk_full
from muralist.core.slurm import set_rank_environment
from muralist.data.source import sample_files, short_hash
from muralist.data.tar_members import TarImage
from muralist.evaluate.command import measure, stats
from muralist.evaluate.encoders import InceptionEncoder, file_sha256
from muralist.evaluate.inception import find_weights, load_inception
from muralist.evaluate.inputs import find_images, read_statistics
from muralist.generate.command import INTERRUPTED, generate
from muralist.generate.model_info import inspect_model
from muralist.generate.plan import SEED_STRIDE
from muralist.models.hub import find_model
from muralist.models.jit_spec import UNCONDITIONAL
from muralist.models.weights import WeightSet, has_single_weight_set, latest_checkpoint
from muralist.settings import EvaluateSettings, GenerateSettings, StatsSettings, SweepSettings
from muralist.tools.doctor.command import check_generation

log = logging.getLogger("muralist")
RESULTS = "sweep.json"
_PROMPTS = "prompts.jsonl"
_ROWS_WHILE_RUNNING = 10
_TABLE_WIDTH = 118  # without a terminal


class Combination(BaseModel, frozen=True):
    """Sampling settings to try; None where the model leaves no choice."""

    weights: WeightSet | None
    guidance_scale: float | None = None
    guidance_interval: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        scale = "" if self.guidance_scale is None else f"_cfg{self.guidance_scale:.12g}"
        interval = "_{:.12g}-{:.12g}".format(*self.guidance_interval) if self.guidance_interval else ""
        return f"{self.weights or 'weights'}{scale}{interval}"

    @property
    def generate_settings(self) -> dict[str, Any]:
        """The settings of `muralist generate` that it fixes."""
        return self.model_dump(include=set(Combination.model_fields), exclude_none=True)

    @property
    def flags(self) -> str:
        """The flags of `muralist generate` for it."""
        words: list[str] = []
        for name, value in self.generate_settings.items():
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *(word if isinstance(word, str) else f"{word:.12g}" for word in values)]
        return shlex.join(words)

    @property
    def sort_key(self) -> tuple[str, float, tuple[float, float]]:
        """Its order in sweep.json."""
        return self.weights or "", self.guidance_scale or 0.0, self.guidance_interval or (0.0, 0.0)


class SweepScore(Combination, frozen=True):
    """The FID of one combination, an entry of sweep.json."""

    fid: float
    low: float
    high: float
    images: int
    gpu_seconds: float  # time of all GPUs together, without loading and interruptions

    def to_json(self) -> dict[str, Any]:
        """Return the entry of sweep.json."""
        return {"name": self.name, **self.model_dump(mode="json")}


def list_combinations(
    settings: SweepSettings, guided: bool, single_set: bool, distilled: bool = False
) -> tuple[list[Combination], list[str]]:
    """Return the combinations to try, and notes for the log.

    `guided`: the model has classes. `single_set`: it has one set of weights, without EMA. `distilled`: its guidance is
    part of the weights.
    """
    notes = []
    intervals = [_parse_interval(text) for text in settings.guidance_interval]
    weights: Sequence[WeightSet | None] = settings.weights
    if single_set:
        weights = [None]
        notes.append("The model has a single set of weights: there are no EMA weights to choose from.")
    if distilled or not guided:
        fixed = "The guidance of a distilled model is fixed"
        why = fixed if distilled else "The model is unconditional and cannot be guided"
        notes.append(f"{why}: only its weights are compared.")
        return [Combination(weights=which) for which in dict.fromkeys(weights)], notes
    candidates = [
        # A scale of 1 is no guidance in any interval.
        Combination(weights=which, guidance_scale=scale, guidance_interval=interval if scale != 1 else None)
        for which, scale, interval in product(weights, settings.guidance_scale, intervals)
    ]
    return list(dict.fromkeys(candidates)), notes


def _parse_interval(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
        if 0 <= low < high <= 1:
            return low, high
    except ValueError:
        pass  # the same message
    raise UserError(
        f"{text!r} is not an interval for --guidance_interval.",
        "An interval is two numbers from 0 to 1, the lower one first, with a comma between them.",
        "Write LOW,HIGH, for example 0.1,1 or 0,1 0.1,1.",
    )


def _reference_digest(path: Path, output: Path) -> str:
    """Check the reference, a folder of images or an .npz file; generated images must not become part of it."""
    if path.suffix == ".npz":
        read_statistics(path)
        return file_sha256(path)[:16]
    if output.absolute().is_relative_to(path.absolute()):
        raise UserError(
            f"{output} is inside {path}: generated images would become part of the reference.",
            fix="Choose another --output_dir.",
        )
    files = find_images(path, "--reference")
    names = "\n".join(file.relative_to(path).as_posix() for file in files)
    paths = [file.tar if isinstance(file, TarImage) else file for file in files]
    return short_hash(names, sample_files(len(paths), paths.__getitem__))


@dataclass
class SweepResults:
    """The content of sweep.json."""

    path: Path
    model_path: str
    settings: dict[str, Any]
    """Everything besides the combination that affects the scores: sweeps with other settings are not comparable."""
    scores: dict[str, SweepScore] = field(default_factory=dict)  # by the name of the combination
    full: SweepScore | None = None

    @classmethod
    def open(cls, path: Path, model_path: str, settings: dict[str, Any]) -> SweepResults:
        """Read the results of an earlier command, and refuse those of other settings."""
        results = cls(path, model_path, settings)
        if not path.is_file():
            return results
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            scores = [SweepScore(**entry) for entry in content["combinations"]]
            full = SweepScore(**content["full"]) if content["full"] else None
            earlier = dict(content["settings"])
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} is damaged.",
                fix="Delete it and run the same command: images and features are kept, scores are computed again.",
            ) from None
        if scores and earlier != settings:
            names = [name for name in earlier | settings if settings.get(name) != earlier.get(name)]
            changes = "; ".join(f"{name} {earlier.get(name)!s:.16} -> {settings.get(name)!s:.16}" for name in names)
            raise UserError(
                f"{path.parent} holds a sweep with other settings.",
                f"Changed: {changes}. Its model was {content.get('model_path')}.",
                "Run the command as before, or choose another --output_dir.",
            )
        if scores:
            results.scores, results.full = {score.name: score for score in scores}, full
        return results

    def ranked(self) -> list[SweepScore]:
        """Return the scores, best first."""
        return sorted(self.scores.values(), key=lambda score: (score.fid, score.sort_key))

    def write(self, finished: bool = False) -> None:
        """Write sweep.json atomically; only a finished sweep has a winner."""
        ranked = self.ranked()
        winner = None
        if finished:
            tied = [score.name for score in within_noise(ranked)]
            winner = ranked[0].to_json() | {"flags": ranked[0].flags, "within_noise": tied}
        content = {
            "model_path": self.model_path,
            "settings": self.settings,
            "winner": winner,
            "full": self.full.to_json() if self.full else None,
            "combinations": [score.to_json() for score in sorted(ranked, key=lambda score: score.sort_key)],
        }
        atomic_write_json(self.path, content)


def within_noise(ranked: Sequence[SweepScore]) -> list[SweepScore]:
    """Return the scores whose intervals overlap with that of the best one."""
    best = ranked[0]
    return [score for score in ranked[1:] if score.low <= best.high and best.low <= score.high]


def results_table(ranked: Sequence[SweepScore], full: SweepScore | None = None, limit: int | None = None) -> Table:
    """Return a table of the best scores; `full` is the best combination's score with the full count."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("weights", "guidance", "interval", "FID", "95%", "images", "GPU time", ""):
        table.add_column(title, justify="right" if title in ("FID", "95%", "images", "GPU time") else "left")
    tied = within_noise(ranked)
    notes = ["best", *("within noise" if score in tied else "" for score in ranked[1:])]
    rows = list(zip(ranked, notes, strict=True))[:limit]
    for score, note in [*rows, *([(full, "full count")] if full else [])]:
        interval = score.guidance_interval
        table.add_row(
            score.weights or "-",
            "-" if score.guidance_scale is None else f"{score.guidance_scale:g}",
            f"{interval[0]:g} to {interval[1]:g}" if interval else "-",
            f"{score.fid:.2f}",
            f"{score.low:.2f} to {score.high:.2f}",
            f"{score.images:,}",
            format_duration(score.gpu_seconds),
            note,
        )
    return table


def conclusions(ranked: Sequence[SweepScore]) -> list[str]:
    """Return sentences about the best score, its ties and the range of guidance scales."""
    best, tied = ranked[0], within_noise(ranked)
    lines = [f"Best of {len(ranked)}: {best.name}, FID {best.fid:.2f} with {best.images:,} images."]
    if tied:
        others = f"{len(tied)} other{'s' if len(tied) > 1 else ''}: the 95% intervals overlap"
        lines.append(f"It is within noise of {others}. Raise --num_samples to separate them.")
    scales = [score.guidance_scale or 1.0 for score in ranked]
    if scales[0] in (min(scales), max(scales)) and min(scales) < max(scales) and scales[0] != 1:
        which, where = ("highest", "higher") if scales[0] == max(scales) else ("lowest", "lower")
        lines.append(f"Its guidance scale is the {which} one tried: try {where} ones too, in the same folder.")
    return lines


def sweep(settings: SweepSettings) -> int:
    """Score every combination that has no score yet, then the full count of the best one."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    command = Sweep(settings)
    try:
        command.run()
    except OSError as error:
        if error.filename is None and not is_disk_full(error):
            raise
        raise disk_write_error(error, Path(error.filename or command.root)) from None
    return 0


class Sweep:
    """One call of `muralist sweep`; wrong settings are an error before anything is generated."""

    def __init__(self, settings: SweepSettings) -> None:
        set_rank_environment(os.environ)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "Under a launcher, every rank would run the complete sweep.",
                fix="Run the command once, without srun or torchrun: it uses every GPU of the machine.",
            )
        select_devices(settings.gpu_ids)
        self.settings, self.root = settings, Path(settings.output_dir)
        # Fixed now: a run may write newer checkpoints meanwhile.
        self.checkpoint = latest_checkpoint(find_model(settings.model_path, "--model_path"))
        # Recorded only where they are not the default: sweeps from before they existed do not have them.
        self.sampler: dict[str, Any] = {"official_last_step": True} if settings.official_last_step else {}
        if settings.scheduler not in (None, "heun"):
            self.sampler["scheduler"] = settings.scheduler
        self.model = inspect_model(self._generate_settings())
        if not self.model.is_jit:
            raise UserError(
                f"{settings.model_path} is not a JiT model.",
                "A sweep compares EMA weights and guidance of JiT models.",
                "For other models, run `muralist generate` and `muralist evaluate`.",
            )
        self.classes = self.model.description["label_names"]
        self.combinations = self._find_combinations()
        weights, reason = find_weights(settings.inception_weights)
        if weights is None:
            raise UserError(reason)
        load_inception(weights)
        self.inception = InceptionEncoder.from_file(weights)
        self.reference = Path(settings.reference).expanduser()
        self.digest = _reference_digest(self.reference, self.root)
        identity = {name: self.model.identity[name] for name in ("model", "fingerprint")}
        self.steps = self.model.resolved["num_inference_steps"]
        identity |= {"num_inference_steps": self.steps}
        identity |= {name: getattr(settings, name) for name in ("num_samples", "seed_start")}
        identity |= {"reference": self.digest, "inception": self.inception.sha256, **self.sampler}
        self.results = SweepResults.open(self.root / RESULTS, str(self.checkpoint), identity)
        self.console = Console(width=None if Console().is_terminal else _TABLE_WIDTH, highlight=False)
        self.logged_warnings: set[str] = set()

    def _find_combinations(self) -> list[Combination]:
        """Return the combinations whose weights exist; of equal weights, only the first."""
        single_set = has_single_weight_set(self.checkpoint)
        is_distilled = "distilled" in self.model.description
        tried, notes = list_combinations(self.settings, bool(self.classes), single_set, is_distilled)
        first_with: dict[str, WeightSet] = {}  # early in training, both EMAs cover the same few steps
        for which in dict.fromkeys(combination.weights for combination in tried):
            inspect_model(self._generate_settings(Combination(weights=which)))
            file = self.checkpoint / f"{which}.safetensors"
            if which and file.is_file() and (same := first_with.setdefault(file_sha256(file), which)) != which:
                tried = [combination for combination in tried if combination.weights != which]
                notes.append(f"{which} is left out: after so few steps it equals {same} bit for bit.")
        for note in notes:
            log.info("%s", note)
        return tried

    def _generate_settings(self, combination: Combination | None = None, **changes: Any) -> GenerateSettings:
        """Return the settings of generate; `changes` adds prompts and output."""
        fixed = combination.generate_settings if combination else {}
        given = {"prompts_csv": "", "output_dir": "", **self.sampler, **fixed, **changes}
        steps = self.settings.num_inference_steps
        return GenerateSettings(
            model_path=str(self.checkpoint),
            gpu_ids=self.settings.gpu_ids,
            num_inference_steps="auto" if steps is None else steps,
            **given,
        )

    def run(self) -> None:
        """Score all combinations, then the full count of the best one."""
        self.root.mkdir(parents=True, exist_ok=True)
        log.info("%s", self._plan())
        self.results.write()
        self._write_prompts()
        statistics, moments = self._reference_statistics()
        self._score_all(moments)
        best, count, full = self.results.ranked()[0], self.settings.full_samples, self.results.full
        if full and full.name != best.name:
            self.results.full = full = None  # another combination was the best then
        self.results.write(finished=True)
        if count is not None and (full is None or full.images != count):
            log.info("The full count of the best, %s.", best.name)
            # With other seeds: FID on the seeds by which the best was selected would be biased downward.
            seed_start = self.settings.seed_start + SEED_STRIDE
            self.results.full = self._score(best, f"full-{count}", count, seed_start, statistics)
            self.results.write(finished=True)
        self._print_results()

    def _plan(self) -> str:
        """Return what is about to happen."""
        settings, count = self.settings, len(self.combinations)
        done = sum(combination.name in self.results.scores for combination in self.combinations)
        evenly = f" evenly over {len(self.classes):,} classes" if self.classes else ""
        full = f", then {settings.full_samples:,} of the best" if settings.full_samples else ""
        already = f" Scored already: {done}." if done else ""
        images = (count - done) * settings.num_samples + (settings.full_samples or 0)
        height, width = self.model.resolved["height"], self.model.resolved["width"]
        size = images * (height * width * 3 + 4 * self.inception.width)
        return (
            f"{count} combination{'' if count == 1 else 's'} for {self.model.identity['model']}, "
            f"{settings.num_samples:,} images each{evenly}, {self.steps} steps{full}.{already} "
            f"{self.root} may take up to {_format_size(size)}; {_format_size(shutil.disk_usage(self.root).free)} are free."
        )

    def _write_prompts(self) -> None:
        """Write the classes in turn: any number of leading rows is as balanced as possible."""
        # Table cells lose surrounding spaces; classes can be given by index too.
        names = [name if name == name.strip() else str(index) for index, name in enumerate(self.classes)]
        lines = [json.dumps({"prompt": name}) + "\n" for name in names or [UNCONDITIONAL]]
        rows = max(self.settings.num_samples, self.settings.full_samples or 0)
        atomic_write(self.root / _PROMPTS, "".join(islice(cycle(lines), rows)))

    def _reference_statistics(self) -> tuple[Path, Path]:
        """Return two .npz files of the reference: with everything known, and with mean and covariance alone.

        With the second one, an evaluation computes nothing but FID, and its interval is that of the generated images:
        the reference is the same for all combinations and does not affect their order.
        """
        statistics, moments = self.reference, self.root / f"reference-{self.digest}-moments.npz"
        if statistics.suffix != ".npz":
            statistics = self.root / f"reference-{self.digest}.npz"
            if not statistics.is_file():
                source, target = str(self.reference), str(statistics)
                weights, gpus = str(self.inception.source), self.settings.gpu_ids
                stats(StatsSettings(source=source, output=target, inception_weights=weights, gpu_ids=gpus))
        if not moments.is_file():
            known = read_statistics(statistics)
            if known.features is None:
                return statistics, statistics
            count = {} if known.count is None else {"number": np.asarray(known.count)}
            with atomic_open(moments) as file:
                np.savez(file, mu=known.moments.mean, sigma=known.moments.covariance, **count)  # type: ignore[arg-type]
        return statistics, moments

    def _score_all(self, reference: Path) -> None:
        remaining = [combination for combination in self.combinations if combination.name not in self.results.scores]
        count, seed_start = self.settings.num_samples, self.settings.seed_start
        started = time.monotonic()
        for number, combination in enumerate(remaining, start=1):
            log.info("Combination %d of %d: %s.", number, len(remaining), combination.name)
            score = self._score(combination, f"small-{count}", count, seed_start, reference)
            self.results.scores[combination.name] = score
            self.results.write()
            if left := len(remaining) - number:
                self.console.print(results_table(self.results.ranked(), limit=_ROWS_WHILE_RUNNING))
                seconds = (time.monotonic() - started) / number * left
                log.info("%d left, about %s.", left, format_duration(seconds))

    def _score(self, combination: Combination, folder: str, count: int, seed_start: int, reference: Path) -> SweepScore:
        """Generate the missing images of a combination, and evaluate them."""
        images = self.root / folder / combination.name
        paths = {"prompts_csv": str(self.root / _PROMPTS), "output_dir": str(images)}
        settings = self._generate_settings(combination, **paths, num_samples=count, seed_start=seed_start)
        status = generate(settings, preflight=check_generation).status
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise UserError(
                f"Some of the {count:,} images of {combination.name} are missing.",
                f"{images}/failed_prompts_gpu*.txt list the reasons. FID values of fewer images are not comparable.",
                "Run the same command again to retry.",
            )
        report, _ = measure(
            EvaluateSettings(
                images=str(images),
                output_dir=str(images / "evaluation"),
                reference=str(reference),
                inception_weights=str(self.inception.source),
                gpu_ids=self.settings.gpu_ids,
            )
        )
        readable = report["images"]["count"]
        if readable != count:
            raise UserError(
                f"{images} holds {readable:,} readable images instead of {count:,}.",
                fix="Remove files that do not belong there, and run the same command again.",
            )
        for warning in report["warnings"]:
            if warning not in self.logged_warnings:
                self.logged_warnings.add(warning)
                log.warning("%s", warning)
        gc.collect()  # the next combination needs the GPU memory of Inception
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        fid, speeds = report["scores"]["fid"], report["speed"].values()
        seconds = sum(gpu["images"] / gpu["images_per_second"] for gpu in speeds if gpu["images_per_second"])
        tried = combination.model_dump(include=set(Combination.model_fields))
        interval = {name: fid[name] for name in ("low", "high")}
        return SweepScore(**tried, fid=fid["value"], **interval, images=count, gpu_seconds=round(seconds, 1))

    def _print_results(self) -> None:
        ranked, full = self.results.ranked(), self.results.full if self.settings.full_samples else None
        self.console.print(results_table(ranked, full))
        lines = conclusions(ranked)
        if full:
            interval = f"{full.low:.2f} to {full.high:.2f}"
            lines.append(f"With {full.images:,} other images its FID is {full.fid:.2f} ({interval}).")
        sampler = " ".join(
            f"--{name}" if value is True else f"--{name} {value}" for name, value in self.sampler.items()
        )
        flags = ("--model_path", shlex.quote(str(self.checkpoint)), ranked[0].flags, sampler, "--num_inference_steps")
        command = " ".join(filter(None, ("muralist generate", *flags, str(self.steps))))
        lines.append(f"All scores are in {self.root / RESULTS}. To generate images with the best settings:")
        lines.append(f"  {command} --prompts_csv TABLE --output_dir IMAGES")
        print("\n".join(lines))


def _format_size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
