"""Schedules of faults: from a number to a job and what goes wrong in it, as plain data that prints as one line."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.support.fault_injection import Fault

SEED = 10
Job = Literal["train", "generate", "evaluate"]
LIVING_ON = ("pause", "clock", "second")
"""What a process survives without a new start."""
DAMAGE = ("truncated", "zeroed", "flipped", "no manifest", "latest nowhere")
IMAGE_DAMAGE = ("cut image", "flipped image", "lost image", "torn ledger", "half a file")
FEATURE_DAMAGE = ("cut features", "flipped features")
FILES_OF_A_SAVE = 17
FILES_OF_SAMPLES = 8
FILES_OF_A_READER = 7
"""Files that each of two processes of an evaluation touches; their command touches more."""
FILES_OF_AN_EVALUATION = 35


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
    """A small prompt table."""

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
    random = Random(f"{seed}/{number}")
    kind: Job = random.choices(("train", "generate", "evaluate"), weights=(5, 3, 1))[0]
    case, faults = {"train": _training, "generate": _generating, "evaluate": _evaluating}[kind](random)
    return Schedule(number, kind, case, tuple(faults))


def _training(random: Random) -> tuple[Training, list[Fault]]:
    strategy = random.choices(("ddp", "fsdp2"), weights=(4, 1))[0]
    ranks = tuple(random.choice((1, 2, 2, 3)) for _ in range(random.choice((1, 1, 2, 3))))
    strategy = "ddp" if 1 in ranks else strategy
    every = random.choice((3, 4))
    steps = 3 * every + random.randrange(3)
    samples, loaders = random.choice((0, 1)), random.choice((0, 0, 1, 2))
    skipped = (random.randrange(1, steps - 1),) if strategy == "ddp" and random.random() < 0.1 else ()
    case = Training(ranks, strategy, steps, every, samples, loaders, skipped)
    faults: list[Fault] = []
    places = sorted(random.randrange(steps) for _ in range(random.choice((1, 1, 2, 3))))
    for place in places:
        faults.append(_in_training(random, case, place))
    if random.random() < 0.3:
        # Something must end a start that has two checkpoints, so that one can be damaged.
        step = random.randrange(2 * every + 1, steps)
        faults.append(Fault("kill", f"rank {random.randrange(min(ranks))}", "step", step))
        faults.append(Fault(random.choice(DAMAGE), "disk", "start", 2))
    if random.random() < 0.2:  # while it is starting: folders, lock, settings, the first sign of life
        faults.append(
            Fault(
                random.choice(("kill", "kill", "term")),
                f"rank {random.randrange(min(ranks))}",
                "file",
                random.randrange(24),
            )
        )
    return case, faults


def _in_training(random: Random, case: Training, step: int) -> Fault:
    least = min(case.ranks)
    who = f"rank {random.randrange(least)}"
    when = random.choices(("step", "save", "sampling"), weights=(5, 4, 2 if case.samples else 0))[0]
    if when == "sampling":
        what = random.choice(("kill", "kill", "term", "pause", "full"))
        at = min(step, case.steps - 1)
        return Fault(what, who, when, at, random.randrange(FILES_OF_SAMPLES))
    if when == "save":
        what = random.choice(("kill", "kill", "kill", "term", "pause", "full", "full", "read_only"))
        return Fault(what, "rank 0", when, step, random.randrange(FILES_OF_A_SAVE))
    kinds = ["kill", "kill", "term", "usr1", "pause", "clock", "second"]
    kinds += ["freeze"] if least > 1 else []
    kinds += ["loader"] * 2 if case.loaders else []
    kinds += ["nan", "inf"] if not case.skipped else []
    return Fault(random.choice(kinds), who, when, step)


def _generating(random: Random) -> tuple[Generating, list[Fault]]:
    workers = tuple(random.choice((1, 2, 3)) for _ in range(random.choice((1, 2))))
    case = Generating(workers, random.randrange(18, 31), random.choice((2, 3)))
    files = 2 * (case.rows // max(workers))  # each image is opened and renamed
    faults = []
    for _ in range(random.choice((1, 1, 2, 3))):
        who = f"worker {random.randrange(min(workers))}"
        kinds = ["kill", "kill", "freeze", "pause", "torn", "torn", "memory", "full", "deleted", "second", "clock"]
        faults.append(Fault(random.choice(kinds), who, "image", random.randrange(files)))
    if random.random() < 0.3:
        faults.append(Fault(random.choice(("kill", "int", "term")), "command", "file", random.randrange(6, 30)))
    if random.random() < 0.4:
        faults.append(Fault("kill", "command", "file", random.randrange(12, 30)))
        faults.append(Fault(random.choice(IMAGE_DAMAGE), "disk", "start", 2))
    return case, faults


def _evaluating(random: Random) -> tuple[Evaluating, list[Fault]]:
    workers = tuple(random.choice((1, 2)) for _ in range(random.choice((1, 2))))
    faults = []
    for _ in range(random.choice((1, 2))):
        who = "command" if 1 in workers or random.random() < 0.5 else f"worker {random.randrange(min(workers))}"
        what = random.choice(("kill", "kill", "int", "term", "pause"))
        files = range(FILES_OF_A_READER) if who.startswith("worker") else range(5, FILES_OF_AN_EVALUATION)
        faults.append(Fault(what, who, "file", random.choice(files)))
    if random.random() < 0.4:  # the command of one process computes, and so writes, the features itself
        late = range(40, 60) if workers[0] == 1 else range(30, FILES_OF_AN_EVALUATION)
        faults.append(Fault("kill", "command", "file", random.choice(late)))
        faults.append(Fault(random.choice(FEATURE_DAMAGE), "disk", "start", 2))
    return Evaluating(workers), faults
