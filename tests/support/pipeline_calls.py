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
    """Generate a batch, or one image at a time where the pipeline does not support batching, as workers do."""
    batches = [requests] if pipeline.supports_batching() else [[request] for request in requests]
    return [image for batch in batches for image in pipeline.generate(batch, SIZE, no_callback, **more)]


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
        "guidance_scale": GUIDANCE,
        "num_frames": 1,
        "use_resolution_binning": False,
        "clean_caption": False,
        "generator": [torch.Generator().manual_seed(request.seed) for request in requests],
        **given,
    }
    output = pipe(**{name: value for name, value in arguments.items() if name in parameters}, output_type="pil")
    images = [frames[0] for frames in output.frames] if hasattr(output, "frames") else output.images
    return [np.asarray(image) for image in images]
