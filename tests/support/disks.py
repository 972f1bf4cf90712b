"""A real disk of a megabyte, so that "no space left" comes from the system and not from a stand-in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Path]:
    """Mount a small memory disk, or skip the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this user may mount disks here."""
    place = folder / "mounted"
    place.mkdir(parents=True, exist_ok=True)
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    ):
        return False
    subprocess.run(["umount", str(place)], check=True)
    return True


def leave_free(disk: Path, wanted: int) -> None:
    """Fill a disk with one file until only `wanted` bytes, in whole pages, are free."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(b"\0" * (shutil.disk_usage(disk).free // PAGE * PAGE - wanted // PAGE * PAGE))


@contextmanager
def read_only_view(folder: Path, view: Path) -> Iterator[Path]:
    """Show a folder at a second place where nobody, not even root, can write; or skip the test."""
    folder.mkdir(parents=True, exist_ok=True)
    view.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["mount", "--bind", str(folder), str(view)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"a folder cannot be shown twice here: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        yield view
    finally:
        subprocess.run(["umount", "--lazy", str(view)], check=True)
