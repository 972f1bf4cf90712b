"""Measure the pause of training for a checkpoint and its samples, per model: bench/results/NAME.json.

python bench/measure_pause.py NAME [MODEL@SIZE ...]     such as JiT-B/4@64 HunyuanDiT@64 DiT-g/2@1024

HunyuanDiT is the small built-in model; DiT-g/2 has the published size and random weights. A checkpoint pauses training only
for the copy to host memory; a thread then writes the files.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench.full_hunyuan import build_full_hunyuan
from bench.measure_training import RESULTS, hardware, versions

from muralist.core.run_dir import atomic_write_json
from muralist.models.spec import build_spec, find_family
from muralist.settings import CheckpointSettings, ModelSettings, OptimSettings, SampleSettings, TrainSettings
from muralist.train.checkpoint import CheckpointWriter
from muralist.train.distributed import World
from muralist.train.optim import build_optimizer
from muralist.train.parallel import DataParallel
from muralist.train.samples import write_samples
from muralist.train.step import EMA


def measure(name: str, size: int, folder: Path) -> dict[str, Any]:
    """Measure one image per GPU and a checkpoint of a model."""
    model = ModelSettings(name=name, img_size=size)
    if name == "DiT-g/2":
        model = ModelSettings(name="HunyuanDiT", path=str(build_full_hunyuan(folder / "model")), img_size=size)
    settings = TrainSettings(model=model, results_dir=str(folder), use_amp=True)
    world = World()
    strategy = DataParallel(world)
    find_family(settings.model.name).prepare(settings)
    family = build_spec(settings, [])
    precision = torch.bfloat16 if world.device.type == "cuda" else None
    family.to_device(world.device, precision or torch.float32)
    network = family.network()
    strategy.to_device(network, compiled=False)
    optimizer = build_optimizer(network, OptimSettings())
    emas = [EMA(dict(network.named_parameters()), 1.0) for _ in range(2)]
    result: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in network.parameters())}
    state: Any = SimpleNamespace(spec=family, network=network, optimizer=optimizer, emas=emas)
    drawing = strategy.inference_network(state)
    assert drawing is not None

    def draw(step: int) -> None:
        prompts = family.default_prompts()
        write_samples(folder / "samples", step, 0, 1, family, drawing, prompts, SampleSettings(), precision, [])

    drawn = [seconds(partial(draw, step)) for step in range(3)]
    snapshot = strategy.snapshot(state)
    assert snapshot is not None
    writer = CheckpointWriter(folder / "checkpoints", CheckpointSettings(keep_last=1))
    result["seconds training stands still for the samples, the first time"] = round(drawn[0], 3)
    result["seconds training stands still for the samples, later"] = round(min(drawn[1:]), 3)
    for step, when in ((1, ", the first time"), (2, ", later")):
        copied = seconds(lambda step=step: writer.submit(step, snapshot.weights, snapshot.state, {}))
        result[f"seconds training stands still for the checkpoint{when}"] = round(copied, 3)
        result[f"seconds until the checkpoint is on disk{when}"] = round(copied + seconds(writer.finish), 3)
    written = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    result["checkpoint, GB"] = round(sum(path.stat().st_size for path in written) / 1e9, 3)
    return result


def seconds(work: Any) -> float:
    """Return the seconds of a call, including its work on the GPU."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(name: str, models: list[str]) -> None:
    """Measure each model and write the result."""
    results = {}
    for model in models:
        which, _, size = model.partition("@")
        with tempfile.TemporaryDirectory() as folder:
            results[model] = measure(which, int(size), Path(folder))
        print(model, results[model], flush=True)
    content = {
        "command": f"python bench/measure_pause.py {name} {' '.join(models)}",
        "samples": "one image, 10 steps of the family's solver (Heun takes two passes a step), guidance where it has any",
        "hardware": hardware(),
        "versions": versions(),
        "results": results,
    }
    atomic_write_json(RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
