"""How many pictures a second a JiT makes on one GPU, beside another implementation in the same run.

python bench/jit_generate_speed.py NAME [CASE ...] [--other SAMPLER.py]        a case is MODEL@SIZExBATCH

50 Heun steps, guidance 2.9 on [0.1, 1], bf16, random weights. SAMPLER.py has `build_sampler(model, img_size, batch,
device)` that returns a callable making one batch of pictures. Writes bench/results/NAME.json as it goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware, versions
from bench.train_speed import finish, loaded, parsed
from bench.turns import alone

from muralist.generate.jit_painter import JiTPainter
from muralist.generate.painter import Order, Pending
from muralist.models import jit
from muralist.models.jit_family import JiTFamily, Objective
from muralist.runfolder import write_json
from muralist.scale.flops import matmul_rate
from muralist.settings import GenerateSettings, ObjectiveSettings

CASES = ["JiT-B/4@64x64", "JiT-B/4@64x256", "JiT-B/16@256x128"]
CLASSES = 1000
WARM, BATCHES = 2, 2


def our_sampler(model: str, img_size: int, batch: int, device: torch.device, steps: int) -> Callable[[], Any]:
    """A batch of `muralist generate`, from orders to bytes on the host; the one before is fetched while it is painted."""
    family = JiTFamily(
        model, img_size, [str(i) for i in range(CLASSES)], Objective.from_settings(ObjectiveSettings(), img_size)
    )
    network = jit.build(model, img_size, CLASSES)
    network.initialise(0)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # what starts at nought too: no picture is as cheap as a black one
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    settings = GenerateSettings(
        prompts_csv="", output_dir="", model_path="",  # nothing is read: the painter is made here
        num_inference_steps=steps, guidance_scale=2.9, guidance_interval=(0.1, 1.0),
    )  # fmt: skip
    painter = JiTPainter(family, network.to(device).eval().requires_grad_(False), settings)
    flying: list[Pending] = []
    begun = 0

    def orders(first: int) -> list[Order]:
        return [Order(str(number % CLASSES), "", number) for number in range(first, first + batch)]

    def sampler() -> None:
        nonlocal begun
        painter.prepare(orders(begun) + orders(begun + batch))  # as a worker does
        flying.append(painter.begin(orders(begun), (img_size, img_size), lambda: None))
        begun += batch
        if len(flying) > 1:
            flying.pop(0).wait()

    return sampler


def waited_for(sampler: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A sampler whose pictures are there when it returns."""

    def wait() -> None:
        sampler()
        finish(device)

    return wait


def measure(name: str, sampler: Callable[[], Any], batch: int, device: torch.device) -> dict[str, Any]:
    """Pictures per second where batch follows batch: the first to be timed is begun while another is painted."""
    started = time.perf_counter()
    sampler()
    finish(device)
    first = time.perf_counter() - started
    with alone():
        rate = matmul_rate(device, torch.bfloat16)
        for call in range(WARM + BATCHES):
            if call == WARM:
                started = time.perf_counter()
            sampler()
        seconds = (time.perf_counter() - started) / BATCHES
        finish(device)
    return {
        "variant": name,
        "images/s": round(batch / seconds, 2),
        "seconds to the first batch": round(first, 1),
        "matmul rate, TFLOP/s": round(rate / 1e12, 1),
    }


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "rows": [],
    }
    for case in options.cases:
        model, img_size, batch = parsed(case)
        samplers = {"muralist": our_sampler(model, img_size, batch, device, options.steps)}
        if options.other:
            samplers["other"] = waited_for(loaded(options.other).build_sampler(model, img_size, batch, device), device)
        for name, sampler in samplers.items():
            row = {"case": case} | measure(name, sampler, batch, device)
            result["rows"].append(row)
            write_json(RESULTS / f"{options.name}.json", result)
            print(row, flush=True)


if __name__ == "__main__":
    main()
