"""Large inputs: time and memory stay within bounds that a laptop has, and what was measured is printed (`pytest -s`).

With MURALIST_RECORD=1 it is written to bench/results/load.json, which docs/security.md shows. Each measurement is a
process of its own, whose processor time counts, not the clock: a busy machine is not a failure.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muralist.tools.launch import launch
from tests.support.images import encoded, noise
from tests.support.records import write_record
from tests.support.runs import environment
from tests.support.worker_pools import ThreadedRun

ROWS = 1_000_000
FILES = 100_000
PROCESSES = 64
RECORD = "load"
_rows: list[dict[str, Any]] = []
"""What was measured by this process."""


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    """Write down what was measured, on request."""
    yield
    if os.environ.get("MURALIST_RECORD"):
        write_record(RECORD, "MURALIST_RECORD=1 pytest -m slow tests/test_load.py", {"table": _rows})


def note(what: str, seconds: float, megabytes: float | None = None) -> None:
    """Print a row of the record, and keep it."""
    memory = "" if megabytes is None else f"{megabytes:.0f} MB"
    _rows.append({"input": what, "CPU time": f"{seconds:.0f} s", "memory": memory})
    print(_rows[-1])


_MEASURED = r"""
import json, re, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
{prepare}
began = time.process_time()
answer = {work}
peak = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(json.dumps({{"answer": answer, "seconds": time.process_time() - began, "megabytes": peak}}))
"""


def measure(folder: Path, what: str, prepare: str, work: str) -> tuple[Any, float, float]:
    """The answer of some work, the seconds it computed, and the most memory its process had."""
    script = _MEASURED.format(prepare=prepare, work=work)
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    note(what, found["seconds"], found["megabytes"])
    return found["answer"], found["seconds"], found["megabytes"]


_PLAN = """
from muralist.data.prompts import open_prompt_table
from muralist.generate.plan import Plan
def planned():
    plan = Plan(open_prompt_table(str(folder / "table.csv")), 1, 0, "", (8, 8), "png")
    plan.check_file_names()
    return plan
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of a million rows."""
    folder = tmp_path_factory.mktemp("load")
    with (folder / "table.csv").open("w") as file:
        file.write("image_id,prompt,seed\n")
        file.writelines(f"img{row:07d},a photo of scene number {row} at noon,{row}\n" for row in range(ROWS))
    return folder


@pytest.mark.slow
def test_a_plan_of_a_million_rows(table: Path) -> None:
    answer, seconds, megabytes = measure(table, "planning a table of 1,000,000 rows", _PLAN, "len(planned())")
    assert answer == ROWS
    assert seconds < 60  # 10 on one core of a small server
    assert megabytes < 400  # 114 there


_LEDGER = """
import numpy as np
from muralist.generate.output_dir import Header, OutputDir
plan, output = planned(), OutputDir(folder / "images")
output.create()
with output.ledger.open("w") as file:
    file.write(Header({}, 1).line())
    for sample in plan.samples(np.arange(len(plan))):
        line = {"status": "done", "index": sample.row, "copy": 0, "id": sample.id, "seed": sample.seed,
                "prompt": sample.prompt, "file": sample.file, "gpu": "0", "key": sample.key,
                "bytes": 3, "sha256": "x", "changed": 1}
        file.write(json.dumps(line) + "\\n")
"""


@pytest.mark.slow
def test_a_resume_of_a_plan_of_a_million_rows(table: Path) -> None:
    prepare = _PLAN + _LEDGER
    answer, seconds, megabytes = measure(
        table,
        "resuming a plan of 1,000,000 rows, each with its line in the ledger",
        prepare,
        "int(output.finished(plan).sum())",
    )
    assert answer == 0  # the images themselves are not there
    assert seconds < 180  # 45 beside other work
    assert megabytes < 500  # 128


@pytest.mark.slow
def test_a_folder_of_a_hundred_thousand_images(tmp_path: Path) -> None:
    first = tmp_path / "000000.png"
    first.write_bytes(encoded(noise(1, 2, 2)))
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(FILES):
        if number % 20_000 == 0:  # a file has so many names at most, on some disks
            first = folder / f"source{number}.png"
            first.write_bytes(encoded(noise(number, 2, 2)))
        os.link(first, folder / f"{number:06d}_seed{number}.png")
    prepare = "from muralist.evaluate.inputs import find_images"
    answer, seconds, megabytes = measure(
        tmp_path, "listing 100,000 images", prepare, 'len(find_images(folder / "images", "--images"))'
    )
    assert answer == FILES + FILES // 20_000
    assert seconds < 40  # 3
    assert megabytes < 1500  # 500, of which PyTorch takes nearly all


_RANK = """
import os, sys, time
from pathlib import Path
from muralist.generate.plan import Sample
from muralist.generate.output_dir import Shard
from muralist.train.watchdog import Watchdog, WatchdogTiming
folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sample = Sample(rank, rank, 0, str(rank), rank, "a car", "", 8, 8, "x.png")
with Watchdog(folder / "heartbeats", rank, size, 600, WatchdogTiming(beat=1.5)) as watchdog:
    shard = Shard(folder / "shards" / f"gpu{rank}.jsonl", "x")
    for number in range(20):
        watchdog.report("working", number)
        shard.failed(sample, "tried", str(rank), 0.1)
        time.sleep(0.05)
    shard.close()
"""


@pytest.mark.slow
def test_sixty_four_processes_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All write their lines and signs of life into one folder and watch each other; nothing is lost, nothing is left."""
    from muralist.data.ledger_reader import read_lines
    from muralist.generate.output_dir import Header, merge_shards, start_ledger

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert launch([sys.executable, "-c", _RANK, str(tmp_path)], PROCESSES) == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    note(f"{PROCESSES} processes that watch each other's heartbeats", computed)
    start_ledger(tmp_path / "ledger.jsonl", Header({}, 1))
    merge_shards(tmp_path / "ledger.jsonl", tmp_path / "shards")
    lines = list(read_lines(tmp_path / "ledger.jsonl"))
    assert len(lines) == 20 * PROCESSES and {line["gpu"] for line in lines} == {str(rank) for rank in range(PROCESSES)}
    assert not list((tmp_path / "heartbeats").glob("*")) if (tmp_path / "heartbeats").exists() else True
    assert computed < 120  # 15


def test_sixty_four_workers_share_a_table(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, ["car", "tree"] * PROCESSES, batch_size=1)
    began = time.process_time()
    assert threaded.run([str(label) for label in range(PROCESSES)]) == (2 * PROCESSES, 0)
    assert {line["gpu"] for line in threaded.lines().values()} == {str(label) for label in range(PROCESSES)}
    print(f"{PROCESSES} workers: {time.process_time() - began:.1f} s")
    assert time.process_time() - began < 60
