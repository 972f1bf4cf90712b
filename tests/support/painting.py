"""Painters of tiny pipelines, and what to paint with them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from muralist.generate.painter import Order, Painter
from muralist.generate.pipelines import open_painter
from muralist.settings import GenerateSettings

CPU = torch.device("cpu")
SIZE = (64, 64)
STEPS = 4
CAR = Order("a red car", "", 5)
NIGHT = Order("night in the rain, many lights and a long way to go home from the city", "dark", 6)
SNOW = Order("snow", "a blurry and ugly picture, with noise", 7)
DOGS = Order("two dogs on the street", "", 8)
CAT = Order("cat", "dog", 9)
FULL = Order("many " * 120, "few " * 130, 10)  # more than all the tokens that an encoder reads


def settings(folder: Path, **changes: Any) -> GenerateSettings:
    given = {"num_inference_steps": STEPS, "dtype": "fp32", "height": SIZE[0], "width": SIZE[1], **changes}
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(folder), **given)


def painter_of(folder: Path, **changes: Any) -> Painter:
    return open_painter(settings(folder, **changes), CPU)


def no_beat() -> None:
    pass


def paint(painter: Painter, *orders: Order, **more: Any) -> list[np.ndarray]:
    return painter.paint(orders, SIZE, no_beat, **more)


def differ(one: np.ndarray, other: np.ndarray) -> int:
    """By how many grey levels, at most."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def plain(folder: Path, *orders: Order, scheduler: Any = None, **given: Any) -> list[np.ndarray]:
    """The same by diffusers alone, with nothing of ours in between."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    takes = inspect.signature(pipe.__call__).parameters
    arguments = {
        "prompt": [order.prompt for order in orders],
        "negative_prompt": [order.negative_prompt for order in orders],
        "height": SIZE[0],
        "width": SIZE[1],
        "num_inference_steps": STEPS,
        "guidance_scale": 7.5,
        "num_frames": 1,
        "use_resolution_binning": False,
        "clean_caption": False,
        "generator": [torch.Generator().manual_seed(order.seed) for order in orders],
        **given,
    }
    output = pipe(**{name: value for name, value in arguments.items() if name in takes}, output_type="pil")
    made = [frames[0] for frames in output.frames] if hasattr(output, "frames") else output.images
    return [np.asarray(picture) for picture in made]
