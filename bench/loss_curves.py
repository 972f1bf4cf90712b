"""The loss of one JiT trained in fp32, bf16 and fp8: the same weights, pictures, noise and times at every step.

python bench/loss_curves.py NAME --data cifar10.npz [--steps 500] [--batch 256] [--model JiT-S/4] [--tiny]

Not compiled: compiling three kinds of step would take longer than the steps; the kernels are the same. fp32 has no TF32. A
second seed in bf16 shows how far apart two runs are that differ by chance alone. Writes bench/results/NAME.json, from which
scripts/draw_loss_curves.py draws the curves. --tiny is a trial on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.measure_training import RESULTS, hardware, versions
from bench.train_speed import build_stepper

from muralist.data.arrays import open_archive
from muralist.data.on_device import PicturesOnDevice
from muralist.data.stream import Stream
from muralist.runfolder import write_json
from muralist.settings import DataSettings, ModelSettings, OptimSettings, Precision, TrainSettings

SIDE = 32
CLASSES = [str(number) for number in range(10)]
# Name, --use_amp, --precision, seed.
RUNS: list[tuple[str, bool, Precision, int]] = [
    ("fp32", False, "auto", 0),
    ("bf16", True, "auto", 0),
    ("fp8", True, "fp8", 0),
    ("bf16, another seed", True, "auto", 1),
]


def pictures(path: Path, device: torch.device) -> PicturesOnDevice:
    """All training pictures of an archive."""
    with open_archive(path) as archive:
        images, labels = archive["train_x"], archive["train_y"].astype(np.int64)
    return PicturesOnDevice(torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device), None)


def curve(settings: TrainSettings, data: PicturesOnDevice, steps: int, device: torch.device) -> list[float]:
    """The loss of every step."""
    stepper = build_stepper(settings, CLASSES, device, compiled=False, graphs=False)
    order = Stream(settings.seed, len(data.labels))
    batches = data.batches(order, stepper.plan.numbers(0, range(steps)))
    total = stepper.plan.total
    losses = [stepper.step([batch], images=step * total).loss for step, batch in enumerate(batches)]
    return torch.stack(losses).tolist()


def compared(curves: dict[str, list[float]], window: int) -> dict[str, Any]:
    """Means over the last steps, how far they are from fp32's, and how far chance moves them."""
    last = {name: np.array(losses[-window:]) for name, losses in curves.items()}
    means = {name: float(losses.mean()) for name, losses in last.items()}
    apart = {}
    for name in ("bf16", "fp8"):
        difference = last[name] - last["fp32"]  # step by step: both have seen the same
        apart[name] = {
            "of the mean": float(difference.mean() / means["fp32"]),
            "standard error": float(difference.std(ddof=1) / len(difference) ** 0.5 / means["fp32"]),
        }
    by_chance = abs(means["bf16, another seed"] - means["bf16"]) / means["bf16"]
    return {
        "window": window,
        "mean loss of the last steps": means,
        "from fp32": apart,
        "from seed to seed": by_chance,
        "fp8 is within chance": abs(apart["fp8"]["of the mean"]) <= by_chance,
    }


def main() -> None:
    """Train four times and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10 as .npz: train_x, train_y")
    parser.add_argument("--model", default="JiT-S/4")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.steps, options.batch, options.window = "JiT-T/16", 4, 4, 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    data = pictures(options.data, device)
    curves, seconds = {}, {}
    for name, use_amp, precision, seed in RUNS:
        settings = TrainSettings(
            model=ModelSettings(name=options.model, img_size=SIDE, enable_condition=True),
            data=DataSettings(batch_size=options.batch),
            optim=OptimSettings(learning_rate=5e-4, warmup_steps=options.steps // 10),
            seed=seed,
            use_amp=use_amp,
            precision=precision,
        )
        started = time.perf_counter()
        curves[name] = curve(settings, data, options.steps, device)
        seconds[name] = round(time.perf_counter() - started, 1)
        print(name, f"{seconds[name]} s, last loss {curves[name][-1]:.4f}", flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "model": f"{options.model} at {SIDE} px",
        "pictures": len(data.labels),
        "batch": options.batch,
        "steps": options.steps,
        "seconds": seconds,
        **compared(curves, options.window),
        "loss": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
    }
    write_json(options.folder / f"{options.name}.json", result)
    print({key: result[key] for key in ("from fp32", "from seed to seed", "fp8 is within chance")}, flush=True)


if __name__ == "__main__":
    main()
