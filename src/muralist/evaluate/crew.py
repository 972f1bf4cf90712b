"""Processes that compute features together, one per device: what one leaves undone when it dies, the others do."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from muralist.errors import UserError
from muralist.evaluate.cache import Cache
from muralist.evaluate.extraction import DECODING_AHEAD, Batch, Finished, extract
from muralist.evaluate.extractors import Extractor
from muralist.loading import loading

log = logging.getLogger("muralist")
PATIENCE = 600.0  # seconds without a finished batch, after which a process is given up
_LOOK = 1.0  # seconds
_FAREWELL = 10.0  # seconds in which a process ends that was killed, or has nothing to do
_NAMES_SHOWN = 3


@dataclass
class _Member:
    """A process and the batches it was given and has not finished, in its order."""

    label: str
    process: Any
    pipe: Connection
    open: deque[Batch] = field(default_factory=deque)
    heard: float = field(default_factory=time.monotonic)

    def give(self, batch: Batch) -> bool:
        """Hand over a batch; False if there is nobody any more."""
        if not self.open:
            self.heard = time.monotonic()  # nobody expected a sign of life while it had nothing to do
        try:
            self.pipe.send(batch)
        except OSError:
            return False
        self.open.append(batch)
        return True


def extract_together(
    extractor: Extractor,
    cache: Cache,
    batches: Sequence[Batch],
    devices: dict[str, str],
    progress: Callable[[int, int], None],
) -> dict[bytes, str]:
    """Compute and keep all batches; returns which items cannot be decoded, and why."""
    crew = _Crew(deque(batches), progress)
    labels = list(devices)[: len(batches)]
    try:
        for label in labels:
            crew.start(label, extractor, cache, devices[label], len(labels))
        with loading(f"the weights of {extractor.name}", extractor.source):
            crew.run(until_first=True)
        crew.run()
        return crew.broken
    finally:
        crew.end()


class _Crew:
    def __init__(self, waiting: deque[Batch], progress: Callable[[int, int], None]) -> None:
        self.waiting, self.progress = waiting, progress
        self.members: list[_Member] = []
        self.broken: dict[bytes, str] = {}
        self.done, self.total = 0, sum(map(len, waiting))

    def start(self, label: str, extractor: Extractor, cache: Cache, device: str, processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        arguments = (extractor, cache, device, processes, theirs)
        process = context.Process(target=_work, args=arguments, name=f"muralist-evaluate-{label}", daemon=True)
        process.start()
        theirs.close()
        self.members.append(_Member(label, process, ours))

    def run(self, until_first: bool = False) -> None:
        """Until every batch is finished, or one is."""
        while (self.waiting or any(member.open for member in self.members)) and not (until_first and self.done):
            self._hand_out()
            by_pipe = {member.pipe: member for member in self.members}
            for pipe in wait(list(by_pipe), _LOOK):
                assert isinstance(pipe, Connection)
                self._hear(by_pipe[pipe])
            now = time.monotonic()
            for member in [one for one in self.members if one.open and now - one.heard > PATIENCE]:
                self._lose(member, f"finished nothing for {PATIENCE:.0f} s and was given up")

    def _hand_out(self) -> None:
        """In turn, so that each has something to do before any has plenty."""
        for depth in range(1, DECODING_AHEAD + 2):
            for member in self.members:
                while self.waiting and len(member.open) < depth and member.give(self.waiting[0]):
                    self.waiting.popleft()

    def _hear(self, member: _Member) -> None:
        try:
            said = member.pipe.recv()
        except (EOFError, OSError):
            self._lose(member, _obituary(member.process))
            return
        member.heard = time.monotonic()
        if isinstance(said, Finished):
            member.open.popleft()
            self.done += said.items
            self.broken |= said.broken
            self.progress(self.done, self.total)
        elif isinstance(said, BaseException):
            raise said
        else:
            self._lose(member, f"failed: {said}")

    def _lose(self, member: _Member, how: str) -> None:
        member.process.kill()
        member.process.join(_FAREWELL)
        self.members.remove(member)
        what = f"Process {member.label}, which computes features, {how}."
        if not self.members:
            raise UserError(what, _last_words(member), "The same command again goes on from what is done.")
        self.waiting.extendleft(reversed(member.open))
        log.warning("%s The others take over its share.", what)

    def end(self) -> None:
        """Let go those that have nothing to do, and end the others."""
        idle = [member for member in self.members if not member.open and not self.waiting]
        for member in idle:
            member.pipe.close()  # which they take for the end
        for member in self.members:
            if member in idle:
                member.process.join(_FAREWELL)
            member.process.kill()
            member.process.join()


def _last_words(member: _Member) -> str:
    names = [str(item.content) for batch in list(member.open)[:1] for item in batch]
    if not names:
        return "No other process is left."
    shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else "")
    return f"No other process is left. It was busy with {shown}."


def _obituary(process: Any) -> str:
    process.join(5)
    code = process.exitcode
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended unexpectedly"


def _work(extractor: Extractor, cache: Cache, device: str, processes: int, pipe: Connection) -> None:
    """The life of a process: batches come through the pipe, and what is finished goes back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears Ctrl+C and ends its processes

    def next_batch(waits: bool) -> Batch | None:
        try:
            return pipe.recv() if waits or pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None  # that was all, or the command is gone

    with suppress(BrokenPipeError, ConnectionResetError):  # the command is gone
        for report in _reports(extract(extractor, cache, next_batch, torch.device(device), processes)):
            pipe.send(report)


def _reports(work: Iterator[Finished]) -> Iterator[Finished | Exception | str]:
    """What is finished; at last an error that the others would meet as well, or a sentence on what went wrong here."""
    try:
        yield from work
    except (UserError, OSError) as error:
        yield error
    except Exception as error:
        yield f"{type(error).__name__}: {(str(error) or 'no more is known').splitlines()[0][:300].rstrip('.')}"
