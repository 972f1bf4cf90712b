"""The standard benchmarks with tiny models on a CPU: sides alternate, and the record has what the tables need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.standard import ITEMS, summarize, timed_calls
from scripts import benchmark_tables

from tests.conftest import REPOSITORY
from tests.support.runs import environment


def test_ratios_are_those_of_medians() -> None:
    rates = {"muralist": [4.0, 6.0, 5.0], "baseline": [2.0, 2.5, 1.0]}
    rounds = [{"side": side, "images/s": values[turn]} for turn in range(3) for side, values in rates.items()]
    found = summarize(rounds)
    assert found["images/s, median"] == {"muralist": 5.0, "baseline": 2.0}
    assert found["ratio"] == {"baseline": 2.5}
    assert found["spread"] == {"muralist": 0.4, "baseline": 0.75}


def test_single_images_of_varying_length_are_timed_more_often() -> None:
    assert timed_calls(ITEMS["lengths-qwen"], 16) == 2
    assert timed_calls(ITEMS["lengths-qwen"], 1) == 8
    assert timed_calls(ITEMS["generate-wan"], 1) == ITEMS["generate-wan"].calls


@pytest.mark.slow
def test_tiny_items_are_measured_beside_plain_diffusers_and_another_tree(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    for item in ("train-b4-64", "generate-wan"):  # the record of the first is kept
        command = [sys.executable, "bench/standard.py", record, "--tiny", "--rounds", "2", "--items", item]
        subprocess.run([*command, "--old", REPOSITORY], cwd=REPOSITORY, env=environment(), check=True)
    items = json.loads(record.read_text())["items"]
    assert [row["side"] for row in items["train-b4-64"]["rounds"]] == ["muralist", "old"] * 2
    assert [row["side"] for row in items["generate-wan"]["rounds"]] == ["muralist", "old", "baseline"] * 2
    first = items["train-b4-64"]["first"]
    assert first["muralist"]["losses of the first steps"] == first["old"]["losses of the first steps"]
    assert items["generate-wan"]["images, old beside new"] == {"images": 16, "same bytes": 16}
    table = benchmark_tables.table(record).splitlines()
    assert len(table) == 4 and table[3].startswith("| Wan-2.1-1.3B, 64 px | `muralist generate`, batch 2 |")
