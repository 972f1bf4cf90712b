"""The output folder: what is there, which command holds it, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muralist.core.errors import UserError
from muralist.generate import ledger
from muralist.generate.ledger import Shard
from muralist.generate.output_dir import OutputDir, explain_write_errors, write_failures
from tests.support.disks import small_disk
from tests.support.worker_pools import ThreadedRun

PROMPTS = ["car", "tree", "house", "car"]


@pytest.fixture
def threaded(tmp_path: Path) -> ThreadedRun:
    """A folder with four images."""
    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0"]) == (4, 0)
    return threaded


def missing(threaded: ThreadedRun) -> list[int]:
    return np.flatnonzero(~threaded.output.finished(threaded.plan)).tolist()


def rewrite(tmp_path: Path, prompts: list[str]) -> ThreadedRun:
    """The same folder with another table."""
    kept = (tmp_path / "images" / "ledger.jsonl").read_bytes()
    threaded = ThreadedRun(tmp_path, prompts)
    threaded.output.ledger.write_bytes(kept)
    return threaded


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_truncate, _corrupt, Path.unlink], ids=["truncated", "corrupted", "gone"])
def test_a_damaged_image_is_generated_again(threaded: ThreadedRun, harm: Callable[[Path], None]) -> None:
    assert missing(threaded) == []
    before = threaded.images()
    harm(threaded.output.root / "000003_seed44.png")
    assert missing(threaded) == [2]
    assert threaded.run(["5"], indices=[2]) == (1, 0)
    assert missing(threaded) == [] and threaded.images() == before
    assert [line["gpu"] for line in threaded.lines().values()] == ["0", "0", "5", "0"]


def test_rows_may_be_appended_but_not_changed(threaded: ThreadedRun, tmp_path: Path) -> None:
    assert missing(rewrite(tmp_path, [*PROMPTS, "tree"])) == [4]
    assert missing(rewrite(tmp_path, PROMPTS[:2])) == []
    with pytest.raises(UserError, match="Row 2 of the table is not the one .* Changed: prompt 'tree' -> 'house'"):
        missing(rewrite(tmp_path, ["car", "house", "house", "car"]))
    with pytest.raises(UserError, match="Row 1 of the table"):
        missing(rewrite(tmp_path, ["house", *PROMPTS]))


def test_a_killed_command_is_recovered(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    for row, label in ((0, "0"), (1, "1")):
        shard = Shard(threaded.output.shard(label), threaded.header.digest)
        path = threaded.output.root / threaded.plan.sample(row).file
        path.write_bytes(b"intact")
        shard.done(threaded.plan.sample(row), path, "0" * 64, label, 1.0, None)
    with threaded.output.shard("1").open("ab") as file:
        file.write(b'{"status": "done", "ind')
    (threaded.output.root / ".000003_seed44.png.77.tmp").write_bytes(b"half")
    (threaded.output.work / "rank3.beat").write_text("working 3\n")
    threaded.output.recover()
    assert missing(threaded) == [2, 3]
    assert sorted(path.name for path in threaded.output.root.iterdir()) == [
        ".ledger", "000001_seed42.png", "000002_seed43.png", "ledger.jsonl",
    ]  # fmt: skip
    assert not list(threaded.output.work.iterdir())


def test_lines_without_a_ledger_are_removed(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    Shard(threaded.output.shard("0"), "old").failed(threaded.plan.sample(0)._replace(prompt="other"), "no", "0", 1.0)
    threaded.output.ledger.unlink()
    threaded.output.recover()
    assert not list(threaded.output.work.iterdir())


def test_overwrite_removes_only_what_the_ledger_names(threaded: ThreadedRun) -> None:
    root = threaded.output.root
    (root / "mine.png").write_bytes(b"mine")
    (root.parent / "outside.png").write_bytes(b"outside")
    shard = Shard(threaded.output.shard("0"), "x")
    for file in ("../outside.png", "..", "", "a/../../outside.png"):
        shard.failed(threaded.plan.sample(0)._replace(file=file), "no", "0", 1.0)
    write_failures(threaded.output, ["0"])
    threaded.output.clear()
    assert sorted(path.name for path in root.iterdir()) == [".ledger", "mine.png"]
    assert (root.parent / "outside.png").read_bytes() == b"outside"


def test_overwrite_removes_a_ledger_that_cannot_be_read(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    output.create()
    output.ledger.write_bytes(b"\xff not a ledger\n")
    output.clear()
    assert not output.ledger.exists()


def test_images_without_a_ledger_are_refused(threaded: ThreadedRun) -> None:
    threaded.output.ledger.unlink()
    with pytest.raises(UserError, match="holds 000001_seed42.png, but no ledger that says how it was made"):
        threaded.output.check_unclaimed(threaded.plan)
    for path in threaded.output.root.glob("0*.png"):
        path.rename(path.with_name(f"other-{path.name}"))
    threaded.output.check_unclaimed(threaded.plan)  # images of other names do not matter


def test_changed_settings_are_refused_and_named(threaded: ThreadedRun) -> None:
    with pytest.raises(UserError, match=r"Changed: model tiny -> huge; steps default -> 5\..*--overwrite"):
        threaded.output.check_settings({"model": "huge", "steps": 5}, threaded.header)
    threaded.output.check_settings({"model": "tiny"}, threaded.header)


def test_failures_are_listed_per_worker_until_they_are_corrected(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, ["car", "no\tsuch", "house", "nor this"])
    assert threaded.run(["2", "3"]) == (2, 2)
    assert write_failures(threaded.output, ["2", "3"]) == 2
    assert threaded.output.failures("2").read_text() == ""
    text = threaded.output.failures("3").read_text().splitlines()
    assert [line.split("\t")[:3] for line in text] == [["000002", "43", "no such"], ["000004", "45", "nor this"]]
    shard = Shard(threaded.output.shard("0"), "x")
    path = threaded.output.root / "000002_seed43.png"
    path.write_bytes(b"corrected")
    shard.done(threaded.plan.sample(1), path, "0" * 64, "0", 1.0, None)
    ledger.merge(threaded.output.ledger, threaded.output.work)
    assert write_failures(threaded.output, ["0"]) == 1
    assert threaded.output.failures("3").read_text() == text[1] + "\n"  # a file of a worker that is not used now
    assert threaded.output.failures("0").read_text() == ""


def _hold(root: Path, events: tuple) -> None:
    with OutputDir(root).lock():
        events[0].set()
        events[1].wait(20)


def test_a_second_command_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    context = multiprocessing.get_context("fork")
    events = (context.Event(), context.Event())
    output = OutputDir(tmp_path)
    output.create()
    other = context.Process(target=_hold, args=(tmp_path, events))
    other.start()
    assert events[0].wait(20)
    owner = json.loads((tmp_path / "lock").read_text())
    assert (owner["pid"], owner["job"]) == (other.pid, "7") and time.time() - owner["heartbeat"] < 60
    with pytest.raises(UserError, match=f"is being filled by process {other.pid} on "), output.lock():
        pass
    assert (tmp_path / "lock").exists()
    other.kill()
    other.join()
    with output.lock():
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["file", "file/images"])
def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*(File exists|Not a directory)\."):
        OutputDir(tmp_path / name).create()


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    import subprocess

    with small_disk(tmp_path / "disk") as disk:
        OutputDir(disk).create()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with (
            pytest.raises(UserError, match=r"Cannot write .*lock: Read-only file system\."),
            explain_write_errors(disk),
            OutputDir(disk).lock(),
        ):
            pass
        with pytest.raises(UserError, match=r"Cannot write .*Read-only file system\."):
            OutputDir(disk / "images").create()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path / "bilder 画像 [x] 🎨", ["car"])
    assert threaded.run(["0"]) == (1, 0)
    assert missing(threaded) == []


def test_a_command_whose_folder_was_deleted_does_not_remove_the_next_lock(tmp_path: Path) -> None:
    output = OutputDir(tmp_path / "images")
    output.create()
    with output.lock() as first:
        shutil.rmtree(output.root)
        output.create()
        with output.lock() as second:
            assert second.is_current() and not first.is_current()
    output.create()
    with output.lock() as first:
        shutil.rmtree(output.root)
        output.create()
        (output.root / "lock").write_text("of another command")
    assert (output.root / "lock").read_text() == "of another command"
