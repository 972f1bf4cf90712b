"""Time the sampling of a JiT on one GPU, and that of another implementation in the same run.

python bench/jit_generate_speed.py NAME [CASE ...] [--other SAMPLER.py]        a case is MODEL@SIZExBATCH

50 Heun steps, guidance 2.9 on [0.1, 1], bf16, random weights. SAMPLER.py has `build_sampler(model, img_size, batch,
device)` that returns a callable: one batch of images. The result is written to bench/results/NAME.json after every row.
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
from bench.train_speed import finish, load_module, parse_case

from muralist.core.run_dir import atomic_write_json
from muralist.generate.jit_pipeline import JiTPipeline
from muralist.generate.pipeline import PendingBatch, SampleRequest
from muralist.models import jit
from muralist.models.jit_spec import JiTSpec, Objective
from muralist.settings import GenerateSettings, ObjectiveSettings
from muralist.train.metrics import matmul_rate

CASES = ["JiT-B/4@64x64", "JiT-B/4@64x256", "JiT-B/16@256x128"]
CLASSES = 1000
WARM, BATCHES = 2, 2


def our_sampler(model: str, img_size: int, batch: int, device: torch.device, steps: int) -> Callable[[], Any]:
    """Return a batch of `muralist generate`: requests to bytes on the host; the previous batch is fetched meanwhile."""
    spec = JiTSpec(
        model, img_size, [str(i) for i in range(CLASSES)], Objective.from_settings(ObjectiveSettings(), img_size)
    )
    network = jit.build(model, img_size, CLASSES)
    network.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # zero-initialized layers too, so that images are not constant
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    settings = GenerateSettings(
        prompts_csv="", output_dir="", model_path="",  # not read: the pipeline is built here
        num_inference_steps=steps, guidance_scale=2.9, guidance_interval=(0.1, 1.0),
    )  # fmt: skip
    pipeline = JiTPipeline(spec, network.to(device).eval().requires_grad_(False), settings)
    pending: list[PendingBatch] = []
    begun = 0

    def requests(first: int) -> list[SampleRequest]:
        return [SampleRequest(str(seed % CLASSES), "", seed) for seed in range(first, first + batch)]

    def sampler() -> None:
        nonlocal begun
        pipeline.prepare(requests(begun) + requests(begun + batch))  # as a worker does
        pending.append(pipeline.generate_async(requests(begun), (img_size, img_size), lambda: None))
        begun += batch
        if len(pending) > 1:
            pending.pop(0).wait()

    return sampler


def synchronous(sampler: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a sampler that waits for its images."""

    def wait() -> None:
        sampler()
        finish(device)

    return wait


def measure(name: str, sampler: Callable[[], Any], batch: int, device: torch.device) -> dict[str, Any]:
    """Return images per second in steady state: the first timed batch overlaps with the previous one."""
    started = time.perf_counter()
    sampler()
    finish(device)
    first = time.perf_counter() - started
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
        model, img_size, batch = parse_case(case)
        samplers = {"muralist": our_sampler(model, img_size, batch, device, options.steps)}
        if options.other:
            samplers["other"] = synchronous(
                load_module(options.other).build_sampler(model, img_size, batch, device), device
            )
        for name, sampler in samplers.items():
            row = {"case": case} | measure(name, sampler, batch, device)
            result["rows"].append(row)
            atomic_write_json(RESULTS / f"{options.name}.json", result)
            print(row, flush=True)


if __name__ == "__main__":
    main()
