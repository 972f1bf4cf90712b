"""The settings of the tools: pack, export, launch, show, demo, doctor, estimate and board."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from muralist.settings.section import LocalPath, Section


class PackSettings(Section):
    """muralist pack SOURCE DESTINATION: decode and crop every image once, ahead of training; with --encode also run
    the VAE and the text encoders of a pipeline."""

    source: Annotated[str, LocalPath]
    """Any data set that train reads."""
    destination: Annotated[str, LocalPath]
    """Folder to write; must not exist or be empty."""
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 64
    """Side of the square images in pixels, or height and width."""
    caption: str | None = None
    """Source of the captions, as in training: a column name, or a template with {column} fields."""
    cameras: list[str] = []
    """Waymo: use only images of these cameras, as in training."""
    num_workers: PositiveInt | None = None
    """Decoding processes; default: one per CPU core."""
    encode: Annotated[str | None, LocalPath] = None
    """Store latents and text embeddings of this pipeline (a folder in diffusers layout, a Hub id, or small: the HunyuanDiT
    that train builds) instead of pixels; training from them runs no VAE or text encoder and has the same losses."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With --encode: precision of the model and of the stored values; train --use_amp computes in bf16."""
    random_flip: bool = True
    """With --encode: also store the latents of each flipped image, for training with --random_flip."""


LoraFormat = Literal["diffusers", "comfy", "peft"]


class ExportSettings(Section):
    """muralist export SOURCE DESTINATION: write weights as a folder in diffusers layout, or a LoRA alone."""

    source: Annotated[str, LocalPath]
    """A run, a checkpoint folder, an official .pth file, or a .safetensors file."""
    destination: Annotated[str, LocalPath]
    """Folder to write."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """Which weights: as trained, or one of the two EMAs."""
    sigma_rel: Annotated[float, Field(gt=0.01, lt=0.28)] | None = None
    """Instead of one of these: a power-function EMA of this relative length (EDM2), assembled from all checkpoints that the
    run has kept."""
    lora_format: LoraFormat | None = None
    """Write the LoRA alone: diffusers (for `pipe.load_lora_weights`), comfy (for ComfyUI) or peft; default: merge it into
    the model, with the LoRA alone beside it."""


class LaunchSettings(Section):
    """muralist launch [--nproc N] COMMAND ...: start a command as several processes on this machine.

    muralist launch --slurm --nodes N --gpus-per-node N COMMAND ...: submit it as a SLURM job that saves and requeues itself.
    """

    nproc: PositiveInt | None = None
    """Number of processes; default: NPROC, else the entries of CUDA_VISIBLE_DEVICES, else the number of GPUs, else 1.
    With --slurm: processes per node, on nodes without GPUs."""
    slurm: bool = False
    """Write a job script into logs/ and submit it with sbatch."""
    nodes: PositiveInt | None = None
    """With --slurm: number of nodes; default 1."""
    gpus_per_node: PositiveInt | None = None
    """With --slurm: GPUs, and processes, per node."""
    partition: str | None = None
    """With --slurm: partition; default: the cluster's."""
    time: str | None = None
    """With --slurm: time limit of the job, after which the run is saved and requeued, e.g. 24:00:00; default: the
    partition's limit."""


class ShowSettings(Section):
    """muralist show PATH: show an image, a run or a folder of images."""

    path: Annotated[str, LocalPath]
    """An image, a run (its contact sheet of samples), or a folder (a contact sheet of up to 48 of its images)."""
    output: Annotated[str | None, LocalPath] = None
    """File for the contact sheet (-o); default: FOLDER-sheet.png in the current folder."""


class DemoSettings(Section):
    """muralist demo: train a small model on driving scenes and show its samples."""

    results_dir: Annotated[str, LocalPath] = "results"
    """Folder that holds the run demo."""
    max_steps: PositiveInt | None = None
    """Stop after this optimizer step."""


class DoctorSettings(Section):
    """muralist doctor: check this machine, or a planned run, for problems.

    muralist doctor                       the machine
    muralist doctor train FLAGS           and a training, with the flags of train; --config FILE alone means this too
    muralist doctor generate FLAGS        and a generation, with the flags of generate
    muralist launch --nproc 8 doctor ...  and the collective self-test of the ranks (also under torchrun and srun)
    """

    as_json: bool = False
    """Print the findings as JSON."""
    timeout: PositiveFloat = 60.0
    """Seconds to wait for missing ranks."""


DOCTOR_FLAT_NAMES = {"json": "as_json"}
"""`json` itself is a name that settings cannot have."""


class EstimateSettings(Section):
    """muralist estimate: time, cost, scaling and memory of a training, from a measured speed.

    muralist estimate --model.path FOLDER --img_size N: memory of fine-tuning a pipeline, full and LoRA, from its files.
    """

    source: Annotated[str, LocalPath] = "probe"
    """A run's folder, a file of bench/results, or probe: real training steps on this machine for --seconds."""
    model: str | None = None
    """JiT-B/4 and so on; default: the measured model, which may be any model of a run. Another JiT is assumed to reach the
    same MFU."""
    model_path: Annotated[str | None, LocalPath] = None
    """A pipeline in diffusers layout, or a Hub id: estimate its fine-tuning without a measurement; with --img_size, --gpus
    and --memory."""
    lora_rank: PositiveInt | None = None
    """With --model.path: rank of the LoRA; default: that of train."""
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    """Side of the images, or height and width; default: as measured."""
    batch_size: PositiveInt | None = None
    """Images per GPU and step; default: as measured."""
    gpus: PositiveInt = 8
    """Number of GPUs."""
    tokens: list[str] = ["1T", "10B"]
    """Token budgets: 10B, 1T, 5e9. A token is an image patch."""
    images: list[str] = []
    """Image budgets instead: 300M, 1.2B."""
    price: PositiveFloat | None = None
    """Price of a GPU hour, in any currency."""
    watts: PositiveFloat | None = None
    """Power of a GPU under load; default: the GPU's limit if known."""
    memory: PositiveFloat | None = None
    """Memory of a GPU in GB; default: the GPU's if known, else 80."""
    gpus_per_node: PositiveInt = 8
    """GPUs that share the fast link inside a node."""
    link: PositiveFloat | None = None
    """GB/s that a GPU sends inside a node; default: the GPU's NVLink if known, else 25 (PCIe 4)."""
    network: PositiveFloat = 400.0
    """Gbit/s that a GPU sends to other nodes: 400 and 200 are InfiniBand, 25 a 200 Gbit/s Ethernet adapter shared by
    eight GPUs."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Duration of the probe."""
    plot: Annotated[str | None, LocalPath] = None
    """Write the scaling curve as a page (FILE.html) or an image (FILE.svg)."""


ESTIMATE_FLAT_NAMES = {"from": "source", "model.path": "model_path"}
"""`from` is a word of Python's."""


class BoardSettings(Section):
    """muralist board ROOT: serve a page with every run, generation folder and evaluation under a folder, live."""

    root: Annotated[str, LocalPath]
    """Folder to read, with its sub-folders; nothing outside it is shown, nothing in it is changed."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 makes the page reachable from other machines."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8420
    """Port to listen on, or the next free one; 0: any free port."""
    open: bool = False
    """Open the page in this machine's browser."""
