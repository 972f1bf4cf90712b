"""The board over a hundred long runs and a hundred thousand files: quick, and in bounded memory.

With MURALIST_RECORD=1 the measurement is written to bench/results/board_load.json, which docs/board.md shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.boards import Board, ledger_line, write_generation, write_run
from tests.support.records import write_record
from tests.support.runs import finish, start

pytestmark = [pytest.mark.slow, pytest.mark.alone]
_RUNS, _STEPS, _ROWS = 100, 10_000, 100_000
_MEGABYTES = 300
RECORD = "board_load"


def _link_samples(run: Path, model: Path, checkpoints: int, images: int) -> int:
    """Samples as hard links to one image and one text per prompt: as many files as one likes, in seconds."""
    for step in range(1, checkpoints + 1):
        folder = run / "samples" / f"step_{step * 10:07d}"
        folder.mkdir(parents=True)
        for gpu in range(images):
            os.link(model / "image.png", folder / f"gpu_{gpu}_sample.png")
            os.link(model / f"{gpu % 50}.txt", folder / f"gpu_{gpu}_prompt.txt")
    return 2 * checkpoints * images


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    root, model = folder / "results", folder / "model"
    first = write_run(root / "run-000", steps=_STEPS, checkpoints=1)
    model.mkdir()
    os.link(first / "samples" / "step_0000010" / "gpu_0_sample.png", model / "image.png")
    for number in range(50):
        (model / f"{number}.txt").write_text(f"prompt {number}\n")
    files = 0
    for number in range(1, _RUNS):
        run = root / f"run-{number:03d}"
        (run / "logs").mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl", "logs/train.log"):
            os.link(first / name, run / name)
        files += _link_samples(run, model, *((500, 50) if number == 1 else (10, 26)))
    assert files > 100_000
    write_generation(root / "images", rows=0)
    with (root / "images" / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(ledger_line(row, str(row % 8)) for row in range(_ROWS))
    return root


def _memory(process: int, what: str = "VmRSS") -> float:
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition(f"{what}:")[2].split()[0]) / 1024


def test_a_hundred_runs_and_a_hundred_thousand_files(crowd: Path, tmp_path: Path) -> None:
    process = start("muralist", "board", crowd, "--port", 0, XDG_CACHE_HOME=str(tmp_path))
    assert process.stdout is not None
    board = Board(int(process.stdout.readline().split("/")[2].partition(":")[2]))
    seconds: dict[str, float] = {}

    def timed(name: str, ask: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        answer = ask()
        seconds[name] = max(seconds.get(name, 0.0), time.perf_counter() - began)
        return answer

    try:
        board.get("/")  # by now it listens, and has loaded itself
        idle = _memory(process.pid)
        told = timed("list", lambda: board.get("/api/overview").json())
        assert len(told["run"]) == _RUNS and all(run["step"] == _STEPS for run in told["run"])
        timed("list again", lambda: board.get("/api/overview"))
        window = timed("curves", lambda: board.get("/api/curves?run=run-000").json())
        assert window["rows"] == _STEPS and len(window["x"]) == 1250
        again = f"/api/curves?run=run-000&have={window['version']}.{window['width']}.{window['next']}"
        assert len(timed("curves again", lambda: board.get(again)).body) < 2000
        grid = timed("grid", lambda: board.get("/api/samples?run=run-001").json())
        assert len(grid["steps"]) == 500 and len(grid["prompts"]) == 50 and grid["files"][499][49]
        timed("grid again", lambda: board.get("/api/samples?run=run-001"))
        generation = timed("ledger, one look", lambda: board.get("/api/generation?folder=images").json())
        while generation["read"] < 1:
            generation = timed("ledger, one look", lambda: board.get("/api/generation?folder=images").json())
        assert generation["done"] == _ROWS
        timed("ledger again", lambda: board.get("/api/generation?folder=images"))
        page = timed("images", lambda: board.get(f"/api/images?folder=images&begin={_ROWS - 100}").json())
        assert page["images"][-1]["prompt"] == f"image {_ROWS - 1}"
        for number in range(1, 40):
            board.get(f"/api/curves?run=run-{number:03d}")
            board.get(f"/api/samples?run=run-{number:03d}")
        full = _memory(process.pid, "VmHWM")
    finally:
        process.terminate()
        finish(process, expect=None, timeout=30)
    measured = {name: round(value, 2) for name, value in seconds.items()}
    print(measured, f"{idle:.0f} MB idle, {full:.0f} MB at most")
    if os.environ.get("MURALIST_RECORD"):
        command = "MURALIST_RECORD=1 pytest -m slow tests/board/test_load.py"
        write_record(RECORD, command, {"seconds": measured, "MB": {"at rest": round(idle), "at most": round(full)}})
    assert seconds["list"] < 2 and seconds["curves"] < 2 and seconds["grid"] < 4 and seconds["images"] < 1
    assert max(seconds["list again"], seconds["curves again"], seconds["grid again"], seconds["ledger again"]) < 1
    assert seconds["ledger, one look"] < 3, "a look takes a second and the part that was begun"
    assert full < _MEGABYTES
