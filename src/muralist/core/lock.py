"""The lock of a run or an output folder: a file that names the host, process, job and last heartbeat of its owner.

It is a POSIX lock (`fcntl.lockf`), which NFS and Lustre know and which ends with its process. `flock`, and the package
`filelock`, which uses it, would leave the lock with forked data loader processes for seconds after their trainer was
killed. On a disk without locks, the owner's heartbeat in the file decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from muralist.core.errors import UserError

_FRESH = 60.0  # seconds for which the heartbeat of another machine counts, where the disk has no locks
_BEAT = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP)

InUse = Callable[[str], UserError]
"""Makes the error that a second command gets, from a description of the owner."""


@dataclass
class FileLock:
    """An open lock file."""

    file: IO[str]
    path: Path
    in_use: InUse
    _last_beat: float = 0.0

    def acquire(self) -> None:
        """Become the only owner, or raise `in_use` with the owner's name."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise self.in_use(self.owner_name()) from None
            owner = self._owner()
            if owner and owner["host"] != socket.gethostname() and time.time() - owner["heartbeat"] < _FRESH:
                raise self.in_use(self.owner_name()) from None
        self.beat()

    def share(self) -> None:
        """Hold the lock together with the other ranks of this command."""
        with suppress(OSError):  # a disk without locks
            fcntl.lockf(self.file, fcntl.LOCK_SH)

    def is_current(self) -> bool:
        """Return whether the file still has its name: if not, it was deleted, and another command may hold a new one."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except OSError:
            return False

    def is_exclusive(self) -> bool:
        """Return whether no other rank holds the lock."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _NO_LOCKS
        return True

    def beat(self) -> None:
        """Write the owner and the time into the file; most calls do nothing."""
        if self._last_beat and time.monotonic() - self._last_beat < _BEAT:
            return
        self._last_beat = time.monotonic()
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "heartbeat": time.time(),
        }
        try:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(json.dumps(owner) + "\n")
            self.file.flush()
        except OSError as error:
            error.filename = str(self.path)  # a full disk names no file
            raise

    def owner_name(self) -> str:
        """Name the owner's process and host, as far as the file tells."""
        owner = self._owner()
        return f"process {owner['pid']} on {owner['host']}" if owner else "another process"

    def _owner(self) -> dict[str, Any]:
        try:
            self.file.seek(0)
            owner = json.loads(self.file.read())
            known = isinstance(owner["host"], str) and isinstance(owner["pid"], int) and owner["heartbeat"] < 2.0**62
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return owner if known else {}


@contextmanager
def hold_lock(path: Path, in_use: InUse, shared: bool = False) -> Iterator[FileLock]:
    """Hold the lock at `path` and remove it at the end; ranks of one command hold it `shared`.

    An OSError names the file that cannot be written.
    """
    file = None
    try:
        while True:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            lock = FileLock(file, path, in_use)
            lock.share() if shared else lock.acquire()
            if lock.is_current():
                break
            file.close()  # the last owner removed the file meanwhile, and a lock on a removed file excludes nobody
        try:
            yield lock
        finally:
            if lock.is_current() and lock.is_exclusive():
                with suppress(OSError):
                    path.unlink()
    finally:
        if file is not None:
            file.close()
