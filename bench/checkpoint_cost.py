"""What checkpoints and their samples cost a training run: bench/results/NAME.json.

python bench/checkpoint_cost.py NAME [--data PACKED_OR_NPZ] [--steps_between 80] [any flag of muralist train]

Runs `muralist train` as a user would (JiT-B/4 at 64 px, batch 256, on random pictures where no data are given) with a
checkpoint and a sample every so many steps, and reads the answer from what the run itself writes. Each metric has the
time of day, so from one checkpoint to the next all is seen: the loop standing still, and steps that are slower while the
files are written in a thread. Steps before the first checkpoint, and those between the end of that writing and the next
one, say what a step takes alone.
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
from bench.cifar_fid import Workshop
from bench.measure_training import RATES, RESULTS, hardware, versions

from muralist.runfolder import write_json

CYCLES = 4  # checkpoints; the time after the last is not measured
STRETCHES = 9  # lines of the log between two checkpoints
INTERVAL = 1000  # steps between checkpoints, of which the goal speaks
RANDOM_PICTURES = 8192
USUAL = {
    "--model": "JiT-B/4", "--img_size": "64", "--batch_size": "256", "--epochs": "1000", "--val_fraction": "0",
    "--init_from": "none",
}  # fmt: skip


class Stretch(NamedTuple):
    """Steps that were written out together."""

    first: int
    last: int
    begin: float
    end: float
    counted: float  # seconds of these steps as the run counts them, in which pauses are left out

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1


def stretches(lines: Sequence[dict[str, Any]]) -> list[Stretch]:
    """The run's steps, as they were written out; before the first of them nothing is known."""
    together = [list(group) for _, group in groupby(lines, lambda line: line["train/samples_per_second"])]
    found = []
    for before, group in pairwise(together):
        images = group[-1]["images"] - before[-1]["images"]
        counted = images / group[-1]["train/samples_per_second"]
        found.append(Stretch(group[0]["step"], group[-1]["step"], before[-1]["time"], group[-1]["time"], counted))
    return found


def cost(lines: Sequence[dict[str, Any]], written: dict[int, float]) -> dict[str, Any]:
    """The time lost to each checkpoint that training went on from; `written` says when its files were complete."""
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


def random_pictures(path: Path, side: int) -> Path:
    """An .npz file of noise in ten classes."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (RANDOM_PICTURES, side, side, 3), dtype=np.uint8)
    np.savez(path, train_x=images, train_y=np.arange(RANDOM_PICTURES) % 10)
    return path


def measure(options: argparse.Namespace, given: list[str], folder: Path) -> dict[str, Any]:
    """Train and look at what was written."""
    usual = {name: value for name, value in USUAL.items() if name not in given}
    side = int(usual.get("--img_size") or given[given.index("--img_size") + 1])
    between, run = options.steps_between, folder / "runs" / "cost"
    words = ["train", "--data_path", str(options.data or random_pictures(folder / "noise.npz", side))]
    words += [word for pair in usual.items() for word in pair] + ["--enable_condition", "--use_amp"]
    words += ["--ckpt_every", str(between), "--max_steps", str(CYCLES * between), "--keep_last", str(CYCLES)]
    words += ["--log_every", str(max(1, between // STRETCHES))]
    words += ["--results_dir", str(run.parent), "--run_name", run.name, *given]
    seconds = Workshop(folder).run("train", *words)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    manifests = (run / "checkpoints").glob("*/manifest.json")
    written = {json.loads(path.read_text())["step"]: path.stat().st_mtime for path in manifests}
    for step in written:
        if not list((run / "samples" / f"step_{step:07d}").glob("gpu_*_sample.png")):
            raise SystemExit(f"The checkpoint of step {step} has no sample.")
    return {
        "command": shlex.join(["python", "bench/checkpoint_cost.py", *sys.argv[1:]]),
        "trained by": f"muralist {shlex.join(words)}".replace(f"{folder}/", ""),
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
    parser.add_argument("--data", type=Path, help="what to train on; default: random pictures")
    parser.add_argument("--steps_between", type=int, default=80, help="checkpoints")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, given, Path(folder))
    write_json(RESULTS / f"{options.name}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
