"""A fleet on a clock that skips: real scheduling, workers, files and ledger lines; only the painting is waited for.

Everything that is computed takes the time it takes. When nobody computes, because every worker waits for its painter and the
fleet for its workers, the clock skips to the end of the next batch. All workers and the fleet share the cores of one process
here, where each has its own in earnest: what is counted as overhead is more than there will be.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from muralist.data import ledger_lines
from muralist.data.prompts import open_table
from muralist.generate import ledger
from muralist.generate.fleet import Fleet, Shape
from muralist.generate.folder import OutputFolder
from muralist.generate.ledger import Header
from muralist.generate.messages import Began, Done, Failed, Gone, Job, Order, Ready, Report
from muralist.generate.painter import Finished, Way
from muralist.generate.painter import Order as PaintOrder
from muralist.generate.plan import Plan
from muralist.generate.screen import Lines
from muralist.generate.worker import Worker
from muralist.settings import GenerateSettings

SIDE = 8
_SEED = 42
_NAP = 0.002  # seconds between looks at whether somebody still computes


@dataclass(frozen=True)
class Case:
    """What the workers have to do, and how fast they are."""

    rows: int
    batch: int
    seconds_per_picture: float
    workers: int
    loading: float = 0.0
    """Seconds until a worker is ready."""
    costs: Callable[[np.ndarray], np.ndarray] = np.ones_like
    """By row number: how dear a row is, compared with others."""
    slow: float = 1.0
    """How many times longer the first worker takes."""


class Outcome(NamedTuple):
    """Seconds on the skipping clock, and what was computed meanwhile."""

    seconds: float
    painting: float  # from the first worker that is ready to the last picture
    tail: float  # from the first worker that ran out of work to the last picture
    batches: int
    computed: float  # processor seconds of this process: all workers and the fleet
    made: int
    twice: int


@dataclass
class _Member:
    """What the clock must know of a worker: whether it computes, and when it is to wake."""

    inbox: _Inbox = field(default_factory=lambda: _Inbox())
    wakes_at: float | None = None
    woken: threading.Event = field(default_factory=threading.Event)
    painting: int = 0
    unsaved: int = 0
    idle_since: float = 0.0
    ended: bool = False

    @property
    def computes(self) -> bool:
        if self.ended:
            return False
        if self.wakes_at is not None:
            return self.unsaved > self.painting
        return not (self.inbox.waited_for and self.inbox.empty()) or self.unsaved > 0


class _Inbox(queue.Queue[Order]):
    """Says whether somebody waits for it."""

    waited_for = False

    def get(self, block: bool = True, timeout: float | None = None) -> Order:
        """The next order."""
        self.waited_for = True
        order = super().get(block, timeout)
        self.waited_for = False
        return order


class SkippingCrew:
    """Workers in threads, and the clock by which their painters wait."""

    def __init__(self, job: Job, case: Case) -> None:
        self.job, self.case = job, case
        self.costs = case.costs(np.arange(case.rows, dtype=np.float64))
        self.costs = self.costs / self.costs.mean()
        self.outbox: queue.Queue[tuple[str, Report]] = queue.Queue()
        self.members: dict[str, _Member] = {}
        self.threads: list[threading.Thread] = []
        self.batches = 0
        self.ready_at = float("inf")
        self._skipped, self._lock = 0.0, threading.Lock()

    def now(self) -> float:
        """Seconds: real ones and those that were skipped."""
        return time.monotonic() + self._skipped

    def start(self, label: str) -> None:
        """Start a worker's thread."""
        member = self.members[label] = _Member()
        slow = self.case.slow if label == "0" else 1.0

        def send(report: Report) -> None:
            with self._lock:
                if isinstance(report, Began):
                    member.painting = len(report.numbers)
                    member.unsaved += member.painting
                elif isinstance(report, Done | Failed):
                    member.unsaved -= 1
                    member.idle_since = self.now()
                self.outbox.put((label, report))

        def run() -> None:
            self._sleep(member, self.case.loading)
            self.ready_at = min(self.ready_at, self.now())
            send(Ready(True, {"device": "a clock"}))
            painter = _Painter(self, member, slow)
            Worker(self.job, label, torch.device("cpu"), painter, send).serve(member.inbox)
            member.ended = True
            self.outbox.put((label, Gone("ended with status 0")))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def paint(self, member: _Member, orders: Sequence[PaintOrder], slow: float) -> None:
        """Wait as long as a batch takes: as its rows are dear, padding as dear as what it repeats."""
        cost = float(np.mean([self.costs[order.seed - _SEED] for order in orders]))
        self.batches += 1
        self._sleep(member, cost * len(orders) * self.case.seconds_per_picture * slow)
        member.painting = 0

    def _sleep(self, member: _Member, seconds: float) -> None:
        until = self.now() + seconds
        member.woken.clear()
        member.wakes_at = until
        while (left := until - self.now()) > 0:
            member.woken.wait(left)
            member.woken.clear()
        member.wakes_at = None

    def send(self, label: str, order: Order) -> None:
        """Put an order into a worker's box."""
        self.members[label].inbox.put(order)

    def receive(self, seconds: float) -> list[tuple[str, Report]]:
        """What workers said; if nobody computes, the clock skips to where somebody will."""
        while True:
            try:
                return [self.outbox.get(timeout=_NAP)]
            except queue.Empty:
                self._skip()

    def _skip(self) -> None:
        with self._lock:
            asleep = [member for member in self.members.values() if member.wakes_at is not None]
            if not self.outbox.empty() or not asleep or any(member.computes for member in self.members.values()):
                return
            first = min(asleep, key=lambda member: member.wakes_at or 0.0)
            assert first.wakes_at is not None
            self._skipped += max(0.0, first.wakes_at - self.now())
            first.woken.set()

    def kill(self, label: str) -> None:
        """Nobody hangs here."""
        raise AssertionError(f"worker {label} was given up")

    def close(self, patience: float) -> None:
        """All were told to stop."""
        for thread in self.threads:
            thread.join(patience)


class _Painter:
    def __init__(self, crew: SkippingCrew, member: _Member, slow: float) -> None:
        self.crew, self.member, self.slow = crew, member, slow

    def batches(self) -> bool:
        return True

    def prepare(self, orders: Sequence[PaintOrder]) -> None:
        pass

    def cut_short(self, prompt: str) -> bool:
        return False

    def begin(
        self, orders: Sequence[PaintOrder], size: tuple[int, int], beat: Callable[[], None], way: Way = Way.USUAL
    ) -> Finished:
        self.crew.paint(self.member, orders, self.slow)
        beat()
        return Finished([np.full((*size, 3), order.seed % 256, np.uint8) for order in orders])


def simulate(case: Case, folder: Path) -> Outcome:
    """Run a fleet to its end in an empty folder; an error unless every row was made exactly once."""
    output = OutputFolder(folder / "images")
    output.create()
    table = folder / "prompts.csv"
    table.write_text("prompt\n" + "a quiet street in the rain\n" * case.rows)
    plan = Plan(open_table(str(table)), 1, _SEED, "", (SIDE, SIDE), "png")
    header = Header({"model": "a clock"}, case.batch)
    ledger.start(output.ledger, header)
    settings = GenerateSettings(prompts_csv=str(table), output_dir=str(output.root), model_path="none")
    crew = SkippingCrew(Job(settings, output.root, header.digest, {}), case)
    shape = Shape(case.batch, case.batch)
    fleet = Fleet(plan, output, header.digest, crew, Lines(), lambda *_: shape, lambda: None, lambda: None, timeout=1e9)
    began, computed = crew.now(), time.process_time()
    fleet.run([str(label) for label in range(case.workers)], np.arange(case.rows))
    ended = max(member.idle_since for member in crew.members.values())
    crew.close(patience=10)
    computed = time.process_time() - computed
    ledger.merge(output.ledger, output.work)
    made = [line["index"] for line in ledger_lines.read_lines(output.ledger) if line["status"] == ledger_lines.DONE]
    return Outcome(
        seconds=ended - began,
        painting=ended - crew.ready_at,
        tail=ended - min(member.idle_since for member in crew.members.values()),
        batches=crew.batches,
        computed=computed,
        made=len(set(made)),
        twice=len(made) - len(set(made)),
    )
