"""The FID of a JiT along its training: bench/results/NAME.json, from which scripts/draw_fid_curve.py draws the curve.

python bench/cifar_fid.py NAME --data cifar10.npz --inception_weights WEIGHTS [--folder FOLDER] [flags of train]

Runs `muralist stats` on the training images, `muralist train` for the given seconds, then `muralist generate` and
`muralist evaluate` for some of its checkpoints, spaced by a constant factor of steps. Starting a process takes as
long as generating its images: a few checkpoints run at once and share the GPU. With --folder, run, images and evaluations
stay there; FOLDER/evaluation-STEP/report/index.html is the report page of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware, versions

from muralist.core.run_dir import atomic_write_json
from muralist.data.ledger_reader import LEDGER, read_lines
from muralist.evaluate.inception import read_tensors

CLASSES, SIDE = 10, 32
BATCH = 250  # of generation: 5,000 images divide into batches of this size, which use the GPU fully
CONCURRENT = 6  # checkpoints evaluated at once: some start while others generate
PATIENCE = 120.0  # seconds for the last checkpoint after a request to stop
STOPPED = 128 + signal.SIGTERM  # the exit status of a training that was stopped, with its state saved
LINES_SHOWN = 30
NOTE = (
    f"The reference is the training set. Up to {CONCURRENT} checkpoints share the GPU: alone, each would be faster. "
    "Seconds since the command count imports and compiling; seconds of steps do not, nor the writing of checkpoints."
)


@dataclass(frozen=True)
class CommandRunner:
    """Runs commands in a folder, each with its own log."""

    folder: Path

    def start(
        self, name: str, *words: object, threads: int | None = None, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a muralist command, with further environment variables."""
        environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}) | dict(variables or {})
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "muralist", *map(str, words)], stdout=log, stderr=log, env=environment
            )

    def check(self, name: str, process: subprocess.Popen[bytes], allowed: int = 0) -> None:
        """Wait for a command to end, and end with it where it failed; `allowed` is another status that is no failure."""
        if process.wait() not in (0, allowed):
            lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
            raise SystemExit("\n".join([f"{name} failed:", *lines[-LINES_SHOWN:]]))

    def run(self, name: str, *words: object, threads: int | None = None) -> float:
        """Run a command to its end; returns its seconds."""
        started = time.perf_counter()
        self.check(name, self.start(name, *words, threads=threads))
        return time.perf_counter() - started


def warm_rate(output: Path, batch: int) -> float:
    """Return the images per second of a folder, from when the last files of batches were written.

    The first fifth of the batches and the last one do not count: compilation, and a batch that none follows.
    """
    times = sorted(line["changed"] for line in read_lines(output / LEDGER) if "changed" in line)
    batches = len(times) // batch
    first, last = max(1, batches // 5) * batch - 1, max(2, batches - 1) * batch - 1
    if last >= len(times):
        return 0.0
    return (last - first) / max(1, times[last] - times[first]) * 1e9


@dataclass(frozen=True)
class Bench:
    """One call of this script."""

    options: argparse.Namespace
    train_flags: list[str]
    runner: CommandRunner

    @property
    def run(self) -> Path:
        """The folder of the training run."""
        return self.runner.folder / "runs" / "cifar10"

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.run / "checkpoints" / f"step_{step:07d}"

    @property
    def statistics(self) -> Path:
        """Return the statistics of the training images."""
        return self.runner.folder / "cifar10-train.npz"

    @property
    def weights(self) -> tuple[str, str]:
        """The flag that names Inception's weights."""
        return "--inception_weights", self.options.inception_weights

    def train_command(self) -> list[str]:
        """The training; its learning rate is constant, so that it may end at any step."""
        place = ["--results_dir", str(self.run.parent), "--run_name", self.run.name]
        words = "train --config configs/cifar10.yaml --lr_schedule constant --epochs 1000 --keep_last 60"
        words += f" --ckpt_every {self.options.every} --samples_per_gpu 0 --log_every 50"
        return [*words.split(), "--data_path", self.options.data, *place, *self.train_flags]

    def generate_command(self, checkpoint: Path, images: Path) -> list[object]:
        """Return the command that generates all classes in turn with EMA weights."""
        chosen = self.options
        words = f"generate --weights ema1 --guidance_scale {chosen.guidance:g} --num_inference_steps {chosen.steps}"
        words += f" --batch_size {min(BATCH, chosen.images)}"
        return [*words.split(), "--model_path", checkpoint, "--prompts_csv", self.prompts(), "--output_dir", images]

    def evaluate_command(self, images: Path, output: Path) -> list[object]:
        """Return the command that evaluates images against the training set."""
        return ["evaluate", "--images", images, "--reference", self.statistics, "--output_dir", output, *self.weights]

    def prompts(self) -> Path:
        """A table of the classes in turn."""
        path = self.runner.folder / "prompts.csv"
        if not path.is_file():
            path.write_text("prompt\n" + "".join(f"{row % CLASSES}\n" for row in range(self.options.images)))
        return path

    def train(self) -> tuple[float, float]:
        """Train until it ends or its time is over; returns when it began, and its seconds."""
        began, started = time.time(), time.perf_counter()
        process = self.runner.start("train", *self.train_command())
        try:
            process.wait(self.options.seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        self.runner.check("train", process, STOPPED)
        return began, time.perf_counter() - started

    def score(self, step: int) -> dict[str, Any]:
        """Generate and evaluate the images of a checkpoint."""
        images, output = self.runner.folder / f"images-{step}", self.runner.folder / f"evaluation-{step}"
        seconds = self.runner.run(f"generate-{step}", *self.generate_command(self.checkpoint(step), images))
        threads = max(1, (os.cpu_count() or 1) // CONCURRENT)
        self.runner.run(f"evaluate-{step}", *self.evaluate_command(images, output), threads=threads)
        report = json.loads((output / "report.json").read_text())
        if report["images"]["count"] != self.options.images:
            raise SystemExit(f"{images} holds {report['images']['count']} images, not {self.options.images}.")
        fid = report["scores"]["fid"]
        return {
            "fid": fid["value"],
            "fid, 95%": [fid["low"], fid["high"]],
            "kid": report["kid"],
            "generated images": report["images"]["count"],
            "reference images": report["reference"]["count"],
            "images per second": sum(gpu["images_per_second"] for gpu in report["speed"].values()),
            "seconds of generation, with loading": round(seconds, 1),
            "seconds of evaluation": report["seconds"],
        }


def measured_steps(metrics: list[dict[str, Any]], every: int) -> list[int]:
    """The steps that have a regular checkpoint: those at which the held-out loss was measured."""
    return [line["step"] for line in metrics if line["step"] % every == 0 and "val/loss" in line]


def spread(steps: list[int], count: int) -> list[int]:
    """The first, the last, and those nearest to equal factors between them."""
    first, last = steps[0], steps[-1]
    wanted = [first * (last / first) ** (index / max(1, count - 1)) for index in range(count - 1)] + [last]
    return sorted({min(steps, key=lambda step: abs(step - goal)) for goal in wanted})


def along(metrics: list[dict[str, Any]], step: int, began: float) -> dict[str, Any]:
    """Where training was at a step."""
    before = [line for line in metrics if line["step"] <= step]
    here, batch = before[-1], before[-1]["images"] / before[-1]["step"]
    return {
        "step": step,
        "images": here["images"],
        "seconds since the command": round(here["time"] - began, 1),
        "seconds of steps": round(sum(batch / line["train/samples_per_second"] for line in before), 1),
        "val/loss": here["val/loss"],
    }


def measure(name: str, options: argparse.Namespace, train_flags: list[str], folder: Path) -> None:
    """Train, then score; what is known is on disk after every checkpoint."""
    started = time.perf_counter()
    bench = Bench(options, train_flags, CommandRunner(folder))
    bench.prompts()
    halved = any(value.dtype is torch.float16 for value in read_tensors(Path(options.inception_weights)).values())
    stats = ("stats", options.data, "-o", bench.statistics, "--img_size", SIDE, *bench.weights)
    with ThreadPoolExecutor(CONCURRENT) as pool:
        reference = pool.submit(bench.runner.run, "stats", *stats)  # while training still compiles
        began, training = bench.train()
        statistics = reference.result()
        written = bench.run / "metrics.jsonl"
        metrics = [json.loads(line) for line in written.read_text().splitlines()] if written.is_file() else []
        # The first ones are gone where training was faster than expected.
        steps = [step for step in measured_steps(metrics, options.every) if bench.checkpoint(step).is_dir()]
        if not steps:
            raise SystemExit(f"Training ended before its first checkpoint at step {options.every}.")
        print(f"trained for {training:.0f} s, to step {metrics[-1]['step']}; checkpoints {steps}", flush=True)
        made = json.loads((bench.checkpoint(steps[-1]) / "manifest.json").read_text())
        checkpoints: dict[int, dict[str, Any]] = {}
        futures = {pool.submit(bench.score, step): step for step in spread(steps, options.checkpoints)}
        for future in as_completed(futures):
            step = futures[future]
            checkpoints[step] = along(metrics, step, began) | future.result()
            print(checkpoints[step], flush=True)
            example = (bench.train_command(), bench.generate_command(Path("CHECKPOINT"), Path("IMAGES")), stats,
                       bench.evaluate_command(Path("IMAGES"), Path("EVALUATION")))  # fmt: skip
            content = {
                "command": shlex.join(["python", "bench/cifar_fid.py", *sys.argv[1:]]),
                "commands": [f"muralist {' '.join(map(str, words))}".replace(f"{folder}/", "") for words in example],
                "note": NOTE,
                "model": "{model} at {img_size} px".format_map(made["model"]),
                "total batch": made["total_batch"],
                "inception in 16 bits": halved,
                "solver steps": options.steps,
                "guidance": options.guidance,
                "hardware": hardware(),
                "versions": versions(),
                "seconds of statistics": round(statistics, 1),
                "seconds of training, start to end": round(training, 1),
                "seconds of all": round(time.perf_counter() - started, 1),
                "checkpoints": [checkpoints[step] for step in sorted(checkpoints)],
            }
            atomic_write_json(RESULTS / f"{name}.json", content)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in bench/results")
    parser.add_argument("--data", required=True, help="CIFAR-10 as .npz: train_x, train_y, test_x, test_y")
    parser.add_argument("--inception_weights", required=True, help="as of evaluate")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training, from its command on")
    parser.add_argument("--every", type=int, default=100, help="optimizer steps between checkpoints")
    parser.add_argument("--checkpoints", type=int, default=6, help="how many are scored")
    parser.add_argument("--images", type=int, default=5000, help="of each checkpoint")
    parser.add_argument("--steps", type=int, default=10, help="of the solver")
    parser.add_argument("--guidance", type=float, default=1.0, help="guidance scale; 1: none")
    parser.add_argument("--folder", type=Path, help="for run, images and evaluations; default: a temporary one")
    options, train_flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        measure(options.name, options, train_flags, Path(folder))


if __name__ == "__main__":
    main()
