"""Measure the cost of checkpoints and their samples in a training run: bench/results/NAME.json.

python bench/checkpoint_cost.py NAME [--data PACKED_OR_NPZ] [--steps_between 80] [any flag of muralist train]

Runs `muralist train` (JiT-B/4 at 64 px, batch 256, on random images unless --data is given) with a checkpoint and a sample
every few steps, and reads the timestamps of its metrics. The cost of a checkpoint is the pause of the loop plus the
slow-down of steps while files are written in a thread. Steps before the first checkpoint, and steps after the files of a
checkpoint are complete, give the undisturbed step time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from bench.cifar_fid import CommandRunner
from bench.measure_training import RATES, RESULTS, hardware, versions

from muralist.core.run_dir import atomic_write_json

CYCLES = 4  # checkpoints; the time after the last is not measured
STRETCHES = 9  # log lines between two checkpoints
INTERVAL = 1000  # steps between checkpoints for the reported share
RANDOM_IMAGES = 8192
DEFAULTS = {
    "--model": "JiT-B/4", "--img_size": "64", "--batch_size": "256", "--epochs": "1000", "--val_fraction": "0",
    "--init_from": "none",
}  # fmt: skip


class Stretch(NamedTuple):
    """Steps that were logged together."""

    first: int
    last: int
    begin: float
    end: float
    counted: float  # seconds of these steps without pauses, as the run counts them

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.last - self.first + 1


def stretches(lines: Sequence[dict[str, Any]]) -> list[Stretch]:
    """Group the steps as they were logged; the first group has no start time and is left out."""
    together = [list(group) for _, group in groupby(lines, lambda line: line["train/samples_per_second"])]
    found = []
    for before, group in pairwise(together):
        images = group[-1]["images"] - before[-1]["images"]
        counted = images / group[-1]["train/samples_per_second"]
        found.append(Stretch(group[0]["step"], group[-1]["step"], before[-1]["time"], group[-1]["time"], counted))
    return found


def cost(lines: Sequence[dict[str, Any]], written: dict[int, float]) -> dict[str, Any]:
    """Return the time lost to each checkpoint; `written` is the time at which its files were complete."""
    saved = sorted(written)
    all_stretches = stretches(lines)
    quiet = [stretch for stretch in all_stretches if stretch.last <= saved[0]]
    events = []
    for step, following in pairwise(saved):
        here = [stretch for stretch in all_stretches if step < stretch.first and stretch.last <= following]
        quiet += [stretch for stretch in here if stretch.begin > written[step]]
        events.append((step, here))
    alone = sum(stretch.end - stretch.begin for stretch in quiet) / sum(stretch.steps for stretch in quiet)
    rows = []
    for step, here in events:
        passed = here[-1].end - here[0].begin
        still = passed - sum(stretch.counted for stretch in here)
        lost = passed - alone * sum(stretch.steps for stretch in here)
        rows.append({
            "step": step,
            "seconds lost": round(lost, 3),
            "of which the loop stands still": round(still, 3),
            "seconds until its files were complete": round(written[step] - here[0].begin, 1),
            "the next had to wait for them": written[step] > here[-1].end,  # then --steps_between is too short
        })  # fmt: skip
    later = mean(row["seconds lost"] for row in rows[1:])
    return {
        "checkpoints": rows,
        "ms of a step without": round(alone * 1e3, 2),
        "steps without": sum(stretch.steps for stretch in quiet),
        f"share of the time with one every {INTERVAL} steps": round(later / (later + INTERVAL * alone), 5),
        "the same, the first": round(rows[0]["seconds lost"] / (rows[0]["seconds lost"] + INTERVAL * alone), 5),
    }


def random_images(path: Path, side: int) -> Path:
    """Write an .npz file of noise in ten classes."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (RANDOM_IMAGES, side, side, 3), dtype=np.uint8)
    np.savez(path, train_x=images, train_y=np.arange(RANDOM_IMAGES) % 10)
    return path


def measure(options: argparse.Namespace, given: list[str], folder: Path) -> dict[str, Any]:
    """Train and evaluate the metrics."""
    usual = {name: value for name, value in DEFAULTS.items() if name not in given}
    side = int(usual.get("--img_size") or given[given.index("--img_size") + 1])
    between, run = options.steps_between, folder / "runs" / "cost"
    flags = ["train", "--data_path", str(options.data or random_images(folder / "noise.npz", side))]
    flags += [part for pair in usual.items() for part in pair] + ["--enable_condition", "--use_amp"]
    flags += ["--ckpt_every", str(between), "--max_steps", str(CYCLES * between), "--keep_last", str(CYCLES)]
    flags += ["--log_every", str(max(1, between // STRETCHES))]
    flags += ["--results_dir", str(run.parent), "--run_name", run.name, *given]
    seconds = CommandRunner(folder).run("train", *flags)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    manifests = (run / "checkpoints").glob("*/manifest.json")
    written = {json.loads(path.read_text())["step"]: path.stat().st_mtime for path in manifests}
    for step in written:
        if not list((run / "samples" / f"step_{step:07d}").glob("gpu_*_sample.png")):
            raise SystemExit(f"The checkpoint of step {step} has no sample.")
    return {
        "command": shlex.join(["python", "bench/checkpoint_cost.py", *sys.argv[1:]]),
        "trained by": f"muralist {shlex.join(flags)}".replace(f"{folder}/", ""),
        "hardware": hardware(),
        "versions": versions(),
        "seconds, start to end": round(seconds, 1),
        **{f"median {name}": median(line[name] for line in lines[len(lines) // 4 :]) for name in RATES},
        **cost(lines, written),
        "the run's own forecast": json.loads((run / "forecast.json").read_text()),
    }


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in bench/results")
    parser.add_argument("--data", type=Path, help="training data; default: random images")
    parser.add_argument("--steps_between", type=int, default=80, help="steps between checkpoints")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, given, Path(folder))
    atomic_write_json(RESULTS / f"{options.name}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
