"""A generation folder while it fills: counts, newest images, failures, and lines read once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from muralist.board import generation as module
from muralist.board.generation import Generation, generation_summary
from muralist.generate.console import ProgressLines, WorkerProgress
from muralist.generate.output_dir import OutputDir, note_plan
from tests.support.boards import ledger_line, write_generation


def lock(folder: Path, age: float = 0.0) -> None:
    (folder / "lock").write_text(json.dumps({"host": "here", "pid": 1, "job": "", "heartbeat": time.time() - age}))


def counts(told: dict) -> list[tuple]:
    return [(worker["gpu"], worker["done"], worker["failed"], worker["total"]) for worker in told["workers"]]


def test_a_finished_folder(tmp_path: Path) -> None:
    told = Generation(write_generation(tmp_path / "images")).progress()
    assert (told["state"], told["done"], told["failed"], told["read"]) == ("finished", 5, 1, 1.0)
    assert counts(told) == [("0", 2, 1, None), ("1", 3, 0, None)]
    assert [line["file"] for line in told["newest"]] == [f"row-{row}.png" for row in (5, 4, 3, 1, 0)]
    assert told["reasons"] == [("out of memory", 1)] and told["settings"] == {"steps": 20}
    (failure,) = told["failures"]
    assert (failure["id"], failure["seed"], failure["prompt"], failure["gpu"]) == ("row-2", 44, "image 2", "0")
    assert told["workers"][1]["speed"] == 0.5, "rows 1, 3 and 5 came two seconds apart"


def test_shards_of_running_workers_are_read(tmp_path: Path) -> None:
    folder = write_generation(tmp_path / "images", rows=4, failed=(2,))
    generation = Generation(folder)
    assert generation.progress()["done"] == 3
    output = OutputDir(folder)
    output.work.mkdir()
    lock(folder)
    display = ProgressLines(output)
    display.update({"0": WorkerProgress(1, 0, 4), "1": WorkerProgress(1, 1, 3)}, 2)
    output.shard("0").write_text("\n" + ledger_line(2, "0"))
    output.shard("1").write_text("\n" + ledger_line(4, "1") + ledger_line(5, "1", "a bad prompt") + '{"status": "do')
    told = generation.progress()
    assert (told["state"], told["done"], told["failed"], told["unassigned"]) == ("running", 5, 1, 2)
    assert counts(told) == [("0", 1, 0, 4), ("1", 1, 1, 3)]
    assert told["reasons"] == [("a bad prompt", 1)], "row 2 was mended"
    assert told["newest"][0]["file"] == "row-4.png"

    with output.ledger.open("a") as ledger:  # the command ends: lines move, nothing is counted twice
        ledger.write(ledger_line(2, "0") + ledger_line(4, "1") + ledger_line(5, "1", "a bad prompt"))
    version = told["version"]
    for path in (output.shard("0"), output.shard("1"), output.progress, folder / "lock"):
        path.unlink()
    output.work.rmdir()
    told = generation.progress()
    assert (told["state"], told["done"], told["failed"]) == ("finished", 5, 1) and told["version"] != version
    (write_generation(tmp_path / "other", rows=2, failed=()) / "ledger.jsonl").replace(output.ledger)
    assert generation.progress()["done"] == 2, "a replaced ledger is read again"


def test_the_planned_count_is_that_of_the_last_command(tmp_path: Path) -> None:
    folder = write_generation(tmp_path / "images", rows=3, failed=())
    generation = Generation(folder)
    assert generation.progress()["planned"] is None, "a ledger of before"
    note_plan(folder / "ledger.jsonl", 10)
    assert generation.progress()["planned"] == 10
    with (folder / "ledger.jsonl").open("a") as ledger:
        ledger.write(ledger_line(3) + '{"planned": "many"}\n[]\n7\n{"status": "do')
    note_plan(folder / "ledger.jsonl", 4)
    told = generation.progress()
    assert (told["planned"], told["done"], told["failed"]) == (4, 4, 0)


def test_images_are_in_the_order_of_the_table(tmp_path: Path) -> None:
    folder = write_generation(tmp_path / "images", rows=0)
    rows = [9, 3, 3, 700, 5]
    with (folder / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(ledger_line(row) for row in rows)
        ledger.write(ledger_line(3, copy=1, file="row-3-copy.png") + ledger_line(8, error="no"))
        ledger.write(ledger_line(-1) + ledger_line(1 << 40) + ledger_line(1, copy=1 << 30))
    page = Generation(folder).images(1, 3)
    assert page["total"] == 5
    assert [line["file"] for line in page["images"]] == ["row-3-copy.png", "row-5.png", "row-9.png"]
    assert Generation(folder).images(5, 10)["images"] == []


def test_a_long_ledger_is_read_over_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_READ_SECONDS", 0.0)
    monkeypatch.setattr("muralist.board.files._BLOCK", 4096)
    generation = Generation(write_generation(tmp_path / "images", rows=0))
    with (tmp_path / "images" / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(ledger_line(row) for row in range(100))
    first = generation.progress()
    assert 0 < first["read"] < 1 and 0 < first["done"] < 100
    for _ in range(20):
        told = generation.progress()
    assert told["read"] == 1.0 and told["done"] == 100


def test_states_in_the_list(tmp_path: Path) -> None:
    folder = write_generation(tmp_path / "images")
    assert generation_summary(folder)["state"] == "finished"
    lock(folder)
    assert generation_summary(folder)["state"] == "running"
    lock(folder, age=120)
    assert generation_summary(folder)["state"] == "lost"
