"""The settings of `muralist generate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from muralist.settings.section import Fraction, Section


def scheduler_name(text: str) -> str:
    """One name for one scheduler, as different people write it: eulerdiscrete, EulerDiscrete, EulerDiscreteScheduler."""
    return text.casefold().removesuffix("scheduler")


class GenerateSettings(Section):
    """muralist generate: a picture, or several, for every row of a prompt table, on every GPU at hand."""

    prompts_csv: str
    """The table: CSV, TSV, JSONL or Parquet with a column prompt or caption (and, if it likes, image_id, seed,
    negative_prompt, width, height), a .txt file with one prompt per line, MS-COCO's captions (.json), or muralist: a
    hundred prompts that come with it."""
    output_dir: str
    """Where pictures, ledger.jsonl and failed_prompts_gpuN.txt go; the same command again goes on there."""
    model_path: str
    """A text-to-image or text-to-video pipeline in diffusers layout, or a run or checkpoint trained here."""
    num_samples: PositiveInt | None = None
    """Use only the first this many rows; default: all."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """Which GPUs; default: all visible. Without a GPU, one CPU process stands in for each."""
    seed_start: Annotated[int, Field(ge=0, lt=2**62)] = 42
    """Row i has seed seed_start + i, unless the table gives one."""
    num_inference_steps: PositiveInt = 20
    """Denoising steps."""
    guidance_scale: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Classifier-free guidance scale; auto: 7.5, for JiT 2.9."""
    guidance_interval: tuple[Fraction, Fraction] = (0.1, 1.0)
    """JiT: the times, from 0 (noise) to 1 (picture), between which guidance is on."""
    official_last_step: bool = False
    """JiT: reproduce the official sampler, whose clamp of 1 - t leaves noise in the last step."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """JiT: which weights of a run, a checkpoint or an official file: as trained, or one of the two averages."""
    negative_prompt: str = ""
    """What pictures should not show, where a row does not say."""
    height: PositiveInt | None = None
    """Height in pixels, where a row does not say; default: 480, for models trained here their own."""
    width: PositiveInt | None = None
    """Width in pixels, where a row does not say; default: 832, for models trained here their own."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the model."""
    preset: Literal["exact", "fast"] = "exact"
    """fast: guides, and runs the network, only at some of the steps, with 8-bit products where the GPU has them; the first
    rows are painted both ways, and the distance is told."""
    cfg_truncation_step: Annotated[int, Field(ge=0)] | None = None
    """Guide only the first this many steps; the rest need half the work."""
    num_frames: PositiveInt = 1
    """Frames of text-to-video models; one is a picture, more are a clip."""
    enable_half_frame: bool = False
    """Halve the frames of a clip; does nothing for one frame."""
    video_format: Literal["mp4", "webp"] = "mp4"
    """How clips are stored; webp is lossless."""
    images_per_prompt: PositiveInt = 1
    """Pictures for each row; copy c of a row has its seed + 1,000,000 c."""
    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Pictures made at once on a GPU; auto: the largest that fits, found once and kept in the ledger."""
    allow_batch_change: bool = False
    """Go on with smaller batches when memory runs out later; rows made so are marked in the ledger."""
    scheduler: Annotated[str, AfterValidator(scheduler_name)] | None = None
    """Another scheduler of diffusers that fits the model, such as EulerDiscrete or DPMSolverMultistep."""
    lora: list[str] = []
    """LoRA weights to add: PATH, or PATH:WEIGHT, or several."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile network and decoder, a minute at the start; auto: on GPUs."""
    cpu_offload: bool | Literal["auto"] = "auto"
    """Keep on the GPU only the part of the model that works; auto: where the model takes most of the card's memory."""
    engine: Literal["local", "ray"] = "local"
    """ray: run the workers on the Ray cluster that is there (an extra)."""
    worker_timeout: PositiveFloat = 600.0
    """Seconds without a denoising step after which a worker is given up and the others take its rows."""
    overwrite: bool = False
    """Begin anew in a folder that holds pictures made with other settings."""
