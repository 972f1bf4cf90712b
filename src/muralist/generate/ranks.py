"""Ranks of `srun` or `torchrun`: each takes its share of the rows by global rank, and the rows of ranks that are lost.

They meet once, through torch's store at MASTER_ADDR, to agree on what there is to do; a rank that was refused before that
comes to say so, or the others would wait for it. From then on they know of each other through the output folder alone, so
that none waits for a rank that is gone, be it the first. Each says every few seconds how it is:

    working    it has rows to make
    idle       it has none, and takes those of ranks that are gone or lost
    ended      it has ended its worker and waits for the others; the first of those that are there merges the ledger
    gone       it has left
    (lost)     nothing new came from it for --worker_timeout
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data import ledger_lines
from muralist.errors import UserError
from muralist.generate.folder import OutputFolder
from muralist.generate.plan import shares
from muralist.generate.progress import ToldScreen
from muralist.generate.screen import Count, Lines, Screen, open_screen
from muralist.runfolder import write_atomically

_MEETING = 600.0  # seconds for all ranks to come, and for the first to take stock
_FAREWELL = 60.0  # seconds that a refused rank gives the others to come and hear of it
_BEAT = 2.0
_LOOK = 1.0
_TAKEN_AT_ONCE = 16  # rows of lost ranks: few enough that all who have time get some
_OTHERS_END = 10.0
_STOCK, _ROWS, _HEARD, _CAME = "muralist/stock", "muralist/rows", "muralist/heard", "muralist/came"
_READY, _REFUSED = b"ready", b"refused"
_AWAY = ("gone", "lost")


class Refused(Exception):
    """Another rank found that nothing can be done, and says why."""


@dataclass
class Ranks:
    """This rank among the others of one command."""

    rank: int
    size: int
    local_rank: int
    folder: OutputFolder
    copies: int
    timeout: float
    todo: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    count: Count = field(default_factory=Count)  # how far this rank's worker is
    _met: bool = False
    _state: str = "working"
    _taken: list[int] = field(default_factory=list)  # of other ranks' rows
    _beaten: float = 0.0
    _beats: int = 0
    _next_look: float = 0.0
    _last_words: dict[int, tuple[dict[str, Any], float]] = field(default_factory=dict)  # and when they were new
    _settled: dict[int, str] = field(default_factory=dict)  # by this command
    _read: dict[Path, int] = field(default_factory=dict)  # bytes

    @classmethod
    def of_environment(
        cls, environment: Mapping[str, str], folder: OutputFolder, copies: int, timeout: float
    ) -> Ranks | None:
        """The place that a launcher gave this process; None where it is alone."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return None
        rank, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
        return cls(rank, size, local_rank, folder, copies, max(timeout, 3 * _BEAT))

    @property
    def labels(self) -> list[str]:
        """What the workers of all ranks are called."""
        return [str(rank) for rank in range(self.size)]

    @property
    def own(self) -> np.ndarray:
        """What this rank is to make."""
        return shares(self.todo, self.size)[self.rank]

    def share_stock(self, take_stock: Callable[[], np.ndarray]) -> None:
        """The first rank finds what there is to do and tells the others; `Refused` where one was told to give up."""
        store = self._meet(_MEETING)
        store.set(f"{_CAME}/{self.rank}", _READY)
        if self.rank:
            go_on = self._hear(store, _STOCK) == b"go on"
            if go_on:
                self.todo = np.frombuffer(self._hear(store, _ROWS), np.int64)
            store.add(_HEARD, 1)
            if not go_on:
                raise Refused
        else:
            try:
                self._see_who_came(store)
                self.todo = take_stock()
                store.set(_ROWS, self.todo.tobytes())
                store.set(_STOCK, "go on")
            except BaseException:
                store.set(_STOCK, "give up")
                raise
            finally:  # the store may be in this process, which may have nothing to do and end
                _wait(lambda: store.add(_HEARD, 0) == self.size - 1, _OTHERS_END)
        if self.folder.ledger.is_file():
            self._read[self.folder.ledger] = self.folder.ledger.stat().st_size  # what failed before is tried again

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Where this rank is refused before it has met the others, they hear of it."""
        try:
            yield
        except Exception:
            if not self._met:
                with suppress(UserError, RuntimeError):  # nobody came; what went wrong is told in any case
                    self._give_up()
            raise

    def _give_up(self) -> None:
        store = self._meet(_FAREWELL)
        store.set(f"{_CAME}/{self.rank}", _REFUSED)
        if self.rank:
            store.add(_HEARD, 1)
            return
        store.set(_STOCK, "give up")
        _wait(lambda: store.add(_HEARD, 0) == self.size - 1, _OTHERS_END)

    def _see_who_came(self, store: Any) -> None:
        for rank in range(1, self.size):
            if self._hear(store, f"{_CAME}/{rank}", rank) == _REFUSED:
                raise Refused

    def decides(self) -> bool:
        """Whether this rank speaks for all: it is the first of those that are there."""
        return all(self._state_of(rank) in _AWAY for rank in range(self.rank))

    def beat(self) -> None:
        """Leave a sign of life in the folder; most calls do nothing."""
        if time.monotonic() - self._beaten >= _BEAT:
            self._say(self._state)

    def more(self) -> np.ndarray | None:
        """Some rows of ranks that are gone or lost; None once every row is settled."""
        began = time.monotonic()
        if began < self._next_look:
            return np.empty(0, np.int64)
        self._look()
        left = [(place, number) for place, number in enumerate(self.todo.tolist()) if number not in self._settled]
        if not left:
            return None
        states = [self._state_of(rank) for rank in range(self.size)]
        there = [rank for rank, state in enumerate(states) if state not in _AWAY]
        taken = {number for rank in there if rank != self.rank for number in self._last_words[rank][0]["taken"]}
        free = [number for place, number in left if place % self.size not in there and number not in taken]
        idle = [rank for rank in there if states[rank] == "idle" or rank == self.rank]
        # Two ranks that look at the same moment may take the same row: it costs time, but gives the same picture.
        self._taken = free[idle.index(self.rank) :: len(idle)][:_TAKEN_AT_ONCE]
        self._say("working" if self._taken else "idle")
        self._next_look = time.monotonic() + max(_LOOK, 10 * (time.monotonic() - began))
        return np.array(self._taken, dtype=np.int64)

    def missing(self) -> int:
        """Rows of this command that have no picture."""
        self._look()
        return sum(self._settled.get(number) != ledger_lines.DONE for number in self.todo.tolist())

    def closes_the_folder(self) -> bool:
        """The last thing a rank asks: whether it is to merge the ledger. Waits until no other rank needs the folder.

        A rank that is interrupted while others work leaves that to them; where nobody does it, the next command will.
        """
        self._say("ended")
        self._look()
        complete = all(number in self._settled for number in self.todo.tolist())
        others = [rank for rank in range(self.size) if rank != self.rank]

        def waited() -> bool:
            self.beat()
            if not self.decides():
                return not self.folder.work.is_dir()  # another rank has done it
            return all(self._state_of(rank) in ("ended", *_AWAY) for rank in others)

        in_time = _wait(waited, self.timeout + _OTHERS_END if complete else _OTHERS_END)
        closes = self.folder.work.is_dir() and self.decides() and (in_time or complete)
        if not closes:
            self._say("gone")
        return closes

    def all_counts(self) -> dict[str, Count]:
        """How far every rank's worker is, as far as they have told."""
        counts = {}
        for rank, part in enumerate(shares(self.todo, self.size)):
            state = self._state_of(rank)
            told = (
                self.count if rank == self.rank else Count(*self._last_words[rank][0].get("count", (0, 0, len(part))))
            )
            counts[str(rank)] = told._replace(total=told.finished) if state in _AWAY else told
        return counts

    def _meet(self, seconds: float) -> Any:
        from torch.distributed import rendezvous

        self._met = True
        try:
            return next(rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=seconds)))[0]
        except Exception as error:
            raise UserError(
                f"Rank {self.rank} did not meet the other ranks: {str(error).splitlines()[0]:.200}",
                fix="Start them all with one torchrun or srun.",
            ) from None

    def _hear(self, store: Any, key: str, speaker: int = 0) -> bytes:
        try:
            if _wait(lambda: store.check([key]), _MEETING):
                return bytes(store.get(key))
        except RuntimeError:  # the first rank is gone, and the store with it
            pass
        raise UserError(
            f"Rank {self.rank} heard nothing from rank {speaker}.", fix="See why that ended; the same command goes on."
        )

    def _say(self, state: str) -> None:
        self._state, self._beaten, self._beats = state, time.monotonic(), self._beats + 1
        if self.folder.work.is_dir():  # else another rank saw the end and tidied up
            words = {"state": state, "beat": self._beats, "taken": self._taken, "count": self.count}
            write_atomically(self._beat_file(self.rank), json.dumps(words))

    def _state_of(self, rank: int) -> str:
        """How a rank is; one that never said anything counts as working from the first time we ask."""
        if rank == self.rank:
            return self._state
        try:
            words = json.loads(self._beat_file(rank).read_text())
        except OSError:
            words = {"state": "working", "taken": []}
        before, since = self._last_words.get(rank, ({}, 0.0))
        if words != before:
            self._last_words[rank] = (words, time.monotonic())
        elif words["state"] != "gone" and time.monotonic() - since > self.timeout:
            return "lost"
        return str(words["state"])

    def _look(self) -> None:
        """Read what workers have written since the last look."""
        # The ledger last: lines are there before they leave the shards.
        for file in (*self.folder.work.glob("*.jsonl"), self.folder.ledger):
            try:
                with file.open("rb") as lines:
                    lines.seek(self._read.get(file, 0))
                    news = lines.read()
            except OSError:
                continue  # merged meanwhile, or not yet begun
            whole = news.rfind(b"\n") + 1
            self._read[file] = self._read.get(file, 0) + whole
            for raw in news[:whole].splitlines():
                if (line := ledger_lines.parsed(raw)) is not None:
                    self._settled[line["index"] * self.copies + line["copy"]] = line["status"]

    def _beat_file(self, rank: int) -> Path:
        return self.folder.work / f"rank{rank}.beat"


class RankScreen:
    """The first rank shows how far all are; the others only say what goes wrong."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._screen: Screen = Lines() if ranks.rank else ToldScreen(open_screen(), ranks.folder)
        self._shown = 0.0

    def show(self, counts: Mapping[str, Count], unassigned: int) -> None:
        """Remember how far this rank is, and show how far all are."""
        (self.ranks.count,) = counts.values()
        if self.ranks.rank == 0 and time.monotonic() - self._shown > _LOOK:
            self._shown = time.monotonic()
            everybody = self.ranks.all_counts()
            assigned = sum(count.total for count in everybody.values())
            self._screen.show(everybody, max(0, len(self.ranks.todo) - assigned))

    def say(self, sentence: str) -> None:
        """Something worth a line."""
        self._screen.say(sentence)

    def close(self) -> None:
        """No more comes."""
        self._screen.close()


def _wait(happened: Callable[[], bool], seconds: float) -> bool:
    """Whether it happened in time; in short naps, which a signal can end."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
