"""What is found under a root, and in which state it is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from muralist.board import readers
from muralist.board.readers import Runs, Scanner
from tests.support.boards import line, write_generation, write_run


def found(root: Path, scanner: Scanner | None = None) -> list[tuple[str, str]]:
    return [(entry.kind, entry.name.relative_to(root).as_posix()) for entry in (scanner or Scanner(root)).entries()]


def test_entries_are_found_up_to_a_depth(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "b" / "c" / "deep")
    write_generation(tmp_path / "a" / "b" / "c" / "deep" / "images")
    write_run(tmp_path / "1" / "2" / "3" / "4" / "5" / "6" / "too-deep")
    write_run(tmp_path / ".hidden" / "run")
    (tmp_path / "a" / "b" / "c" / "deep" / "checkpoints" / "config.yaml").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "a")
    assert found(tmp_path) == [("run", "a/b/c/deep"), ("generation", "a/b/c/deep/images")]
    assert found(tmp_path / "a" / "b" / "c" / "deep")[0] == ("run", "."), "the root itself may be a run"


def test_names_may_be_in_any_script(tmp_path: Path) -> None:
    names = ["실험\u3000하나", "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}", "no\N{NO-BREAK SPACE}break"]
    for name in names:
        write_run(tmp_path / name, checkpoints=0)
    write_run(tmp_path / os.fsdecode(b"not text \xff"), checkpoints=0)
    assert found(tmp_path) == sorted(("run", name) for name in names)


def test_links_are_followed_only_under_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_SCAN_INTERVAL", 0.0)
    root = tmp_path / "results"
    for run in (root / "day" / "run", root / ".hidden" / "run", tmp_path / "secret"):
        write_run(run)
    links = {"best": "day/run", "away": "../secret", "up": "..", "unseen": ".hidden/run", "gone": "nothing", "a": "b",
             "b": "a", "day/self": "../day", "again": "best", ".best": "day/run"}  # fmt: skip
    for link, target in links.items():
        (root / link).symlink_to(target)
    scanner = Scanner(root)
    seen = [("run", "again"), ("run", "best"), ("run", "day/run")]
    assert found(root, scanner) == seen
    assert {entry.folder for entry in scanner.entries()} == {root / "day" / "run"}, "read where it really lies"

    (root / "day" / "run").rename(tmp_path / "moved")
    (root / "day" / "run").symlink_to(tmp_path / "moved")
    assert found(root, scanner) == [], "what a link names has become a link that leads out"


def test_new_and_removed_folders_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_SCAN_INTERVAL", 0.0)
    scanner = Scanner(tmp_path)
    assert found(tmp_path, scanner) == []
    (tmp_path / "run").mkdir()
    assert found(tmp_path, scanner) == []
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert found(tmp_path, scanner) == [("run", "run")]
    (tmp_path / "run").rename(tmp_path / "other")
    assert found(tmp_path, scanner) == [("run", "other")]


def heartbeat(run: Path, age: float = 0.0, rank: int = 0, **more: Any) -> None:
    path = run / "heartbeats" / f"rank_{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"left": "", "message": "", **more}))
    os.utime(path, (time.time() - age,) * 2)


def test_the_state_of_a_run(tmp_path: Path) -> None:
    runs, run = Runs(), write_run(tmp_path / "run")
    assert runs.summary(run)["state"] == "finished"
    (run / "logs" / "train.log").write_text("length  2 epochs x 50.0 steps/epoch = 1,200 steps\n")
    os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
    assert (runs.summary(run)["state"], runs.summary(run)["steps"]) == ("stopped", 1200)
    heartbeat(run)
    assert runs.summary(run)["state"] == "running"
    heartbeat(run, age=300)
    assert runs.summary(run)["state"] == "lost" and "killed" in runs.summary(run)["message"]
    heartbeat(run, left="failed", message="The loss became nan at step 7.")
    told = runs.summary(run)
    assert (told["state"], told["message"]) == ("failed", "The loss became nan at step 7.")
    heartbeat(run, rank=1, left="lost contact", message="Rank 0 failed.")
    assert runs.summary(run)["message"] == "The loss became nan at step 7."
    heartbeat(run, age=300, left="failed", message="The loss became nan at step 7.")
    heartbeat(run, rank=1)
    assert runs.summary(run)["state"] == "running", "what an earlier launch left behind does not count"


def test_a_summary_follows_its_file(tmp_path: Path) -> None:
    runs, run = Runs(), write_run(tmp_path / "run", steps=3)
    assert runs.summary(run)["step"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, 0.125) + '{"step": 5')
    assert (runs.summary(run)["step"], runs.summary(run)["loss"]) == (4, 0.125)
    (run / "metrics.jsonl").write_text('{"step": "x", "images": [1], "train/loss": NaN}\n')
    told = runs.summary(run)
    assert told["step"] is None and told["loss"] is None and told["images"] is None and told["sparkline"] == []
