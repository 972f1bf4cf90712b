"""A check of `muralist doctor`: its texts and its function, the context that it examines, and its finding."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muralist.core.errors import UserError
from muralist.data.prompts import open_prompts
from muralist.generate.model_info import ModelInfo, inspect_model
from muralist.generate.output_dir import keep_folder_settings
from muralist.settings import GenerateSettings, TrainSettings

if TYPE_CHECKING:
    from muralist.tools.doctor.collective_test import CollectiveReport, MissingRanks
    from muralist.tools.doctor.hardware import Gpu, Gpus


# Outcome of a check: fine; it will run, but perhaps not as intended; it cannot work; not applicable.
Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of one check; an empty `why` or `fix` stands for the general text of the check."""

    status: Status
    message: str
    why: str = ""
    fix: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)  # figures for programs (`--json`)
    name: str = ""  # of the check, as is `symptom`
    symptom: str = ""
    seconds: float = 0.0
    host: str = field(default_factory=socket.gethostname)

    @property
    def is_problem(self) -> bool:
        """Whether the check failed or warns."""
        return self.status in ("failed", "warning")


ok, skipped = partial(Finding, "ok"), partial(Finding, "skipped")
warning, failed = partial(Finding, "warning"), partial(Finding, "failed")


@dataclass
class CheckContext:
    """What the checks examine: this machine, and the training or generation that will run on it."""

    train: TrainSettings | None = None
    run: Path | None = None  # run folder of the training
    generate: GenerateSettings | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    starting: bool = False  # whether train or generate itself runs the checks as it starts, instead of the doctor
    exchange: CollectiveReport | MissingRanks | None = None  # outcome of the collective self-test of all ranks

    def __post_init__(self) -> None:
        self.job = "train" if self.train else "generate" if self.generate else "machine"
        self.rank, self.local_rank = (int(self.environment.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        self.ranks = int(self.environment.get("WORLD_SIZE", "1"))
        self.gpu_ids = list(self.generate.gpu_ids) if self.generate else []
        self.uses_ray = self.generate is not None and self.generate.engine == "ray"

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

    @property
    def output(self) -> tuple[Path, str]:
        """Folder of the results, and the flag that sets it."""
        if self.run:
            return self.run, "--results_dir"
        assert self.generate
        return Path(self.generate.output_dir), "--output_dir"

    @cached_property
    def model(self) -> ModelInfo:
        """Model of a generation, inspected once; a UserError if the model folder is unusable."""
        assert self.generate
        return inspect_model(keep_folder_settings(self.generate))

    @cached_property
    def images(self) -> int:
        """Number of images that a generation will write."""
        assert self.generate
        return len(open_prompts(self.generate)) * self.generate.images_per_prompt


@dataclass(frozen=True)
class Check:
    """One check; docs/troubleshooting.md is generated from its texts."""

    name: str
    function: Callable[[CheckContext], Finding]
    jobs: tuple[str, ...] = ("machine", "train", "generate")
    at_start: bool = False  # whether train and generate run this check themselves, before they load anything
    per_machine: bool = False  # whether each machine of a run has its own result
    certain: bool = True  # whether a failure at the start ends train and generate; otherwise they log it and continue
    description: str = ""
    symptom: str = ""  # trouble that this check explains, in the words of an error message or of a user
    why: str = ""
    fix: str = ""

    def run(self, context: CheckContext) -> Finding:
        """Run the check; an exception becomes a finding, so that the other checks still run."""
        began = time.perf_counter()
        try:
            finding = self.function(context)
        except UserError as error:
            finding = failed(error.what, error.why, error.fix)
        except Exception as error:  # drivers, file systems and damaged files raise errors of every type
            finding = warning(f"The check itself ended with {type(error).__name__}: {error}")
        if finding.is_problem:
            finding = replace(finding, why=finding.why or self.why, fix=finding.fix or self.fix)
        seconds = round(time.perf_counter() - began, 3)
        return replace(finding, name=self.name, symptom=self.symptom, seconds=seconds)


CHECKS: list[Check] = []  # all checks, in the order of the output
_TEXTS = re.compile("(?P<description>.*) Symptom: (?P<symptom>.*) Otherwise: (?P<why>.*) Fix: (?P<fix>.*)")


def check(name: str, *jobs: str, **options: Any) -> Callable[[Callable[[CheckContext], Finding]], Check]:
    """Register a function as a check, for some jobs or for all; the sections of its docstring are the texts."""

    def register(function: Callable[[CheckContext], Finding]) -> Check:
        found = _TEXTS.fullmatch(" ".join((function.__doc__ or "").split()))
        texts: dict[str, Any] = found.groupdict() if found else {}  # `python -OO` drops docstrings
        CHECKS.append(Check(name, function, jobs or Check.jobs, **options, **texts))
        return CHECKS[-1]

    return register
