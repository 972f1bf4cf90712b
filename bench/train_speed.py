"""How fast a JiT trains on one GPU, beside the floor of its operations and beside another implementation, in one run.

python bench/train_speed.py NAME [CASE ...] [--variants fused,plain] [--other STEP.py] [--profile]

A case is MODEL@SIZExBATCH, such as JiT-B/4@64x256. Every variant takes the same steps on data that lie on the card. Their
first losses are kept beside the times; `python -m tests.models.kernel_checks` compares the kernels with float64. STEP.py
has a function `build(model, img_size, batch, device)` that returns a callable taking one step of another implementation.
A variant is fused or plain (with our kernels or without) and words after a +: graphs (recorded and replayed), apart (AdamW
and the averages one after the other), combo (Inductor puts small kernels that do not wait for each other into one), cudnn,
flash (attention). Joined, such as fused+graphs+combo.
Writes bench/results/NAME.json as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware, versions
from bench.profile_kernels import time_by_kind
from bench.turns import alone
from torch import Tensor
from torch._inductor import config as inductor

from muralist.data.loader import Batch
from muralist.models import jit_ops
from muralist.models.family import build_family
from muralist.runfolder import write_json
from muralist.scale.flops import matmul_rate
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train.distributed import Engine
from muralist.train.schedule import Clock, learning_rate, plan_batch
from muralist.train.stepper import Stepper, autocast_type, build_optimizer
from muralist.train.strategy import Replicated

CASES = ["JiT-B/4@64x256", "JiT-B/4@64x64"]
CLASSES = [str(number) for number in range(1000)]
STEPS = 30


def build_stepper(
    settings: TrainSettings, classes: list[str], device: torch.device, compiled: bool, graphs: bool
) -> Stepper:
    """Everything that `muralist train` takes a step with."""
    family = build_family(settings, classes)
    network = family.network().to(device)
    plan = plan_batch(settings.data, settings.optim, ranks=1)
    return Stepper(
        family=family,
        network=network,
        optimizer=build_optimizer(network, settings.optim),
        strategy=Replicated(Engine()),
        plan=plan,
        rate=learning_rate(settings.optim, Clock(100_000, plan.total, 1)),
        seed=settings.seed,
        autocast=autocast_type(settings.mixed, device),
        compiled=compiled,
        graphs=graphs,
        max_grad_norm=None,
        half_lives=(7e6, 2e6),
    )


def our_step(model: str, img_size: int, batch: int, device: torch.device, words: list[str]) -> Callable[[], Any]:
    """A step of `muralist train`: draws, forward, backward, AdamW, two averages."""
    settings = TrainSettings(
        model=ModelSettings(name=model, img_size=img_size, enable_condition=True),
        data=DataSettings(batch_size=batch),
        optim=OptimSettings(warmup_steps=0),
        use_amp=True,
        precision="fp8" if "fp8" in words else "auto",
    )
    stepper = build_stepper(settings, CLASSES, device, compiled=device.type == "cuda", graphs="graphs" in words)
    if "apart" in words:
        stepper.one_pass = None
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, img_size, img_size, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, len(CLASSES), (batch,), generator=generator)
    data = Batch(images, labels, [], torch.arange(batch)).to(device)
    taken = 0

    def step() -> Tensor:
        nonlocal taken
        taken += 1
        return stepper.step([data], images=taken * batch).loss

    return step


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """What a name such as fused, plain, fused+combo, fused+fp8+graphs or plain+flash stands for around a step.

    Those of other attention (cudnn, flash) replace ours.
    """
    kernels, *more = name.split("+")
    before = jit_ops._kernels_run, jit_ops._hoppers_kernels_run
    backends = torch.backends.cuda
    states = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()
    if kernels == "plain":
        jit_ops._kernels_run = lambda: False  # type: ignore[assignment]
    if "cudnn" in more or "flash" in more:
        jit_ops._hoppers_kernels_run = lambda: False  # type: ignore[assignment]
        backends.enable_flash_sdp("flash" in more)
        backends.enable_cudnn_sdp("cudnn" in more)
        backends.enable_mem_efficient_sdp(False)
    try:
        # Nothing is tried out by the clock: what is computed may not depend on it.
        with inductor.patch({"combo_kernels": True, "combo_kernels_autotune": 0} if "combo" in more else {}):
            yield
    finally:
        jit_ops._kernels_run, jit_ops._hoppers_kernels_run = before
        for enable, state in zip(
            (backends.enable_flash_sdp, backends.enable_mem_efficient_sdp, backends.enable_cudnn_sdp),
            states,
            strict=True,
        ):
            enable(state)


def loaded(path: Path) -> ModuleType:
    """Another implementation's file."""
    spec = importlib.util.spec_from_file_location("other", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks its functions' module up by name
    spec.loader.exec_module(module)
    return module


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step: the mean of a row of them, and of a second row: their difference is the noise."""
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
    """Wait for the card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: str, name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One row of the table."""
    model, img_size, batch = parsed(case)
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    family = build_family(TrainSettings(model=ModelSettings(name=model, img_size=img_size)), [])
    with variant(name) if name != "other" else contextlib.nullcontext():
        started = time.perf_counter()
        if name == "other":
            step = loaded(options.other).build(model, img_size, batch, device)
        else:
            step = our_step(model, img_size, batch, device, name.split("+"))
        losses = [float(step())]
        first = time.perf_counter() - started
        losses += [float(step()) for _ in range(4)]
        with alone():
            rate = matmul_rate(device, torch.bfloat16)
            seconds, again = timed(step, options.steps, device)
            profiled = time_by_kind(step, 5) if options.profile and device.type == "cuda" and name != "other" else ()
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
        row |= dict(zip(("ms by kind", "kernels", "kernels a step"), profiled, strict=False))
    return row


def parsed(case: str) -> tuple[str, int, int]:
    """Model, image size and batch of a case."""
    found = re.fullmatch(r"(.+)@(\d+)x(\d+)", case)
    if not found:
        raise SystemExit(f"{case} is not MODEL@SIZExBATCH")
    return found[1], int(found[2]), int(found[3])


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--variants", default="fused,plain")
    parser.add_argument("--other", type=Path)
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
    names = [name for name in options.variants.split(",") if name] + (["other"] if options.other else [])
    for case in options.cases:
        for name in names:
            row = measure(case, name, options, device)
            result["rows"].append(row)
            write_json(RESULTS / f"{options.name}.json", result)
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)


if __name__ == "__main__":
    main()
