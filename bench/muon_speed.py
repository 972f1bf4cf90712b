"""Measure a step of Muon for the matrices of a JiT's blocks, ours and torch's: bench/results/muon_speed_h200.json.

python bench/muon_speed.py [NAME]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware, versions

from muralist.core.run_dir import atomic_write_json
from muralist.models.jit import build
from muralist.settings import OptimSettings
from muralist.train.optim import Muon, build_optimizer

MODELS = ("JiT-S/4", "JiT-B/4", "JiT-L/4")
ROUNDS, STEPS = 5, 20


def measure(model: str, device: torch.device) -> dict[str, Any]:
    """Measure both in alternating rounds; milliseconds of a step, the median of the rounds."""
    network = build(model, 64, 1).to(device)
    optimizer = build_optimizer(network, OptimSettings(optimizer="muon"))
    assert isinstance(optimizer, Muon)
    matrices = optimizer.matrices
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    ours = Muon(matrices, 0.0, None)
    theirs = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    times: dict[str, list[float]] = {"ours": [], "torch.optim.Muon": []}
    for number in range(ROUNDS + 1):
        for name, one in (("ours", ours), ("torch.optim.Muon", theirs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(STEPS):
                one.step()
            end.record()
            torch.cuda.synchronize()
            if number:  # the first round warms up
                times[name].append(start.elapsed_time(end) / STEPS)
    return {name: round(sorted(values)[len(values) // 2], 3) for name, values in times.items()}


def main() -> None:
    """Write the record."""
    device = torch.device("cuda")
    rows = {model: measure(model, device) for model in MODELS}
    command = f"python bench/muon_speed.py {' '.join(sys.argv[1:])}".rstrip()
    record = {"command": command, "hardware": hardware(), "versions": versions(), "ms a step": rows}
    atomic_write_json(RESULTS / f"{(sys.argv[1:] or ['muon_speed_h200'])[0]}.json", record)
    print(record)


if __name__ == "__main__":
    main()
