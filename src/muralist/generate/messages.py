"""What the fleet and its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muralist.errors import UserError
from muralist.generate.plan import Sample
from muralist.settings import GenerateSettings


@dataclass(frozen=True)
class Job:
    """What a worker is told at its start."""

    settings: GenerateSettings
    folder: Path
    digest: str  # of the ledger's settings
    facts: dict[str, Any]  # what every file says of its making, beside its own prompt and seed


@dataclass(frozen=True)
class Begin:
    """The first word to a process: what it works at, by which name, and where."""

    job: Job
    label: str
    device: str


@dataclass(frozen=True)
class Measure:
    """Find the largest batch that fits, up to a limit, painting this sample."""

    sample: Sample
    most: int


@dataclass(frozen=True)
class Task:
    """Samples of one size to paint in one call of `shape` pictures; missing ones are padded."""

    samples: tuple[Sample, ...]
    shape: int
    agreed: int  # the ledger's shape: pictures made in another one are marked
    alone: bool = False  # nothing else is with the device meanwhile: a worker died with this before


@dataclass(frozen=True)
class Stop:
    """No more tasks come."""


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    batches: bool  # whether it may paint several at once
    made_with: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """The largest batch that fits."""

    shape: int


@dataclass(frozen=True)
class Beat:
    """A denoising step was made."""


@dataclass(frozen=True)
class Began:
    """A batch is being painted; should the worker die now, one of its samples may be why."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """A sample's file and its line in the ledger are on disk."""

    number: int


@dataclass(frozen=True)
class Failed:
    """A sample was tried alone and could not be painted; the ledger says so."""

    number: int
    reason: str


@dataclass(frozen=True)
class Remark:
    """Something a person should read."""

    text: str


@dataclass(frozen=True)
class Hopeless:
    """This worker can paint no more; `everyone`: nor can any other."""

    error: UserError
    everyone: bool


@dataclass(frozen=True)
class Gone:
    """The worker's process has ended."""

    how: str


Order = Measure | Task | Stop
Report = Ready | Measured | Beat | Began | Done | Failed | Remark | Hopeless | Gone
