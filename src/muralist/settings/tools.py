"""The settings of what surrounds training: `muralist pack`, `export`, `launch`, `show` and `demo`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from muralist.settings.section import Section


class PackSettings(Section):
    """muralist pack SOURCE DESTINATION: crop every image once, ahead of training; with --encode also run the VAE and the
    text encoders of a HunyuanDiT on them."""

    source: str
    """What to read: anything train reads."""
    destination: str
    """Folder to write; must not exist or be empty."""
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 64
    """Side of the square images in pixels, or height and width."""
    caption: str | None = None
    """Where captions come from, as in training: a column's name, or a text with {column} fields."""
    cameras: list[str] = []
    """Waymo's files: only images by these cameras, as in training."""
    num_workers: PositiveInt | None = None
    """Decoding processes; default: one per core."""
    encode: str | None = None
    """Keep latents and text embeddings of this HunyuanDiT (a folder in diffusers layout, or small: the one that train
    builds) instead of pixels; training from them runs no VAE encoder and no text encoder, and has the same losses."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With --encode: what the model computes in and what is kept; train with --use_amp computes in bf16."""
    random_flip: bool = True
    """With --encode: keep each mirror image's latents too, for training with --random_flip."""


class ExportSettings(Section):
    """muralist export SOURCE DESTINATION: weights as a diffusers-style folder."""

    source: str
    """A run, a checkpoint folder, an official .pth file, or a .safetensors file."""
    destination: str
    """Folder to write."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """Which weights: as trained, or one of the two averages."""


class LaunchSettings(Section):
    """muralist launch [--nproc N] COMMAND ...: start a command as several processes on this machine.

    muralist launch --slurm --nodes N --gpus-per-node N COMMAND ...: submit it as a job that saves and requeues itself."""

    nproc: PositiveInt | None = None
    """How many; default: NPROC, else the entries of CUDA_VISIBLE_DEVICES, else the GPUs there are, else 1. With --slurm:
    processes per node, on nodes without GPUs."""
    slurm: bool = False
    """Write the job into logs/ and submit it with sbatch instead of starting anything here."""
    nodes: PositiveInt | None = None
    """With --slurm: nodes of the job; default 1."""
    gpus_per_node: PositiveInt | None = None
    """With --slurm: GPUs, and processes, of each node."""
    partition: str | None = None
    """With --slurm: where to queue; default: the cluster's own."""
    time: str | None = None
    """With --slurm: how long a turn may take before the run is saved and queued again, e.g. 24:00:00; default: the
    partition's limit."""


class ShowSettings(Section):
    """muralist show PATH: a quick look at a picture, a run or a folder of pictures."""

    path: str
    """A picture, a run (its sheet of samples is shown), or a folder: a sheet of up to 48 of its pictures is made."""
    output: str | None = None
    """Where that sheet is written (-o); default: FOLDER-sheet.png in the current folder."""


class DemoSettings(Section):
    """muralist demo: train a small model on driving scenes and look at it."""

    results_dir: str = "results"
    """Where the run demo goes."""
    max_steps: PositiveInt | None = None
    """Stop early."""
