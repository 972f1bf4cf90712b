"""Measure the training speed of this machine, and its memory per image, with real steps on random images."""

from __future__ import annotations

from collections.abc import Callable

import torch

from muralist.core.hardware import can_compile
from muralist.data.loader import Batch
from muralist.models import configs
from muralist.models.spec import build_spec
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.tools.estimate import MeasuredSpeed
from muralist.train.distributed import World
from muralist.train.parallel import build_strategy
from muralist.train.preflight import state_bytes
from muralist.train.schedule import BatchPlan, TrainingClock, learning_rate
from muralist.train.step import TrainState, autocast_dtype

_MIN_READINGS = 6
_READING_SECONDS = 0.5  # or one step, if a step takes longer


def probe(model: str, img_size: int, batch_size: int, seconds: float, clock: Callable[[], float]) -> MeasuredSpeed:
    """Train on random images for a number of seconds of `clock`."""
    world = World()
    on_gpu = world.device.type == "cuda"
    settings = TrainSettings(
        data=DataSettings(path="driving_world", batch_size=batch_size),
        model=ModelSettings(name=model, img_size=img_size),
        optim=OptimSettings(warmup_steps=0),
        use_amp=on_gpu,
    )
    family = build_spec(settings, [])
    network = family.network()
    count = sum(parameter.numel() for parameter in network.parameters())
    strategy = build_strategy(world)
    compiled = on_gpu and can_compile()

    def build_state(images: int) -> TrainState:
        plan = BatchPlan(total=images, ranks=1, accumulation_steps=1, batch_size=images)
        rate = learning_rate(settings.optim, TrainingClock(samples=images, total_batch=images, epochs=1))
        autocast = autocast_dtype(settings, world.device)
        # With CUDA graphs, as in a run on one GPU.
        return TrainState(settings, family, network, strategy, plan, rate, autocast, compiled, cuda_graphs=compiled)

    images = batch_size
    if not on_gpu:  # a batch with which a CPU takes enough steps in the given time
        state, batch = build_state(1), _random_batch(1, img_size)
        _run_steps(state, batch, 1)
        before = clock()
        _run_steps(state, batch, 1)
        images = max(1, min(batch_size, int(seconds / (_MIN_READINGS + 4) / max(1e-9, clock() - before))))
    state, batch = build_state(images), _random_batch(images, img_size)
    if on_gpu:
        batch = batch.pin_memory()  # as the data loader does
        torch.cuda.reset_peak_memory_stats(world.device)
    state.warm_up(batch)
    for _ in range(2):
        _run_steps(state, batch, 1)
    tokens = images * configs.tokens_per_image(configs.parse_jit_name(model)[1], img_size)
    readings: list[float] = []
    began, steps = clock(), 1
    while clock() - began < seconds or len(readings) < _MIN_READINGS:
        before = clock()
        _run_steps(state, batch, steps)
        taken = max(1e-9, clock() - before)
        readings.append(steps * tokens / taken)
        steps = max(1, round(steps * _READING_SECONDS / taken))
    image_bytes = None
    if on_gpu:
        activations = torch.cuda.max_memory_allocated(world.device) - state_bytes("ddp", count, 0, 1)
        image_bytes = max(1.0, activations / state.micro_batch)
    origin = f"a probe of {clock() - began:.0f} s on this machine"
    return MeasuredSpeed(origin, model, img_size, images, world.device_name, 1, tuple(readings), image_bytes)


def _run_steps(state: TrainState, batch: Batch, count: int) -> None:
    for _ in range(count):
        result = state.step([batch])
    float(result.loss)  # synchronizes


def _random_batch(count: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    labels, indices = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    return Batch(images_u8=images, labels=labels, captions=[""] * count, sample_indices=indices)
