"""How a fleet scales to 8 and 64 GPUs: on paper, and with the real fleet on a clock that skips the painting.

python bench/fleet_scaling.py [ROWS]

One picture's cost, the batch and the time to load come from bench/results/generate_h200.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.fleet_simulation import Case, simulate
from bench.measure_training import RESULTS, versions

from muralist.runfolder import write_json

MEASURED, WHICH = RESULTS / "generate_h200.json", "DiT-g/2@1024x1024@4"
FLEETS = (8, 64)
SLOW = 2.0  # times as long


def _spread(rows: np.ndarray) -> np.ndarray:
    """Most rows cost between a third and three times the middle one."""
    return np.random.default_rng(0).lognormal(0.0, 0.5, len(rows))


def _dear_last(rows: np.ndarray) -> np.ndarray:
    """The last tenth of the table costs three times as much."""
    return np.where(rows < 0.9 * len(rows), 1.0, 3.0)


COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "equal rows": np.ones_like,
    "uneven rows": _spread,
    "dear rows last": _dear_last,
}


def measured_case(rows: int) -> Case:
    """One worker with the cost of a picture and the loading time that were measured."""
    line = json.loads(MEASURED.read_text())["results"][WHICH]
    cost = 1 / line["images per second, median batch"]
    loading = line["seconds with loading the model"] - line["pictures"] * cost
    return Case(rows, line["batch"], cost, 1, loading)


def on_paper(case: Case) -> dict[str, float]:
    """Loading, rows times cost over GPUs, and the tail: batches are whole, so some GPUs make one more than others."""
    capacity = case.workers - 1 + 1 / case.slow
    share = case.rows * case.seconds_per_picture / capacity
    batch = case.batch * case.seconds_per_picture
    tail = math.ceil(share / batch) * batch - share
    return {"loading": case.loading, "rows x cost / GPUs": share, "tail": tail, "seconds": case.loading + share + tail}


def play(case: Case) -> dict[str, Any]:
    """Simulate one fleet."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = simulate(case, Path(folder))
    assert (outcome.made, outcome.twice) == (case.rows, 0), outcome
    return {
        "seconds": outcome.seconds,
        "painting": outcome.painting,
        "tail": outcome.tail,
        "batches": outcome.batches,
        "computed per row, ms": 1000 * outcome.computed / case.rows,
    }


def scaling(name: str, alone: Case) -> list[dict[str, Any]]:
    """One GPU and the fleets, with rows of one kind of cost."""
    one = play(alone)
    print(f"{name}: 1 GPU {one['seconds']:,.0f} s, {one['computed per row, ms']:.1f} ms computed per row", flush=True)
    lines = []
    for workers in FLEETS:
        for slow in (1.0, SLOW) if name == "uneven rows" else (1.0,):
            case = replace(alone, workers=workers, slow=slow)
            played, paper = play(case), on_paper(case)
            capacity = workers - 1 + 1 / slow
            line = {
                "rows": name,
                "GPUs": workers,
                "one GPU takes times as long": slow,
                "capacity": capacity,
                "speed-up of painting": one["painting"] / played["painting"],
                "speed-up with loading": one["seconds"] / played["seconds"],
                "on paper, with loading": on_paper(alone)["seconds"] / paper["seconds"],
                "simulated": played,
                "paper": paper,
            }
            lines.append(_rounded(line))
            print(json.dumps(lines[-1]), flush=True)
    return [{"rows": name, "GPUs": 1, "simulated": _rounded(one), "paper": _rounded(on_paper(alone))}, *lines]


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _rounded(value) for name, value in content.items()}
    return round(content, 3) if isinstance(content, float) else content


def main(rows: int) -> None:
    """Play every case and write the result."""
    case = measured_case(rows)
    results = [line for name, costs in COSTS.items() for line in scaling(name, replace(case, costs=costs))]
    content = {
        "command": f"python bench/fleet_scaling.py {rows}",
        "what": "The fleet's real scheduling, workers, files and ledger; painters only wait, on a clock that skips it. "
        "All workers share the cores of this machine, so that overhead is counted too high.",
        "measured": f"{WHICH} in {MEASURED.name}",
        "seconds per picture": round(case.seconds_per_picture, 3),
        "batch": case.batch,
        "loading": round(case.loading, 1),
        "rows": rows,
        "cores here": os.cpu_count(),
        "versions": versions(),
        "results": results,
    }
    write_json(RESULTS / "fleet_scaling.json", content)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
