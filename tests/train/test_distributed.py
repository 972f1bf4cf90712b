"""Backends of the process group, and locks of extension builds that were killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from muralist.core.errors import UserError
from muralist.settings import DistBackend
from muralist.train import distributed
from muralist.train.distributed import process_group_backends, remove_stale_extension_locks


def test_a_stale_extension_lock_is_removed_and_a_recent_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    logged: list[str] = []
    monkeypatch.setattr(distributed.log, "warning", lambda text, *values: logged.append(text % values))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    assert FileBaton(str(lock)).try_acquire()
    remove_stale_extension_locks()
    assert lock.exists() and f"delete {lock}" in logged[-1]
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    (lock.parent / "build.o").write_bytes(b"")
    remove_stale_extension_locks()
    assert lock.exists()  # the build makes progress
    os.utime(lock.parent / "build.o", (hour_ago, hour_ago))
    remove_stale_extension_locks()
    assert not lock.exists() and f"Removed {lock}" in logged[-1]


@pytest.mark.parametrize(
    ("wanted", "size", "gpus", "expected"),
    [
        ("auto", 8, 8, "cpu:gloo,cuda:nccl"),
        ("nccl", 8, 8, "cpu:gloo,cuda:nccl"),
        ("gloo", 8, 8, "gloo"),
        ("auto", 4, 1, "gloo"),
        ("auto", 4, 3, "gloo"),
        ("auto", 2, 0, "gloo"),
    ],
)
def test_backend_depends_on_whether_processes_share_a_gpu(
    wanted: DistBackend, size: int, gpus: int, expected: str
) -> None:
    assert process_group_backends(wanted, size, gpus) == expected


@pytest.mark.parametrize(("gpus", "have"), [(1, "1 GPU"), (3, "3 GPUs"), (0, "no GPU")])
def test_nccl_is_refused_for_processes_that_share_a_gpu(gpus: int, have: str) -> None:
    with pytest.raises(UserError, match=f"4 processes have {have}"):
        process_group_backends("nccl", 4, gpus)
