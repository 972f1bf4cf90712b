"""The sampler of `muralist generate` for a JiT with random weights, timed by `bench/standard.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from muralist.generate.jit_pipeline import JiTPipeline
from muralist.generate.pipeline import PendingBatch, SampleRequest
from muralist.models import jit
from muralist.models.jit_spec import JiTSpec, Objective
from muralist.settings import GenerateSettings, ObjectiveSettings

CLASSES = 1000


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
