"""Loads tiny pipelines, and generates images with them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from muralist.generate.pipeline import Pipeline, SampleRequest, load_pipeline
from muralist.settings import GenerateSettings

CPU = torch.device("cpu")
SIZE = (64, 64)
STEPS = 4
GUIDANCE = 7.5
CAR = SampleRequest("a red car", "", 5)
NIGHT = SampleRequest("night in the rain, many lights and a long way to go home from the city", "dark", 6)
SNOW = SampleRequest("snow", "a blurry and ugly image, with noise", 7)
DOGS = SampleRequest("two dogs on the street", "", 8)
CAT = SampleRequest("cat", "dog", 9)
LONG = SampleRequest("many " * 120, "few " * 130, 10)  # more tokens than any text encoder reads


def settings(folder: Path, **changes: Any) -> GenerateSettings:
    given = {"num_inference_steps": STEPS, "dtype": "fp32", "height": SIZE[0], "width": SIZE[1], **changes}
    if not folder.name.startswith("schnell"):  # which is not guided
        given.setdefault("guidance_scale", GUIDANCE)
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(folder), **given)


def load(folder: Path, **changes: Any) -> Pipeline:
    return load_pipeline(settings(folder, **changes), CPU)


def no_callback() -> None:
    pass


def generate(pipeline: Pipeline, *requests: SampleRequest, **more: Any) -> list[np.ndarray]:
    """Generate a batch as workers do: one call per text group, in which each image keeps its slot, or image by image."""
    if not pipeline.supports_batching():
        return [pipeline.generate([request], SIZE, no_callback, **more)[0] for request in requests]
    groups = pipeline.text_groups(requests)
    images: dict[int, np.ndarray] = {}
    for group in dict.fromkeys(groups):
        slots = [slot for slot, own in enumerate(groups) if own == group]
        batch = [requests[slot] if slot in slots else requests[slots[0]] for slot in range(len(requests))]
        made = pipeline.generate(batch, SIZE, no_callback, **more)
        images |= {slot: made[slot] for slot in slots}
    return [images[slot] for slot in range(len(requests))]


def max_difference(one: np.ndarray, other: np.ndarray) -> int:
    """In gray levels."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def generate_with_diffusers(
    folder: Path, *requests: SampleRequest, scheduler: Any = None, **given: Any
) -> list[np.ndarray]:
    """Generate the same images by diffusers alone."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    parameters = inspect.signature(pipe.__call__).parameters
    arguments = {
        "prompt": [request.prompt for request in requests],
        "negative_prompt": [request.negative_prompt for request in requests],
        "height": SIZE[0],
        "width": SIZE[1],
        "num_inference_steps": STEPS,
        "generator": [torch.Generator().manual_seed(request.seed) for request in requests],
        **given,
    }
    if "negative_prompt" not in parameters:
        del arguments["negative_prompt"]
    output = pipe(**arguments, output_type="pil")
    images = [frames[0] for frames in output.frames] if hasattr(output, "frames") else output.images
    return [np.asarray(image) for image in images]
