"""A pool of worker processes, one per device, and of processes that compute tasks; generation and evaluation share them.

Each worker has a pipe of its own: a worker that is killed in the middle of a message breaks no other worker's pipe.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, cycle
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from muralist.core.errors import UserError

_POLL = 1.0  # seconds
_EXIT_SECONDS = 5.0  # in which a killed process is gone
_CLOSED = object()
_starting = threading.Lock()

Inbox = queue.Queue[Any]
Send = Callable[[Any], None]
Target = Callable[..., None]
"""The work of a process: `target(inbox, send, *arguments)`; its end is the end of the process."""


@contextmanager
def without_main_module() -> Iterator[None]:
    """Start processes that do not import the caller's script, which they need nothing of.

    A process that is not forked imports `__main__` first: a script without `if __name__ == "__main__":` would call its
    command again in every worker.
    """
    with _starting:  # a second thread would take the placeholder for the script
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@dataclass(frozen=True)
class WorkerExited:
    """The last message of every worker: its process has ended."""

    reason: str


class WorkerPool(ABC):
    """Workers by label, wherever they run, and how long each has been silent."""

    def __init__(self) -> None:
        self._last_message: dict[str, float] = {}

    @abstractmethod
    def start(self, label: str) -> None:
        """Start a worker, or start one that has exited again."""

    @abstractmethod
    def send(self, label: str, message: Any) -> None:
        """Send a message to a worker; one that has exited does not get it."""

    @abstractmethod
    def kill(self, label: str) -> None:
        """End a worker now."""

    @abstractmethod
    def close(self, grace: float) -> None:
        """End all workers; those that were told to stop have `grace` seconds to exit by themselves."""

    @abstractmethod
    def _receive(self, seconds: float) -> list[tuple[str, Any]]: ...

    def receive(self, seconds: float) -> list[tuple[str, Any]]:
        """Return messages of workers, waiting up to `seconds` for the first; `WorkerExited` is each worker's last."""
        messages = self._receive(seconds)
        for label, _ in messages:
            self.reset_silence(label)
        return messages

    def silence(self, label: str) -> float:
        """Return the seconds since a worker was started, sent its last message or was last expected to send one."""
        return time.monotonic() - self._last_message[label]

    def reset_silence(self, label: str) -> None:
        """Count a worker's silence from now on: it had nothing to do before."""
        self._last_message[label] = time.monotonic()


class _Worker:
    """A process and our end of its pipe; a thread sends messages, because a process that hangs reads none."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sender = threading.Thread(target=self._send, daemon=True)
        self.sender.start()

    def _send(self) -> None:
        with suppress(OSError):  # receive() reports the exit
            while (message := self.outbox.get()) is not _CLOSED:
                self.pipe.send(message)

    def close(self) -> None:
        """Release the pipe of a process that has exited, where a message that is being sent fails at once."""
        self.outbox.put(_CLOSED)
        self.sender.join(_EXIT_SECONDS)
        self.pipe.close()

    def exit_report(self) -> str:
        """Say how the process ended."""
        self.process.join(_EXIT_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


class ProcessPool(WorkerPool):
    """Processes of this machine that run `target(inbox, send, *arguments[label])`."""

    def __init__(self, name: str, target: Target, arguments: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__()
        self.name, self.target, self.arguments = name, target, arguments
        self._workers: dict[str, _Worker] = {}  # the last one of each label
        self._running: dict[str, _Worker] = {}  # those whose exit has not been reported
        atexit.register(self.close, 0.0)  # multiprocessing itself would wait for processes that nobody has stopped

    def start(self, label: str) -> None:
        """Spawn a process: CUDA does not survive a fork."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self.target, self.arguments[label])
        # Not a daemon, which may have no processes of its own: a worker of evaluation has some that decode.
        process = context.Process(target=_serve, args=arguments, name=f"{self.name}-{label}", daemon=False)
        # Ctrl+C in a terminal reaches a worker before it can ignore the signal: block it until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with without_main_module():
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends with the process
        self._workers[label] = self._running[label] = _Worker(process, ours)
        self.reset_silence(label)

    def send(self, label: str, message: Any) -> None:
        """Queue a message for a worker's pipe."""
        if worker := self._running.get(label):
            worker.outbox.put(message)

    def _receive(self, seconds: float) -> list[tuple[str, Any]]:
        messages: list[tuple[str, Any]] = []
        readable = wait([worker.pipe for worker in self._running.values()], timeout=seconds)
        for label, worker in list(self._running.items()):
            if worker.pipe not in readable:
                continue
            try:
                messages.append((label, worker.pipe.recv()))
            except Exception:  # the end of the pipe, or half a message of a killed process
                del self._running[label]
                messages.append((label, WorkerExited(worker.exit_report())))
                worker.close()
        return messages

    def kill(self, label: str) -> None:
        """Send SIGKILL: it also ends a process that is stopped or hangs in a driver."""
        self._workers[label].process.kill()

    def close(self, grace: float) -> None:
        """Wait for processes to exit, then kill those that are left."""
        processes = [worker.process for worker in self._workers.values()]
        _join(processes, grace)
        for process in processes:
            process.kill()
        _join(processes, _EXIT_SECONDS)
        for worker in self._running.values():
            worker.close()
        self._running.clear()
        self._workers.clear()
        atexit.unregister(self.close)  # last: a close that Ctrl+C interrupts is repeated at exit


class TaskProcessExited(UserError):
    """A process of a `TaskPool` has ended, with tasks that are lost."""


class TaskPool:
    """Processes that compute `function(task, *arguments)`; the processes take turns.

    `work` and `describe` say in an error what the processes do, and with which task one was busy when it died.
    """

    def __init__(
        self,
        name: str,
        work: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        processes: int,
        describe: Callable[[Any], str],
    ) -> None:
        self._work, self._describe = work, describe
        labels = [str(number) for number in range(processes)]
        self._pool = ProcessPool(name, _serve_tasks, dict.fromkeys(labels, (function, arguments)))
        self._pending: dict[str, deque[Any]] = {label: deque() for label in labels}
        self._labels, self._numbers = cycle(labels), count()
        self._results: dict[int, Any] = {}
        try:
            for label in labels:
                self._pool.start(label)
        except BaseException:
            self._pool.close(0.0)
            raise

    def submit(self, task: Any) -> int:
        """Send a task to the next process; returns the number of its result."""
        number, label = next(self._numbers), next(self._labels)
        self._pending[label].append(task)
        self._pool.send(label, (number, task))
        return number

    def result(self, number: int) -> Any:
        """Wait for the result of a task and return it, once."""
        while number not in self._results:
            for label, message in self._pool.receive(_POLL):
                if isinstance(message, WorkerExited):
                    busy = [self._describe(task) for task in list(self._pending[label])[:1]]
                    raise TaskProcessExited(
                        f"A process that {self._work} {message.reason}.",
                        f"It was busy with {busy[0]}." if busy else "",
                        "Run the same command again to resume.",
                    )
                finished, result = message
                self._results[finished] = result
                self._pending[label].popleft()
        return self._results.pop(number)

    def close(self) -> None:
        """Kill the processes; tasks without a result are lost."""
        self._pool.close(0.0)


def _serve_tasks(inbox: Inbox, send: Send, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    while True:
        number, task = inbox.get()
        send((number, function(task, *arguments)))


def _join(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _serve(pipe: Connection, target: Target, arguments: tuple[Any, ...]) -> None:
    """Run in the worker's process until the target returns or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches every process of a terminal; the parent decides
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    inbox: Inbox = queue.Queue()
    lock = threading.Lock()

    def listen() -> None:
        while True:
            try:
                inbox.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone: nobody waits for results

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    threading.Thread(target=listen, daemon=True).start()
    target(inbox, send, *arguments)
