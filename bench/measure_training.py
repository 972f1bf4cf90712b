"""Run `muralist train` and summarize it in bench/results/NAME.json: hardware, versions, command, speed, held-out loss.

python bench/measure_training.py NAME --results_dir results --run_name NAME [any other flag of muralist train]
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from muralist import __version__
from muralist.cli import main
from muralist.core.run_dir import atomic_write_json

RESULTS = Path(__file__).parent / "results"
RATES = ("train/samples_per_second", "train/tokens_per_second", "train/mfu", "train/data_wait_fraction")


def hardware() -> dict[str, Any]:
    """Return the hardware for a record."""
    if torch.cuda.is_available():
        return {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def versions(*more: str) -> dict[str, str]:
    """Return the versions for a record."""
    return {"muralist": __version__, "torch": torch.__version__, "python": platform.python_version()} | {
        name: version(name) for name in more
    }


def summarize(run: Path) -> dict[str, Any]:
    """Return the median speeds over the second half of the run, and its losses."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    second_half = lines[len(lines) // 2 :]
    tail = [line["train/loss"] for line in lines[-100:]]
    return {
        "steps": lines[-1]["step"],
        "images": lines[-1]["images"],
        **{f"median {name}": median(line[name] for line in second_half) for name in RATES},
        "train/loss, mean of the last 100 steps": sum(tail) / len(tail),
        "val/loss": {line["step"]: line["val/loss"] for line in lines if "val/loss" in line},
    }


def measure(name: str, arguments: list[str]) -> int:
    """Train, then write the record."""
    started = time.time()
    status = main(["train", *arguments])
    if status == 0:
        run = Path(arguments[arguments.index("--results_dir") + 1]) / arguments[arguments.index("--run_name") + 1]
        result = {
            "command": " ".join(["muralist", "train", *arguments]),
            "hardware": hardware(),
            "versions": versions(),
            "seconds, start to end": round(time.time() - started, 1),
            **summarize(run),
        }
        if torch.cuda.is_available():
            result["peak memory, GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        atomic_write_json(RESULTS / f"{name}.json", result)
    return status


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1], sys.argv[2:]))
