"""Collective self-test: all ranks of a launch report presence, then measure compute, bandwidth and clock offsets.

Presence and results go through the rendezvous store, which can name missing ranks. Only then do collectives run, each
with a timeout that names the ranks that did not join.
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

from muralist.core.formatting import format_list
from muralist.train.distributed import count_gpus, process_group_backends
from muralist.train.metrics import matmul_rate

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Bytes of the all-reduces: about a scalar agreement, a layer and a bucket of gradients."""
_ROUNDS = 4
_PINGS = 8
_SLOW = 2.0  # times the median of the other ranks


class MissingRanks(Exception):
    """Ranks that did not connect, or left."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


@dataclass
class CollectiveReport:
    """Measurements of all ranks."""

    hosts: list[str]
    bandwidths: dict[int, float]  # bytes per second over each link of a ring all-reduce, by payload size
    compute: list[float]  # seconds that a matmul of 10^9 FLOPs takes on each rank
    broadcast: list[float]  # seconds of a broadcast from each rank
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By host: seconds by which its clock is ahead of rank 0's, and the error bound."""

    def slow_ranks(self) -> list[str]:
        """Describe ranks that compute or send much more slowly than the others."""
        slow = []
        for verb, seconds in (("computes", self.compute), ("sends", self.broadcast)):
            for rank, own in enumerate(seconds):
                factor = own / median(seconds[:rank] + seconds[rank + 1 :])
                if factor > _SLOW:
                    slow.append(f"rank {rank} on {self.hosts[rank]} {verb} {factor:.1f} times slower than the others")
        return slow


class CollectiveTest:
    """The self-test of one launch, as one of its ranks runs it."""

    def __init__(self, environment: Mapping[str, str], timeout: float) -> None:
        """Connect to the other ranks; MissingRanks names those that do not connect."""
        self.rank, self.world_size, self.timeout = int(environment["RANK"]), int(environment["WORLD_SIZE"]), timeout
        address, port = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment["MASTER_PORT"])
        # torchrun's agent hosts the store; under other launchers rank 0 does.
        is_master = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            tcp_store = dist.TCPStore(
                address, port, is_master=is_master, timeout=timedelta(seconds=timeout), wait_for_workers=False
            )
        except (dist.DistError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise MissingRanks(f"Rank 0 does not answer at {address}:{port} ({reason})", [0]) from None
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"doctor/{attempt}", tcp_store)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():  # ranks may share a GPU
            self.device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        self.hosts: list[str] = []
        self.hosts = self.gather("host", socket.gethostname())

    def publish(self, key: str, value: object) -> None:
        """Store a value of this rank for the others."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def gather(self, key: str, value: object, extra_time: float = 0.0) -> list[Any]:
        """Return the values of all ranks; MissingRanks names ranks that publish none before the timeout."""
        try:
            self.publish(key, value)
            deadline = time.monotonic() + self.timeout + extra_time
            while missing := self._missing(key):
                if time.monotonic() > deadline:
                    raise MissingRanks(f"{self._names(missing)} did not connect within {self.timeout:g} s", missing)
                time.sleep(0.05)
            return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.world_size)]
        except dist.DistError:
            raise MissingRanks("Rank 0, which hosts the store, has left") from None  # and has printed why

    def _missing(self, key: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.store.check([f"{key}/{rank}"])]

    def _names(self, ranks: Sequence[int]) -> str:
        names = [f"{rank} on {self.hosts[rank]}" if self.hosts else str(rank) for rank in ranks]
        return f"Rank {format_list(names, 8)}"

    def measure(self, extra_time: float) -> CollectiveReport:
        """Measure everything; ranks may be `extra_time` seconds later than the timeout for the first collective."""
        self.gather("ready", None, extra_time)
        on_gpu = self.device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(self.device)
            gpus = count_gpus(self.store, self.rank, self.world_size) if on_gpu else 0
            dist.init_process_group(
                process_group_backends("auto", self.world_size, gpus),
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout + 30),  # longer than ours, which can name the missing ranks
            )
            bandwidths, broadcast = {}, []
            for size in SIZES:
                payload = torch.ones(size // 4, device=self.device)
                seconds = self._time(f"all-reduce of {size} bytes", partial(dist.all_reduce, payload, async_op=True))
                bandwidths[size] = 2 * (self.world_size - 1) / self.world_size * size / max(1e-9, seconds)
            compute = self.gather("compute", 1e9 / matmul_rate(self.device, torch.float32))
            for source in range(self.world_size):
                name = f"broadcast from rank {source}"
                own = self._time(name, partial(dist.broadcast, payload, source, async_op=True), rounds=2)
                broadcast.append(max(self.gather(name, own)))
            first_ranks = [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]
            clocks = {self.hosts[rank]: self.clock_offset(rank, time.time) for rank in first_ranks if rank}
            self.gather("finished", None)
            dist.destroy_process_group()
        except RuntimeError as error:  # from gloo, NCCL or a driver, for example because a rank is gone
            raise MissingRanks(f"The exchange failed on rank {self.rank}: {str(error).splitlines()[0]}") from None
        return CollectiveReport(self.hosts, bandwidths, compute, broadcast, clocks)

    def _time(self, name: str, start: Callable[[], dist.Work], rounds: int = _ROUNDS) -> float:
        """Seconds of the fastest of a few rounds, each after a barrier."""
        best = float("inf")
        for index in range(rounds):
            self._wait(f"barrier before {name}, {index}", dist.all_reduce(torch.zeros(1), async_op=True))
            began = time.perf_counter()
            self._wait(f"{name}, {index}", start())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            best = min(best, time.perf_counter() - began)
        return best

    def _wait(self, name: str, work: dist.Work) -> None:
        """Wait for a collective; after the timeout, MissingRanks names the ranks that did not join it."""
        self.publish(name, None)
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > self.timeout:
                missing = self._missing(name)
                raise MissingRanks(f"{self._names(missing) if missing else 'Some rank'} hangs: {name}", missing)
            if waited > 0.01:
                time.sleep(0.0005)
        work.wait()

    def clock_offset(self, other: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Seconds by which the clock of a rank is ahead of rank 0's, and half of the shortest round trip to it.

        Only rank 0 and the other rank take part; the result is valid on rank 0.
        """
        best = 0.0, float("inf")
        for index in range(_PINGS):
            ping, pong = f"ping/{other}/{index}", f"pong/{other}/{index}"
            if self.rank == 0:
                sent = clock()
                self.store.set(ping, "")
                theirs = float(self.store.get(pong))  # waits until it is set
                half = (clock() - sent) / 2
                best = min(best, (theirs - sent - half, half), key=lambda measured: measured[1])
            elif self.rank == other:
                self.store.get(ping)
                self.store.set(pong, repr(clock()))
        return best
