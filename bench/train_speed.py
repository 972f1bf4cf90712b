"""Time variants of the training step of a JiT on one GPU; `bench/standard.py` compares it with the official code.

python bench/train_speed.py NAME [CASE ...] [--variants fused,plain] [--profile]

A case is MODEL@SIZExBATCH, such as JiT-B/4@64x256. Every variant takes the same steps on data in GPU memory. The first
losses are recorded with the times; `python -m tests.kernels.kernel_checks` compares the kernels with float64.
A variant is fused or plain (with our kernels or without), followed by options after a +: graphs (CUDA graphs), fp8, apart
(AdamW and EMA as separate kernels), muon, combo (Inductor combines small independent kernels), cudnn, flash (attention),
such as fused+graphs+combo. The result is written to bench/results/NAME.json after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware, versions
from bench.profile_kernels import time_by_kind
from torch._inductor import config as inductor

from muralist.core.rng import SampleKeys
from muralist.core.run_dir import atomic_write_json
from muralist.data.loader import Batch
from muralist.kernels import ops
from muralist.models.spec import build_spec
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train.distributed import World
from muralist.train.metrics import matmul_rate
from muralist.train.parallel import DataParallel
from muralist.train.schedule import TrainingClock, learning_rate, plan_batch
from muralist.train.step import TrainState, autocast_dtype

CASES = ["JiT-B/4@64x256", "JiT-B/4@64x64"]
CLASSES = [str(number) for number in range(1000)]
STEPS = 30


def build_state(
    settings: TrainSettings, classes: list[str], device: torch.device, compiled: bool, cuda_graphs: bool
) -> TrainState:
    """Build the training state of `muralist train`."""
    spec, plan = build_spec(settings, classes), plan_batch(settings.data, settings.optim, ranks=1)
    rate = learning_rate(settings.optim, TrainingClock(100_000, plan.total, 1))
    autocast = autocast_dtype(settings, device)
    strategy = DataParallel(World())
    return TrainState(settings, spec, spec.network(), strategy, plan, rate, autocast, compiled, cuda_graphs)


def our_step(model: str, img_size: int, batch: int, device: torch.device, options: list[str]) -> Callable[[], Any]:
    """Return one step of `muralist train`: random draws, forward, backward, AdamW, two EMAs."""
    settings = TrainSettings(
        model=ModelSettings(name=model, img_size=img_size, enable_condition=True),
        data=DataSettings(batch_size=batch),
        optim=OptimSettings(warmup_steps=0, optimizer="muon" if "muon" in options else "adamw"),
        use_amp=True,
        precision="fp8" if "fp8" in options else "auto",
    )
    state = build_state(settings, CLASSES, device, device.type == "cuda", cuda_graphs="graphs" in options)
    if "apart" in options:
        state.fused_adamw_ema = None
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, img_size, img_size, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, len(CLASSES), (batch,), generator=generator)
    data = Batch(images, labels, [], torch.arange(batch)).to(device)
    state.images = batch
    return lambda: state.step([data]).loss


def our_finetune_step(
    folder: Path, size: tuple[int, int], batch: int, lora: int, device: torch.device
) -> Callable[[], Any]:
    """Return one step of `muralist train --model.path FOLDER` on latents and text that are encoded already."""
    parts: dict[str, Any] = {"training_parts": "lora", "lora_rank": lora} if lora else {}
    settings = TrainSettings(
        model=ModelSettings(path=str(folder), img_size=size, gradient_checkpointing=True, **parts),
        data=DataSettings(batch_size=batch),
        optim=OptimSettings(warmup_steps=0, max_grad_norm=1.0),
        use_amp=True,
    )
    spec, plan = build_spec(settings, []), plan_batch(settings.data, settings.optim, ranks=1)
    autocast = autocast_dtype(settings, device)
    spec.to_device(device, autocast or torch.float32)
    rate, compiled = learning_rate(settings.optim, TrainingClock(100_000, plan.total, 1)), device.type == "cuda"
    state = TrainState(settings, spec, spec.network(), DataParallel(World()), plan, rate, autocast, compiled)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, *size, 3), dtype=torch.uint8, generator=generator)
    captions = [f"a street with {number} parked cars" for number in range(batch)]
    data = Batch(images, torch.zeros(batch, dtype=torch.int64), captions, torch.arange(batch)).to(device)
    encoded = spec.encode(data, SampleKeys(0, data.sample_indices))
    spec.encode = lambda *_: encoded  # type: ignore[method-assign]
    state.images = batch
    return lambda: state.step([data]).loss


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Apply a variant such as fused, plain, fused+combo or plain+flash; cudnn and flash replace our attention."""
    kernels, *more = name.split("+")
    before = ops._have_kernels, ops._have_hopper_kernels
    backends = torch.backends.cuda
    states = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()
    if kernels == "plain":
        ops._have_kernels = lambda: False  # type: ignore[assignment]
    if "cudnn" in more or "flash" in more:
        ops._have_hopper_kernels = lambda: False  # type: ignore[assignment]
        backends.enable_flash_sdp("flash" in more)
        backends.enable_cudnn_sdp("cudnn" in more)
        backends.enable_mem_efficient_sdp(False)
    try:
        # No timed autotuning: the arithmetic must not depend on it.
        with inductor.patch({"combo_kernels": True, "combo_kernels_autotune": 0} if "combo" in more else {}):
            yield
    finally:
        ops._have_kernels, ops._have_hopper_kernels = before
        for enable, state in zip(
            (backends.enable_flash_sdp, backends.enable_mem_efficient_sdp, backends.enable_cudnn_sdp),
            states,
            strict=True,
        ):
            enable(state)


def time_steps(step: Callable[[], Any], steps: int, device: torch.device) -> tuple[float, float]:
    """Return the mean seconds per step of two series; their difference is the noise."""
    for _ in range(8):
        step()
    rows = []
    for _ in range(2):
        finish(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        finish(device)
        rows.append((time.perf_counter() - start) / steps)
    return rows[0], rows[1]


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: str, name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure one case and variant."""
    model, img_size, batch = parse_case(case)
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    family = build_spec(TrainSettings(model=ModelSettings(name=model, img_size=img_size)), [])
    with variant(name):
        started = time.perf_counter()
        step = our_step(model, img_size, batch, device, name.split("+"))
        losses = [float(step())]
        first = time.perf_counter() - started
        losses += [float(step()) for _ in range(4)]
        rate = matmul_rate(device, torch.bfloat16)
        seconds, again = time_steps(step, options.steps, device)
        profile = time_by_kind(step, 5) if options.profile and device.type == "cuda" else ()
        best = min(seconds, again)
        row = {
            "case": case,
            "variant": name,
            "ms a step": round(best * 1e3, 2),
            "ms a step, the other row": round(max(seconds, again) * 1e3, 2),
            "images/s": round(batch / best),
            "K tokens/s": round(batch * family.tokens_per_image() / best / 1e3, 1),
            "share of the matmul rate": round(batch * family.flops_per_image() / best / rate, 3),
            "matmul rate, TFLOP/s": round(rate / 1e12, 1),
            "seconds to the first step": round(first, 1),
            "losses of the first steps": losses,
        }
        if device.type == "cuda":
            row["peak memory, GB"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
        row |= dict(zip(("ms by kind", "kernels", "kernels a step"), profile, strict=False))
    return row


def parse_case(case: str) -> tuple[str, int, int]:
    """Return model, image size and batch of a case."""
    found = re.fullmatch(r"(.+)@(\d+)x(\d+)", case)
    if not found:
        raise SystemExit(f"{case} is not MODEL@SIZExBATCH")
    return found[1], int(found[2]), int(found[3])


def main() -> None:
    """Measure every case and print the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--variants", default="fused,plain")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "rows": [],
    }
    names = options.variants.split(",")
    for case in options.cases:
        for name in names:
            row = measure(case, name, options, device)
            result["rows"].append(row)
            atomic_write_json(RESULTS / f"{options.name}.json", result)
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)


if __name__ == "__main__":
    main()
