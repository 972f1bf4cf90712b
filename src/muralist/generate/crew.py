"""The workers of this machine: one process per GPU, each at the end of its own pipe.

A pipe of its own for each: a worker that is killed in the middle of a message breaks its own pipe and nobody else's.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from muralist.generate.messages import Begin, Gone, Job, Order, Report

_ENDED_BY_ITSELF = 5.0


class Crew(Protocol):
    """Workers by label, wherever they run."""

    def start(self, label: str) -> None:
        """Start a worker, or start one that is gone again."""

    def send(self, label: str, order: Order) -> None:
        """Tell a worker something; one that is gone does not hear it."""

    def receive(self, seconds: float) -> list[tuple[str, Report]]:
        """What workers said, waiting at most this long for the first word; `Gone` is the last word of each."""

    def kill(self, label: str) -> None:
        """End a worker now."""

    def close(self, patience: float) -> None:
        """End all workers: those that were told to stop have this many seconds to do so by themselves."""


@dataclass
class _Worker:
    """A process and our end of its pipe; orders are posted by a thread, since a worker that hangs reads none."""

    process: Any
    pipe: Connection
    outbox: queue.SimpleQueue[Begin | Order | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    def spawn(cls) -> _Worker:
        """Start a process, which imports what every worker needs and waits to be told what to do."""
        from muralist.generate.worker_process import main

        context = multiprocessing.get_context("spawn")  # afresh: CUDA does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs,), name="muralist-worker", daemon=True)
        # Ctrl+C of a terminal reaches a worker even before it can say that it does not listen to it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that its end is the end of the pipe
        return cls(process, ours)

    def __post_init__(self) -> None:
        self.poster = threading.Thread(target=self._post, daemon=True)
        self.poster.start()

    def _post(self) -> None:
        with suppress(OSError):  # receive() tells that it is gone
            while (order := self.outbox.get()) is not None:
                self.pipe.send(order)

    def close(self) -> None:
        """Only for a process that has ended: what was being posted fails at once."""
        self.outbox.put(None)
        self.poster.join(_ENDED_BY_ITSELF)
        self.pipe.close()


class LocalCrew:
    """Processes of this machine; `devices` says which device each label means."""

    def __init__(self, job: Job, devices: dict[str, str], early: list[_Worker] | None = None) -> None:
        self.job, self.devices = job, devices
        self._early = early if early is not None else []
        self._workers: dict[str, _Worker] = {}  # the last one of each label
        self._heard: dict[str, _Worker] = {}  # those whose end has not been told

    @staticmethod
    @contextmanager
    def early() -> Iterator[list[_Worker]]:
        """A worker that is on its way while its command still finds out what there is to do; a crew may take it over."""
        waiting = [_Worker.spawn()]
        try:
            yield waiting
        finally:
            for worker in waiting:
                worker.process.kill()
                worker.process.join(_ENDED_BY_ITSELF)
                worker.close()

    def start(self, label: str) -> None:
        """Give a worker's process its work: one that waits for it, else a new one."""
        worker = self._early.pop() if self._early else _Worker.spawn()
        worker.outbox.put(Begin(self.job, label, self.devices[label]))
        self._workers[label] = self._heard[label] = worker

    def send(self, label: str, order: Order) -> None:
        """Put an order into a worker's pipe."""
        if worker := self._heard.get(label):
            worker.outbox.put(order)

    def receive(self, seconds: float) -> list[tuple[str, Report]]:
        """Read every pipe that has something."""
        reports: list[tuple[str, Report]] = []
        heard = wait([worker.pipe for worker in self._heard.values()], timeout=seconds)
        for label, worker in list(self._heard.items()):
            if worker.pipe not in heard:
                continue
            try:
                reports.append((label, worker.pipe.recv()))
            except Exception:  # its end, or half a message of a killed process
                del self._heard[label]
                reports.append((label, Gone(_obituary(worker.process))))
                worker.close()
        return reports

    def kill(self, label: str) -> None:
        """SIGKILL: it also ends a process that is stopped or hangs in a driver."""
        self._workers[label].process.kill()

    def close(self, patience: float) -> None:
        """Wait a little, then end whatever is left; files are whole or absent at any moment."""
        processes = [worker.process for worker in self._workers.values()]
        deadline = time.monotonic() + patience
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
        deadline = time.monotonic() + _ENDED_BY_ITSELF
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for worker in self._heard.values():
            worker.close()
        self._heard.clear()


def _obituary(process: Any) -> str:
    process.join(_ENDED_BY_ITSELF)
    code = process.exitcode
    if code is None:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
