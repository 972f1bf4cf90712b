"""Ranks of `srun` or `torchrun`: each takes its share of the samples by global rank, and samples of ranks that are lost.

One rendezvous, through torch's store at MASTER_ADDR, makes them agree on the samples; a rank that is refused before that
joins the rendezvous to say so, or the others would wait for it. From then on they communicate through files in the output
folder alone, so that none waits for a rank that is gone, be it rank 0. Each rewrites a beat file every few seconds:

    working    it has samples to generate
    idle       it has none, and takes those of ranks that are gone or lost
    ended      its worker has ended, and it waits for the others; the first rank that is left merges the ledger
    gone       it has left
    (lost)     its beat file did not change for --worker_timeout
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from muralist.core.errors import UserError
from muralist.core.liveness import BeatAge, read_beat, write_beat
from muralist.data import ledger_reader
from muralist.data.ledger_reader import LedgerFollower
from muralist.generate.console import WorkerProgress
from muralist.generate.output_dir import OutputDir
from muralist.generate.plan import round_robin

_RENDEZVOUS_SECONDS = 600.0  # seconds for all ranks to come, and for rank 0 to find the missing samples
_REFUSED_WAITS = 60.0  # seconds that a refused rank waits for the others
_BEAT = 2.0
_POLL = 1.0
_TAKEN_AT_ONCE = 16  # samples of lost ranks: few enough that all idle ranks get some
_OTHERS_END = 10.0
_DECISION, _HEARD, _ARRIVED = "muralist/decision", "muralist/heard", "muralist/arrived"
_GO_ON, _GIVE_UP = b"go on", b"give up"
_READY, _REFUSED = b"ready", b"refused"
_AWAY = ("gone", "lost")


class RankRefused(Exception):
    """Another rank found that nothing can be done, and printed why."""


@dataclass
class RankCoordinator:
    """This rank among the others of one command."""

    rank: int
    size: int
    local_rank: int
    output: OutputDir
    copies: int
    timeout: float
    todo: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    progress: WorkerProgress = field(default_factory=WorkerProgress)  # of this rank's worker
    _met: bool = False
    _state: str = "working"
    _taken: list[int] = field(default_factory=list)  # samples of other ranks
    _last_beat: float = 0.0
    _beats: int = 0
    _next_poll: float = 0.0
    _next_display: float = 0.0
    _others: dict[int, dict[str, Any]] = field(default_factory=dict)  # their last beats
    _ages: dict[int, BeatAge] = field(default_factory=dict)
    _status: dict[int, str] = field(default_factory=dict)  # done or failed, by this command

    def __post_init__(self) -> None:
        self._follower = LedgerFollower(self.output.root)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], output: OutputDir, copies: int, timeout: float
    ) -> RankCoordinator | None:
        """Return the rank that a launcher gave this process; None where it is alone."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return None
        rank, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
        return cls(rank, size, local_rank, output, copies, max(timeout, 3 * _BEAT))

    @property
    def labels(self) -> list[str]:
        """The labels of the workers of all ranks."""
        return [str(rank) for rank in range(self.size)]

    @property
    def own(self) -> np.ndarray:
        """The samples of this rank."""
        return round_robin(self.todo, self.size)[self.rank]

    # The rendezvous.

    def agree_on_samples(self, find_missing: Callable[[], np.ndarray]) -> None:
        """Let rank 0 find the missing samples and tell the others; `RankRefused` where a rank cannot take part."""
        store = self._rendezvous(_RENDEZVOUS_SECONDS)
        store.set(f"{_ARRIVED}/{self.rank}", _READY)
        if self.rank:
            decision = self._get(store, _DECISION)
            store.add(_HEARD, 1)
            if decision == _GIVE_UP:
                raise RankRefused
            self.todo = np.frombuffer(decision.removeprefix(_GO_ON), np.int64)
        else:
            decision = _GIVE_UP
            try:
                if any(self._get(store, f"{_ARRIVED}/{rank}", rank) == _REFUSED for rank in range(1, self.size)):
                    raise RankRefused
                self.todo = find_missing()
                decision = _GO_ON + self.todo.tobytes()
            finally:
                store.set(_DECISION, decision)
                self._wait_until_heard(store)
        self._follower.skip_ledger()  # earlier failures are tried again

    @contextmanager
    def reporting_refusal(self) -> Iterator[None]:
        """Tell the others if this rank is refused before it has met them."""
        try:
            yield
        except Exception:
            if not self._met:
                with suppress(UserError, RuntimeError):  # nobody came; the error itself is printed in any case
                    store = self._rendezvous(_REFUSED_WAITS)
                    store.set(f"{_ARRIVED}/{self.rank}", _REFUSED)
                    if self.rank:
                        store.add(_HEARD, 1)
                    else:
                        store.set(_DECISION, _GIVE_UP)
                        self._wait_until_heard(store)
            raise

    def _wait_until_heard(self, store: Any) -> None:
        """Keep the store, which may live in this process, until the other ranks have read the decision."""
        _wait(lambda: store.add(_HEARD, 0) == self.size - 1, _OTHERS_END)

    def _rendezvous(self, seconds: float) -> Any:
        from torch.distributed import rendezvous

        self._met = True
        try:
            return next(rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=seconds)))[0]
        except Exception as error:
            raise UserError(
                f"Rank {self.rank} did not meet the other ranks: {str(error).splitlines()[0]:.200}",
                fix="Start them all with one torchrun or srun.",
            ) from None

    def _get(self, store: Any, key: str, sender: int = 0) -> bytes:
        try:
            if _wait(lambda: store.check([key]), _RENDEZVOUS_SECONDS):
                return bytes(store.get(key))
        except RuntimeError:  # rank 0 is gone, and the store with it
            pass
        raise UserError(
            f"Rank {self.rank} received nothing from rank {sender}.",
            fix="See why that rank ended, then run the same command again to resume.",
        )

    # Afterwards: beat files and the workers' lines.

    def is_leader(self) -> bool:
        """Return whether this rank decides for all: it is the first of those that are left."""
        return all(self._state_of(rank) in _AWAY for rank in range(self.rank))

    def beat(self) -> None:
        """Rewrite the beat file; most calls do nothing."""
        if time.monotonic() - self._last_beat >= _BEAT:
            self._set_state(self._state)

    def take_lost_samples(self) -> np.ndarray | None:
        """Return some samples of ranks that are gone or lost; None once every sample is done or failed."""
        started = time.monotonic()
        if started < self._next_poll:
            return np.empty(0, np.int64)
        self._read_new_lines()
        left = [(place, index) for place, index in enumerate(self.todo.tolist()) if index not in self._status]
        if not left:
            return None
        states = [self._state_of(rank) for rank in range(self.size)]
        present = [rank for rank, state in enumerate(states) if state not in _AWAY]
        taken = {index for rank in present if rank != self.rank for index in self._others[rank]["taken"]}
        free = [index for place, index in left if place % self.size not in present and index not in taken]
        idle = [rank for rank in present if states[rank] == "idle" or rank == self.rank]
        # Two ranks that look at the same moment may take the same sample: it costs time, but gives the same image.
        self._taken = free[idle.index(self.rank) :: len(idle)][:_TAKEN_AT_ONCE]
        self._set_state("working" if self._taken else "idle")
        self._next_poll = time.monotonic() + max(_POLL, 10 * (time.monotonic() - started))
        return np.array(self._taken, dtype=np.int64)

    def missing(self) -> int:
        """Count the samples of this command that have no image."""
        self._read_new_lines()
        return sum(self._status.get(index) != ledger_reader.DONE for index in self.todo.tolist())

    def should_merge_ledger(self) -> bool:
        """Wait until no other rank needs the folder; returns whether this rank is to merge the ledger.

        A rank that is interrupted while others work leaves that to them; where nobody does it, the next command will.
        """
        self._set_state("ended")
        self._read_new_lines()
        complete = all(index in self._status for index in self.todo.tolist())
        others = [rank for rank in range(self.size) if rank != self.rank]

        def others_ended() -> bool:
            self.beat()
            if not self.is_leader():
                return not self.output.work.is_dir()  # another rank has merged
            return all(self._state_of(rank) in ("ended", *_AWAY) for rank in others)

        in_time = _wait(others_ended, self.timeout + _OTHERS_END if complete else _OTHERS_END)
        merges = self.output.work.is_dir() and self.is_leader() and (in_time or complete)
        if not merges:
            self._set_state("gone")
        return merges

    def exchange_progress(self, own: WorkerProgress) -> tuple[dict[str, WorkerProgress], int] | None:
        """Tell the others how far this rank is.

        For rank 0, every second, return how far all ranks are, as far as their beat files tell, and how many samples
        belong to none.
        """
        self.progress = own
        self.beat()
        if self.rank or time.monotonic() < self._next_display:
            return None
        self._next_display = time.monotonic() + _POLL
        workers = {}
        for rank, share in enumerate(round_robin(self.todo, self.size)):
            state, progress = self._state_of(rank), self.progress
            if rank != self.rank:
                progress = WorkerProgress(*self._others[rank].get("count", (0, 0, len(share))))
            workers[str(rank)] = progress._replace(total=progress.finished) if state in _AWAY else progress
        return workers, max(0, len(self.todo) - sum(progress.total for progress in workers.values()))

    def _set_state(self, state: str) -> None:
        self._state, self._last_beat, self._beats = state, time.monotonic(), self._beats + 1
        if self.output.work.is_dir():  # else another rank has merged and removed it
            beat = {"state": state, "beat": self._beats, "taken": self._taken, "count": self.progress}
            write_beat(self._beat_file(self.rank), beat)

    def _state_of(self, rank: int) -> str:
        """Return a rank's state; one without a beat file counts as working from the first time it is asked for."""
        if rank == self.rank:
            return self._state
        beat = self._others.setdefault(rank, {"state": "working", "taken": []})
        with suppress(OSError):
            beat = self._others[rank] = read_beat(self._beat_file(rank)) or beat  # None while it is being rewritten
        silence = self._ages.setdefault(rank, BeatAge()).observe(beat)
        return "lost" if beat["state"] != "gone" and silence > self.timeout else str(beat["state"])

    def _read_new_lines(self) -> None:
        """Read what workers have written since the last time."""
        for line in self._follower.new_lines():
            self._status[line["index"] * self.copies + line["copy"]] = line["status"]

    def _beat_file(self, rank: int) -> Path:
        return self.output.work / f"rank{rank}.beat"


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until a condition holds; returns whether it did in time. A signal can interrupt the short naps."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
