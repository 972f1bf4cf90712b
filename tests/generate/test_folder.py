"""The output folder: what is there, whose it is, and what is refused."""

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

from muralist.errors import UserError
from muralist.generate import ledger
from muralist.generate.folder import OutputFolder, write_failures
from muralist.generate.ledger import Shard
from tests.support.crews import Atelier
from tests.support.disks import small_disk

PROMPTS = ["car", "tree", "house", "car"]


@pytest.fixture
def atelier(tmp_path: Path) -> Atelier:
    """A folder with four pictures."""
    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0"]) == (4, 0)
    return atelier


def missing(atelier: Atelier) -> list[int]:
    return np.flatnonzero(~atelier.folder.finished(atelier.plan)).tolist()


def rewrite(tmp_path: Path, prompts: list[str]) -> Atelier:
    """The same folder with another table."""
    kept = (tmp_path / "images" / "ledger.jsonl").read_bytes()
    atelier = Atelier(tmp_path, prompts)
    atelier.folder.ledger.write_bytes(kept)
    return atelier


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_truncate, _corrupt, Path.unlink], ids=["truncated", "corrupted", "gone"])
def test_a_picture_that_is_not_whole_is_made_again(atelier: Atelier, harm: Callable[[Path], None]) -> None:
    assert missing(atelier) == []
    before = atelier.bytes()
    harm(atelier.folder.root / "000003_seed44.png")
    assert missing(atelier) == [2]
    assert atelier.run(["5"], numbers=[2]) == (1, 0)
    assert missing(atelier) == [] and atelier.bytes() == before
    assert [line["gpu"] for line in atelier.lines().values()] == ["0", "0", "5", "0"]


def test_rows_may_be_appended_but_not_changed(atelier: Atelier, tmp_path: Path) -> None:
    assert missing(rewrite(tmp_path, [*PROMPTS, "tree"])) == [4]
    assert missing(rewrite(tmp_path, PROMPTS[:2])) == []
    with pytest.raises(UserError, match="Row 2 of the table is not the one .* Changed: prompt 'tree' -> 'house'"):
        missing(rewrite(tmp_path, ["car", "house", "house", "car"]))
    with pytest.raises(UserError, match="Row 1 of the table"):
        missing(rewrite(tmp_path, ["house", *PROMPTS]))


def test_what_a_killed_command_left_is_taken_up(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    for row, label in ((0, "0"), (1, "1")):
        shard = Shard(atelier.folder.shard(label), atelier.header.digest)
        path = atelier.folder.root / atelier.plan.sample(row).file
        path.write_bytes(b"whole")
        shard.done(atelier.plan.sample(row), path, "0" * 64, label, 1.0, None)
    with atelier.folder.shard("1").open("ab") as file:
        file.write(b'{"status": "done", "ind')
    (atelier.folder.root / ".000003_seed44.png.77.tmp").write_bytes(b"half")
    (atelier.folder.work / "rank3.beat").write_text("working 3\n")
    atelier.folder.sweep()
    assert missing(atelier) == [2, 3]
    assert sorted(path.name for path in atelier.folder.root.iterdir()) == [
        ".ledger", "000001_seed42.png", "000002_seed43.png", "ledger.jsonl",
    ]  # fmt: skip
    assert not list(atelier.folder.work.iterdir())


def test_lines_without_a_ledger_count_for_nothing(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    Shard(atelier.folder.shard("0"), "old").failed(atelier.plan.sample(0)._replace(prompt="other"), "no", "0", 1.0)
    atelier.folder.ledger.unlink()
    atelier.folder.sweep()
    assert not list(atelier.folder.work.iterdir())


def test_overwrite_removes_what_the_ledger_names_and_nothing_else(atelier: Atelier) -> None:
    root = atelier.folder.root
    (root / "mine.png").write_bytes(b"mine")
    (root.parent / "outside.png").write_bytes(b"outside")
    shard = Shard(atelier.folder.shard("0"), "x")
    for file in ("../outside.png", "..", "", "a/../../outside.png"):
        shard.failed(atelier.plan.sample(0)._replace(file=file), "no", "0", 1.0)
    write_failures(atelier.folder, ["0"])
    atelier.folder.clear()
    assert sorted(path.name for path in root.iterdir()) == [".ledger", "mine.png"]
    assert (root.parent / "outside.png").read_bytes() == b"outside"


def test_overwrite_removes_a_ledger_that_cannot_be_read(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.create()
    folder.ledger.write_bytes(b"\xff not a ledger\n")
    folder.clear()
    assert not folder.ledger.exists()


def test_pictures_without_a_ledger_are_refused(atelier: Atelier) -> None:
    atelier.folder.ledger.unlink()
    with pytest.raises(UserError, match="holds 000001_seed42.png, but no ledger that says how it was made"):
        atelier.folder.check_unclaimed(atelier.plan)
    for path in atelier.folder.root.glob("0*.png"):
        path.rename(path.with_name(f"other-{path.name}"))
    atelier.folder.check_unclaimed(atelier.plan)  # pictures of other names are in nobody's way


def test_changed_settings_are_refused_and_named(atelier: Atelier) -> None:
    with pytest.raises(UserError, match=r"Changed: model tiny -> huge; steps default -> 5\..*--overwrite"):
        atelier.folder.check_settings({"model": "huge", "steps": 5}, atelier.header)
    atelier.folder.check_settings({"model": "tiny"}, atelier.header)


def test_failures_are_told_per_worker_until_they_are_mended(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path, ["car", "no\tsuch", "house", "nor this"])
    assert atelier.run(["2", "3"]) == (2, 2)
    assert write_failures(atelier.folder, ["2", "3"]) == 2
    assert atelier.folder.failures("2").read_text() == ""
    told = atelier.folder.failures("3").read_text().splitlines()
    assert [line.split("\t")[:3] for line in told] == [["000002", "43", "no such"], ["000004", "45", "nor this"]]
    shard = Shard(atelier.folder.shard("0"), "x")
    path = atelier.folder.root / "000002_seed43.png"
    path.write_bytes(b"mended")
    shard.done(atelier.plan.sample(1), path, "0" * 64, "0", 1.0, None)
    ledger.merge(atelier.folder.ledger, atelier.folder.work)
    assert write_failures(atelier.folder, ["0"]) == 1
    assert atelier.folder.failures("3").read_text() == told[1] + "\n"  # a file of a worker that is not used now
    assert atelier.folder.failures("0").read_text() == ""


def _hold(root: Path, events: tuple) -> None:
    with OutputFolder(root).locked("job 7"):
        events[0].set()
        events[1].wait(20)


def test_a_second_command_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    events = (context.Event(), context.Event())
    folder = OutputFolder(tmp_path)
    folder.create()
    other = context.Process(target=_hold, args=(tmp_path, events))
    other.start()
    assert events[0].wait(20)
    said = json.loads((tmp_path / "lock").read_text())
    assert (said["pid"], said["job"]) == (other.pid, "job 7") and time.time() - said["heartbeat"] < 60
    with pytest.raises(UserError, match=f"is being filled by process {other.pid} on "), folder.locked(""):
        pass
    assert (tmp_path / "lock").exists()
    other.kill()
    other.join()
    with folder.locked(""):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["file", "file/images"])
def test_a_folder_that_cannot_be_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*(File exists|Not a directory)\."):
        OutputFolder(tmp_path / name).create()


def test_a_disk_that_may_not_be_written_is_told_in_words(tmp_path: Path) -> None:
    import subprocess

    with small_disk(tmp_path / "disk") as disk:
        OutputFolder(disk).create()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with (
            pytest.raises(UserError, match=r"Cannot write .*lock: Read-only file system\."),
            OutputFolder(disk).locked(""),
        ):
            pass
        with pytest.raises(UserError, match=r"Cannot write .*Read-only file system\."):
            OutputFolder(disk / "images").create()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path / "bilder 画像 [x] 🎨", ["car"])
    assert atelier.run(["0"]) == (1, 0)
    assert missing(atelier) == []


def test_a_command_whose_folder_was_deleted_leaves_the_next_ones_lock_alone(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "images")
    folder.create()
    with folder.locked("first") as first:
        shutil.rmtree(folder.root)
        folder.create()
        with folder.locked("second") as second:
            assert second.is_there() and not first.is_there()
    folder.create()
    with folder.locked("first") as first:
        shutil.rmtree(folder.root)
        folder.create()
        (folder.root / "lock").write_text("of another command")
    assert (folder.root / "lock").read_text() == "of another command"
