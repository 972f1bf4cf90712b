"""Name the process that died or hangs: every rank rewrites a small file, and a rank that is stuck reads the others'.

    heartbeats/rank_0.json      rewritten every two seconds; removed when the process ends normally

The files are written and read by a thread that needs no network, which may be what is broken. An error in this thread
is logged once and never stops training.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from muralist.core.errors import EXIT_LOST_PEERS
from muralist.core.formatting import format_duration
from muralist.core.liveness import BeatAge, ProcessIdentity, read_beat, write_beat

log = logging.getLogger("muralist")
WAITING = "waiting for the other processes"
SAVING = "saving"  # a process that reports this needs no other process, and is left to finish when another one dies
RESUME_HINT = "Run the same command to resume from the last checkpoint."
_MAX_MESSAGE = 600  # characters; keeps a record below 4 KB, which a single write puts down intact
_MAX_LINES = 8
_MANY_RANKS = 16


@dataclass(frozen=True)
class WatchdogTiming:
    """How often a process writes its file and how long it waits for the others, in seconds."""

    beat: float = 2.0
    suspicion: float = 15.0  # a main thread that reported nothing for so long is taken to wait for the others
    silence: float = 40.0  # another process whose file has not changed for so long is frozen or disconnected
    exit_delay: float = 30.0  # the longest time that `before_exit`, such as writing a checkpoint, may take


Left = Literal["", "failed", "lost contact"]


@dataclass(frozen=True)
class Heartbeat(ProcessIdentity):
    """The content of a process's file."""

    rank: int
    doing: str
    step: int | None
    for_seconds: int  # since the main thread reported this
    left: Left  # why the process is about to end; empty while it runs
    message: str
    written: str
    beat: int
    launch: str  # what the processes of one launch have in common

    def __str__(self) -> str:
        return f"Rank {self.rank} on {self.host} (process {self.process})"

    @property
    def activity(self) -> str:
        """What the main thread does, and at which step."""
        return self.doing if self.step is None else f"{self.doing}, step {self.step}"


_HEARTBEAT = TypeAdapter(Heartbeat)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a process's file; None where it is torn or not a heartbeat."""
    try:
        return _HEARTBEAT.validate_python(read_beat(path))
    except ValidationError:
        return None


class Peer:
    """Another process, observed through its file."""

    def __init__(self, rank: int, path: Path, launch: str, longest_gap: float) -> None:
        self.rank, self.path, self.launch = rank, path, launch
        self.heartbeat: Heartbeat | None = None
        self.state: Literal["never reported", "running", "ended", "dead", "failed", "lost contact"] = "never reported"
        self.silent, self.settled = BeatAge(longest_gap), BeatAge(longest_gap)
        # An earlier launch with the same port may have left a file, which counts only once it has changed.
        self.found_at_start: Heartbeat | None = None
        with suppress(OSError):
            self.found_at_start = read_heartbeat(path)

    def update(self, all_started: bool) -> None:
        """Read the file; one that disappeared belonged to a process that ended normally."""
        missing, found = False, None
        try:
            found = read_heartbeat(self.path)
        except FileNotFoundError:
            missing = True
        if found and found.launch == self.launch and found != self.found_at_start:
            self.heartbeat = found
        if missing and (self.heartbeat or all_started):
            self.state = "ended"
        elif self.heartbeat:
            self.state = self.heartbeat.left or ("dead" if self.heartbeat.is_dead() else "running")
        else:
            self.state = "never reported"
        born = self.heartbeat and self.heartbeat.born
        # A missing file is never silent: each observation gets a value of its own.
        self.silent.observe(object() if missing else self.heartbeat and (self.heartbeat.beat, born))
        self.settled.observe((self.state, born))

    def exit_report(self) -> str:
        """Describe what happened to the process."""
        if self.heartbeat is None:
            return f"Rank {self.rank} has ended." if self.state == "ended" else self._never_reported()
        who, message = str(self.heartbeat), self.heartbeat.message
        ago = f", at least {format_duration(self.silent.seconds)} ago" if self.silent.seconds >= 1 else ""
        last = f"Last report{ago}: {self.heartbeat.activity}."
        return {
            "failed": f"{who} failed: {message}",
            "lost contact": f"{who} stopped earlier: {message}",
            "dead": f"{who} is dead: it crashed or was killed, possibly for lack of memory. {last}",
            "ended": f"{who} has ended. {last}",
        }.get(self.state, f"{who} does not respond: it or its machine is frozen, dead or disconnected. {last}")

    def _never_reported(self) -> str:
        address = ":".join(filter(None, (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))))
        unreachable = f"could not reach {address} or " if address else ""
        text = f"Rank {self.rank} never reported to {self.path.parent}: it was not started or {unreachable}does not see"
        old = self.found_at_start
        if not old or old.launch != self.launch:
            return f"{text} this folder."
        says = old.message or old.activity
        return f"{text} this folder. Its file, possibly of an earlier start, says: {says} ({old.written})."


class _Activity(NamedTuple):
    doing: str
    step: int | None
    since: float


class Watchdog:
    """Writes this process's heartbeat and watches the others', from before they connect until they have left."""

    def __init__(
        self, folder: Path, rank: int, size: int, timeout: float, timing: WatchdogTiming | None = None
    ) -> None:
        self.folder, self.rank, self.size, self.timeout = folder, rank, size, timeout
        self.timing = timing or WatchdogTiming()
        self._certainty = 2.5 * self.timing.beat  # a time in which a living process writes at least twice
        self.before_exit: Callable[[], object] | None = None  # called before the watchdog ends this process
        self._path, self._identity = folder / f"rank_{rank}.json", ProcessIdentity.current()
        # Without MASTER_ADDR, which on the first host may be localhost.
        names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
        self._launch = "/".join(os.environ.get(name, "") for name in names)
        self._activity = _Activity("starting", None, time.monotonic())
        self._stuck = BeatAge(2 * self.timing.beat)
        self._beat, self._message, self._writable = 0, "", True
        self._left: Left = ""
        # Every rank reads every file: with many ranks less often, to spare the file server.
        self._read_every = 0.9 * self.timing.beat * max(1.0, size / _MANY_RANKS)
        self._last_read = time.monotonic()
        self._peers: list[Peer] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Watchdog:
        others = [rank for rank in range(self.size) if rank != self.rank]
        gap = 2 * self._read_every
        self._peers = [Peer(rank, self.folder / f"rank_{rank}.json", self._launch, gap) for rank in others]
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._left:
            self.failed(str(error) or type(error).__name__)
        self._ended.set()
        self._thread.join(3 * self.timing.beat)
        if self._thread.is_alive():
            return  # it hangs in the file system
        if self._left and self.size > 1:
            self._write()  # the file stays for the others to read
        else:
            with suppress(OSError):
                self._remove_files()

    def report(self, doing: str, step: int | None = None) -> None:
        """Note what the main thread does from now on; the thread writes it to the file."""
        self._activity = _Activity(doing, self._activity.step if step is None else step, time.monotonic())

    def failed(self, message: str) -> None:
        """Write down why this process ends, for the others to report."""
        self._leave("failed", message)

    def diagnosis(self) -> str:
        """Describe which processes are missing and what they did last; waits a few seconds for it to show.

        Called by a process that lost contact: it writes the result down for the others and is about to end.
        """
        deadline = time.monotonic() + 3 * self.timing.beat
        try:
            self._read_peers()
            while not (lines := self._missing()) and time.monotonic() < deadline:
                time.sleep(self._read_every / 8)
                self._read_peers()
            lines = lines or self._missing(silence=self._certainty) or self._stragglers()
        except OSError as error:
            lines = [f"The files in {self.folder}, which would tell more, cannot be read: {error.strerror}."]
        if not self._left:
            self._leave("lost contact", " ".join(lines))
        self.report("leaving")
        return "\n".join(lines)

    def _run(self) -> None:
        while not self._ended.wait(self.timing.beat):
            try:
                self._tick()
            except Exception as error:  # whatever it is, training goes on
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                _warn_once("Cannot watch the other processes", reason)

    def _tick(self) -> None:
        activity = self._activity
        stuck = self._stuck.observe(activity)
        self._beat += 1
        self._write()
        if self.size == 1 or stuck < min(self._certainty, self.timeout):
            return
        if time.monotonic() - self._last_read >= self._read_every:
            self._read_peers()
        # Where this process cannot write its own file, the disk may be what keeps the others' files from changing.
        lines = self._missing(self.timing.silence if self._writable else math.inf, self._certainty)
        if lines and stuck >= self.timing.suspicion and activity.doing != SAVING:
            self._exit(activity, "Another process is missing", lines)
        elif stuck >= self.timeout:
            late = f"No progress for {format_duration(stuck)} (--dist_timeout)"
            # A timeout may be shorter than the silence after which a process counts as frozen.
            silent = self._missing(self._certainty, self._certainty) if self._writable else []
            self._exit(activity, late, lines or silent or self._stragglers())

    def _read_peers(self) -> None:
        with self._lock:
            self._last_read = time.monotonic()
            for peer in self._peers:
                peer.update(all_started=self._activity.step is not None)

    def _missing(self, silence: float = math.inf, settled: float = 0.0) -> list[str]:
        """One line on each missing process; on those that ended because of others only if no cause is visible."""
        with self._lock:
            certain = [peer for peer in self._peers if peer.settled.seconds >= settled]
            causes = [peer for peer in certain if peer.state in ("failed", "dead")]
            causes += [peer for peer in certain if peer.state == "running" and peer.silent.seconds >= silence]
            causes = causes or [peer for peer in certain if peer.state == "lost contact"]
            return _first_lines([peer.exit_report() for peer in causes])

    def _stragglers(self) -> list[str]:
        """Lines on the processes that the others wait for, where none is known to be dead."""
        with self._lock:
            absent = [peer.exit_report() for peer in self._peers if peer.state in ("never reported", "ended")]
            everyone = [self._heartbeat(), *(peer.heartbeat for peer in self._peers if peer.heartbeat)]
        steps = [-1 if heartbeat.step is None else heartbeat.step for heartbeat in everyone]
        late = [heartbeat for heartbeat, step in zip(everyone, steps, strict=True) if step == min(steps)]
        late = [heartbeat for heartbeat in late if heartbeat.doing != WAITING] or late
        if len(late) == len(everyone):
            same = f"All {self.size} processes run and report the same: {late[0].activity}."
            return _first_lines(absent) or [f"{same} The network between them may be broken."]
        for one in late:
            absent.append(f"{one} keeps the others waiting: {one.activity}, for {format_duration(one.for_seconds)}.")
        return _first_lines(absent)

    def _exit(self, activity: _Activity, what: str, lines: list[str]) -> None:
        """End this process, whose main thread is stuck in an activity where no exception reaches it."""
        if self._ended.is_set() or self._activity is not activity:
            return  # it moved on
        text = "\n".join((f"{what}: rank {self.rank} stops.", *lines, RESUME_HINT))
        if self._left == "failed":
            text = self._message  # it failed by itself and hangs on its way out
        elif not self._left:
            self._leave("lost contact", " ".join(lines))

        def log_and_flush() -> None:
            log.error(text)
            for stream in (*log.handlers, sys.stdout, sys.stderr):
                stream.flush()

        # In threads of their own: a lock that the stuck main thread holds must not keep this process alive.
        for job, seconds in ((self.before_exit, self.timing.exit_delay), (log_and_flush, 5.0)):
            if job is not None:
                helper = threading.Thread(target=_ignore_errors, args=(job,), daemon=True)
                helper.start()
                helper.join(seconds)
        os._exit(EXIT_LOST_PEERS)

    def _leave(self, how: Left, message: str) -> None:
        self._left, self._message = how, " ".join(message.split())[:_MAX_MESSAGE]
        self._write()

    def _heartbeat(self) -> Heartbeat:
        doing, step, since = self._activity
        fields: dict[str, Any] = asdict(self._identity) | {"rank": self.rank, "doing": doing, "step": step}
        fields |= {"for_seconds": round(time.monotonic() - since), "left": self._left, "message": self._message}
        fields |= {"written": time.strftime("%Y-%m-%d %H:%M:%S"), "beat": self._beat, "launch": self._launch}
        return Heartbeat(**fields)

    def _write(self) -> None:
        if not self._lock.acquire(timeout=self.timing.beat):
            return  # the file system hangs; the thread that holds the lock writes next
        try:
            write_beat(self._path, asdict(self._heartbeat()))
            self._writable = True
        except OSError as error:
            self._writable = False
            what = f"Cannot write {self._path}, from which the other processes see that this one is alive"
            _warn_once(what, error.strerror)
        finally:
            self._lock.release()

    def _remove_files(self) -> None:
        """Remove this process's file; rank 0 also removes files of dead processes, as of earlier launches."""
        for path in self.folder.glob("rank_*.json") if self.rank == 0 else (self._path,):
            found, me = read_heartbeat(path), self._identity
            mine = found and (found.process, found.born, found.space) == (me.process, me.born, me.space)
            if found and (mine or found.left or found.is_dead()):
                path.unlink(missing_ok=True)
        self.folder.rmdir()  # succeeds for the last process


@cache
def _warn_once(what: str, reason: str) -> None:
    log.warning("%s: %s. Training goes on.", what, reason)


def _ignore_errors(job: Callable[[], object]) -> None:
    with suppress(Exception):
        job()


def _first_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"And {more} more."] if more > 0 else lines
