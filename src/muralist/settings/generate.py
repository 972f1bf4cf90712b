"""The settings of `muralist generate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from muralist.settings.section import Fraction, Section


def scheduler_name(text: str) -> str:
    """One name for one scheduler, as different people write it: eulerdiscrete, EulerDiscrete, EulerDiscreteScheduler."""
    return text.casefold().removesuffix("scheduler")


class GenerateSettings(Section):
    """muralist generate: one or several images for every row of a prompt table, on all GPUs."""

    prompts_csv: str
    """CSV, TSV, JSONL or Parquet table with a column prompt or caption (optional: image_id, seed, negative_prompt,
    width, height; image inputs: image, mask, control_image, strength), a .txt file with one prompt per line, MS-COCO
    captions (.json), or muralist: 100 built-in prompts."""
    output_dir: str
    """Folder for the images, ledger.jsonl and failed_prompts_gpuN.txt; the same command resumes there."""
    model_path: str
    """A pipeline in diffusers layout, text-to-image, text-to-video or with image inputs, or a run or checkpoint of
    muralist train."""
    num_samples: PositiveInt | None = None
    """Use only the first N rows; default: all."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """GPUs to use; default: all visible ones. Without a GPU, one CPU process replaces each."""
    seed_start: Annotated[int, Field(ge=0, lt=2**62)] = 42
    """Row i has seed seed_start + i, unless the table has a seed column."""
    num_inference_steps: PositiveInt = 20
    """Denoising steps."""
    guidance_scale: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Classifier-free guidance scale; auto: 7.5, for JiT 2.9."""
    guidance_interval: tuple[Fraction, Fraction] = (0.1, 1.0)
    """JiT: interval of t, from 0 (noise) to 1 (image), in which guidance is on."""
    official_last_step: bool = False
    """JiT: reproduce the official sampler, whose clamp of 1 - t leaves noise after the last step."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """JiT: which weights of a run, a checkpoint or an official file: as trained, or one of the two EMAs."""
    negative_prompt: str = ""
    """Negative prompt of rows that have none."""
    height: PositiveInt | None = None
    """Height in pixels of rows that have none; default: 480, for models trained here their own."""
    width: PositiveInt | None = None
    """Width in pixels of rows that have none; default: 832, for models trained here their own."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the model."""
    preset: Literal["exact", "fast"] = "exact"
    """fast: apply guidance and run the network at some of the steps only, with FP8 matmuls on GPUs that support them;
    the first rows are generated in both modes and their PSNR is reported."""
    cfg_truncation_step: Annotated[int, Field(ge=0)] | None = None
    """Apply guidance to the first N steps only; the others need half the compute."""
    num_frames: PositiveInt = 1
    """Frames of text-to-video models; 1 makes an image, more make a clip."""
    enable_half_frame: bool = False
    """Halve the number of frames of a clip; has no effect on one frame."""
    video_format: Literal["mp4", "webp"] = "mp4"
    """File format of clips; webp is lossless."""
    images_per_prompt: PositiveInt = 1
    """Images per row; copy c of a row has its seed + 1,000,000 c."""
    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Images per batch on a GPU; auto: the largest that fits, measured once and stored in the ledger."""
    allow_batch_change: bool = False
    """Continue with smaller batches if memory runs out later; such rows are marked in the ledger."""
    scheduler: Annotated[str, AfterValidator(scheduler_name)] | None = None
    """A diffusers scheduler that is compatible with the model, such as EulerDiscrete or DPMSolverMultistep."""
    lora: list[str] = []
    """LoRA weights to load: PATH or PATH:WEIGHT, one or several."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile the network and the decoder, which takes about a minute at the start; auto: on GPUs."""
    cpu_offload: bool | Literal["auto"] = "auto"
    """Keep only the active component of the pipeline on the GPU; auto: if the model takes most of the GPU's memory."""
    engine: Literal["local", "ray"] = "local"
    """ray: run the workers on a running Ray cluster (an extra)."""
    worker_timeout: PositiveFloat = 600.0
    """Seconds without a denoising step after which a worker is stopped and the others take its rows."""
    overwrite: bool = False
    """Start over in a folder that holds images made with other settings."""
