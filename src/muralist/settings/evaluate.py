"""The settings of `muralist evaluate`, and of the commands around it: `stats`, `report` and `sweep`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from muralist.settings.generate import scheduler_name
from muralist.settings.section import LocalPath, Section


def _split_commas(value: Any) -> Any:
    """Take fid,kid for two names, as the flag or as one text in Python."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    return [name.strip() for word in words for name in word.split(",") if name.strip()]


Resize = Literal["pytorch-fid", "clean-fid"]


class EvaluateSettings(Section):
    """muralist evaluate: FID, KID, CLIP score and other metrics of a folder of images."""

    images: Annotated[str, LocalPath]
    """Folder of images, with its sub-folders; prompts and failures are read from a ledger.jsonl in it."""
    output_dir: Annotated[str, LocalPath]
    """Folder for report.json and the features; the same command resumes there."""
    reference: Annotated[str | None, LocalPath] = None
    """Folder of real images, or an .npz file by `muralist stats` or other tools (mu, sigma); none: only metrics
    without a reference."""
    prompts_csv: Annotated[str | None, LocalPath] = None
    """Prompts in any format of `muralist generate`; row ID has the files ID.* and ID_seedN.*; default: the prompts in
    the ledger."""
    category_column: list[str] = []
    """Columns of the prompt table by whose values the scores of images are averaged; default: category, challenge and
    tag, where the table has them."""
    inception_weights: Annotated[str | None, LocalPath] = None
    """Inception weights of 2015-12-05, .pth or .pt; default: the file in MURALIST_INCEPTION, or in the usual caches."""
    clip_path: Annotated[str | None, LocalPath] = None
    """CLIP model saved by transformers, a folder or its id on the Hugging Face Hub, for CLIP score and CMMD."""
    dinov2_path: Annotated[str | None, LocalPath] = None
    """DINOv2 model saved by transformers, a folder or its id on the Hugging Face Hub, for FD-DINOv2; papers report
    dinov2-large (ViT-L/14)."""
    pickscore_weights: Annotated[str | None, LocalPath] = None
    """Folder with the weights of PickScore; docs/evaluating.md lists the files of each score, and a missing one is
    named with its origin."""
    hpsv2_weights: Annotated[str | None, LocalPath] = None
    """Folder with HPS_v2.1_compressed.pt and a CLIP tokenizer, for HPSv2.1."""
    hpsv3_weights: Annotated[str | None, LocalPath] = None
    """Folder with HPSv3.safetensors, the settings and tokenizer of Qwen2-VL-7B-Instruct, and the file with the
    instruction, for HPSv3."""
    imagereward_weights: Annotated[str | None, LocalPath] = None
    """Folder with ImageReward.pt, med_config.json and BERT's vocab.txt, for ImageReward."""
    aesthetic_weights: Annotated[str | None, LocalPath] = None
    """Folder with sac+logos+ava1-l14-linearMSE.pth, for the LAION aesthetic score; needs OpenAI's ViT-L/14 as
    --clip_path."""
    vqascore_weights: Annotated[str | None, LocalPath] = None
    """Folder with a vision-language model, for VQAScore."""
    judge_weights: Annotated[str | None, LocalPath] = None
    """Folder with a vision-language model that answers the questions of GenEval 2 and DPG-Bench; published GenEval 2
    values use Qwen3-VL-8B-Instruct."""
    geneval2_questions: Annotated[str | None, LocalPath] = None
    """geneval2_data.jsonl, for GenEval 2."""
    dpg_questions: Annotated[str | None, LocalPath] = None
    """dpg_bench.csv, for DPG-Bench."""
    geneval_layout: Annotated[str | None, LocalPath] = None
    """Folder into which the images are put as classic GenEval's scripts read them; needs its evaluation_metadata.jsonl
    as --prompts_csv."""
    metrics: Annotated[list[str], BeforeValidator(_split_commas)] = []
    """Scores to compute, such as fid,kid,clip; one that lacks an input is then an error. Default: every score whose
    inputs are there."""
    resize: Resize = "pytorch-fid"
    """How images are resized for Inception: bilinear as in pytorch-fid, or bicubic with antialiasing as in clean-fid."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """GPUs to use; default: all visible ones. Without a GPU, one CPU process replaces each, or NPROC processes."""
    dry_run: bool = False
    """Check reference, weights and models, print which scores will be computed, and write nothing; the images may be
    generated later."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the KID subsets and the bootstrap intervals."""


class StatsSettings(Section):
    """muralist stats SOURCE -o STATS.npz: compute the reference statistics for `evaluate` once."""

    source: Annotated[str, LocalPath]
    """Folder of images, with its sub-folders; with --img_size, any data set that train reads."""
    output: Annotated[str, LocalPath]
    """The .npz file to write (-o): mu and sigma, as other tools store them, and the features."""
    img_size: PositiveInt | None = None
    """Read SOURCE as training does, cropped to squares of this side; default: the images as they are."""
    max_samples: PositiveInt | None = None
    """With --img_size: use only the first N images, as in training."""
    inception_weights: Annotated[str | None, LocalPath] = None
    """As for evaluate."""
    resize: Resize = "pytorch-fid"
    """As for evaluate, which must then be given the same."""
    dinov2_path: Annotated[str | None, LocalPath] = None
    """As for evaluate: also stores the features for FD-DINOv2."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """As for evaluate."""


class ReportSettings(Section):
    """muralist report FOLDERS ...: write the page of one evaluation, or compare several."""

    folders: Annotated[list[str], LocalPath]
    """Output folders of evaluate: one, or several to compare."""
    output_dir: Annotated[str, LocalPath] = "report"
    """Folder for index.html."""


_Count = Annotated[int, Field(ge=2)]


class SweepSettings(Section):
    """muralist sweep: find the EMA, guidance scale and guidance interval of a JiT with the best FID: every
    combination on a few images, then the best one on many."""

    model_path: Annotated[str, LocalPath]
    """A run or checkpoint of a JiT, or official weights."""
    reference: Annotated[str, LocalPath]
    """Folder of real images, or an .npz file by `muralist stats` or other tools (mu, sigma)."""
    output_dir: Annotated[str, LocalPath]
    """Folder for images, scores and sweep.json; the same command resumes there, one with more values adds them."""
    weights: list[Literal["model", "ema1", "ema2"]] = ["ema1", "ema2"]
    """Weights to try: as trained, or one of the two EMAs."""
    guidance_scale: list[Annotated[float, Field(ge=0)]] = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    """Guidance scales to try; 1 is no guidance. The paper's: $(seq 1 0.1 4)."""
    guidance_interval: list[str] = ["0.1,1"]
    """Intervals to try, each as LOW,HIGH: t from 0 (noise) to 1 (image) in which guidance is on."""
    scheduler: Annotated[str, AfterValidator(scheduler_name)] | None = None
    """Solver: heun (default), abm2 or euler, as for generate."""
    official_last_step: bool = False
    """Reproduce the official sampler, whose clamp of 1 - t leaves noise after the last step."""
    num_samples: _Count = 8192
    """Images per combination, evenly over the classes; the same classes and seeds for all."""
    full_samples: _Count | None = 50_000
    """Images of the best combination, with seeds of their own; none: skip this."""
    num_inference_steps: PositiveInt | None = None
    """Denoising steps; default: 50, or those of a distilled model."""
    seed_start: Annotated[int, Field(ge=0, lt=2**61)] = 42
    """Image i of a combination has seed seed_start + i."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """GPUs to use; default: all visible ones. Without a GPU, one CPU process replaces each."""
    inception_weights: Annotated[str | None, LocalPath] = None
    """As for evaluate."""
