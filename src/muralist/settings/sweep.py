"""The settings of `muralist sweep`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from muralist.settings.section import Section

_Count = Annotated[int, Field(ge=2)]


class SweepSettings(Section):
    """muralist sweep: which average of a JiT's weights, guidance scale and guidance interval have the best FID: every
    combination on a few pictures, then the best one on many."""

    model_path: str
    """A run or checkpoint of a JiT trained here, or official weights."""
    reference: str
    """Folder of real pictures, or an .npz file by `muralist stats` or others (mu, sigma)."""
    output_dir: str
    """Where pictures, numbers and sweep.json go; the same command again goes on there, one with more values adds them."""
    weights: list[Literal["model", "ema1", "ema2"]] = ["ema1", "ema2"]
    """Which weights to try: as trained, or one of the two averages."""
    guidance_scale: list[Annotated[float, Field(ge=0)]] = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    """Guidance scales to try; 1 is none. The paper's: $(seq 1 0.1 4)."""
    guidance_interval: list[str] = ["0.1,1"]
    """Intervals to try, each as LOW,HIGH: times from 0 (noise) to 1 (picture) between which guidance is on."""
    official_last_step: bool = False
    """Reproduce the official sampler, whose clamp of 1 - t leaves noise in the last step."""
    num_samples: _Count = 8192
    """Pictures of each combination, evenly over the classes; the same classes and seeds for all."""
    full_samples: _Count | None = 50_000
    """Pictures of the best combination, with seeds of their own; none: leave that out."""
    num_inference_steps: PositiveInt = 50
    """Denoising steps."""
    seed_start: Annotated[int, Field(ge=0, lt=2**61)] = 42
    """Picture i of a combination has seed seed_start + i."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """Which GPUs; default: all visible. Without a GPU, one CPU process stands in for each."""
    inception_weights: str | None = None
    """As of evaluate."""
