"""What each process is doing, in a file a person can read, and an end with a reason for one that waits for a dead one.

    heartbeats/rank_0.json      written in place every two seconds; gone when the process ended in good order

A process whose main thread is stuck looks at the others' files from a thread of its own, so it needs nothing of the
network that may be what is broken. Nothing here may hurt training: what goes wrong is said once, and training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from types import TracebackType

from muralist.errors import STATUS_LOST_OTHERS
from muralist.words import duration

log = logging.getLogger("muralist")
WAITING = "waiting for the other processes"
SAVING = "saving"  # while it does this, a process is not ended because another one died: it needs nobody for it
_BLOCK = 512  # a record fills whole blocks, so that its length stays the same and a write never leaves a rest behind
_LONGEST_MESSAGE = 600  # characters; keeps a record below 4 KB, which one write puts down whole
_MOST_LINES = 8
_CROWD = 16
_FAILED, _LOST_OTHERS = "failed", "lost contact"
_News = tuple[str, int | None, float]  # what the main thread does, at which step, since when


@dataclass(frozen=True)
class Pace:
    """How often a process writes its file and how long it bears with the others, in seconds."""

    beat: float = 2.0
    suspicion: float = 15.0
    """A main thread that reported nothing for so long is taken to wait for the others."""
    silence: float = 40.0
    """Another process whose file has not changed for so long, watched all the while, is frozen or cut off."""
    last_words: float = 30.0
    """How long the end may be put off for what must still be done, a checkpoint under way say."""

    @property
    def certainty(self) -> float:
        """So long a living process would have written again."""
        return 2.5 * self.beat


def rank_and_size() -> tuple[int, int]:
    """This process's number and how many there are, as the launcher says, before they have met."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _launch() -> str:
    """What the processes of one launch have in common; not the address, which on the first machine may be localhost."""
    known = (os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    return "/".join(known)


def _process_space() -> str:
    """Processes that say the same here see each other's numbers: one kernel and one container, whatever the host name."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _birth(process: int) -> str:
    """When a process began, in the kernel's count, so that a number given anew is told apart; empty when it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # nothing else, such as too many open files, means that it is gone
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has only its exit status left


@dataclass(frozen=True)
class Record:
    """What a process's file says."""

    rank: int
    host: str
    process: int
    doing: str
    step: int | None
    for_seconds: int
    """How long ago the main thread said so."""
    left: str
    """How it ended, where it could still say so."""
    message: str
    written: str
    beat: int
    launch: str
    born: str
    space: str

    def encoded(self) -> bytes:
        """The record as it is written: whole blocks, readable."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        return text[:-1].ljust(math.ceil(len(text) / _BLOCK) * _BLOCK - 1) + b"\n"

    def name(self) -> str:
        """The process, for people."""
        return f"Rank {self.rank} on {self.host} (process {self.process})"

    def said(self) -> str:
        """What its main thread is at."""
        return self.doing if self.step is None else f"{self.doing}, step {self.step}"


_KINDS = {
    field.name: {"int": (int,), "str": (str,)}.get(str(field.type), (int, type(None))) for field in fields(Record)
}


def _read(path: Path) -> Record | None:
    """A process's record; None when it is torn, even on another try."""
    for _ in range(3):
        try:
            record = Record(**json.loads(path.read_bytes()))
            if all(isinstance(getattr(record, name), kinds) for name, kinds in _KINDS.items()):
                return record
        except (ValueError, TypeError, RecursionError):
            pass
        time.sleep(0.02)
    return None


class Fate(Enum):
    """What became of another process, as far as its file tells."""

    UNHEARD = "never reported"
    RUNNING = "running"
    LEFT = "left in good order"
    FAILED = "failed and said why"
    GONE = "gone without a word"
    LOST_OTHERS = "gave up because of others"


class _Peer:
    """Another process, as this one sees its file change: beats are counted, clocks of other hosts never compared."""

    def __init__(self, rank: int, path: Path, launch: str, space: str) -> None:
        self.rank, self.path, self.launch, self.space = rank, path, launch, space
        self.record: Record | None = None
        self.fate = Fate.UNHEARD
        self.silent = 0.0  # seconds of watching without a new beat
        self.settled = 0.0  # seconds of watching since its fate last changed
        self.before: Record | None = None
        """What its file said when this process began. An earlier launch with the same port may have left it, so it counts
        only once it has changed; a living process changes it with every beat."""
        with suppress(OSError):
            self.before = _read(path)

    def look(self, watched: float, everyone_was_here: bool) -> None:
        """Read its file, `watched` seconds after the last look."""
        last = self.record
        try:
            found = _read(self.path)
            missing = False
        except FileNotFoundError:
            found, missing = None, True
        if found and found.launch == self.launch and found != self.before:
            self.record = found
        fate = self._fate(missing and (last is not None or everyone_was_here))
        beats = last is None or self.record is None or (self.record.beat, self.record.born) != (last.beat, last.born)
        self.silent = 0.0 if beats or missing else self.silent + watched
        same = last and self.record and fate == self.fate and self.record.born == last.born
        self.settled = self.settled + watched if same else 0.0
        self.fate = fate

    def _fate(self, removed: bool) -> Fate:
        if removed:
            return Fate.LEFT
        if self.record is None:
            return Fate.UNHEARD
        if self.record.left:
            return Fate.FAILED if self.record.left == _FAILED else Fate.LOST_OTHERS
        return Fate.GONE if _is_gone(self.record, self.space) else Fate.RUNNING

    def obituary(self) -> str:
        """What became of it, in a sentence or two."""
        if self.record is None:
            return f"Rank {self.rank} has left." if self.fate is Fate.LEFT else self._never_reported()
        ago = f", at least {duration(self.silent)} ago" if self.silent >= 1 else ""
        name, said = self.record.name(), f"The last it said{ago}: {self.record.said()}."
        if self.fate is Fate.FAILED:
            return f"{name} failed: {self.record.message}"
        if self.fate is Fate.LOST_OTHERS:
            return f"{name} gave up before: {self.record.message}"
        if self.fate is Fate.GONE:
            return f"{name} is gone: it crashed or was killed, for want of memory perhaps. {said}"
        if self.fate is Fate.LEFT:
            return f"{name} has left. {said}"
        return f"{name} is silent: it or its machine is frozen, dead or cut off. {said}"

    def _never_reported(self) -> str:
        meeting = ":".join(filter(None, (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))))
        reasons = ["it was not started", f"could not reach {meeting}" if meeting else "", "does not see this folder"]
        told = f"Rank {self.rank} never reported to {self.path.parent}: {' or '.join(filter(None, reasons))}."
        if self.before and self.before.launch == self.launch:
            said = self.before.message or self.before.said()
            told += f" Its file, which may be of an earlier start, says: {said} ({self.before.written})."
        return told


def _is_gone(record: Record, space: str) -> bool:
    """Whether a process whose number means something here no longer exists."""
    return bool(space) and record.space == space and _birth(record.process) != record.born


class Heartbeat:
    """Every training process holds one from before it meets the others until it has left them."""

    def __init__(self, folder: Path, rank: int, size: int, timeout: float, pace: Pace | None = None) -> None:
        self.folder, self.rank, self.size, self.timeout = folder, rank, size, timeout
        self.pace = pace or Pace()
        self.before_exit: Callable[[], object] | None = None
        """Called before this process is ended for want of another, for at most `Pace.last_words` seconds."""
        self._path = self._path_of(rank)
        self._host, self._launch, self._space = socket.gethostname(), _launch(), _process_space()
        self._born = _birth(os.getpid())
        self._news: _News = ("starting", None, time.monotonic())
        self._seen: _News = self._news
        self._stuck = 0.0
        self._beat, self._ticked, self._looked = 0, time.monotonic(), time.monotonic()
        self._left, self._message, self._writable = "", "", True
        # Everyone looks at everyone: in a crowd less often, for the file server's sake.
        self._look_every = 0.9 * self.pace.beat * max(1.0, size / _CROWD)
        self._complaints: set[str] = set()
        self._peers: list[_Peer] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._peers = [_Peer(rank, self._path_of(rank), self._launch, self._space) for rank in others]
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._left:
            self.failed(str(error) or type(error).__name__)
        self._ended.set()
        self._thread.join(3 * self.pace.beat)
        if self._thread.is_alive():
            return  # stuck in the file system; this process does not wait for that
        if self._left and self.size > 1:
            self._write()  # stays for the others to read
            return
        with suppress(OSError):
            self._take_away()

    def report(self, doing: str, step: int | None = None) -> None:
        """Say what the main thread does from now on; costs nothing, the thread writes it down."""
        self._news = (doing, self._news[1] if step is None else step, time.monotonic())

    def failed(self, message: str) -> None:
        """Leave word why this process ends, so that the others need not guess."""
        self._leave(_FAILED, message)

    def diagnosis(self) -> str:
        """Which processes are missing and what they did last, for a person; waits a few seconds for it to show.

        For a process that gives up because the others are out of reach: they will pass on what it found.
        """
        deadline = time.monotonic() + 3 * self.pace.beat
        try:
            self._look()
            while not (lines := self._missing()) and time.monotonic() < deadline:
                time.sleep(self._look_every / 8)
                self._look()
            lines = lines or self._missing(silence=self.pace.certainty) or self._behind()
        except OSError as error:
            lines = [f"The files in {self.folder}, which would tell more, cannot be read: {error.strerror}."]
        if not self._left:
            self._leave(_LOST_OTHERS, " ".join(lines))
        self.report("leaving")
        return "\n".join(lines)

    # What follows runs in the thread, but for what the methods above call.

    def _run(self) -> None:
        while not self._ended.wait(self.pace.beat):
            try:
                self._tick()
            except Exception as error:  # whatever it is, training goes on
                self._complain("Cannot watch the other processes", error)

    def _tick(self) -> None:
        now = time.monotonic()
        # Time in which this process itself was frozen (a suspended job, a file server that hung) says nothing of others.
        watched, self._ticked = min(now - self._ticked, 2 * self.pace.beat), now
        news = self._news
        self._stuck, self._seen = (self._stuck + watched if news is self._seen else 0.0), news
        self._beat += 1
        self._write()
        if self.size > 1 and self._stuck >= min(self.pace.certainty, self.timeout):
            self._watch()

    def _watch(self) -> None:
        # Where this process cannot write, the others' silence may be the disk's.
        silence = self.pace.silence if self._writable else math.inf
        if time.monotonic() - self._looked >= self._look_every:
            self._look()
        lines = self._missing(silence, self.pace.certainty)
        if lines and self._stuck >= self.pace.suspicion and self._seen[0] != SAVING:
            self._end("Another process is missing", lines)
        elif self._stuck >= self.timeout:
            self._end(f"No progress for {duration(self._stuck)} (--dist_timeout)", lines or self._behind())

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            watched, self._looked = min(now - self._looked, 2 * self._look_every), now
            for peer in self._peers:
                peer.look(watched, everyone_was_here=self._news[1] is not None)

    def _missing(self, silence: float = math.inf, settled: float = 0.0) -> list[str]:
        """A line on each process that is gone; those that gave up because of others only when it is not seen for whom."""
        with self._lock:
            sure = [peer for peer in self._peers if peer.settled >= settled]
            first = [peer for peer in sure if peer.fate in (Fate.FAILED, Fate.GONE)]
            first += [peer for peer in sure if peer.fate is Fate.RUNNING and peer.silent >= silence]
            return _few([peer.obituary() for peer in first or [p for p in sure if p.fate is Fate.LOST_OTHERS]])

    def _behind(self) -> list[str]:
        """Who keeps the others waiting, when none is known to be dead."""
        with self._lock:
            absent = [peer.obituary() for peer in self._peers if peer.fate in (Fate.UNHEARD, Fate.LEFT)]
            everyone = [self._record(), *(peer.record for peer in self._peers if peer.record)]
        lowest = min(_steps(record) for record in everyone)
        late = [record for record in everyone if _steps(record) == lowest]
        late = [record for record in late if record.doing != WAITING] or late
        rarest = min(Counter(record.doing for record in late).items(), key=lambda item: item[1])[0]
        late = [record for record in late if record.doing == rarest]
        waited_for = [
            f"{record.name()} keeps the others waiting: {record.said()}, for {duration(record.for_seconds)}."
            for record in late
        ]
        if len(late) < len(everyone):
            return _few(absent + waited_for)
        network = "The network between them may be broken."
        return _few(absent) or [f"All {self.size} processes run and say the same: {late[0].said()}. {network}"]

    def _end(self, what: str, lines: Sequence[str]) -> None:
        """Say why, and end this process: its main thread is stuck where no exception reaches it."""
        if self._ended.is_set() or self._news is not self._seen:
            return  # it moved on
        fix = "The same command goes on from the last checkpoint."
        # A process that failed by itself and hangs on its way out says its own error, not what came of it.
        said = self._message if self._left == _FAILED else "\n".join((f"{what}: rank {self.rank} stops.", *lines, fix))
        if not self._left:
            self._leave(_LOST_OTHERS, " ".join(lines))
        # In threads of their own: a lock that the stuck main thread holds must not keep this process alive.
        for job, patience in ((self.before_exit, self.pace.last_words), (lambda: _say_last(said), 5.0)):
            if job is not None:
                helper = threading.Thread(target=_quietly, args=(job,), daemon=True)
                helper.start()
                helper.join(patience)
        os._exit(STATUS_LOST_OTHERS)

    def _leave(self, how: str, message: str) -> None:
        self._left, self._message = how, " ".join(message.split())[:_LONGEST_MESSAGE]
        self._write()

    def _record(self) -> Record:
        doing, step, since = self._news
        return Record(
            rank=self.rank,
            host=self._host,
            process=os.getpid(),
            doing=doing,
            step=step,
            for_seconds=round(time.monotonic() - since),
            left=self._left,
            message=self._message,
            written=time.strftime("%Y-%m-%d %H:%M:%S"),
            beat=self._beat,
            launch=self._launch,
            born=self._born,
            space=self._space,
        )

    def _write(self) -> None:
        """In place, not renamed: on NFS a renamed file may show up a minute later, an opened one is always looked up."""
        if not self._lock.acquire(timeout=self.pace.beat):
            return  # the file system hangs; the thread that holds the lock writes next
        try:
            _overwrite(self._path, self._record().encoded())
            self._writable = True
        except OSError as error:
            self._writable = False
            self._complain(f"Cannot write {self._path}, which tells the other processes what this one does", error)
        finally:
            self._lock.release()

    def _take_away(self) -> None:
        """Remove this process's file; rank 0 also those of processes known to be gone, of earlier launches say."""
        for path in self.folder.glob("rank_*.json") if self.rank == 0 else (self._path,):
            record = _read(path)
            mine = record and (record.process, record.born, record.space) == (os.getpid(), self._born, self._space)
            if record and (mine or record.left or _is_gone(record, self._space)):
                path.unlink(missing_ok=True)
        self.folder.rmdir()  # the last one

    def _path_of(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def _complain(self, what: str, error: Exception) -> None:
        if what not in self._complaints:
            self._complaints.add(what)
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            log.warning("%s: %s. Training goes on.", what, reason)


def _overwrite(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o666)
    try:
        os.pwrite(descriptor, data, 0)
        if os.fstat(descriptor).st_size > len(data):
            os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _steps(record: Record) -> int:
    return -1 if record.step is None else record.step


def _few(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"And {more} more."] if more > 0 else list(lines)


def _quietly(job: Callable[[], object]) -> None:
    with suppress(Exception):
        job()


def _say_last(text: str) -> None:
    log.error(text)
    for handler in log.handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
