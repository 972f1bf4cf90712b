"""Ranks of `srun` or `torchrun`: each takes its share of the rows by global rank, and the rows of ranks that are lost.

They meet once, through torch's store at MASTER_ADDR, to agree on what there is to do; from then on they know of each other
through the output folder alone, so that none waits for a rank that is gone, be it the first.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from muralist.errors import UserError
from muralist.generate import ledger
from muralist.generate.fleet import Not, Shape
from muralist.generate.folder import OutputFolder
from muralist.generate.plan import shares
from muralist.runfolder import write_atomically

_BEAT = 2.0
_LOOK = 1.0
_STOCK, _SHAPE = "muralist/stock", "muralist/shape"


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
    _store: Any = None
    _beaten: float = 0.0
    _next_look: float = 0.0
    _count: int = 0
    _last_words: dict[int, tuple[str, float]] = field(default_factory=dict)  # of each rank, and when it was new to us
    _taken: set[int] = field(default_factory=set)

    @classmethod
    def of_environment(
        cls, environment: Mapping[str, str], folder: OutputFolder, copies: int, timeout: float
    ) -> Ranks | None:
        """The place that a launcher gave this process; None where it is alone."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size == 1:
            return None
        rank, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
        return cls(rank, size, local_rank, folder, copies, timeout)

    def share_stock(self, take_stock: Callable[[], tuple[np.ndarray, ledger.Header | None]]) -> ledger.Header | None:
        """The first rank looks what there is to do and tells the others, or tells them why nothing can be done."""
        from torch.distributed import rendezvous

        try:
            self._store, _, _ = next(
                rendezvous("env://", self.rank, self.size, timeout=timedelta(seconds=self.timeout))
            )
        except Exception as error:
            raise UserError(
                f"Rank {self.rank} did not meet the other ranks: {str(error).splitlines()[0]:.200}",
                fix="Start them all with one torchrun or srun.",
            ) from None
        if self.rank == 0:
            try:
                self.todo, header = take_stock()
            except BaseException as error:
                self._store.set(_STOCK, json.dumps({"refused": str(error)}))
                raise
            buffer = io.BytesIO()
            np.save(buffer, self.todo)
            write_atomically(self.folder.work / "todo.npy", buffer.getvalue())
            self._store.set(_STOCK, json.dumps({"header": header.line() if header else None}))
            return header
        told = json.loads(self._get(_STOCK))
        if "refused" in told:
            raise UserError(f"The first rank refused: {told['refused']}")
        self.todo = np.load(self.folder.work / "todo.npy")
        return ledger.Header.parse(told["header"]) if told["header"] else None

    @property
    def own(self) -> np.ndarray:
        """What this rank is to make."""
        return shares(self.todo, self.size)[self.rank]

    def publish_shape(self, shape: Shape) -> None:
        """The first rank says how many pictures are made at once."""
        self._store.set(_SHAPE, json.dumps(shape))

    def published_shape(self) -> Shape | Not:
        """What the first rank said, if it has."""
        return Shape(*json.loads(self._store.get(_SHAPE))) if self._store.check([_SHAPE]) else Not.DECIDED

    def _get(self, key: str) -> str:
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
            return self._store.get(key).decode()
        except Exception:
            raise UserError(
                f"Rank {self.rank} heard nothing from the first rank for {self.timeout:.0f} s.",
                fix="Its own message says why; the same command goes on.",
            ) from None

    def beat(self, state: str = "working") -> None:
        """Leave a sign of life in the folder; most calls do nothing."""
        now = time.monotonic()
        if state == "working" and now - self._beaten < _BEAT:
            return
        self._beaten, self._count = now, self._count + 1
        write_atomically(self._beat_file(self.rank), f"{state} {self._count}\n")

    def more(self) -> np.ndarray | None:
        """Rows of ranks that fell silent, shared among those that have time; None once every row is settled."""
        if time.monotonic() < self._next_look:
            return np.empty(0, np.int64)
        if not self.folder.work.is_dir():  # another rank saw the end and tidied up
            return None
        started = time.monotonic()
        self.beat("finished")
        left = self.todo[~np.isin(self.todo, list(self._settled()))]
        self._next_look = time.monotonic() + max(_LOOK, 20 * (time.monotonic() - started))
        if not len(left):
            return None
        states = [self._state(rank) for rank in range(self.size)]
        owner = {number: rank for rank, part in enumerate(shares(self.todo, self.size)) for number in part.tolist()}
        free = [number for number in left.tolist() if states[owner[number]] != "working" and owner[number] != self.rank]
        idle = [rank for rank, state in enumerate(states) if state == "finished"]
        mine = [number for number in free[idle.index(self.rank) :: len(idle)] if number not in self._taken]
        self._taken.update(mine)
        return np.array(mine, dtype=np.int64)

    def closes_the_folder(self) -> bool:
        """Whether this rank is the one to merge the ledger: the first of those that are left."""
        return all(self._state(rank) == "lost" for rank in range(self.rank))

    def _state(self, rank: int) -> str:
        """`working`, `finished`, or `lost` when nothing new came for a while; one that never came counts from now."""
        if rank == self.rank:
            return "finished"
        try:
            word = self._beat_file(rank).read_text()
        except OSError:
            word = "working"
        seen, since = self._last_words.get(rank, ("", 0.0))
        if word != seen:
            self._last_words[rank] = (word, time.monotonic())
        elif not word.startswith("finished") and time.monotonic() - since > self.timeout:
            return "lost"
        return word.split()[0]

    def _settled(self) -> set[int]:
        """Rows that are made or have failed; the ledger last, because lines go there before they leave the shards."""
        files = [*self.folder.work.glob("*.jsonl"), self.folder.ledger]
        lines = (line for file in files for line in ledger.read_lines(file) if line["copy"] < self.copies)
        return {line["index"] * self.copies + line["copy"] for line in lines}

    def _beat_file(self, rank: int) -> Path:
        return self.folder.work / f"rank{rank}.beat"
