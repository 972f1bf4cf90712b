"""Locks of extension builds that were killed are removed; recent ones are named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from muralist.train import distributed
from muralist.train.distributed import remove_stale_extension_locks


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
