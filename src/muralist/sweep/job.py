"""`muralist sweep`: every combination on a few pictures, the best one on many.

Each combination is a folder that `generate` fills and `evaluate` measures; what is there is not made again:

    OUT/prompts.jsonl                      the model's classes in turn
    OUT/reference-DIGEST.npz               what a reference folder's pictures look like
    OUT/small-8192/ema1_cfg2.9_0.1-1/      pictures, ledger and evaluation/ of a combination
    OUT/full-50000/ema1_cfg2.9_0.1-1/      the same of the best one
    OUT/sweep.json                         every number, and the winner
"""

from __future__ import annotations

import filecmp
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
from itertools import combinations as combinations_of_two
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from muralist.errors import UserError
from muralist.evaluate.extractors import InceptionFeatures
from muralist.evaluate.inception_weights import find_weights, load_inception
from muralist.evaluate.job import measure
from muralist.generate.job import INTERRUPTED, generate
from muralist.generate.models import CheckedModel, check_model
from muralist.generate.plan import SEEDS_BETWEEN_COPIES
from muralist.machine import choose_devices
from muralist.models.jit_family import UNCONDITIONAL
from muralist.models.weights import Which, holds_one_set, latest_checkpoint
from muralist.runfolder import no_space, write_atomically
from muralist.scale.slurm import adopt_ranks
from muralist.settings import EvaluateSettings, GenerateSettings, SweepSettings
from muralist.sweep.combinations import Combination, combinations
from muralist.sweep.reference import Reference
from muralist.sweep.results import Found, Score, table, verdict
from muralist.words import duration

log = logging.getLogger("muralist")
RESULTS = "sweep.json"
_PROMPTS = "prompts.jsonl"
_SHOWN_ON_THE_WAY = 10
_WIDTH = 118  # of the table where there is no terminal


def sweep(settings: SweepSettings) -> int:
    """Try what was not tried yet, then make and measure the full number of pictures of the best."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    command = Sweep.prepare(settings)
    try:
        return command.run()
    except _Interrupted:
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        raise no_space(error, Path(error.filename)) from None


class _Interrupted(Exception):
    """Ctrl+C while pictures were made; generate has said what is there."""


@dataclass
class Sweep:
    """One call of `muralist sweep`, checked before anything is made."""

    settings: SweepSettings
    root: Path
    model_path: Path  # of a run, its checkpoint: the run may go on meanwhile
    model: CheckedModel
    tried: list[Combination]
    inception: InceptionFeatures
    reference: Reference
    found: Found
    console: Console
    warned: set[str] = field(default_factory=set)

    @classmethod
    def prepare(cls, settings: SweepSettings) -> Sweep:
        """Find everything; what is missing or makes no sense is an error now, not after an hour."""
        adopt_ranks(os.environ)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "Under a launcher, every rank would make the whole sweep.",
                fix="Give the command once, without srun or torchrun: it uses every GPU of the machine.",
            )
        choose_devices(settings.gpu_ids)
        root, model_path = Path(settings.output_dir), latest_checkpoint(Path(settings.model_path))
        model = check_model(_generate_settings(settings, model_path))
        if model.kind != "jit":
            raise UserError(
                f"{settings.model_path} is not a JiT model, and a sweep is for JiT.",
                fix="For other models, `muralist generate` and `muralist evaluate` do the same in two commands.",
            )
        guided = bool(model.description["label_names"])
        tried, notes = combinations(settings, guided, one_set=holds_one_set(model_path))
        for combination in {combination.weights: combination for combination in tried}.values():
            check_model(_generate_settings(settings, model_path, combination))
        for which, same in _equal_weights(model_path, settings.weights).items():
            tried = [combination for combination in tried if combination.weights != which]
            notes.append(f"{which} is left out: in so short a training it is the same as {same}, to the last bit.")
        weights, reason = find_weights(settings.inception_weights)
        if weights is None:
            raise UserError(reason)
        load_inception(weights)
        inception = InceptionFeatures.of(weights)
        reference = Reference.find(Path(settings.reference).expanduser(), root)
        common = {name: model.identity[name] for name in ("model", "fingerprint")}
        common |= {name: getattr(settings, name) for name in ("num_inference_steps", "num_samples", "seed_start")}
        common |= {"reference": reference.digest, "inception": inception.digest} | _last_step(settings)
        found = Found.open(root / RESULTS, str(model_path), common)
        for note in notes:
            log.info("%s", note)
        width = None if Console().is_terminal else _WIDTH
        console = Console(width=width, highlight=False)
        return cls(settings, root, model_path, model, tried, inception, reference, found, console)

    def run(self) -> int:
        """Try all, then take the best."""
        log.info("%s", self._contract())
        self.root.mkdir(parents=True, exist_ok=True)
        self.found.write()
        self._write_prompts()
        known = self.reference.statistics(self.root, self.inception.weights, self.settings.gpu_ids)
        self._try_all(self.reference.moments(known, self.root))
        best = self.found.ranked()[0].combination
        if self.found.full and self.found.full.combination != best:
            self.found.full = None  # of what was the best before there were more to compare
        self.found.write(finished=True)
        count, full = self.settings.full_samples, self.found.full
        if count is not None and (full is None or full.images != count):
            log.info("The full count of the best, %s.", best.name)
            # Seeds of their own: those by which the best was chosen would flatter it.
            seed_start = self.settings.seed_start + SEEDS_BETWEEN_COPIES
            self.found.full = self._score(best, f"full-{count}", count, seed_start, known)
            self.found.write(finished=True)
        self._conclude(best)
        return 0

    def _contract(self) -> str:
        """What is about to happen."""
        settings, classes = self.settings, len(self.model.description["label_names"])
        done = sum(combination in self.found.scores for combination in self.tried)
        evenly = f" evenly over {classes:,} classes" if classes else ""
        full = f", then {settings.full_samples:,} of the best" if settings.full_samples else ""
        there = f" Measured already: {done}." if done else ""
        pictures = (len(self.tried) - done) * settings.num_samples + (settings.full_samples or 0)
        height, width = self.model.settled["height"], self.model.settled["width"]
        most = pictures * (height * width * 3 + 4 * self.inception.width)
        place = next(folder for folder in (self.root.absolute(), *self.root.absolute().parents) if folder.is_dir())
        return (
            f"{len(self.tried)} combination{'' if len(self.tried) == 1 else 's'} for {self.model.identity['model']}, "
            f"{settings.num_samples:,} pictures each{evenly}, {settings.num_inference_steps} steps{full}.{there} "
            f"{self.root} may take up to {_size(most)}; {_size(shutil.disk_usage(place).free)} are free."
        )

    def _write_prompts(self) -> None:
        """The classes in turn: any number of rows from the beginning is as even as it can be."""
        names = self.model.description["label_names"] or [UNCONDITIONAL]
        # A table's cells lose the spaces around them; classes have numbers too.
        classes = [name if name == name.strip() else str(number) for number, name in enumerate(names)]
        rows = max(self.settings.num_samples, self.settings.full_samples or 0)
        lines = [json.dumps({"prompt": name}) + "\n" for name in classes]
        write_atomically(self.root / _PROMPTS, "".join(lines[row % len(lines)] for row in range(rows)))

    def _try_all(self, reference: Path) -> None:
        todo = [combination for combination in self.tried if combination not in self.found.scores]
        started = time.monotonic()
        for number, combination in enumerate(todo, start=1):
            log.info("Combination %d of %d: %s.", number, len(todo), combination.name)
            settings = self.settings
            folder = f"small-{settings.num_samples}"
            score = self._score(combination, folder, settings.num_samples, settings.seed_start, reference)
            self.found.scores[combination] = score
            self.found.write()
            if number < len(todo):
                self.console.print(table(self.found.ranked(), most=_SHOWN_ON_THE_WAY))
                left = (time.monotonic() - started) / number * (len(todo) - number)
                log.info("%d to go, about %s.", len(todo) - number, duration(left))

    def _score(self, combination: Combination, folder: str, count: int, seed_start: int, reference: Path) -> Score:
        """Make what is missing of a combination's pictures, and measure them."""
        images = self.root / folder / combination.name
        made = _generate_settings(self.settings, self.model_path, combination)
        status = generate(
            made.model_copy(
                update={
                    "prompts_csv": str(self.root / _PROMPTS),
                    "output_dir": str(images),
                    "num_samples": count,
                    "seed_start": seed_start,
                }
            )
        )
        if status == INTERRUPTED:
            raise _Interrupted
        if status:
            raise UserError(
                f"Some of the {count:,} pictures of {combination.name} are missing.",
                f"failed_prompts_gpu*.txt in {images} say why. FIDs of fewer pictures would not compare.",
                "The same command tries again.",
            )
        report, _ = measure(
            EvaluateSettings(
                images=str(images),
                output_dir=str(images / "evaluation"),
                reference=str(reference),
                inception_weights=str(self.inception.weights),
                gpu_ids=self.settings.gpu_ids,
            )
        )
        if report["images"]["count"] != count:
            raise UserError(
                f"{images} holds {report['images']['count']:,} readable pictures instead of {count:,}.",
                fix="Remove what does not belong there, and run the same command again.",
            )
        for warning in report["warnings"]:
            if warning not in self.warned:
                self.warned.add(warning)
                log.warning("%s", warning)
        gc.collect()  # the next pictures need the memory of the card that Inception had
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return Score.of_report(combination, report)

    def _conclude(self, best: Combination) -> None:
        full = self.found.full if self.settings.full_samples else None
        ranked = self.found.ranked()
        self.console.print(table(ranked, full))
        said = verdict(ranked)
        if full:
            said.append(
                f"With {full.images:,} other pictures its FID is {full.fid:.2f} ({full.low:.2f} to {full.high:.2f})."
            )
        last_step = "--official_last_step" if self.settings.official_last_step else ""
        flags = ("--model_path", shlex.quote(str(self.model_path)), best.flags, last_step, "--num_inference_steps")
        command = " ".join(filter(None, ("muralist generate", *flags, str(self.settings.num_inference_steps))))
        said.append(f"All numbers are in {self.root / RESULTS}. To make pictures so:")
        said.append(f"  {command} --prompts_csv TABLE --output_dir IMAGES")
        for line in said:
            print(line)


def _generate_settings(
    settings: SweepSettings, model_path: Path, combination: Combination | None = None
) -> GenerateSettings:
    """What generate is told; which pictures and where to, comes later."""
    return GenerateSettings(
        prompts_csv="",
        output_dir="",
        model_path=str(model_path),
        gpu_ids=settings.gpu_ids,
        num_inference_steps=settings.num_inference_steps,
        **_last_step(settings),
        **(combination.chosen if combination else {}),
    )


def _last_step(settings: SweepSettings) -> dict[str, Any]:
    """Said only where it was asked for: sweeps from before there was a choice go on."""
    return {"official_last_step": True} if settings.official_last_step else {}


def _equal_weights(model_path: Path, sets: Sequence[Which]) -> dict[Which, Which]:
    """Sets of a checkpoint's weights that are another one's equal: early on, both averages are over the same few steps."""
    files = {which: model_path / f"{which}.safetensors" for which in sets}
    there = [which for which, file in files.items() if file.is_file()]
    equal: dict[Which, Which] = {}
    for one, other in combinations_of_two(there, 2):
        if one not in equal and other not in equal and filecmp.cmp(files[one], files[other], shallow=False):
            equal[other] = one
    return equal


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
