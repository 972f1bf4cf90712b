"""Real training steps on this machine for half a minute, without data: what it can do, and what an image takes of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from muralist.data.loader import Batch
from muralist.machine import can_compile
from muralist.models import variants
from muralist.models.family import build_family
from muralist.scale.measured import Measured
from muralist.scale.memory import state_bytes
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train.distributed import Engine
from muralist.train.schedule import BatchPlan, Clock, learning_rate
from muralist.train.stepper import Stepper, autocast_type, build_optimizer
from muralist.train.strategy import build_strategy

_FEWEST_READINGS = 6
_READING = 0.5  # seconds, or one step where that takes longer


def probe(model: str, img_size: int, batch_size: int, seconds: float, clock: Callable[[], float]) -> Measured:
    """Train on pictures that are there already; `clock` counts seconds."""
    engine = Engine()
    on_gpu = engine.device.type == "cuda"
    settings = TrainSettings(
        data=DataSettings(path="driving_world", batch_size=batch_size),
        model=ModelSettings(name=model, img_size=img_size),
        optim=OptimSettings(warmup_steps=0),
        use_amp=on_gpu,
    )
    family = build_family(settings, [])
    network = family.network()
    count = sum(parameter.numel() for parameter in network.parameters())
    strategy = build_strategy(engine)
    compiled = on_gpu and can_compile()
    strategy.place(network, compiled)
    optimizer = build_optimizer(network, settings.optim)

    def stepper_of(images: int) -> Stepper:
        clock_of_run = Clock(samples=images, total_batch=images, epochs=1)
        return Stepper(
            family=family,
            network=network,
            optimizer=optimizer,
            strategy=strategy,
            plan=BatchPlan(total=images, ranks=1, parts=1, part=images),
            rate=learning_rate(settings.optim, clock_of_run),
            seed=0,
            autocast=autocast_type(settings.use_amp, engine.device),
            compiled=compiled,
            max_grad_norm=None,
            skip_non_finite=False,
            graphs=compiled,  # as a run on one GPU has it
            half_lives=(settings.optim.ema1_half_life, settings.optim.ema2_half_life),
        )

    images = batch_size if on_gpu else _bearable(stepper_of(1), batch_size, img_size, seconds, clock)
    stepper = stepper_of(images)
    batch = _pictures(images, img_size)
    if on_gpu:
        batch = batch.pin_memory()  # as the loader hands it over
        torch.cuda.reset_peak_memory_stats(engine.device)
    stepper.warm_up(batch)
    for _ in range(2):
        _steps(stepper, batch, 1)
    tokens = images * variants.tokens_per_image(variants.parse_name(model)[1], img_size)
    readings: list[float] = []
    began, at_once = clock(), 1
    while clock() - began < seconds or len(readings) < _FEWEST_READINGS:
        before = clock()
        _steps(stepper, batch, at_once)
        taken = max(1e-9, clock() - before)
        readings.append(at_once * tokens / taken)
        at_once = max(1, round(at_once * _READING / taken))
    image_bytes = None
    if on_gpu:
        beside = torch.cuda.max_memory_allocated(engine.device) - state_bytes("ddp", count, 0, 1)
        image_bytes = max(1.0, beside / stepper.micro)
    origin = f"a probe of {clock() - began:.0f} s on this machine"
    return Measured(origin, model, img_size, images, engine.device_name, 1, tuple(readings), image_bytes)


def _bearable(stepper: Stepper, wanted: int, img_size: int, seconds: float, clock: Callable[[], float]) -> int:
    """How many images a step may have on a CPU, so that a probe has enough steps."""
    batch = _pictures(1, img_size)
    _steps(stepper, batch, 1)
    before = clock()
    _steps(stepper, batch, 1)
    return max(1, min(wanted, int(seconds / (_FEWEST_READINGS + 4) / max(1e-9, clock() - before))))


def _steps(stepper: Stepper, batch: Batch, count: int) -> None:
    for _ in range(count):
        result = stepper.step([batch], images=0)
    float(result.loss)  # waits for the device


def _pictures(count: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    labels, numbers = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    return Batch(images_u8=images, labels=labels, captions=[""] * count, numbers=numbers)
