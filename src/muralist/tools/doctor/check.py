"""A check of `muralist doctor`: the function that runs it, its explanation, the context it sees and its result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from muralist.core.errors import UserError
from muralist.settings import GenerateSettings, TrainSettings

if TYPE_CHECKING:
    from muralist.generate.model_info import ModelInfo
    from muralist.tools.doctor.collective_test import CollectiveReport, MissingRanks
    from muralist.tools.doctor.hardware import Gpu, Gpus

ALL_JOBS = frozenset({"machine", "train", "generate"})
TRAIN, GENERATE = frozenset({"train"}), frozenset({"generate"})


class Status(StrEnum):
    """Outcome of a check: fine; it will run, but perhaps not as intended; it cannot work; not applicable."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """Result of one check; an empty `why` or `fix` stands for the general text of the check."""

    status: Status
    message: str
    why: str = ""
    fix: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Figures for programs (`--json`)."""

    @property
    def is_problem(self) -> bool:
        """Whether the check failed or warns."""
        return self.status in (Status.FAILED, Status.WARNING)


ok, skipped = partial(Finding, Status.OK), partial(Finding, Status.SKIPPED)
warning, failed = partial(Finding, Status.WARNING), partial(Finding, Status.FAILED)


@dataclass(frozen=True)
class CheckContext:
    """What the checks examine: this machine, and the training or generation that will run on it."""

    train: TrainSettings | None = None
    run: Path | None = None
    """Run folder of the training."""
    generate: GenerateSettings | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    starting: bool = False
    """Whether train or generate itself runs the checks as it starts, instead of the doctor."""
    known_model: ModelInfo | None = None
    known_images: int | None = None
    """Number of images that a generation will write, if its table has been read already."""
    exchange: CollectiveReport | MissingRanks | None = None
    """Outcome of the collective self-test of all ranks."""

    @property
    def job(self) -> str:
        """Kind of job, which selects the checks."""
        return "train" if self.train else "generate" if self.generate else "machine"

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return int(self.environment.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(self.environment.get("LOCAL_RANK", "0"))

    @property
    def ranks(self) -> int:
        """World size."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    @property
    def gpu_ids(self) -> list[int]:
        """GPUs selected by --gpu_ids."""
        return list(self.generate.gpu_ids) if self.generate else []

    @property
    def uses_ray(self) -> bool:
        """Whether Ray, not this machine, provides the GPUs."""
        return self.generate is not None and self.generate.engine == "ray"

    @cached_property
    def gpus(self) -> Gpus:
        """GPUs of this machine, queried once."""
        from muralist.tools.doctor.hardware import query_nvidia_smi

        return query_nvidia_smi()

    @property
    def own_gpus(self) -> list[Gpu]:
        """GPUs that the job uses on this machine: the selected or visible ones; training uses one per process."""
        visible = self.gpus.visible(self.environment, self.gpu_ids)
        return visible[: int(self.environment.get("LOCAL_WORLD_SIZE", "1"))] if self.train else visible

    @cached_property
    def model(self) -> ModelInfo:
        """Model of a generation, inspected once; a UserError if the model folder is unusable."""
        from muralist.generate.model_info import inspect_model

        assert self.generate
        return self.known_model or inspect_model(self.generate)

    @cached_property
    def images(self) -> int:
        """Number of images that a generation will write."""
        from muralist.data.prompts import open_prompt_table

        assert self.generate
        if self.known_images is not None:
            return self.known_images
        rows = len(open_prompt_table(self.generate.prompts_csv, self.generate.num_samples))
        return rows * self.generate.images_per_prompt


@dataclass(frozen=True)
class Check:
    """One check; it decorates the function that runs it, whose docstring becomes the description.

    docs/troubleshooting.md is generated from these texts.
    """

    name: str
    symptom: str
    """Trouble that this check explains, in the words of an error message or of a user."""
    why: str
    fix: str
    jobs: frozenset[str] = ALL_JOBS
    at_start: bool = False
    """Whether train and generate run this check themselves, before they load anything."""
    per_machine: bool = False
    """Whether each machine of a run has its own result."""
    certain: bool = True
    """Whether a failure at the start ends train and generate; otherwise they log it and continue."""
    function: Callable[[CheckContext], Finding] = lambda _: skipped("")

    def __call__(self, function: Callable[[CheckContext], Finding]) -> Check:
        """Return this check with the function that runs it."""
        return replace(self, function=function)

    @property
    def description(self) -> str:
        """What the check does."""
        return " ".join((self.function.__doc__ or "").split())


@dataclass(frozen=True)
class CheckResult:
    """A check that ran."""

    check: Check
    finding: Finding
    seconds: float
    host: str = ""
    """Host name, if this is not the machine that prints the results."""

    def error(self) -> UserError:
        """Convert the finding to an error or a log message."""
        return UserError(self.finding.message, self.finding.why, self.finding.fix)


def run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run one check; an exception becomes a finding, so that the other checks still run."""
    began = time.perf_counter()
    try:
        finding = check.function(context)
    except UserError as error:
        finding = failed(error.what, error.why, error.fix)
    except Exception as error:  # drivers, file systems and damaged files raise errors of every type
        finding = warning(f"The check itself ended with {type(error).__name__}: {error}")
    if finding.is_problem:
        finding = replace(finding, why=finding.why or check.why, fix=finding.fix or check.fix)
    return CheckResult(check, finding, time.perf_counter() - began)
