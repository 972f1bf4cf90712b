"""The output folder: who works in it, what is already there, what the command that made it said."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from muralist.data import ledger_lines
from muralist.errors import UserError
from muralist.generate import ledger
from muralist.generate.ledger import Header
from muralist.generate.plan import Plan
from muralist.runfolder import is_full, open_own, write_atomically

_FRESH = 60.0  # seconds for which the lock of another machine, where the disk knows no locks, is believed
_BEAT = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP)
_FAILURES = "failed_prompts_gpu"
_OTHER_FOLDER = "Choose another --output_dir, or give --overwrite to begin anew in this one."


@dataclass(frozen=True)
class OutputFolder:
    """Where everything of one table goes."""

    root: Path

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.root / "ledger.jsonl"

    @property
    def work(self) -> Path:
        """What exists only while a command runs: the workers' lines and signs of life."""
        return self.root / ".ledger"

    def shard(self, label: str) -> Path:
        """A worker's lines."""
        return self.work / f"gpu{label}.jsonl"

    @property
    def progress(self) -> Path:
        """How far each worker of the running command is, for those who watch."""
        return self.work / "progress.beat"

    @property
    def exact(self) -> Path:
        """In fast mode: some of the pictures as exact mode makes them; hidden, because they are not rows of their own."""
        return self.root / ".exact"

    def failures(self, label: str) -> Path:
        """The prompts a worker could not draw."""
        return self.root / f"{_FAILURES}{label}.txt"

    def create(self) -> None:
        """Make the folder, or say why it cannot be made."""
        if self.work.is_symlink():  # files in it are removed
            raise UserError(f"{self.work} is a link, which nothing here made.", fix="Remove it.")
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(error, self.root) from None

    def sweep(self) -> None:
        """Take up what a killed command left: its lines go into the ledger, files it was writing away."""
        if self.ledger.is_file():
            ledger.merge(self.ledger, self.work)
        # Lines that belong to no ledger say nothing about this command's pictures.
        self.remove_unfinished()
        for path in (*self.work.glob(".*.tmp"), *self.work.glob("*.beat"), *self.work.glob("*.jsonl")):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file the old ledger names, and the ledger last: cut off in the middle, it can be done again."""
        ledgers = [*self.work.glob("*.jsonl"), self.ledger]
        shutil.rmtree(self.exact, ignore_errors=True)
        for path in ledgers:
            for line in ledger_lines.read_lines(path):
                # A name out of a file is not trusted to stay in the folder, nor to be one of a file.
                with suppress(OSError, ValueError):
                    (self.root / Path(line["file"]).name).unlink()
        for path in (*self.root.glob(f"{_FAILURES}*.txt"), *ledgers):
            path.unlink(missing_ok=True)

    def has_pictures(self) -> bool:
        """Whether a ledger, or a worker's lines that are not in it yet, name a picture."""
        files = (self.ledger, *self.work.glob("*.jsonl"))
        return any(line["status"] == ledger.DONE for path in files for line in ledger.read_lines(path))

    def check_settings(self, settings: dict[str, Any], header: Header) -> None:
        """Refuse to mix pictures made differently."""
        names = sorted(settings.keys() | header.settings.keys())
        changed = [name for name in names if settings.get(name) != header.settings.get(name)]
        if not changed:
            return
        before, now = ({name: made.get(name, "default") for name in changed} for made in (header.settings, settings))
        told = "; ".join(f"{name} {before[name]!s:.60} -> {now[name]!s:.60}" for name in changed)
        raise UserError(
            f"{self.root} holds pictures made with other settings.",
            f"Changed: {told}.",
            f"Run the command as it was, or: {_OTHER_FOLDER[0].lower()}{_OTHER_FOLDER[1:]}",
        )

    def check_unclaimed(self, plan: Plan) -> None:
        """Refuse pictures that no ledger vouches for, where they have the names of those to be made."""
        taken = {entry.name for entry in os.scandir(self.root) if entry.name.endswith(f".{plan.extension}")}
        samples = plan.samples(np.arange(len(plan))) if taken else iter(())
        if file := next((sample.file for sample in samples if sample.file in taken), None):
            raise UserError(
                f"{self.root} holds {file}, but no ledger that says how it was made.",
                "It cannot be told whether it belongs to this command.",
                "Choose another --output_dir, or move these pictures away.",
            )

    def finished(self, plan: Plan) -> np.ndarray:
        """Which samples exist whole: bool, by number."""
        last = np.full(
            len(plan), -1, dtype=np.int64
        )  # place of the last line about each sample: lines would fill memory
        for place, line in ledger_lines.placed_lines(self.ledger):
            if 0 <= line["index"] < len(plan.table) and 0 <= line["copy"] < plan.copies:
                last[line["index"] * plan.copies + line["copy"]] = place
        known = np.flatnonzero(last >= 0)
        done = np.zeros(len(plan), dtype=bool)
        for sample, line in zip(
            plan.samples(known), ledger_lines.lines_at(self.ledger, last[known].tolist()), strict=True
        ):
            if line["status"] != ledger_lines.DONE:
                continue  # a row that failed may have been put right
            if line["key"] != sample.key:
                now = sample._asdict()
                names = ("id", "seed", "prompt", "negative_prompt", "height", "width")
                changed = [
                    f"{name} {line.get(name)!r:.80} -> {now[name]!r:.80}"
                    for name in names
                    if line.get(name) != now[name]
                ]
                raise UserError(
                    f"Row {sample.row + 1} of the table is not the one from which {self.root} was made.",
                    f"Changed: {'; '.join(changed)}.",
                    _OTHER_FOLDER,
                )
            done[sample.number] = ledger.is_whole(self.root / sample.file, line)
        return done

    @contextmanager
    def locked(self, job: str, shared: bool = False) -> Iterator[Lock]:
        """Hold the folder: a second command on it is refused; the lock dies with its process.

        Ranks of one command hold it `shared`: while one of them lives, it is held.
        """
        path = self.root / "lock"
        with ExitStack() as stack:
            held = False
            while not held:
                try:
                    file = stack.enter_context(open_own(path, "a+"))
                except OSError as error:
                    raise cannot_write(error, path) from None
                lock = Lock(file, path, job)
                if shared:
                    lock.share()
                else:
                    lock.take()
                # Its last owner may have removed the file in between, and a lock on a file that is gone holds nobody off.
                held = lock.is_there()
            try:
                yield lock
            finally:
                if lock.is_there() and lock.is_ours_alone():
                    with suppress(OSError):
                        path.unlink()

    def remove_unfinished(self) -> None:
        """Remove what workers that are gone were writing."""
        for path in self.root.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """Merge the workers' lines and leave nothing else behind."""
        if self.ledger.is_file():
            ledger.merge(self.ledger, self.work)
        shutil.rmtree(self.work, ignore_errors=True)


@dataclass
class Lock:
    """Names host, process, job and last sign of life of the command that works in a folder."""

    file: IO[str]
    path: Path
    job: str
    _beaten: float = 0.0

    def take(self) -> None:
        """Become the owner, or say who is."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise self._refusal() from None
            owner = self._owner()  # a disk without locks: what the file says must do
            if owner and owner["host"] != socket.gethostname() and time.time() - owner["heartbeat"] < _FRESH:
                raise self._refusal() from None
        self.beat()

    def share(self) -> None:
        """Hold it together with the other ranks of this command."""
        with suppress(OSError):  # a disk without locks
            fcntl.lockf(self.file, fcntl.LOCK_SH)

    def is_there(self) -> bool:
        """Whether its file still has its name: if not, the folder was deleted, and what is there now may be another's."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except OSError:
            return False

    def is_ours_alone(self) -> bool:
        """Whether no other rank holds it."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _NO_LOCKS
        return True

    def beat(self) -> None:
        """Say that the owner is alive; most calls do nothing."""
        if time.monotonic() - self._beaten < _BEAT and self._beaten:
            return
        self._beaten = time.monotonic()
        told = {"host": socket.gethostname(), "pid": os.getpid(), "job": self.job, "heartbeat": time.time()}
        try:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(json.dumps(told) + "\n")
            self.file.flush()
        except OSError as error:
            raise cannot_write(error, self.path) from None

    def _owner(self) -> dict[str, Any]:
        """Host, process, job and last sign of life; nothing where the file does not tell all of it."""
        try:
            self.file.seek(0)
            said = json.loads(self.file.read())
            known = isinstance(said["host"], str) and isinstance(said["pid"], int) and said["heartbeat"] < 2.0**62
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return said if known else {}

    def _refusal(self) -> UserError:
        owner = self._owner()
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        return UserError(
            f"{self.path.parent} is being filled by {who}.", fix="Wait for it, stop it, or give another --output_dir."
        )


def write_failures(folder: OutputFolder, labels: list[str]) -> int:
    """One file per worker of this command with what it could not draw, empty when nothing failed; returns how many."""
    failed: dict[tuple[int, int], dict[str, Any]] = {}
    for line in ledger_lines.read_lines(folder.ledger):
        sample = line["index"], line["copy"]
        failed.pop(sample, None)
        if line["status"] == ledger_lines.FAILED:
            failed[sample] = line
    # Files of workers that this command does not use may tell of failures that are mended by now.
    earlier = [path.stem.removeprefix(_FAILURES) for path in folder.root.glob(f"{_FAILURES}*.txt")]
    by_label: dict[str, list[str]] = {label: [] for label in (*labels, *earlier)}
    for line in failed.values():
        cells = (line["id"], line["seed"], line["prompt"], line["error"])
        told = "\t".join(" ".join(str(cell).split()) for cell in cells)
        by_label.setdefault(line["gpu"], []).append(told + "\n")
    for label, lines in by_label.items():
        write_atomically(folder.failures(label), "".join(lines).encode(errors="replace"))
    return len(failed)


def cannot_write(error: OSError, folder: Path) -> UserError:
    """The sentence for a disk that takes no more pictures."""
    if is_full(error):
        return UserError(
            f"No space left on the disk that holds {folder}.",
            "Every picture that the ledger names is whole.",
            "Free some space and run the same command again: it goes on.",
        )
    return UserError(f"Cannot write {error.filename or folder}: {error.strerror}.", fix="Check that it may be written.")
