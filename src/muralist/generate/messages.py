"""Messages between the scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muralist.core.errors import UserError
from muralist.core.worker_pool import WorkerExited
from muralist.generate.plan import Sample
from muralist.settings import GenerateSettings


@dataclass(frozen=True)
class GenerationJob:
    """Everything a worker needs at its start."""

    settings: GenerateSettings
    output_dir: Path
    digest: str  # of the ledger's settings
    metadata: dict[str, Any]  # written into every image beside its own prompt and seed


@dataclass(frozen=True)
class MeasureBatchSize:
    """Find the largest batch of this sample that fits into memory."""

    sample: Sample
    limit: int


@dataclass(frozen=True)
class GenerateBatch:
    """Generate samples of one size in one call of `batch_size` images; missing ones are padded."""

    samples: tuple[Sample, ...]
    batch_size: int
    recorded_batch_size: int  # the ledger's: images of another batch size are marked
    exclusive: bool = False  # nothing else is on the device meanwhile: a worker died with one of these samples before

    @property
    def indices(self) -> tuple[int, ...]:
        """The sample indices."""
        return tuple(sample.sample_index for sample in self.samples)


@dataclass(frozen=True)
class StopWorker:
    """No more batches come."""


@dataclass(frozen=True)
class WorkerReady:
    """The model is loaded."""

    supports_batching: bool
    environment: dict[str, str]  # versions and device, on which the last bits of an image depend


@dataclass(frozen=True)
class BatchSizeMeasured:
    """The largest batch that fits."""

    batch_size: int


@dataclass(frozen=True)
class Heartbeat:
    """The worker took a denoising step."""


@dataclass(frozen=True)
class BatchStarted:
    """Samples that are on the device: if the worker dies now, one of them may be the cause."""

    indices: tuple[int, ...]


@dataclass(frozen=True)
class SampleDone:
    """A sample's file and its line in the ledger are on disk."""

    sample_index: int


@dataclass(frozen=True)
class SampleFailed:
    """A sample failed, tried by itself; the ledger says so."""

    sample_index: int
    reason: str


@dataclass(frozen=True)
class WorkerNote:
    """A sentence for the user."""

    text: str


@dataclass(frozen=True)
class WorkerFailed:
    """This worker cannot generate any more; `all_workers`: nor can any other."""

    error: UserError
    all_workers: bool


Request = MeasureBatchSize | GenerateBatch | StopWorker
Report = (
    WorkerReady
    | BatchSizeMeasured
    | Heartbeat
    | BatchStarted
    | SampleDone
    | SampleFailed
    | WorkerNote
    | WorkerFailed
    | WorkerExited
)
