"""Run folders: path checks, atomic writes and the one file lock.

Files are written to a temporary name, flushed and renamed, so that none is ever partial. The lock names the host,
process, job and last heartbeat of its owner. It is a POSIX lock (`fcntl.lockf`), which NFS and Lustre know and which
ends with its process. `flock`, and the package `filelock`, which uses it, would leave the lock with forked data loader
processes for seconds after their trainer was killed. On a disk without locks, the owner's heartbeat decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from muralist.core.errors import UserError, closest_match


def exists(path: Path) -> bool:
    """Return whether a path exists; False for names too long for the disk, where `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path) -> bool:
    """Return whether a file exists; likewise without raising."""
    return os.path.isfile(path)  # noqa: PTH113


def base_dir_of(file: Path, relative: str) -> Path:
    """Return the base folder of a relative path inside a file: the file's folder, unless the path exists elsewhere only.

    HunyuanDiT writes paths relative to its working directory (`./dataset/porcelain/images/0.png`), so the current folder
    and the parents of the file are tried too.
    """
    own = file.absolute().parent
    for folder in (own, Path.cwd(), *own.parents):
        if exists(folder / relative):
            return folder
    return own


def check_exists(path: Path, what: str, fix: str) -> None:
    """Raise if a path does not exist, with the closest existing name; `what` names the kind of input."""
    if exists(path):
        return
    missing = path.absolute()
    while not os.path.isdir(missing.parent):  # noqa: PTH112
        missing = missing.parent
    is_last = missing == path.absolute()
    why = f"{missing.parent} has no entry {missing.name}." if is_last else f"The folder {missing} does not exist."
    similar = closest_match(missing.name, (entry.name for entry in missing.parent.iterdir()))
    raise UserError(f"The {what} {path} was not found.", f"{why} {similar}".strip(), fix)


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
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
        try:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(json.dumps(owner | {"heartbeat": time.time()}) + "\n")
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
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+") as file:
            lock = FileLock(file, path, in_use)
            lock.share() if shared else lock.acquire()
            if not lock.is_current():
                continue  # the last owner removed the file meanwhile, and a lock on a removed file excludes nobody
            try:
                yield lock
            finally:
                if lock.is_current() and lock.is_exclusive():
                    with suppress(OSError):
                        path.unlink()
            return


_TORCH_WRITE_ERRORS = ("inline_container.cc", "PytorchStreamWriter")


@contextmanager
def atomic_open(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that is written completely or not at all: aside, flushed to disk at the end, then renamed.

    Without `flush` that holds for a killed process, but not for a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with aside.open("xb") as file:  # fails on an existing link instead of following it
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk does not name the file
        raise
    finally:
        aside.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes | str, flush: bool = True) -> None:
    """Write a file completely or not at all, as `atomic_open` does."""
    with atomic_open(path, flush) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def open_no_follow(path: Path, mode: str, encoding: str | None = None, buffering: int = -1) -> IO[Any]:
    """Open a file for appending; refuse a symbolic link, which a folder from elsewhere may contain."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, buffering, encoding=encoding, opener=opener)


def atomic_write_json(path: Path, content: Any) -> None:
    """Write a readable JSON file atomically."""
    atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def fsync(path: Path) -> None:
    """Flush a file, or a folder, so that renames inside it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is flushed to disk and renamed to `final` at the end; after an error nothing is left.

    Its files get the permissions of new files: libraries such as safetensors write files that only the owner may read.
    With `replace`, an existing folder is replaced, and put back if the rename fails.
    """
    final = final.absolute()
    temporary, old = (final.with_name(f".{final.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            fsync(path)
        fsync(temporary)
        if final.exists() and replace:
            final.replace(old)
        temporary.replace(final)
        fsync(final.parent)
    except UserError:
        raise
    except Exception as error:
        if old.exists() and not final.exists():
            old.replace(final)
        raise disk_write_error(find_os_error(error), final) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)


def find_os_error(error: BaseException) -> OSError:
    """Return the OSError behind an error of safetensors or torch; re-raise any other error, which is a bug."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError):
            return behind
        if found := re.search(r"\(os error (\d+)\)", str(behind)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        behind = behind.__cause__ or behind.__context__
    if any(text in str(error) for text in _TORCH_WRITE_ERRORS):  # from another process, without its cause
        return OSError(errno.EIO, "incomplete write")
    raise error


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error means a full disk or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_write_error(error: OSError, path: Path) -> UserError:
    """Return the error message for a failed write."""
    if is_disk_full(error):
        return UserError(
            f"No space left on the disk that holds {path}.",
            "The file was not written; everything written before it is intact.",
            "Free some space and run the same command again to resume.",
        )
    return UserError(f"Cannot write {path}: {error.strerror}.", fix="Check that the folder exists and is writable.")


def sanitize_name(text: str) -> str:
    """Replace characters that a run's name may not contain by dashes."""
    return re.sub(r"[^\w.+=@-]+", "-", text).lstrip(".")


class RunDir:
    """The folder of one run and the paths inside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"  # the settings, readable by `--config`
        self.checkpoints = root / "checkpoints"  # one folder per checkpoint, and `latest`, a text file with a name
        self.samples = root / "samples"  # one folder per checkpoint
        self.log = root / "logs" / "train.log"
        self.metrics = root / "metrics.jsonl"  # one JSON object per optimizer step
        self.tensorboard = root / "tensorboard"
        self.heartbeats = root / "heartbeats"  # one file per rank
        self.shapes = root / "picture_shapes.npz"  # height and width of every image, measured for --multireso
        self.forecast = root / "forecast.json"  # the time estimate of the run, and its error at the end
        self.broken = root / "broken.txt"  # images that --on_broken skip left out, one per line
        self.profile = root / "profile"  # traces of --profile
        self.save_request = root / "save"  # touch this file to request a checkpoint at the next step

    @classmethod
    def named(cls, results_dir: str, name: str) -> RunDir:
        """Return the folder of a run; raise if the name is not a plain folder name."""
        if not name or sanitize_name(name) != name:
            raise UserError(
                f"--run_name {name!r} is not a valid folder name.", fix="Use letters, digits and . _ + = @ - only."
            )
        return cls(Path(results_dir) / name)

    def create(self) -> None:
        """Create the folders."""
        try:
            for folder in (self.checkpoints, self.samples, self.log.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_write_error(error, self.root) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against a second trainer; the lock ends with its process."""

        def in_use(owner: str) -> UserError:
            fix = "Wait for it, stop it, or use another --run_name."
            return UserError(f"The run {self.root} is being trained by {owner}.", fix=fix)

        path = self.root / "lock"
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_lock(path, in_use))
            except OSError as error:
                raise disk_write_error(error, path) from None
            yield
