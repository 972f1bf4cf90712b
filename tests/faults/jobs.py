"""The jobs of fault schedules: their commands, when they are finished, which files can be damaged, expected results."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from muralist.core.errors import UserError
from muralist.data.ledger_reader import read_lines
from muralist.train import checkpoint
from tests.faults.schedule import Evaluating, Generating, Training
from tests.support.fault_injection import PLAN, Plan
from tests.support.fork_server import SMALLEST
from tests.support.generating import makers, other_files, read_images
from tests.support.recovery import Workshop
from tests.support.runs import assert_same_state, last_checkpoint, metrics, only_run

LONGEST = 14
"""Steps of the undisturbed trainings, with a checkpoint at each: one serves all shorter ones."""


class Job(ABC):
    """One disturbed job in a folder."""

    refusal: str
    """What a second command on the same folder is told."""

    def __init__(self, shop: Workshop, place: Path, random: Random) -> None:
        self.shop, self.place, self.random = shop, place, random

    @abstractmethod
    def arguments(self, start: int) -> list[object]:
        """The command of a start; the first is number 1."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether everything that was asked for is there."""

    @abstractmethod
    def damage(self, what: str) -> list[str] | None:
        """Harm files between two starts; returns what the next start must say, or None if there is nothing to action yet."""

    @abstractmethod
    def compare(self) -> None:
        """What is there equals what an undisturbed job leaves, to the bit."""

    def environment(self, start: int) -> dict[str, str]:
        """Return the environment of a start."""
        return {}

    def heard(self, start: int, told: str) -> None:  # noqa: B027
        """Take in what a start printed, where that matters."""


def _flip(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, random: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: random.randrange(len(content))])


class TrainingJob(Job):
    """Ends with every tensor of the last checkpoint and every number of the metrics as if nothing had happened."""

    refusal = "is being trained by process"

    def __init__(self, shop: Workshop, place: Path, random: Random, case: Training) -> None:
        super().__init__(shop, place, random)
        self.case = case
        self.results = place / "results"
        self.line: list[tuple[int, int]] = []
        """Ranks and first step of every start of which something is left in the end."""

    def arguments(self, start: int) -> list[object]:
        return train_words(self.shop, self.case, self._ranks(start), self.results, self.case.steps, self.case.every)

    def _ranks(self, start: int) -> int:
        return self.case.ranks[(start - 1) % len(self.case.ranks)]

    def heard(self, start: int, told: str) -> None:
        if begun := re.search(r"^run .*, (?:resuming from \S+|starting) at step (\d+)$", told, re.MULTILINE):
            first = int(begun[1])
            self.line = [(ranks, step) for ranks, step in self.line if step < first]
            if not self.line or self.line[-1][0] != self._ranks(start):
                self.line.append((self._ranks(start), first))

    def is_finished(self) -> bool:
        last = checkpoint.folder_name(self.case.steps)
        return self._has_begun() and (only_run(self.results) / "checkpoints" / last).is_dir()

    def _has_begun(self) -> bool:
        """Whether there is a run: a command may be killed before it has made its folder."""
        return self.results.is_dir() and any(self.results.iterdir())

    def damage(self, what: str) -> list[str] | None:
        if not self._has_begun():
            return None
        folder = only_run(self.results) / "checkpoints"
        there = checkpoint.list_checkpoints(folder)
        if len(there) < 2 or not (folder / "latest").is_file():
            return None
        if what == "latest nowhere":
            (folder / "latest").write_text("step_0009999\n")
            return ["step_0009999"]
        newest = there[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        action: dict[str, Callable[[], object]] = {
            "truncated": lambda: _cut(self.random.choice(files), self.random),
            "zeroed": lambda: (file := self.random.choice(files)).write_bytes(bytes(file.stat().st_size)),
            "flipped": lambda: _flip(self.random.choice(files), self.random),
            "no manifest": (newest / "manifest.json").unlink,
        }
        action[what]()
        self._refuse(newest)
        return ["Falling back to the previous checkpoint."]

    def _refuse(self, damaged: Path) -> None:
        """Asked for by name, a damaged checkpoint is an error."""
        try:
            checkpoint.read_manifest(damaged)
        except UserError:
            pass
        else:
            raise AssertionError(f"{damaged} is damaged and is not taken to be so")
        log = self.place.parent / "refused.log"
        with log.open("wb") as output:
            process = self.shop.fork_server.start([*self.arguments(1), "--resume", damaged], output)
        assert process.poll(60) == 1 and str(damaged) in log.read_text(), log.read_text()

    def compare(self) -> None:
        run, last = only_run(self.results), checkpoint.folder_name(self.case.steps)
        reference = _Reference(self.shop, self.case, tuple(self.line))
        assert last_checkpoint(run).name == last
        checkpoint.read_manifest(last_checkpoint(run))
        assert_same_state(reference.checkpoint(self.case.steps), last_checkpoint(run))
        lines, expected = metrics(run), reference.metrics()
        assert [line["step"] for line in lines] == list(range(1, self.case.steps + 1)), "not every step once"
        for line in lines:
            wanted = expected[line["step"]]
            assert line == {key: value for key, value in wanted.items() if key in line or key != "val/loss"}
        assert not list((run / "checkpoints").glob(".*")), "something half written is left"


def train_words(shop: Workshop, case: Training, ranks: int, results: Path, steps: int, every: int) -> list[object]:
    """The command that trains a case on so many ranks."""
    launched = ["launch", "--nproc", ranks] if ranks > 1 else []
    return [*launched, "train", "--data_path", shop.data, "--enable_condition", "--model", f"JiT-{SMALLEST}/8",
            "--img_size", 16, "--batch_size", 4, "--global_batch_size", 6, "--val_fraction", 0.1, "--epochs", 9,
            "--learning_rate", 1e-3, "--warmup_steps", 3, "--no_use_tensorboard", "--log_every", 1,
            "--max_steps", steps, "--ckpt_every", every, "--samples_per_gpu", case.samples, "--sample_steps", 2,
            "--num_workers", case.loaders, "--strategy", case.strategy, "--dist_timeout", 60,
            "--non_finite", "skip" if case.skipped else "stop", "--results_dir", results, "--run_name", "run"]  # fmt: skip


class _Reference:
    """An undisturbed training, on a change of ranks gone on from the undisturbed one before."""

    def __init__(self, shop: Workshop, case: Training, line: tuple[tuple[int, int], ...]) -> None:
        self.before = _Reference(shop, case, line[:-1]) if len(line) > 1 else None
        ranks, self.first = line[-1]
        name = repr((case.strategy, case.skipped, line))
        self.run = shop.references / hashlib.sha256(name.encode()).hexdigest()[:16] / "run"
        if (self.run / "checkpoints" / checkpoint.folder_name(LONGEST)).is_dir():
            return
        shutil.rmtree(self.run.parent, ignore_errors=True)
        self.run.parent.mkdir(parents=True)
        words = train_words(shop, case, ranks, self.run.parent, LONGEST, 1)
        words += ["--keep_last", LONGEST, "--samples_per_gpu", 0]
        if self.before:
            words += ["--resume", self.before.checkpoint(self.first)]
        folder = shop.root / "undisturbed"
        Plan((), folder, self.run.parent, self.run.parent, case.skipped).write(shop.root / "undisturbed.json")
        shop.run(words, self.run.parent / "log", **{PLAN: str(shop.root / "undisturbed.json")})

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / checkpoint.folder_name(step)

    def metrics(self) -> dict[int, dict[str, Any]]:
        before = self.before.metrics() if self.before else {}
        kept = {step: line for step, line in before.items() if step <= self.first}
        return kept | {line["step"]: line for line in metrics(self.run)}


class GeneratingJob(Job):
    """Ends with the image of every row, bit for bit, and its line in the ledger."""

    refusal = "is being filled by process"

    def __init__(self, shop: Workshop, place: Path, random: Random, case: Generating) -> None:
        super().__init__(shop, place, random)
        self.case = case
        self.output = place / "images"

    def arguments(self, start: int) -> list[object]:
        workers = self.case.workers[(start - 1) % len(self.case.workers)]
        return self._command(self.output, workers)

    def _command(self, output: Path, workers: int) -> list[object]:
        return ["generate", "--prompts_csv", self.shop.table(self.case.rows), "--model_path", self.shop.model / "run",
                "--output_dir", output, "--num_inference_steps", 2, "--dtype", "fp32", "--batch_size", self.case.batch,
                "--gpu_ids", *range(workers), "--worker_timeout", 4]  # fmt: skip

    def is_finished(self) -> bool:
        return len(read_images(self.output)) == self.case.rows and not (self.output / ".ledger").exists()

    def damage(self, what: str) -> list[str] | None:
        there = sorted(self.output.glob("*.png"))
        ledger = self.output / "ledger.jsonl"
        if len(there) < 2 or not ledger.is_file():
            return None
        victim = self.random.choice(there)
        if what == "cut image":
            _cut(victim, self.random)
        elif what == "flipped image":
            _flip(victim, self.random)
        elif what == "lost image":
            victim.unlink()
        elif what == "half a file":
            (self.output / f".{victim.name}.1.tmp").write_bytes(victim.read_bytes()[:40])
        else:
            with ledger.open("ab") as file:
                file.write(b'{"status": "done", "index": 0, "copy"')
        return []

    def compare(self) -> None:
        made, expected = read_images(self.output), read_images(self._reference())
        assert made.keys() == expected.keys()
        different = [name for name, data in made.items() if data != expected[name]]
        assert not different, f"{len(different)} images differ, e.g. {different[:3]}"
        # The last line about a row counts: one at which two workers were killed is given up until the next start.
        last = {line["index"]: line for line in read_lines(self.output / "ledger.jsonl")}
        assert set(last) == set(range(self.case.rows))
        for line in last.values():
            assert line["status"] == "done", line
            digest = hashlib.sha256(made[line["file"]]).hexdigest()
            assert line["sha256"] == digest, f"the ledger does not know {line['file']} as it is"
        rest = other_files(self.output)
        assert all(re.fullmatch(r"failed_prompts_gpu\d\.txt", name) and not text for name, text in rest.items()), rest

    def _reference(self) -> Path:
        output = self.shop.references / f"images_{self.case.rows}_{self.case.batch}"
        if not output.is_dir():
            aside = output.with_name("images.new")
            shutil.rmtree(aside, ignore_errors=True)
            self.shop.references.mkdir(exist_ok=True)
            self.shop.run(self._command(aside, 1), self.shop.root / "images.log")
            assert set(makers(aside)) == set(range(self.case.rows))
            aside.rename(output)
        return output


class EvaluatingJob(Job):
    """Ends with the same digits in report.json."""

    refusal = ""

    def __init__(self, shop: Workshop, place: Path, random: Random, case: Evaluating) -> None:
        super().__init__(shop, place, random)
        self.case = case
        self.output = place / "scores"

    def arguments(self, start: int) -> list[object]:
        return self._command(self.output)

    def _command(self, output: Path) -> list[object]:
        return ["evaluate", "--images", self.shop.images, "--reference", self.shop.real, "--clip_path", self.shop.clip,
                "--prompts_csv", self.shop.told, "--output_dir", output]  # fmt: skip

    def environment(self, start: int) -> dict[str, str]:
        return {"NPROC": str(self.case.workers[(start - 1) % len(self.case.workers)])}

    def is_finished(self) -> bool:
        return (self.output / "report.json").is_file()

    def damage(self, what: str) -> list[str] | None:
        files = [path for path in self.output.glob("features/*/*.bin") if path.stat().st_size]
        if not files:
            return None
        {"cut features": _cut, "flipped features": _flip}[what](self.random.choice(files), self.random)
        return []

    def compare(self) -> None:
        output = self.shop.references / "scores"
        if not (output / "report.json").is_file():
            self.shop.references.mkdir(exist_ok=True)
            self.shop.run(self._command(output), self.shop.root / "scores.log")
        here, there = _digits(self.output), _digits(output)
        assert here == there
        assert here["scores"]["clip_score"]["value"] is not None and here["scores"]["cmmd"]["value"] is not None


def _digits(output: Path) -> dict[str, Any]:
    report = json.loads((output / "report.json").read_text())
    del report["seconds"], report["settings"]["output_dir"]
    return report


def job_of(shop: Workshop, place: Path, random: Random, case: Training | Generating | Evaluating) -> Job:
    """The job of a case."""
    match case:
        case Training():
            return TrainingJob(shop, place, random, case)
        case Generating():
            return GeneratingJob(shop, place, random, case)
        case Evaluating():
            return EvaluatingJob(shop, place, random, case)
