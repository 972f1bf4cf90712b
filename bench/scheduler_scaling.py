"""Predict how generation scales to 8 and 64 GPUs: by calculation, and with the real scheduler on a simulated clock.

python bench/scheduler_scaling.py [ROWS]

The cost of an image, the batch and the time to load come from bench/results/generate_h200.json.
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
from bench.measure_training import RESULTS, versions
from bench.scheduler_simulation import Case, simulate

from muralist.core.run_dir import atomic_write_json

RECORD, WHICH = RESULTS / "generate_h200.json", "DiT-g/2@1024x1024@4"
WORKERS = (8, 64)
SLOW = 2.0  # times as long


def _spread(rows: np.ndarray) -> np.ndarray:
    """Return costs between about a third and three times the median."""
    return np.random.default_rng(0).lognormal(0.0, 0.5, len(rows))


def _expensive_last(rows: np.ndarray) -> np.ndarray:
    """Return costs that are three times as high in the last tenth of the table."""
    return np.where(rows < 0.9 * len(rows), 1.0, 3.0)


COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "equal rows": np.ones_like,
    "uneven rows": _spread,
    "expensive rows last": _expensive_last,
}


def measured_case(rows: int) -> Case:
    """Return one worker with the measured cost of an image and loading time."""
    line = json.loads(RECORD.read_text())["results"][WHICH]
    cost = 1 / line["images per second, median batch"]
    loading = line["seconds with loading the model"] - line["pictures"] * cost
    return Case(rows, line["batch"], cost, 1, loading)


def calculate(case: Case) -> dict[str, float]:
    """Return loading, rows x cost / GPUs, and the tail: some GPUs generate one batch more than others."""
    capacity = case.workers - 1 + 1 / case.slow
    share = case.rows * case.seconds_per_image / capacity
    batch = case.batch * case.seconds_per_image
    tail = math.ceil(share / batch) * batch - share
    return {"loading": case.loading, "rows x cost / GPUs": share, "tail": tail, "seconds": case.loading + share + tail}


def run_case(case: Case) -> dict[str, Any]:
    """Simulate one scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = simulate(case, Path(folder))
    assert (outcome.generated, outcome.duplicates) == (case.rows, 0), outcome
    return {
        "seconds": outcome.seconds,
        "generating": outcome.generating,
        "tail": outcome.tail,
        "batches": outcome.batches,
        "computed per row, ms": 1000 * outcome.computed / case.rows,
    }


def scaling(name: str, alone: Case) -> list[dict[str, Any]]:
    """Compare one GPU with several, for one distribution of costs."""
    one = run_case(alone)
    print(f"{name}: 1 GPU {one['seconds']:,.0f} s, {one['computed per row, ms']:.1f} ms computed per row", flush=True)
    lines = []
    for workers in WORKERS:
        for slow in (1.0, SLOW) if name == "uneven rows" else (1.0,):
            case = replace(alone, workers=workers, slow=slow)
            simulated, calculated = run_case(case), calculate(case)
            capacity = workers - 1 + 1 / slow
            line = {
                "rows": name,
                "GPUs": workers,
                "one GPU takes times as long": slow,
                "capacity": capacity,
                "speed-up of generating": one["generating"] / simulated["generating"],
                "speed-up with loading": one["seconds"] / simulated["seconds"],
                "calculated, with loading": calculate(alone)["seconds"] / calculated["seconds"],
                "simulated": simulated,
                "calculated": calculated,
            }
            lines.append(_rounded(line))
            print(json.dumps(lines[-1]), flush=True)
    return [{"rows": name, "GPUs": 1, "simulated": _rounded(one), "calculated": _rounded(calculate(alone))}, *lines]


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _rounded(value) for name, value in content.items()}
    return round(content, 3) if isinstance(content, float) else content


def main(rows: int) -> None:
    """Run every case and write the result."""
    case = measured_case(rows)
    results = [line for name, costs in COSTS.items() for line in scaling(name, replace(case, costs=costs))]
    content = {
        "command": f"python bench/scheduler_scaling.py {rows}",
        "what": "The real scheduler, workers, files and ledger; pipelines only wait, on a simulated clock. "
        "All workers share the cores of this machine, so the overhead is an upper bound.",
        "measured": f"{WHICH} in {RECORD.name}",
        "seconds per image": round(case.seconds_per_image, 3),
        "batch": case.batch,
        "loading": round(case.loading, 1),
        "rows": rows,
        "cores here": os.cpu_count(),
        "versions": versions(),
        "results": results,
    }
    atomic_write_json(RESULTS / "fleet_scaling.json", content)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
