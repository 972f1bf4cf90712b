"""Files are whole or not there, on a full disk too; a run has one trainer, and the lock dies with it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from muralist.core.errors import UserError
from muralist.core.run_dir import RunDir, atomic_write, atomic_write_json, disk_write_error
from tests.support.disks import leave_free, small_disk
from tests.support.runs import finish, start


def test_a_file_is_written_whole_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    for data in ("first äöü\n", b"\0\1", ""):
        atomic_write(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
        assert [each.name for each in path.parent.iterdir()] == ["file.txt"]
    atomic_write_json(path, {"name": "Straße", "list": [1, None]})
    assert json.loads(path.read_text()) == {"name": "Straße", "list": [1, None]}
    assert "Straße" in path.read_text()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_follow_the_users_mask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        atomic_write(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "run" / "metrics.json"
        atomic_write(path, "old")
        leave_free(disk, 16 * 4096)
        with pytest.raises(OSError) as caught:
            atomic_write(path, b"x" * 200_000)
        sentence = disk_write_error(caught.value, path)
        assert path.read_text() == "old"
        assert [each.name for each in path.parent.iterdir()] == ["metrics.json"]
        assert f"No space left on the disk that holds {path}." in str(sentence)
        assert "checkpoint" not in str(sentence), "evaluate, sweep and export say it too"
        assert caught.value.filename == str(path)
        atomic_write(path, "new")
        assert path.read_text() == "new"


def test_a_disk_that_is_full_from_the_start_is_one_sentence(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run = RunDir.named(str(disk), "mine")
        run.create()
        leave_free(disk, 0)
        with pytest.raises(UserError, match="No space left on the disk that holds"), run.locked():
            pytest.fail("the run was held all the same")


def test_a_target_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        atomic_write(tmp_path / "taken", "x")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]
    assert f"Cannot write {tmp_path / 'taken'}" in disk_write_error(caught.value, tmp_path / "taken").what


@pytest.mark.parametrize("name", ["demo", "JiT-B-4-64-cond-0a1b2c", "über+x=1@home", "v1.2", "a..b"])
def test_names_that_are_folders(name: str) -> None:
    assert RunDir.named("results", name).root == Path("results") / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "/etc", ".hidden", "a b", "a\n", "a\0b", "a\\b", "~", "$HOME", "*", "a;b"]
)
def test_names_that_would_leave_the_folder_or_confuse_a_shell_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid folder name"):
        RunDir.named("results", name)


def test_everything_of_a_run_is_inside_it(tmp_path: Path) -> None:
    run = RunDir.named(str(tmp_path), "mine")
    run.create()
    run.create()
    for path in (run.config, run.checkpoints, run.samples, run.log, run.metrics, run.tensorboard, run.save_request):
        assert run.root in path.parents
    assert run.checkpoints.is_dir()
    assert run.samples.is_dir()
    assert run.log.parent.is_dir()


def test_a_results_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*: Not a directory"):
        RunDir.named(str(tmp_path / "results"), "mine").create()


HOLD = """
import os, sys, time
from pathlib import Path
from muralist.core.run_dir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    child = os.fork()  # a loader process, which may outlive its trainer for seconds
    if child:
        print(os.getpid(), child, flush=True)
    time.sleep(60)
"""


def test_a_run_has_one_trainer_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    holder = start("python", "-c", HOLD, tmp_path)
    assert holder.stdout is not None
    child = 0
    try:
        owner, child = map(int, holder.stdout.readline().split())
        with pytest.raises(UserError, match=rf"is being trained by process {owner} on "), run.locked():
            pytest.fail("the run was held all the same")
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
        with run.locked():
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        os.kill(child, 0)  # still alive, and in nobody's way
    finally:
        holder.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_is_let_go_at_the_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    take = "import sys; from pathlib import Path; from muralist.core.run_dir import RunDir\n"
    take += "with RunDir(Path(sys.argv[1])).locked(): print('mine')"
    with run.locked():
        refused = finish(start("python", "-c", take, tmp_path), expect=1)
    assert f"is being trained by process {os.getpid()} on " in refused
    assert finish(start("python", "-c", take, tmp_path)) == "mine\n"
