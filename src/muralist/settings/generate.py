"""The settings of `muralist generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from muralist.core.errors import UserError
from muralist.settings.section import Fraction, LocalPath, Repeatable, Section


def scheduler_name(text: str) -> str:
    """One name for one scheduler, as different people write it: eulerdiscrete, EulerDiscrete, EulerDiscreteScheduler."""
    return text.casefold().removesuffix("scheduler")


def _option_words(value: Any) -> Any:
    """Accept name=value words, several of them joined by commas, or a mapping."""
    if isinstance(value, Mapping):
        return [f"{name}={str(item).lower() if isinstance(item, bool) else item}" for name, item in value.items()]
    if isinstance(value, list):
        return [word for text in value for word in str(text).split(",") if word]
    return value


_DEFAULT_QUALITY = 95  # of JPEG and WebP


class GenerateSettings(Section):
    """muralist generate: one or several images for every row of a prompt table, on all GPUs."""

    prompts_csv: Annotated[str | None, LocalPath] = None
    """CSV, TSV, JSONL or Parquet table with a column prompt or caption (optional: image_id, seed, negative_prompt,
    width, height; image inputs: image, mask, control_image, strength), a .txt file with one prompt per line (# begins
    a comment), MS-COCO captions (.json), - for standard input (lines, JSONL or CSV), or muralist: 100 built-in
    prompts."""
    prompt: Annotated[list[str], Repeatable] = []
    """One or several prompts instead of a table; the flag can be repeated."""
    prompt_column: str | None = None
    """Column of the prompts; default: prompt or caption."""
    seed_column: str | None = None
    """Column of the seeds; default: seed, if there is one."""
    id_column: str | None = None
    """Column of the ids, which begin the file names; default: image_id or id, if there is one."""
    output_dir: Annotated[str, LocalPath]
    """Folder for the images, ledger.jsonl and failed_prompts_gpuN.txt; the same command resumes there."""
    model_path: Annotated[str, LocalPath]
    """A pipeline in diffusers layout, text-to-image, text-to-video or with image inputs, or a run or checkpoint of
    muralist train: its path, or its id on the Hugging Face Hub."""
    num_samples: PositiveInt | None = None
    """Use only the first N rows; default: all."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """GPUs to use; default: all visible ones. Without a GPU, one CPU process replaces each."""
    seed_start: Annotated[int, Field(ge=0, lt=2**62)] = 42
    """Row i has seed seed_start + i, unless the table has a seed column."""
    num_inference_steps: PositiveInt | Literal["auto"] = "auto"
    """Denoising steps; auto: the default of the model's pipeline, for JiT 50."""
    guidance_scale: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Classifier-free guidance scale; auto: the default of the model's pipeline, for JiT 2.9."""
    guidance_interval: tuple[Fraction, Fraction] = (0.1, 1.0)
    """JiT: interval of t, from 0 (noise) to 1 (image), in which guidance is on."""
    official_last_step: bool = False
    """JiT: reproduce the official sampler, whose clamp of 1 - t leaves noise after the last step."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """Models trained here and official JiT files: which weights, as trained, or one of the two EMAs."""
    negative_prompt: str = ""
    """Negative prompt of rows that have none."""
    height: PositiveInt | None = None
    """Height in pixels of rows that have none; default: the model's."""
    width: PositiveInt | None = None
    """Width in pixels of rows that have none; default: the model's."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the model."""
    preset: Literal["exact", "fast", "faster"] = "exact"
    """fast and faster: apply guidance and run the network at some of the steps only, with FP8 matmuls on GPUs that
    support them; the first rows are generated in exact mode too and their PSNR is reported."""
    cfg_truncation_step: Annotated[int, Field(ge=0)] | None = None
    """Apply guidance to the first N steps only; the others need half the compute."""
    num_frames: PositiveInt = 1
    """Frames of text-to-video models; 1 makes an image, more make a clip."""
    enable_half_frame: bool = False
    """Halve the number of frames of a clip; has no effect on one frame."""
    image_format: Literal["png", "jpg", "webp"] = "png"
    """File format of images; prompt and settings are in the metadata of each."""
    image_quality: Annotated[int, Field(ge=1, le=100)] | Literal["lossless"] | None = None
    """Quality of jpg (1 to 100, without chroma subsampling) and webp (1 to 100, or lossless); default: 95."""
    video_format: Literal["mp4", "webp"] = "mp4"
    """File format of clips; webp is lossless."""
    shards: PositiveInt | None = None
    """Write WebDataset shards: tar files of N samples each, with image, prompt (.txt) and facts (.json), and
    index.parquet; default: single image files."""
    images_per_prompt: PositiveInt = 1
    """Images per row; copy c of a row has its seed + 1,000,000 c."""
    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Images per batch on a GPU; it decides the last bits of an image. auto: as many as fill a GPU and fit into its
    memory, whatever the number of rows; measured once and stored in the ledger. On a CPU 1."""
    allow_batch_change: bool = False
    """Continue with smaller batches if memory runs out later; such rows are marked in the ledger."""
    scheduler: Annotated[str, AfterValidator(scheduler_name)] | None = None
    """Another scheduler: euler, heun, dpm++, unipc, ddim, lcm, tcd, ..., or the name of a diffusers class. JiT: heun
    (default; two passes per step), abm2 (one pass per step, for 10 to 20 steps) or euler."""
    scheduler_options: Annotated[list[str], BeforeValidator(_option_words)] = []
    """Options of the scheduler: use_karras_sigmas=true,solver_order=3."""
    timesteps: list[Annotated[int, Field(ge=0)]] = []
    """Time steps of the denoising loop, from the first to the last, instead of a number of steps."""
    distilled: Literal["lcm", "lightning", "hyper", "turbo", "tcd", "dmd2"] | None = None
    """The model or the LoRA is distilled to few steps: take steps, guidance and scheduler from its authors."""
    lora: Annotated[list[str], LocalPath] = []
    """LoRA weights to load: PATH or PATH:WEIGHT, one or several; PATH may be the id of a LoRA on the Hugging Face Hub."""
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

    @model_validator(mode="before")
    @classmethod
    def _check_prompts(cls, given: Any) -> Any:
        """Refuse settings without prompts, and with two sources of them."""
        has_table, has_prompts = given.get("prompts_csv") is not None, bool(given.get("prompt"))
        if has_table and has_prompts:
            raise UserError(
                "--prompt and --prompts_csv cannot both be given.",
                "The prompts of a command come from one place.",
                "Leave one of them out.",
            )
        if not has_table and not has_prompts:
            table = " ".join((cls.model_fields["prompts_csv"].description or "").split())
            raise UserError(
                "--prompts_csv is missing.",
                f"It takes a {table}",
                'Give it, or prompts themselves: --prompt "a red car" --prompt "a blue bus".',
            )
        return given

    _from_folder: frozenset[str] = PrivateAttr(frozenset())

    @property
    def from_folder(self) -> frozenset[str]:
        """Names of the settings whose values are those of the images in the folder."""
        return self._from_folder

    @property
    def resolved_quality(self) -> int | Literal["lossless"] | None:
        """The quality of the images; None for PNG."""
        if self.image_format == "png":
            return None
        return _DEFAULT_QUALITY if self.image_quality is None else self.image_quality


class BatchScriptSettings(GenerateSettings):
    """batch_generate_t2i_multigpu.py: `muralist generate` with the defaults that this script has always had."""

    num_inference_steps: PositiveInt | Literal["auto"] = 20
    """Denoising steps."""
    guidance_scale: Annotated[float, Field(ge=0)] | Literal["auto"] = 7.5
    """Classifier-free guidance scale; for models trained here the default is that of training: 2.9 for JiT, 5 for
    HunyuanDiT."""
    height: PositiveInt | None = 480
    """Height in pixels of rows that have none; for models trained here, the default is their own."""
    width: PositiveInt | None = 832
    """Width in pixels of rows that have none; for models trained here, the default is their own."""
