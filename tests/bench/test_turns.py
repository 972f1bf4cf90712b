"""Test benchmarks that share a GPU: none runs while another is timed, and each of them is timed."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WORK = """
import sys, time
from bench.turns import alone
for _ in range(3):
    begin = time.monotonic()
    time.sleep(float(sys.argv[1]))
    print("work", begin, time.monotonic())
    with alone():
        begin = time.monotonic()
        time.sleep(0.02)
        print("alone", begin, time.monotonic())
"""


def test_one_is_timed_at_a_time_and_none_starves(tmp_path: Path) -> None:
    environment = os.environ | {"MURALIST_TURNS": str(tmp_path / "turns"), "PYTHONPATH": str(REPOSITORY)}
    # The quick ones come back to work again and again while the slow one waits to be alone.
    processes = [
        subprocess.Popen([sys.executable, "-c", WORK, pause], env=environment, stdout=subprocess.PIPE, text=True)
        for pause in ("0.01", "0.02", "0.3")
    ]
    spans: list[tuple[int, str, float, float]] = []
    for number, process in enumerate(processes):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        for line in output.splitlines():
            kind, begin, end = line.split()
            spans.append((number, kind, float(begin), float(end)))
    assert [kind for _, kind, *_ in spans].count("alone") == 9
    for one, other in combinations(spans, 2):
        if one[0] != other[0] and "alone" in (one[1], other[1]):
            assert one[3] <= other[2] or other[3] <= one[2], (one, other)
