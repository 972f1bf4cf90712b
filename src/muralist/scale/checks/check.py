"""A check: what it looks at, which trouble it answers, why that matters, what to do; and what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from muralist.errors import UserError
from muralist.settings import GenerateSettings, TrainSettings

if TYPE_CHECKING:
    from muralist.generate.models import CheckedModel
    from muralist.scale.gpus import Gpu, Gpus


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """What one check saw; why and remedy stand where it is more to the point than what the check says of itself."""

    status: Status
    seen: str
    why: str = ""
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Numbers for programs."""


Facts = Mapping[str, object]


def ok(seen: str, facts: Facts | None = None) -> Finding:
    """Nothing wrong."""
    return Finding(Status.OK, seen, facts=facts or {})


def warning(seen: str, why: str = "", remedy: str = "", facts: Facts | None = None) -> Finding:
    """It will run, but perhaps not as hoped."""
    return Finding(Status.WARNING, seen, why, remedy, facts or {})


def failed(seen: str, why: str = "", remedy: str = "", facts: Facts | None = None) -> Finding:
    """It cannot work."""
    return Finding(Status.FAILED, seen, why, remedy, facts or {})


def skipped(seen: str) -> Finding:
    """There was nothing to look at."""
    return Finding(Status.SKIPPED, seen)


@dataclass(frozen=True)
class Circumstances:
    """What is looked at: this machine, and the job that is to run on it."""

    train: TrainSettings | None = None
    run: Path | None = None
    """The folder of the training's run."""
    generate: GenerateSettings | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    starting: bool = False
    """Whether the job itself asks, which is about to start, and not the doctor."""
    known_model: CheckedModel | None = None
    known_pictures: int | None = None
    """How many a generation is to make, where its table has been read already."""

    @property
    def job(self) -> str:
        """Which checks are to the point."""
        return "train" if self.train else "generate" if self.generate else "machine"

    @property
    def rank(self) -> int:
        """This process's number."""
        return int(self.environment.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return int(self.environment.get("LOCAL_RANK", "0"))

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    @cached_property
    def gpus(self) -> Gpus:
        """The GPUs as the driver knows them; asked once."""
        from muralist.scale.gpus import ask_driver

        return ask_driver()

    @property
    def own_gpus(self) -> list[Gpu]:
        """The GPUs that the job uses on this machine: those that are named, else all; training, one for each process."""
        seen = self.gpus.visible(self.environment, self.generate.gpu_ids if self.generate else ())
        return seen[: int(self.environment.get("LOCAL_WORLD_SIZE", "1"))] if self.train else seen

    @cached_property
    def model(self) -> CheckedModel:
        """The model of a generation, looked at once; a UserError where there is none."""
        from muralist.generate.models import check_model

        assert self.generate
        return self.known_model or check_model(self.generate)

    @cached_property
    def pictures(self) -> int:
        """How many pictures a generation is to make."""
        from muralist.data.prompts import open_table

        assert self.generate
        if self.known_pictures is not None:
            return self.known_pictures
        rows = len(open_table(self.generate.prompts_csv, self.generate.num_samples))
        return rows * self.generate.images_per_prompt


Look = Callable[[Circumstances], Finding]


@dataclass(frozen=True)
class Check:
    """One thing the doctor looks at."""

    name: str
    what: str
    """What is looked at, as a sentence."""
    trouble: str
    """The trouble it answers, in the words of the guide that names it."""
    why: str
    """What happens otherwise."""
    remedy: str
    look: Look
    jobs: frozenset[str] = frozenset({"machine", "train", "generate"})
    quick: bool = False
    """Whether train and generate look at it themselves, before anything is loaded."""
    on_every_machine: bool = False
    """Whether each machine of a run has its own answer."""
    certain: bool = True
    """Whether a job that fails it cannot work; else train and generate warn of it and go on."""


@dataclass(frozen=True)
class Examined:
    """A check that was made."""

    check: Check
    finding: Finding
    seconds: float
    host: str = ""
    """Where, if not on the machine that prints."""

    @property
    def sentence(self) -> UserError:
        """What was found, why it matters and what to do."""
        return UserError(self.finding.seen, self.finding.why, self.finding.remedy)


def examine(check: Check, circumstances: Circumstances) -> Examined:
    """Make one check; an error on the way is a finding too, since a doctor that dies helps nobody."""
    began = time.perf_counter()
    try:
        finding = check.look(circumstances)
    except UserError as error:
        finding = failed(error.what, error.why, error.fix)
    except Exception as error:  # a driver, a file system, a foreign file: what they can raise has no end
        finding = warning(f"The check itself ended with {type(error).__name__}: {error}")
    return Examined(check, complete(check, finding), time.perf_counter() - began)


def complete(check: Check, finding: Finding) -> Finding:
    """A finding with the check's own words where it has none."""
    if finding.status in (Status.OK, Status.SKIPPED):
        return finding
    return replace(finding, why=finding.why or check.why, remedy=finding.remedy or check.remedy)
