"""The scheduler: hands samples to workers round-robin, and finishes even if workers die, hang or fail on a prompt.

Each worker has a share. When the first has nearly finished its own, the rest of all shares goes to whoever is free: a
slow GPU or expensive rows hold nobody up. Towards the end no worker gets a second batch while another may have none.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.worker_pool import WorkerExited, WorkerPool
from muralist.generate import workers
from muralist.generate.console import ProgressLines, WorkerProgress
from muralist.generate.output_dir import OutputDir, Shard
from muralist.generate.plan import Plan, round_robin

_POLL = 0.2  # seconds
_LOADING = 600.0  # seconds for loading a model, beyond the timeout of a step
_SAMPLES_AHEAD = 16  # whose text is encoded together
_BATCHES_AHEAD = 3  # one is being saved, one is on the device, and the next must follow at once
_SLOT_SEARCH = 8  # batches' worth of samples to search for one whose slot is free
_LATE = 60.0  # seconds of loading, after which others may take the samples of a worker
_GROUPED_AT_ONCE = 4096  # samples whose text lengths are found together: a second or two
_DEATHS_PER_SAMPLE = 2
_RESTARTS = 6  # when no worker is left, until an image is made: enough for three rows in turn that end every worker
_SAME_FAILURES = 16


class BatchSize(NamedTuple):
    """Images generated at once: now, and as the ledger says."""

    current: int
    recorded: int


class Undecided(Enum):
    """Why the batch size is not known yet."""

    MEASURE = "a worker has to measure it"
    WAIT = "another rank decides"


DecideBatchSize = Callable[[workers.WorkerReady, int | None], BatchSize | Undecided]
MoreSamples = Callable[[], np.ndarray | None]


@dataclass
class _Worker:
    """What the scheduler knows of one worker."""

    label: str
    share: deque[int]
    total: int
    sent: int = 0  # samples, since it was last started
    batches: list[set[int]] = field(default_factory=list)  # samples that were sent and are not finished
    grouping: list[int] = field(default_factory=list)  # samples whose text groups it was asked for
    on_device: tuple[int, ...] = ()
    ready: workers.WorkerReady | None = None
    alive: bool = True
    fatal: UserError | None = None  # it cannot work, however often it is started
    starts: int = 0
    compiling: bool = False  # until its first image
    done: int = 0
    failed: int = 0

    @property
    def progress(self) -> WorkerProgress:
        return WorkerProgress(self.done, self.failed, self.total, loading=self.alive and self.ready is None)

    def finish(self, indices: Iterable[int]) -> None:
        for batch in self.batches:
            batch.difference_update(indices)
        self.batches = [batch for batch in self.batches if batch]


@dataclass
class Scheduler:
    """The workers of one command and the samples that are left.

    `decide_batch_size` is asked before any image is made, with what a ready worker says of itself, and again with what
    that worker measured. `more_samples` is asked when nothing is left; None means that no more come.
    """

    plan: Plan
    output: OutputDir
    digest: str  # of the ledger's settings
    pool: WorkerPool
    display: ProgressLines
    decide_batch_size: DecideBatchSize
    timeout: float
    more_samples: MoreSamples = lambda: None
    on_progress: Callable[[Mapping[str, WorkerProgress], int], None] | None = None  # default: the display's update
    images_before: int = 0  # made by earlier commands: the model works
    first_image_at: float | None = None

    def __post_init__(self) -> None:
        self.workers: dict[str, _Worker] = {}
        self.unassigned: deque[int] = deque()  # of workers that are gone or behind
        self.suspects: deque[int] = deque()  # were on a device when its worker died: from now on alone in a batch
        self.deaths: Counter[int] = Counter()
        self.failures: Counter[str] = Counter()
        self.batch_size = BatchSize(0, 0)  # not known yet
        self.groups_by_text = False
        self.text_groups: dict[int, str] = {}  # of samples, where only those of one group can share a batch
        self.measuring: str | None = None
        self.restarts = 0
        self.notes: set[str] = set()

    def run(self, labels: Sequence[str], indices: np.ndarray) -> None:
        """Generate the samples; returns when each is done or has failed."""
        for label, share in zip(labels, round_robin(indices, len(labels)), strict=True):
            self.workers[label] = _Worker(label, deque(share.tolist()), len(share))
        for worker in self.workers.values():
            self._start(worker)
        while self._has_work() or self._fetch_more():
            for label, report in self.pool.receive(_POLL):
                self._handle(self.workers[label], report)
            self._check_silence()
            self._settle_batch_size()
            self._hand_out()
            progress = {worker.label: worker.progress for worker in self.workers.values()}
            (self.on_progress or self.display.update)(progress, len(self.unassigned) + len(self.suspects))
        for label in labels:
            self.pool.send(label, workers.StopWorker())

    def _has_work(self) -> bool:
        return bool(self.unassigned or self.suspects) or any(
            worker.share or worker.batches or worker.grouping for worker in self.workers.values()
        )

    def _fetch_more(self) -> bool:
        if (indices := self.more_samples()) is not None:
            self.unassigned.extend(indices.tolist())
        return indices is not None

    def _start(self, worker: _Worker) -> None:
        worker.alive, worker.starts, worker.sent = True, worker.starts + 1, 0
        self.pool.start(worker.label)

    def _handle(self, worker: _Worker, report: workers.Report) -> None:
        if not worker.alive:
            return  # it was given up, and others have its samples
        match report:
            case workers.WorkerReady():
                worker.ready, worker.compiling = report, "compiled" in report.environment
                self.groups_by_text = report.groups_by_text
            case workers.BatchSizeMeasured(batch_size):
                assert worker.ready is not None
                decided = self.decide_batch_size(worker.ready, batch_size)
                assert isinstance(decided, BatchSize)
                self.batch_size, self.measuring = decided, None
            case workers.TextGroups(groups):
                self.text_groups |= groups
                worker.share.extendleft(reversed(self._ordered(worker.grouping)))
                worker.grouping = []
            case workers.BatchStarted(indices):
                worker.on_device = indices
            case workers.SamplesFinished(failures):
                self._finish(worker, failures)
            case workers.WorkerNote(text):
                if text not in self.notes:  # most are the same for every worker
                    self.notes.add(text)
                    self.display.print(text)
            case workers.WorkerFailed(error, all_workers):
                if all_workers:
                    raise error
                worker.fatal = error
                self._lose(worker, str(error))
            case WorkerExited(reason):
                self._lose(worker, f"GPU {worker.label}: its process {reason}.")

    def _finish(self, worker: _Worker, failures: Mapping[int, str | None]) -> None:
        worker.finish(failures)
        reasons = [reason for reason in failures.values() if reason is not None]
        if done := len(failures) - len(reasons):
            worker.done += done
            worker.compiling = False
            self.first_image_at = self.first_image_at or time.monotonic()
            self.restarts = 0
        worker.failed += len(reasons)
        for reason in reasons:
            self._count_failure(reason)

    # The batch size, which all workers share.

    def _settle_batch_size(self) -> None:
        """Find out the batch size with the first worker that is ready."""
        worker = next((worker for worker in self.workers.values() if worker.ready), None)
        if self.batch_size.current or self.measuring is not None or worker is None or worker.ready is None:
            return
        decided = self.decide_batch_size(worker.ready, None)
        if isinstance(decided, BatchSize):
            self.batch_size = decided
        elif decided is Undecided.MEASURE:
            indices = [index for worker in self.workers.values() for index in worker.share] or list(self.unassigned)
            if not indices:
                return  # a rank that may yet get samples of others
            largest = max(indices, key=lambda index: math.prod(self.plan.size_of(index)))
            self.measuring = worker.label
            self.pool.reset_silence(worker.label)
            self.pool.send(worker.label, workers.MeasureBatchSize(self.plan.sample(largest)))

    # Handing out samples.

    def _hand_out(self) -> None:
        """Hand out everybody's own share first; then it is known who has nothing left while others have."""
        if not self.batch_size.current:
            return
        for own in (True, False):
            left = len(self.unassigned) + sum(len(worker.share) for worker in self.workers.values())
            done = sum(worker.done + 1 for worker in self.workers.values() if worker.alive)
            for worker in self.workers.values():
                if worker.alive and worker.ready:
                    ahead = self._batches_ahead(worker, expected=left * (worker.done + 1) / done)
                    while len(worker.batches) < ahead and (indices := self._next_batch(worker, own)):
                        self._send(worker, indices)

    def _batches_ahead(self, worker: _Worker, expected: float) -> int:
        """Return how many batches a worker may have: enough to encode text together, few near the end.

        `expected`: how many of the samples that are left it would make, if all went on as fast as they were.
        """
        most = max(_BATCHES_AHEAD, -(-_SAMPLES_AHEAD // self.batch_size.current))
        if len(self.workers) == 1 or worker.sent < _SAMPLES_AHEAD:
            return most
        return max(1, min(most, int(expected / self.batch_size.current)))

    def _send(self, worker: _Worker, indices: list[int]) -> None:
        if not worker.batches:
            self.pool.reset_silence(worker.label)
        worker.batches.append(set(indices))
        worker.sent += len(indices)
        samples = tuple(self.plan.sample(index) for index in indices)
        exclusive = any(self.deaths[index] for index in indices)
        self.pool.send(worker.label, workers.GenerateBatch(samples, *self.batch_size, exclusive=exclusive))

    def _next_batch(self, worker: _Worker, own: bool) -> list[int]:
        """Return a suspect alone, else a batch of the worker's own share, else of other workers' samples."""
        if own and self.suspects:
            worker.total += 1
            return [self.suspects.popleft()]
        if own:
            return [] if self._is_nearly_through(worker) else self._take_batch(worker, worker.share)
        if not self.unassigned:
            self._pool_shares()
        indices = self._take_batch(worker, self.unassigned)
        worker.total += len(indices)
        return indices

    def _is_nearly_through(self, worker: _Worker) -> bool:
        """Return whether too few samples are left of a share to fill batches well: each needs its slot free."""
        has_begun = len(self.workers) > 1 and worker.sent >= _SAMPLES_AHEAD
        return has_begun and len(worker.share) < _SLOT_SEARCH * self.batch_size.current

    def _pool_shares(self) -> None:
        """Unassign all samples that were not sent yet; workers that still load the model keep theirs for a while."""
        pooled: list[int] = []
        for worker in self.workers.values():
            if worker.ready or self.pool.silence(worker.label) > _LATE:
                pooled += worker.share
                worker.total -= len(worker.share)
                worker.share.clear()
        if pooled:
            self.unassigned.extend(self._ordered(pooled))

    def _ordered(self, indices: Sequence[int]) -> list[int]:
        """Order samples so that those which can share a batch follow each other; unknown text groups come last."""
        by_size = self.plan.grouped_by_size(np.sort(indices)).tolist()
        if not self.groups_by_text:
            return by_size
        rank = {key: place for place, key in enumerate(dict.fromkeys(map(self.plan.batch_key, by_size)))}

        def place(index: int) -> tuple[bool, int, str]:
            group = self.text_groups.get(index)
            return group is None, rank[self.plan.batch_key(index)], group or ""

        return sorted(by_size, key=place)

    def _can_share(self, index: int, other: int) -> bool:
        same_text = self.text_groups.get(index) == self.text_groups.get(other)
        return same_text and self.plan.batch_key(index) == self.plan.batch_key(other)

    def _group_by_text(self, worker: _Worker, source: deque[int]) -> None:
        """Ask a worker for the text groups of the next samples, which are its own from now on."""
        if worker.grouping:
            return
        worker.grouping = [source.popleft() for _ in range(min(_GROUPED_AT_ONCE, len(source)))]
        if source is not worker.share:
            worker.total += len(worker.grouping)
        if not worker.batches:
            self.pool.reset_silence(worker.label)
        samples = tuple(self.plan.samples(np.array(worker.grouping)))
        self.pool.send(worker.label, workers.GroupByText(samples))

    def _take_batch(self, worker: _Worker, source: deque[int]) -> list[int]:
        """Take the first samples that can share a batch, each with its own slot."""
        batch_size = self.batch_size.current
        if self.groups_by_text and batch_size > 1 and source and source[0] not in self.text_groups:
            self._group_by_text(worker, source)
            return []
        batch: dict[int, int] = {}
        skipped: list[int] = []
        while source and len(batch) < batch_size and len(skipped) < _SLOT_SEARCH * batch_size:
            index = source[0]
            if batch and not self._can_share(index, next(iter(batch.values()))):
                break
            source.popleft()
            if batch.setdefault(self.plan.slot(index, batch_size), index) != index:
                skipped.append(index)
        source.extendleft(reversed(skipped))
        return list(batch.values())

    # Workers that hang or die, and samples that fail.

    def _check_silence(self) -> None:
        """Kill workers that have been silent for too long; restart one when none is left."""
        for worker in self.workers.values():
            limit = self.timeout if worker.ready and not worker.compiling else self.timeout + _LOADING
            busy = worker.batches or worker.grouping or not worker.ready or self.measuring == worker.label
            if worker.alive and busy and self.pool.silence(worker.label) > limit:
                self._lose(worker, f"GPU {worker.label} sent no heartbeat for {limit:.0f} s and was killed.")
                self.pool.kill(worker.label)
        if not any(worker.alive for worker in self.workers.values()) and self._has_work():
            self._restart()

    def _lose(self, worker: _Worker, message: str) -> None:
        """Give the samples of a lost worker to the others; those on its device are generated alone from now on."""
        worker.alive, worker.ready = False, None
        if self.measuring == worker.label:
            self.measuring = None
        left = [index for batch in worker.batches for index in sorted(batch)]
        suspects = [index for index in dict.fromkeys(worker.on_device) if index in left]
        worker.batches.clear()
        worker.on_device = ()
        worker.total = worker.done + worker.failed
        self.deaths.update(suspects)
        given_up = [index for index in suspects if self.deaths[index] >= _DEATHS_PER_SAMPLE]
        for index in given_up:
            self._give_up(worker, index)
        for index in dict.fromkeys([*suspects, *left]):
            if index not in given_up:
                # Once a suspect, always alone: in a batch it would be blamed for the next death as well.
                (self.suspects if self.deaths[index] else self.unassigned).append(index)
        rows = len(left) - len(given_up) + len(worker.share) + len(worker.grouping)
        self.unassigned.extend((*worker.share, *worker.grouping))
        worker.share.clear()
        worker.grouping.clear()
        others = any(other.alive for other in self.workers.values())
        self.display.print(f"{message} The others take its {rows:,} rows." if rows and others else message)

    def _give_up(self, worker: _Worker, index: int) -> None:
        reason = f"the worker died {_DEATHS_PER_SAMPLE} times while generating it"
        sample = self.plan.sample(index)
        with closing(Shard(self.output.shard(worker.label), self.digest)) as shard:
            shard.failed(sample, reason, worker.label, 0.0)
        worker.failed += 1
        worker.total += 1
        self.display.print(f"Row {sample.row + 1} is skipped: {reason}.")
        self._count_failure(reason)

    def _restart(self) -> None:
        able = [worker for worker in self.workers.values() if worker.fatal is None]
        if not able:
            raise next(worker.fatal for worker in self.workers.values() if worker.fatal)
        if self.restarts == _RESTARTS:
            raise UserError(
                f"All workers died, and so did {_RESTARTS} that were started in their place.",
                "The usual cause is a machine that runs out of memory.",
                "Run the same command again to resume.",
            )
        self.restarts += 1
        worker = min(able, key=lambda worker: worker.starts)  # another one each time: a GPU may be broken
        self.display.print(f"No worker is left: GPU {worker.label} starts again.")
        self._start(worker)

    def _count_failure(self, reason: str) -> None:
        self.failures[reason] += 1
        done = self.images_before + sum(worker.done for worker in self.workers.values())
        if not done and len(self.failures) == 1 and self.failures[reason] >= _SAME_FAILURES:
            raise UserError(
                f"The first {_SAME_FAILURES} images all failed for the same reason.",
                f"The reason: {reason}",
                "ledger.jsonl names them. Correct the cause and run the same command again.",
            )
