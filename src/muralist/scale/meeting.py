"""The ranks of a launch meet: who comes, how fast they compute and exchange, and what their clocks say.

They meet at a store first, which can tell who is missing; only then in collectives, each of which is given up, and the rank
named that did not come to it, after a while.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muralist.words import listed

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Bytes that are exchanged: what a small agreement, a layer and a bucket of gradients take."""
_ROUNDS = 4
_PINGS = 8
_SLOW = 2.0  # a rank that takes so many times as long as the others is slow
_MATRIX = {"cuda": 4096, "cpu": 512}


class Missing(Exception):
    """Ranks that did not come."""

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        super().__init__(what)
        self.ranks = list(ranks)


@dataclass
class Exchange:
    """What the ranks found out together."""

    hosts: list[str]
    bandwidths: dict[int, float] = field(default_factory=dict)
    """Bytes per second that a ring all-reduce moves over each link, by the size of what is summed."""
    compute: list[float] = field(default_factory=list)
    """Seconds of the same matrix product on each rank."""
    sending: list[float] = field(default_factory=list)
    """Seconds until what each rank sends is everywhere."""
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By host: seconds by which its clock is ahead of rank 0's, and how far that may be wrong."""

    def slow_ranks(self) -> list[str]:
        """Ranks that compute or send much slower than the others, with their hosts."""
        told = []
        for what, seconds in (("computes", self.compute), ("sends", self.sending)):
            for rank, own in enumerate(seconds):
                usual = median(other for number, other in enumerate(seconds) if number != rank)
                if own > _SLOW * usual:
                    told.append(
                        f"rank {rank} on {self.hosts[rank]} {what} {own / usual:.1f} times slower than the others"
                    )
        return told


class Meeting:
    """The ranks of one launch."""

    def __init__(self, environment: Mapping[str, str], patience: float) -> None:
        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.patience = patience
        address, port = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment["MASTER_PORT"])
        # torchrun's agent keeps the store; under other launchers rank 0 does.
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            self.store: dist.Store = dist.PrefixStore(
                f"doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
                dist.TCPStore(
                    address,
                    port,
                    is_master=self.rank == 0 and not hosted,
                    timeout=timedelta(seconds=patience),
                    wait_for_workers=False,
                ),
            )
        except (dist.DistError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise Missing(f"Rank 0 does not answer at {address}:{port} ({reason})", [0]) from None
        gpus = torch.cuda.is_available()
        self.device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
        self.hosts: list[str] = []

    def gather(self, what: str, own: str, longer: float = 0.0) -> list[str]:
        """What each rank has to say; Missing names those that say nothing in time."""
        try:
            self.store.set(f"{what}/{self.rank}", own)
            silent = self._silent(what, longer)
            if silent:
                raise Missing(f"{self._named(silent)} did not come within {self.patience:g} s", silent)
            return [self.store.get(f"{what}/{rank}").decode() for rank in range(self.size)]
        except dist.DistError:
            raise Missing("Rank 0, where all meet, has left", []) from None  # and has said why

    def _silent(self, what: str, longer: float) -> list[int]:
        deadline = time.monotonic() + self.patience + longer
        while True:
            silent = [rank for rank in range(self.size) if not self.store.check([f"{what}/{rank}"])]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def _named(self, ranks: Sequence[int]) -> str:
        names = [f"{rank} on {self.hosts[rank]}" if self.hosts else str(rank) for rank in ranks]
        return f"Rank {listed(names, 8)}"

    def see_who_comes(self) -> None:
        """Wait for all ranks; Missing names those that do not come."""
        self.hosts = self.gather("here", socket.gethostname())

    def measure(self, longer: float) -> Exchange:
        """Exchange, compute, and look at the clocks; ranks may come `longer` than usual after the first."""
        try:
            return self._measure(longer)
        except RuntimeError as error:  # of gloo, NCCL or a driver; a rank that is gone is one of many reasons
            raise Missing(f"The exchange failed on rank {self.rank}: {str(error).splitlines()[0]}", []) from None

    def _measure(self, longer: float) -> Exchange:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        late = timedelta(seconds=self.patience + 30)  # we give up ourselves before that, and can say why
        self.gather("ready", "", longer)
        dist.init_process_group(backend, store=dist.PrefixStore("group", self.store), rank=self.rank,
                                world_size=self.size, timeout=late)  # fmt: skip
        found = Exchange(self.hosts)
        for size in SIZES:
            payload = torch.ones(size // 4, device=self.device)
            seconds = self._time(f"sum of {size} bytes", partial(dist.all_reduce, payload, async_op=True))
            found.bandwidths[size] = 2 * (self.size - 1) / self.size * size / max(1e-9, seconds)
        found.compute = self._seconds_of_all("compute", _matrix_seconds(self.device))
        payload = torch.ones(SIZES[-1] // 4, device=self.device)
        for source in range(self.size):
            send = partial(dist.broadcast, payload, source, async_op=True)
            own = self._time(f"broadcast from {source}", send, rounds=2)
            found.sending.append(max(self._seconds_of_all(f"sending {source}", own)))
        found.clocks = self._clocks(time.time)
        self.gather("leaving", "")
        dist.destroy_process_group()
        return found

    def _time(self, what: str, start: Callable[[], dist.Work], rounds: int = _ROUNDS) -> float:
        """Seconds of the fastest of a few rounds; each begins when all ranks are there."""
        best = float("inf")
        for number in range(rounds):
            self._wait(f"{what}, {number}: meeting", dist.all_reduce(torch.zeros(1), async_op=True))
            began = time.perf_counter()
            self._wait(f"{what}, {number}", start())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            best = min(best, time.perf_counter() - began)
        return best

    def _wait(self, what: str, work: dist.Work) -> None:
        """Until a collective ends, or until it is plain that somebody does not come."""
        self.store.set(f"{what}/{self.rank}", "")
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > self.patience:
                silent = [rank for rank in range(self.size) if not self.store.check([f"{what}/{rank}"])]
                raise Missing(f"{self._named(silent) if silent else 'Some rank'} hangs: {what}", silent)
            if waited > 0.01:
                time.sleep(0.0005)
        work.wait()

    def _seconds_of_all(self, what: str, own: float) -> list[float]:
        """A number of each rank, through the store."""
        return [float(word) for word in self.gather(what, repr(own))]

    def _clocks(self, clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
        """Compare rank 0's clock with that of the first rank on each other host."""
        first = {host: self.hosts.index(host) for host in dict.fromkeys(self.hosts)}
        return {
            host: offset for host, rank in first.items() if rank and (offset := self.offset(rank, clock)) is not None
        }

    def offset(self, other: int, clock: Callable[[], float]) -> tuple[float, float] | None:
        """How far the clock of a rank is ahead of rank 0's, and half the shortest way there and back; None elsewhere."""
        best: tuple[float, float] | None = None
        moment = torch.zeros(1, dtype=torch.float64)
        for number in range(_PINGS if self.rank in (0, other) else 0):
            if self.rank == 0:
                sent = clock()
                self._pass(f"clock {other}, {number} there", dist.isend(moment, other))
                self._pass(f"clock {other}, {number} back", dist.irecv(moment, other))
                way = (clock() - sent) / 2
                if best is None or way < best[1]:
                    best = float(moment) - sent - way, way
            else:
                self._pass(f"clock {other}, {number} there", dist.irecv(moment, 0))
                moment.fill_(clock())
                self._pass(f"clock {other}, {number} back", dist.isend(moment, 0))
        return best

    def _pass(self, what: str, work: dist.Work | None) -> None:
        assert work is not None  # None is for ranks outside a group
        work.wait(timedelta(seconds=self.patience))

    def tell(self, what: str, own: object) -> None:
        """Leave something for rank 0."""
        self.store.set(f"{what}/{self.rank}", json.dumps(own))

    def hear(self, what: str) -> list[Any]:
        """What each rank has left for this one."""
        return [json.loads(text) for text in self.gather(what, "null")]


def _matrix_seconds(device: torch.device) -> float:
    """Seconds of one matrix product, the fastest of a few."""
    side, best = _MATRIX[device.type], float("inf")
    left: Tensor = torch.ones(side, side, device=device)
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        float((left @ left)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return best
