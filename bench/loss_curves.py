"""Train one JiT in fp32, bf16 and fp8 with the same weights, images, noise and times, and record the losses.

python bench/loss_curves.py NAME --data cifar10.npz [--steps 500] [--batch 256] [--model JiT-S/4] [--tiny]

Steps are not compiled: compilation would take longer than the steps, and the kernels are the same. fp32 does not use TF32. A
second seed in bf16 shows the difference between seeds. Writes bench/results/NAME.json, drawn by scripts/draw_loss_curves.py.
--tiny is a test on a CPU.
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
from bench.train_speed import build_state

from muralist.core.run_dir import atomic_write_json
from muralist.data.loader import GpuResidentDataset
from muralist.data.sampler import ShuffledOrder
from muralist.data.sources.arrays import open_archive
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


def load_images(path: Path, device: torch.device) -> GpuResidentDataset:
    """Load all training images of an archive."""
    with open_archive(path) as archive:
        images, labels = archive["train_x"], archive["train_y"].astype(np.int64)
    return GpuResidentDataset(torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device), None)


def curve(settings: TrainSettings, data: GpuResidentDataset, steps: int, device: torch.device) -> list[float]:
    """Return the loss of every step."""
    state = build_state(settings, CLASSES, device, compiled=False, cuda_graphs=False)
    order = ShuffledOrder(settings.seed, len(data.labels))
    batches = data.batches(order, state.plan.sample_indices(0, range(steps)))
    losses = [state.step([batch]).loss for batch in batches]
    return torch.stack(losses).tolist()


def compared(curves: dict[str, list[float]], window: int) -> dict[str, Any]:
    """Compare the mean losses of the last steps with fp32, and with the difference between seeds."""
    last = {name: np.array(losses[-window:]) for name, losses in curves.items()}
    means = {name: float(losses.mean()) for name, losses in last.items()}
    differences = {}
    for name in ("bf16", "fp8"):
        difference = last[name] - last["fp32"]  # paired by step: both saw the same batch
        differences[name] = {
            "of the mean": float(difference.mean() / means["fp32"]),
            "standard error": float(difference.std(ddof=1) / len(difference) ** 0.5 / means["fp32"]),
        }
    by_chance = abs(means["bf16, another seed"] - means["bf16"]) / means["bf16"]
    return {
        "window": window,
        "mean loss of the last steps": means,
        "from fp32": differences,
        "from seed to seed": by_chance,
        "fp8 is within chance": abs(differences["fp8"]["of the mean"]) <= by_chance,
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
    data = load_images(options.data, device)
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
        "images": len(data.labels),
        "batch": options.batch,
        "steps": options.steps,
        "seconds": seconds,
        **compared(curves, options.window),
        "loss": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
    }
    atomic_write_json(options.folder / f"{options.name}.json", result)
    print({key: result[key] for key in ("from fp32", "from seed to seed", "fp8 is within chance")}, flush=True)


if __name__ == "__main__":
    main()
