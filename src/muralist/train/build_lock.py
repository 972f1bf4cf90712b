"""The lock that a killed build of a torch extension leaves behind, for which every later start would wait.

DeepSpeed compiles extensions when they are first needed. The process that does so keeps `<folder>/<extension>/lock` open
until it is done, and the others wait until the file is gone; whoever dies meanwhile leaves it there for good.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from muralist.words import duration

log = logging.getLogger("muralist")
_PROCESSES = Path("/proc")
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"})  # file systems
_LONGEST_QUIET = 600.0  # seconds in which a build elsewhere leaves no trace in its folder
_LONGEST_WAIT = 120.0  # seconds for compilers that outlived the process that started them


def clear_stale_locks() -> None:
    """Remove locks that nobody holds any more, and say so; to be called by every process, before any builds.

    On a disk of this machine a lock is stale if no process has it open. Elsewhere its holder may be on another machine:
    then it is stale when nothing in its folder has changed for ten minutes, and until then the log names it.
    """
    for lock in _locks():
        try:
            with _alone(lock.parent):
                _clear(lock)
        except FileNotFoundError:
            continue  # released, or removed by another process
        except OSError as error:
            log.warning("The lock %s could not be looked at: %s. If a start hangs, delete it.", lock, error.strerror)


def _locks() -> list[Path]:
    if own := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return sorted(Path(own).glob("*/lock"))
    from torch.utils.cpp_extension import get_default_build_root

    return sorted(Path(get_default_build_root()).glob("*/*/lock"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: or one could take away the lock of another that removed the stale one and builds already."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders: then the time between two looks is short
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(lock: Path) -> None:
    found = lock.stat()
    if _is_open_somewhere(found):
        return
    if not _only_here(lock, found):
        quiet = _quiet_seconds(lock)
        if quiet < _LONGEST_QUIET:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                log.warning(
                    "DeepSpeed waits for an extension that a process on another machine seems to build: its lock is %s, and "
                    "the last change there %s ago. If there is no such process, delete that file and start again.",
                    lock,
                    duration(quiet),
                )
            return
    _wait_for_compilers(lock.parent)
    now = lock.stat()
    if (now.st_ino, now.st_mtime_ns) == (found.st_ino, found.st_mtime_ns):
        lock.unlink()
        log.warning("Removed %s: a build of DeepSpeed that was killed had left it, and nobody holds it.", lock)


def _is_open_somewhere(found: os.stat_result) -> bool:
    """Whether a process of this machine has the file open, as far as it may be looked at."""
    for process in _processes():
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):  # closed since
                    there = descriptor.stat()
                    if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
                        return True
    return False


def _processes() -> list[Path]:
    """All that run now; when one is looked at it may be gone."""
    return [path for path in _PROCESSES.iterdir() if path.name.isdecimal()] if _PROCESSES.is_dir() else []


def _only_here(lock: Path, found: os.stat_result) -> bool:
    """Whether a holder must be a process of this machine that we can see."""
    return os.geteuid() in (0, found.st_uid) and _file_system(lock.resolve()) in _LOCAL


def _file_system(path: Path) -> str:
    """The kind of file system a path lies on; empty where the system does not tell."""
    kind, longest = "", -1
    with suppress(OSError):
        for line in (_PROCESSES / "self" / "mounts").read_text().splitlines():
            _, place, found, *_ = line.split()
            place = place.replace("\\040", " ")
            if path.is_relative_to(place) and len(place) >= longest:  # of two at one place the later one is seen
                kind, longest = found, len(place)
    return kind


def _quiet_seconds(lock: Path) -> float:
    """How long ago the last file in the lock's folder changed, by the clock of whoever stores them."""
    last = max(path.stat().st_mtime for path in lock.parent.iterdir())
    with tempfile.NamedTemporaryFile(dir=lock.parent, prefix=".now.") as now:
        return os.fstat(now.fileno()).st_mtime - last


def _wait_for_compilers(folder: Path) -> None:
    """Compilers outlive for a while whoever is killed with SIGKILL; two at once would write the same files."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while _somebody_works_in(folder) and time.monotonic() < deadline:
        time.sleep(0.2)


def _somebody_works_in(folder: Path) -> bool:
    for process in _processes():
        with suppress(OSError):
            if (process / "cwd").samefile(folder):
                return True
    return False
