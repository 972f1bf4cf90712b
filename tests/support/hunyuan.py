"""The small HunyuanDiT for tests: built once per session of tests, tiny images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from muralist.data.loader import Batch
from muralist.demo.driving_world import DrivingWorld
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.hunyuan_dit import HunyuanDiTSpec

SMALL = ["--model", "HunyuanDiT", "--img_size", "32", "--batch_size", "4", "--num_workers", "0", "--warmup_steps", "3",
         "--learning_rate", "1e-3", "--sample_steps", "2", "--no_use_tensorboard", "--data_path", "driving_world",
         "--max_samples", "64", "--val_fraction", "0"]  # fmt: skip


def small_family(
    folder: Path, size: tuple[int, int] = (32, 32), variant: str = "1.2", **settings: float
) -> HunyuanDiTSpec:
    """A family of the small model."""
    return HunyuanDiTSpec.load(build_small_hunyuan_dit(folder, variant), size, **settings)  # type: ignore[arg-type]


def scenes(size: int, count: int, first: int = 0) -> Batch:
    """Driving scenes with captions, numbered as in a stream."""
    items = [DrivingWorld(size).read(first + index) for index in range(count)]
    numbers = torch.arange(first, first + count)
    images = torch.from_numpy(np.stack([item.image for item in items]))
    return Batch(images, torch.zeros(count, dtype=torch.int64), [item.caption for item in items], numbers)


def write_scenes(folder: Path, size: int, count: int, first: int = 0) -> Path:
    """A folder of driving scenes with captions; every sixth has the caption of the first, and the last has none."""
    folder.mkdir(parents=True)
    items = [DrivingWorld(size).read(first + index) for index in range(count)]
    for index, item in enumerate(items):
        Image.fromarray(item.image).save(folder / f"{index:03}.png")
        if index < count - 1:
            (folder / f"{index:03}.txt").write_text(items[0].caption if index % 6 == 0 else item.caption)
    return folder
