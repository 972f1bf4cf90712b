"""Schedules of faults: from a number to a job and what goes wrong in it, as plain data that prints as one line."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.support.saboteur import Fault

SEED = 10
Job = Literal["train", "generate", "evaluate"]
LIVING_ON = ("pause", "clock", "second")
"""What a process survives without a new start."""
DAMAGE = ("truncated", "zeroed", "flipped", "no manifest", "latest nowhere")
PICTURE_DAMAGE = ("cut picture", "flipped picture", "lost picture", "torn ledger", "half a file")
FEATURE_DAMAGE = ("cut features", "flipped features")
FILES_OF_A_SAVE = 17
FILES_OF_SAMPLES = 8


@dataclass(frozen=True)
class Training:
    """A small training."""

    ranks: tuple[int, ...]
    """How many processes each start has, in turn."""
    strategy: str
    steps: int
    every: int
    samples: int
    loaders: int
    skipped: tuple[int, ...] = ()
    """Steps whose loss is never a number, and which the run is told to skip."""

    def __str__(self) -> str:
        more = f", {self.loaders} loader processes" if self.loaders else ""
        more += f", {self.samples} samples" if self.samples else ""
        more += f", step {self.skipped[0]} skipped" if self.skipped else ""
        ranks = ">".join(map(str, self.ranks))
        return f"{self.strategy} on {ranks} ranks, {self.steps} steps, a save every {self.every}{more}"


@dataclass(frozen=True)
class Generating:
    """A small table of pictures."""

    workers: tuple[int, ...]
    rows: int
    batch: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.batch} at once, on {'>'.join(map(str, self.workers))} workers"


@dataclass(frozen=True)
class Evaluating:
    """A small evaluation."""

    workers: tuple[int, ...]

    def __str__(self) -> str:
        return f"on {'>'.join(map(str, self.workers))} processes"


@dataclass(frozen=True)
class Schedule:
    """A job and what goes wrong in it."""

    number: int
    job: Job
    case: Training | Generating | Evaluating
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{self.number} {self.job} {self.case}: {'; '.join(map(str, self.faults))}"

    @property
    def needs_mounts(self) -> bool:
        """Whether a disk is filled or made read-only, which takes the right to mount one."""
        return any(fault.what in ("full", "read_only") for fault in self.faults)


def schedule(number: int, seed: int = SEED) -> Schedule:
    """The schedule of a number; the same one every time."""
    dice = Random(f"{seed}/{number}")
    kind: Job = dice.choices(("train", "generate", "evaluate"), weights=(5, 3, 1))[0]
    case, faults = {"train": _training, "generate": _generating, "evaluate": _evaluating}[kind](dice)
    return Schedule(number, kind, case, tuple(faults))


def _training(dice: Random) -> tuple[Training, list[Fault]]:
    strategy = dice.choices(("ddp", "fsdp2"), weights=(4, 1))[0]
    ranks = tuple(dice.choice((1, 2, 2, 3)) for _ in range(dice.choice((1, 1, 2, 3))))
    strategy = "ddp" if 1 in ranks else strategy
    every = dice.choice((3, 4))
    steps = 3 * every + dice.randrange(3)
    samples, loaders = dice.choice((0, 1)), dice.choice((0, 0, 1, 2))
    skipped = (dice.randrange(1, steps - 1),) if strategy == "ddp" and dice.random() < 0.1 else ()
    case = Training(ranks, strategy, steps, every, samples, loaders, skipped)
    faults: list[Fault] = []
    places = sorted(dice.randrange(steps) for _ in range(dice.choice((1, 1, 2, 3))))
    for place in places:
        faults.append(_in_training(dice, case, place))
    if dice.random() < 0.3:
        # Something must end a start that has two checkpoints, so that one can be damaged.
        step = dice.randrange(2 * every + 1, steps)
        faults.append(Fault("kill", f"rank {dice.randrange(min(ranks))}", "step", step))
        faults.append(Fault(dice.choice(DAMAGE), "disk", "start", 2))
    if dice.random() < 0.2:  # while it is starting: folders, lock, settings, the first sign of life
        faults.append(
            Fault(
                dice.choice(("kill", "kill", "term")), f"rank {dice.randrange(min(ranks))}", "file", dice.randrange(24)
            )
        )
    return case, faults


def _in_training(dice: Random, case: Training, step: int) -> Fault:
    least = min(case.ranks)
    who = f"rank {dice.randrange(least)}"
    when = dice.choices(("step", "save", "sampling"), weights=(5, 4, 2 if case.samples else 0))[0]
    if when == "sampling":
        what = dice.choice(("kill", "kill", "term", "pause", "full"))
        at = min(step, case.steps - 1)
        return Fault(what, who, when, at, dice.randrange(FILES_OF_SAMPLES))
    if when == "save":
        what = dice.choice(("kill", "kill", "kill", "term", "pause", "full", "full", "read_only"))
        return Fault(what, "rank 0", when, step, dice.randrange(FILES_OF_A_SAVE))
    kinds = ["kill", "kill", "term", "usr1", "pause", "clock", "second"]
    kinds += ["freeze"] if least > 1 else []
    kinds += ["loader"] * 2 if case.loaders else []
    kinds += ["nan", "inf"] if not case.skipped else []
    return Fault(dice.choice(kinds), who, when, step)


def _generating(dice: Random) -> tuple[Generating, list[Fault]]:
    workers = tuple(dice.choice((1, 2, 3)) for _ in range(dice.choice((1, 2))))
    case = Generating(workers, dice.randrange(18, 31), dice.choice((2, 3)))
    files = 2 * (case.rows // max(workers))  # each picture is opened and renamed
    faults = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        who = f"worker {dice.randrange(min(workers))}"
        kinds = ["kill", "kill", "freeze", "pause", "torn", "torn", "memory", "full", "deleted", "second", "clock"]
        faults.append(Fault(dice.choice(kinds), who, "picture", dice.randrange(files)))
    if dice.random() < 0.3:
        faults.append(Fault(dice.choice(("kill", "int", "term")), "command", "file", dice.randrange(6, 30)))
    if dice.random() < 0.4:
        faults.append(Fault("kill", "command", "file", dice.randrange(12, 30)))
        faults.append(Fault(dice.choice(PICTURE_DAMAGE), "disk", "start", 2))
    return case, faults


def _evaluating(dice: Random) -> tuple[Evaluating, list[Fault]]:
    workers = tuple(dice.choice((1, 2)) for _ in range(dice.choice((1, 2))))
    faults = []
    for _ in range(dice.choice((1, 2))):
        who = "command" if 1 in workers or dice.random() < 0.5 else f"worker {dice.randrange(min(workers))}"
        what = dice.choice(("kill", "kill", "int", "term", "pause"))
        faults.append(Fault(what, who, "file", dice.randrange(5, 60)))
    if dice.random() < 0.4:
        faults.append(Fault("kill", "command", "file", dice.randrange(40, 60)))
        faults.append(Fault(dice.choice(FEATURE_DAMAGE), "disk", "start", 2))
    return Evaluating(workers), faults
