"""What is found under a root, and in which state it is."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from muralist.board.readers import find_entries, run_summary, sample_grid
from tests.support.boards import PROMPTS, line, write_generation, write_run


def found(root: Path) -> list[tuple[str, str]]:
    return [(entry.kind, entry.name.relative_to(root).as_posix()) for entry in find_entries(root)]


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


def test_links_are_followed_only_under_the_root(tmp_path: Path) -> None:
    root = tmp_path / "results"
    for run in (root / "day" / "run", root / ".hidden" / "run", tmp_path / "secret"):
        write_run(run)
    links = {"best": "day/run", "away": "../secret", "up": "..", "unseen": ".hidden/run", "gone": "nothing", "a": "b",
             "b": "a", "day/self": "../day", "again": "best", ".best": "day/run"}  # fmt: skip
    for link, target in links.items():
        (root / link).symlink_to(target)
    seen = [("run", "again"), ("run", "best"), ("run", "day/run")]
    assert found(root) == seen
    assert {entry.folder for entry in find_entries(root)} == {root / "day" / "run"}, "read where it really lies"

    (root / "day" / "run").rename(tmp_path / "moved")
    (root / "day" / "run").symlink_to(tmp_path / "moved")
    assert found(root) == [], "what a link names has become a link that leads out"


def test_new_and_removed_folders_are_detected(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    (tmp_path / "run").mkdir()
    assert found(tmp_path) == []
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert found(tmp_path) == [("run", "run")]
    (tmp_path / "run").rename(tmp_path / "other")
    assert found(tmp_path) == [("run", "other")]


def heartbeat(run: Path, age: float = 0.0, rank: int = 0, **more: Any) -> None:
    path = run / "heartbeats" / f"rank_{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"left": "", "message": "", **more}))
    os.utime(path, (time.time() - age,) * 2)


def test_the_state_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert run_summary(run)["state"] == "finished"
    (run / "logs" / "train.log").write_text("length  2 epochs x 50.0 steps/epoch = 1,200 steps\n")
    os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
    assert (run_summary(run)["state"], run_summary(run)["steps"]) == ("stopped", 1200)
    heartbeat(run)
    assert run_summary(run)["state"] == "running"
    heartbeat(run, age=300)
    assert run_summary(run)["state"] == "lost" and "killed" in run_summary(run)["message"]
    heartbeat(run, left="failed", message="The loss became nan at step 7.")
    told = run_summary(run)
    assert (told["state"], told["message"]) == ("failed", "The loss became nan at step 7.")
    heartbeat(run, rank=1, left="lost contact", message="Rank 0 failed.")
    assert run_summary(run)["message"] == "The loss became nan at step 7."
    heartbeat(run, age=300, left="failed", message="The loss became nan at step 7.")
    heartbeat(run, rank=1)
    assert run_summary(run)["state"] == "running", "what an earlier launch left behind does not count"


def test_a_summary_follows_its_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    assert run_summary(run)["step"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(4, 0.125) + '{"step": 5')
    assert (run_summary(run)["step"], run_summary(run)["loss"]) == (4, 0.125)
    (run / "metrics.jsonl").write_text('{"step": "x", "images": [1], "train/loss": NaN}\n')
    told = run_summary(run)
    assert told["step"] is None and told["loss"] is None and told["images"] is None and told["sparkline"] == []


def test_a_sample_grid_grows_by_prompts_and_checkpoints(tmp_path: Path) -> None:
    samples = write_run(tmp_path / "run", checkpoints=2) / "samples"
    assert sample_grid(samples)["steps"] == [10, 20]
    # Resumed on two GPUs: the second one draws a prompt of its own, one that is there already, and fails at the third.
    late = samples / "step_0000100"
    shutil.copytree(samples / "step_0000010", late)
    shutil.copy(late / "gpu_0_sample.png", late / "gpu_1_sample.png")
    (late / "gpu_1_prompt.txt").write_text("a new prompt\n")
    shutil.copy(late / "gpu_0_sample.png", late / "gpu_1_sample_2.png")
    (late / "gpu_1_prompt_2.txt").write_text(PROMPTS[0] + "\n")
    (late / "gpu_1_sample_3.png").write_bytes(b"its text is not there yet")
    (late / "gpu_1_error.txt").write_text("out of memory\n")
    (samples / "sheet.png").write_bytes(b"")
    grid = sample_grid(samples)
    assert grid["prompts"] == [*PROMPTS, "a new prompt", PROMPTS[0]] and grid["steps"] == [10, 20, 100]
    assert grid["files"][0][4:] == [None, None]
    assert grid["files"][2][4:] == ["gpu_1_sample.png", "gpu_1_sample_2.png"]
    assert grid["errors"] == [{"step": 100, "gpu": "1", "reason": "out of memory"}]
    shutil.rmtree(samples / "step_0000020")
    assert sample_grid(samples)["steps"] == [10, 100]
    assert sample_grid(tmp_path / "nowhere") == {"prompts": [], "steps": [], "files": [], "errors": []}


def test_prompts_that_gpus_share_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "step_0000010"
    folder.mkdir()
    for number in range(23):  # GPU 0 draws prompts 0, 2, 4, ..., GPU 1 the others
        name = f"_{number // 2 + 1}" if number > 1 else ""
        (folder / f"gpu_{number % 2}_sample{name}.png").write_bytes(b"")
        (folder / f"gpu_{number % 2}_prompt{name}.txt").write_text(f"prompt {number}\n")
    grid = sample_grid(tmp_path)
    assert grid["prompts"] == [f"prompt {number}" for number in range(23)] and None not in grid["files"][0]


def test_an_unchanged_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = write_run(tmp_path / "run", checkpoints=2) / "samples"
    for folder in samples.iterdir():
        os.utime(folder, (time.time() - 60,) * 2)
    before = sample_grid(samples)
    monkeypatch.setattr("muralist.board.readers._read_text", lambda path: pytest.fail("read again"))
    assert sample_grid(samples) == before
