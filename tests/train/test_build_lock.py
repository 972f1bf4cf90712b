"""Locks of builds that were killed are removed; those of living ones never."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from muralist.train import build_lock
from muralist.train.build_lock import clear_stale_locks

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch would keep the lock of an extension."""
    (tmp_path / "deepspeed_shm_comm").mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "deepspeed_shm_comm" / "lock"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(build_lock.log, "handlers", [handler])
    return lines


def build(lock: Path, started: Event) -> None:
    """Hold the lock as torch does."""
    assert FileBaton(str(lock)).try_acquire()
    started.set()
    time.sleep(100)


@contextmanager
def building(lock: Path) -> Iterator[None]:
    """While a process builds, which is killed at the end."""
    started = FORK.Event()
    process = FORK.Process(target=build, args=(lock, started))
    process.start()
    assert started.wait(20)
    yield
    process.kill()
    process.join()


def test_a_killed_build_is_no_obstacle_and_a_living_one_is_left_alone(lock: Path, said: list[str]) -> None:
    with building(lock):
        clear_stale_locks()
        assert lock.exists() and said == []
    assert lock.exists() and not FileBaton(str(lock)).try_acquire(), "the trap: a start would wait here"
    clear_stale_locks()
    assert said == [f"Removed {lock}: a build of DeepSpeed that was killed had left it, and nobody holds it."]
    assert list(lock.parent.iterdir()) == []
    assert FileBaton(str(lock)).try_acquire()


def test_compilers_that_outlived_their_build_end_first(lock: Path, said: list[str]) -> None:
    lock.touch()
    compiler = subprocess.Popen(["sleep", "0.5"], cwd=lock.parent)
    clear_stale_locks()
    assert compiler.poll() is not None or compiler.wait(1) == 0
    assert not lock.exists() and len(said) == 1


def remove_then_build(lock: Path, start: float, builders: multiprocessing.Queue[str]) -> None:
    """What each rank does: clear, then build or wait for the one that does."""
    time.sleep(max(0.0, start - time.time()))
    clear_stale_locks()
    baton = FileBaton(str(lock), wait_seconds=0.01)
    if not baton.try_acquire():
        baton.wait()
        builders.put("waited")
        return
    time.sleep(0.3)
    baton.release()  # fails if somebody took the lock away
    builders.put("built")


def test_of_many_ranks_at_once_none_takes_the_lock_of_another(lock: Path, said: list[str]) -> None:
    lock.touch()
    builders: multiprocessing.Queue[str] = FORK.Queue()
    start = time.time() + 0.3
    ranks = [FORK.Process(target=remove_then_build, args=(lock, start, builders)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    done = [builders.get(timeout=5) for _ in ranks]
    assert "built" in done and not lock.exists()


def test_where_another_machine_may_hold_it_time_tells(
    lock: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lock, "_LOCAL", frozenset())  # as on NFS
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    ago = time.time() - 3600
    lock.touch()
    os.utime(lock, (ago, ago))
    source = lock.with_name("shm.o")
    source.touch()
    os.utime(source, (ago + 3300, ago + 3300))
    clear_stale_locks()
    assert lock.exists() and len(said) == 1
    assert f"its lock is {lock}, and the last change there 5 min 00 s ago" in said[0]
    assert "delete that file and start again" in said[0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    clear_stale_locks()
    assert lock.exists() and len(said) == 1, "one process of a machine says it"
    os.utime(source, (ago + 2900, ago + 2900))
    clear_stale_locks()
    assert [path.name for path in lock.parent.iterdir()] == ["shm.o"]
    assert said[1].startswith(f"Removed {lock}")


def test_torchs_own_place_is_looked_at(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clear_stale_locks()
    folder = tmp_path / "torch_extensions" / "py311_cpu" / "utils"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    clear_stale_locks()
    assert not (folder / "lock").exists() and len(said) == 1


def test_the_kind_of_file_system_is_known() -> None:
    assert build_lock._file_system(Path("/proc/self")) == "proc"
    assert build_lock._file_system(Path("/dev/shm/x")) == "tmpfs"
