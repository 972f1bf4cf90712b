"""The real scheduler, workers, files and ledger on a simulated clock; only the pipelines are replaced by waiting.

Computation takes real time. When nobody computes, because every worker waits for its pipeline and the scheduler for its
workers, the clock skips to the end of the next batch. All workers and the scheduler share the cores of one process here,
while each has its own in practice: the overhead is an upper bound.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from muralist.core.worker_pool import WorkerExited, WorkerPool
from muralist.data import ledger_reader
from muralist.data.prompts import open_prompt_table
from muralist.generate.console import ProgressLines
from muralist.generate.model_info import ModelInfo
from muralist.generate.output_dir import Header, OutputDir, merge_shards, start_ledger
from muralist.generate.pipeline import GenerationMode, PendingBatch, SampleRequest
from muralist.generate.plan import Plan
from muralist.generate.scheduler import BatchSize, Scheduler
from muralist.generate.worker import Worker
from muralist.generate.workers import (
    BatchStarted,
    GenerationJob,
    Report,
    Request,
    SamplesFinished,
    WorkerReady,
)
from muralist.settings import GenerateSettings

SIDE = 8
_SEED = 42
_NAP = 0.002  # seconds between checks whether any thread computes


@dataclass(frozen=True)
class Case:
    """The workload and the speed of the workers."""

    rows: int
    batch: int
    seconds_per_image: float
    workers: int
    loading: float = 0.0
    """Seconds until a worker is ready."""
    costs: Callable[[np.ndarray], np.ndarray] = np.ones_like
    """By row number: the cost of a row, relative to others."""
    slow: float = 1.0
    """Slow-down factor of the first worker."""


class Outcome(NamedTuple):
    """Simulated seconds, and the CPU time behind them."""

    seconds: float
    generating: float  # from the first worker that is ready to the last image
    tail: float  # from the first worker that ran out of work to the last image
    batches: int
    computed: float  # processor seconds of this process: all workers and the scheduler
    generated: int
    duplicates: int


@dataclass
class _WorkerState:
    """State of a worker for the clock: whether it computes, and when it wakes."""

    inbox: _Inbox = field(default_factory=lambda: _Inbox())
    wakes_at: float | None = None
    woken: threading.Event = field(default_factory=threading.Event)
    generating: int = 0
    unsaved: int = 0
    idle_since: float = 0.0
    ended: bool = False

    @property
    def computes(self) -> bool:
        if self.ended:
            return False
        if self.wakes_at is not None:
            return self.unsaved > self.generating
        return not (self.inbox.waited_for and self.inbox.empty()) or self.unsaved > 0


class _Inbox(queue.Queue[Request]):
    """A queue that knows whether a thread waits for it."""

    waited_for = False

    def get(self, block: bool = True, timeout: float | None = None) -> Request:
        """Return the next message."""
        self.waited_for = True
        message = super().get(block, timeout)
        self.waited_for = False
        return message


class SimulatedPool(WorkerPool):
    """Workers in threads, and the clock by which their pipelines wait."""

    def __init__(self, job: GenerationJob, case: Case) -> None:
        super().__init__()
        self.job, self.case = job, case
        self.costs = case.costs(np.arange(case.rows, dtype=np.float64))
        self.costs = self.costs / self.costs.mean()
        self.outbox: queue.Queue[tuple[str, Report]] = queue.Queue()
        self.states: dict[str, _WorkerState] = {}
        self.threads: list[threading.Thread] = []
        self.batches = 0
        self.ready_at = float("inf")
        self._skipped, self._lock = 0.0, threading.Lock()

    def now(self) -> float:
        """Return real plus skipped seconds."""
        return time.monotonic() + self._skipped

    def start(self, label: str) -> None:
        """Start the thread of a worker."""
        self.reset_silence(label)
        state = self.states[label] = _WorkerState()
        slow = self.case.slow if label == "0" else 1.0

        def send(report: Report) -> None:
            with self._lock:
                if isinstance(report, BatchStarted):
                    state.generating = len(report.indices)
                    state.unsaved += state.generating
                elif isinstance(report, SamplesFinished):
                    state.unsaved -= len(report.failures)
                    state.idle_since = self.now()
                self.outbox.put((label, report))

        def run() -> None:
            self._sleep(state, self.case.loading)
            self.ready_at = min(self.ready_at, self.now())
            send(WorkerReady(True, {"device": "a clock"}))
            pipeline = _Pipeline(self, state, slow)
            Worker(self.job, label, torch.device("cpu"), pipeline, send).serve(state.inbox)
            state.ended = True
            self.outbox.put((label, WorkerExited("ended with status 0")))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def wait_for_batch(self, state: _WorkerState, requests: Sequence[SampleRequest], slow: float) -> None:
        """Wait as long as a batch takes: the cost of its rows, padding included."""
        cost = float(np.mean([self.costs[request.seed - _SEED] for request in requests]))
        self.batches += 1
        self._sleep(state, cost * len(requests) * self.case.seconds_per_image * slow)
        state.generating = 0

    def _sleep(self, state: _WorkerState, seconds: float) -> None:
        until = self.now() + seconds
        state.woken.clear()
        state.wakes_at = until
        while (left := until - self.now()) > 0:
            state.woken.wait(left)
            state.woken.clear()
        state.wakes_at = None

    def send(self, label: str, message: Request) -> None:
        """Put a message into a worker's inbox."""
        self.states[label].inbox.put(message)

    def _receive(self, seconds: float) -> list[tuple[str, Report]]:
        """Return the next report; if no worker computes, advance the clock to the next event."""
        while True:
            try:
                return [self.outbox.get(timeout=_NAP)]
            except queue.Empty:
                self._skip()

    def _skip(self) -> None:
        with self._lock:
            asleep = [state for state in self.states.values() if state.wakes_at is not None]
            if not self.outbox.empty() or not asleep or any(state.computes for state in self.states.values()):
                return
            first = min(asleep, key=lambda state: state.wakes_at or 0.0)
            assert first.wakes_at is not None
            self._skipped += max(0.0, first.wakes_at - self.now())
            first.woken.set()

    def kill(self, label: str) -> None:
        """Fail: no worker hangs in the simulation."""
        raise AssertionError(f"worker {label} was killed")

    def close(self, grace: float) -> None:
        """Join all threads."""
        for thread in self.threads:
            thread.join(grace)


class _Pipeline:
    def __init__(self, pool: SimulatedPool, state: _WorkerState, slow: float) -> None:
        self.pool, self.state, self.slow = pool, state, slow

    def supports_batching(self) -> bool:
        return True

    def prepare(self, requests: Sequence[SampleRequest]) -> None:
        pass

    def truncation(self, prompt: str) -> dict[str, Any]:
        return {}

    def ignores_negative_prompts(self) -> str:
        return ""

    def generate_async(
        self,
        requests: Sequence[SampleRequest],
        size: tuple[int, int],
        on_step: Callable[[], None],
        mode: GenerationMode = GenerationMode.DEFAULT,
    ) -> PendingBatch:
        self.pool.wait_for_batch(self.state, requests, self.slow)
        on_step()
        values = torch.tensor([request.seed % 256 for request in requests], dtype=torch.uint8)
        return PendingBatch(values[:, None, None, None].expand(-1, *size, 3), torch.tensor(True), None, "fp32")


def simulate(case: Case, folder: Path) -> Outcome:
    """Run a scheduler to its end in an empty folder; an error unless every row was made exactly once."""
    output = OutputDir(folder / "images")
    output.create()
    table = folder / "prompts.csv"
    table.write_text("prompt\n" + "a quiet street in the rain\n" * case.rows)
    plan = Plan(open_prompt_table(str(table)), 1, _SEED, "", (SIDE, SIDE), "png")
    header = Header({"model": "a clock"}, case.batch)
    start_ledger(output.ledger, header)
    settings = GenerateSettings(prompts_csv=str(table), output_dir=str(output.root), model_path="none")
    pool = SimulatedPool(GenerationJob(settings, ModelInfo({}, {}), output.root, header.digest, {}), case)
    size = BatchSize(case.batch, case.batch)
    scheduler = Scheduler(plan, output, header.digest, pool, ProgressLines(), lambda *_: size, timeout=1e9)
    began, computed = pool.now(), time.process_time()
    scheduler.run([str(label) for label in range(case.workers)], np.arange(case.rows))
    ended = max(state.idle_since for state in pool.states.values())
    pool.close(grace=10)
    computed = time.process_time() - computed
    merge_shards(output.ledger, output.work)
    generated = [
        line["index"] for line in ledger_reader.read_lines(output.ledger) if line["status"] == ledger_reader.DONE
    ]
    return Outcome(
        seconds=ended - began,
        generating=ended - pool.ready_at,
        tail=ended - min(state.idle_since for state in pool.states.values()),
        batches=pool.batches,
        computed=computed,
        generated=len(set(generated)),
        duplicates=len(generated) - len(set(generated)),
    )
