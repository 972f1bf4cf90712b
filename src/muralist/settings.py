"""The typed settings of every job: what can be set, what it means, what happens when nothing is said.

The text under a field is its help. A field marked `Apart` changes where a run goes, how fast it runs or what is shown of
it, but never the result; all other fields together are the run's identity (see `muralist.config.identity`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator


class _Apart:
    """Marks a field that does not shape the result of a run."""


Apart = _Apart()
Strategy = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused, and the text under each field becomes its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )


class DataSettings(Section):
    """Where the images come from and how they are batched."""

    path: str | list[str] | None = None
    """Folder (one sub-folder per class, or flat), CSV/TSV/JSONL, WebDataset tars, Parquet, .npz, a packed or encoded
    folder, HunyuanDiT's index, or driving_world; several are one data set, in their order."""
    batch_size: PositiveInt = 64
    """Images per GPU and optimizer step part; total batch = batch_size x GPUs x gradient_accumulation_steps."""
    global_batch_size: PositiveInt | None = None
    """Total batch of an optimizer step; gradient accumulation is then derived from it."""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], Apart] = "auto"
    """Images per forward pass; auto tries batch_size and halves it while memory is short (ddp, zero2): same result."""
    caption: str | None = None
    """Where captions come from: a column's name, or a text with {column} fields such as "A photo of {label}"; default:
    the column or file that is named like one."""
    cameras: list[str] = []
    """Waymo's files: only images by these cameras, of FRONT FRONT_LEFT FRONT_RIGHT SIDE_LEFT SIDE_RIGHT; default: all."""
    max_samples: PositiveInt | None = None
    """Use only the first this many images of the source."""
    multireso: bool = False
    """HunyuanDiT: train each picture at the size, of about the area of img_size, whose shape is nearest its own; all
    pictures of a batch have one size."""
    reso_step: PositiveInt | None = None
    """With multireso: by how many pixels each size is taller and narrower than the next; default: img_size / 16, rounded to
    a multiple of 16."""
    random_flip: bool = True
    """Mirror each image with probability one half."""
    val_fraction: Fraction = 0.01
    """Part of the images held out for val/loss (at most 1,024) when the source has no held-out part of its own;
    0: none."""
    num_workers: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], Apart] = "auto"
    """Loader processes per GPU; auto: this GPU's share of the cores, at most 8; one where training itself needs them."""
    persistent_workers: Annotated[bool, Apart] = True
    """Keep the loader processes alive; they always are: the stream goes on from epoch to epoch without a restart."""
    pin_memory: Annotated[bool, Apart] = True
    """Load into page-locked memory (only where there is a GPU)."""

    @field_validator("path")
    @classmethod
    def _a_text_for_one(cls, path: str | list[str] | None) -> str | list[str] | None:
        if isinstance(path, list) and len(path) < 2:
            return path[0] if path else None
        return path

    @property
    def paths(self) -> list[str]:
        """The data sets, in their order."""
        return self.path if isinstance(self.path, list) else [self.path] if self.path else []


class ModelSettings(Section):
    """The network."""

    name: str = "JiT-B/4"
    """JiT-{B,L,H,G,S,T}/{patch}, any patch that divides img_size; or HunyuanDiT."""
    path: str | None = None
    """HunyuanDiT: a folder in diffusers layout to fine-tune; none: a small model is built and trained."""
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 64
    """Side of the square images in pixels, or height and width (HunyuanDiT)."""
    enable_condition: bool = False
    """Train with class labels (folder names); starts from the newest unconditional run unless --init_from says
    otherwise."""
    attn_dropout: FractionBelowOne = 0.0
    """Dropout on attention weights, middle half of the blocks."""
    proj_dropout: FractionBelowOne = 0.0
    """Dropout on attention output and MLP hidden units, middle half of the blocks (0.2 for H and G in the paper)."""
    uncond_p: Fraction = 0.1
    """HunyuanDiT: probability of training a sample without its caption for the first text encoder (guidance needs it)."""
    uncond_p_t5: Fraction = 0.1
    """HunyuanDiT: the same for the second text encoder, drawn apart."""
    training_parts: Literal["all", "lora"] = "all"
    """HunyuanDiT: train the whole network, or LoRA: narrow layers beside its own, which stay as they are."""
    lora_rank: PositiveInt = 64
    """Width of these layers."""
    lora_targets: list[str] = ["to_q", "to_k", "to_v", "to_out.0"]
    """Beside which layers of the blocks: ends of their names, such as to_q (all attention), attn2.to_q or ff.net.0.proj."""
    gradient_checkpointing: Annotated[bool, Apart] = False
    """HunyuanDiT: compute activations again in the backward pass instead of keeping them; less memory, same result."""

    @field_validator("img_size")
    @classmethod
    def _one_number_for_a_square(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        return size[0] if isinstance(size, tuple) and size[0] == size[1] else size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.img_size if isinstance(self.img_size, tuple) else (self.img_size, self.img_size)


Kind = Literal["x", "v", "eps"]


class ObjectiveSettings(Section):
    """What the network predicts and how its error is measured."""

    prediction: Kind = "x"
    """What the network puts out: clean image, velocity or noise."""
    loss: Kind = "v"
    """The space in which the squared error is taken."""
    p_mean: float = -0.8
    """Mean of the normal whose sigmoid is the time (t = 1 is data)."""
    p_std: PositiveFloat = 0.8
    """Standard deviation of that normal."""
    noise_scale: PositiveFloat | Literal["auto"] = "auto"
    """Standard deviation of the noise; auto: 1 up to 256 px, img_size / 256 above."""
    t_eps: PositiveFloat = 0.05
    """Lower bound of 1 - t in the conversion to velocity."""
    label_drop_prob: Fraction = 0.1
    """Probability of training a sample without its label (needed for guidance)."""


class OptimSettings(Section):
    """AdamW, its learning rate as a function of images seen, and the two averages of the weights."""

    learning_rate: PositiveFloat = 2e-4
    """Learning rate after warm-up, before lr_rule."""
    blr: PositiveFloat | None = None
    """Base learning rate: learning rate = blr x total batch / 256; replaces learning_rate."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """How learning_rate grows with the total batch: not, in proportion to total batch / lr_base_batch, or with its
    root."""
    lr_base_batch: PositiveInt = 256
    """The total batch learning_rate was chosen for."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Constant after warm-up, or falling to min_lr as a half cosine by the end of training."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where the cosine ends."""
    warmup_steps: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps of linear warm-up."""
    gradient_accumulation_steps: PositiveInt = 1
    """Parts of batch_size images per optimizer step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; biases, norms and embeddings of one dimension have none."""
    beta1: FractionBelowOne = 0.9
    """First AdamW moment."""
    beta2: FractionBelowOne = 0.95
    """Second AdamW moment."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this norm; none: no clipping."""
    ema1_half_life: PositiveFloat = 7_097_472.0
    """Half-life of the first average in images (0.9999 per step of 1,024); never longer than 5% of images seen."""
    ema2_half_life: PositiveFloat = 1_774_102.0
    """Half-life of the second average in images (0.9996 per step of 1,024); never longer than 5% of images seen."""


class CheckpointSettings(Section):
    """What is kept of a run, and where it starts from."""

    every: Annotated[PositiveInt, Apart] = 1000
    """Optimizer steps between checkpoints; the last step always has one."""
    latest_every: Annotated[PositiveInt | None, Apart] = None
    """Optimizer steps between further checkpoints, so that less is lost; keep_last and keep_every say what stays."""
    at_epoch_end: Annotated[bool, Apart] = False
    """A checkpoint at the end of every epoch too."""
    keep_last: Annotated[PositiveInt, Apart] = 3
    """How many of the newest checkpoints stay on disk."""
    keep_every: Annotated[PositiveInt | None, Apart] = None
    """Checkpoints whose step is a multiple of this stay for good."""
    resume: Annotated[str, Apart] = "auto"
    """auto: go on with this run if it has a checkpoint; PATH: go on from that checkpoint; none: start at step 0, refused
    if the run has a checkpoint."""
    init_from: str = "default"
    """Weights to start from: a run, a checkpoint, an official .pth, a LoRA folder of PEFT's, auto (newest unconditional
    run of this model and size) or none; default: auto with --enable_condition, else none."""


class SampleSettings(Section):
    """The pictures made at every checkpoint."""

    prompts: Annotated[list[str], Apart] = []
    """Class names or numbers, or one text file with a prompt per line; default: the first eight classes."""
    per_gpu: Annotated[int, Field(ge=0), Apart] = 1
    """Pictures per GPU and checkpoint; 0: none."""
    steps: Annotated[PositiveInt, Apart] = 10
    """Solver steps."""
    guidance: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], Apart] = "auto"
    """Classifier-free guidance scale (conditional models only); auto: 2.9 for JiT, 5 for HunyuanDiT."""
    interval: Annotated[tuple[Fraction, Fraction], Apart] = (0.1, 1.0)
    """Times between which guidance is on (JiT)."""
    solver: Annotated[Literal["auto", "heun", "euler", "dpm++", "ddim"], Apart] = "auto"
    """JiT: heun (auto; second order, two passes a step) or euler. HunyuanDiT: dpm++ (auto; second order) or ddim."""
    official_last_step: Annotated[bool, Apart] = False
    """Reproduce the official sampler, whose clamp of 1 - t leaves noise in the last step."""
    seed: Annotated[int, Field(ge=0, lt=2**62), Apart] = 0
    """Seed of the first prompt's noise; prompt i has seed + i, the same at every checkpoint."""


class LogSettings(Section):
    """Who is told."""

    every: Annotated[PositiveInt, Apart] = 10
    """Optimizer steps between lines of logs/train.log; metrics are written for every step."""
    use_tensorboard: Annotated[bool, Apart] = True
    """Write TensorBoard files into the run's folder."""
    use_wandb: Annotated[bool, Apart] = False
    """Log to Weights & Biases too (WANDB_MODE=offline works)."""
    wandb_project: Annotated[str, Apart] = "muralist"
    """W&B project."""
    wandb_name: Annotated[str | None, Apart] = None
    """W&B run name; default: the run's name."""


class DistributedSettings(Section):
    """How several processes train one model."""

    strategy: Annotated[Strategy, Apart] = "auto"
    """ddp: everything on every GPU; fsdp2: everything in parts over the GPUs; zero2, zero3: the same by DeepSpeed (an
    extra); auto: what accelerate was configured for, else ddp."""
    dist_timeout: Annotated[PositiveFloat, Apart] = 600.0
    """Seconds without a sign of life after which a run ends and names the rank that is missing."""


class TrainSettings(Section):
    """muralist train: a model on any number of processes."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    samples: SampleSettings = SampleSettings()
    log: LogSettings = LogSettings()
    distributed: DistributedSettings = DistributedSettings()
    epochs: Annotated[PositiveInt, Apart] = 100
    """Passes over the data; where training ends (and, under lr_schedule cosine, part of the run's identity)."""
    max_steps: Annotated[PositiveInt | None, Apart] = None
    """Stop after this optimizer step; never changes a schedule."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Key of the order, the noise and the initial weights."""
    use_amp: bool = False
    """Mixed precision: bf16, or fp16 with loss scaling on GPUs without bf16."""
    compile: Annotated[bool | Literal["auto"], Apart] = "auto"
    """torch.compile the training step; auto: on GPUs."""
    results_dir: Annotated[str, Apart] = "results"
    """Where runs live."""
    run_name: Annotated[str | None, Apart] = None
    """Folder under results_dir; default: derived from the settings, so that the same command finds its own run."""


TRAIN_FLAT_NAMES = {
    "data_path": "data.path",
    "model": "model.name",
    "img_size": "model.img_size",
    "image_size": "model.img_size",
    "learning_rate": "optim.learning_rate",
    "lr": "optim.learning_rate",
    "ckpt_every": "checkpoint.every",
    "ckpt_latest_every": "checkpoint.latest_every",
    "log_every": "log.every",
    "sample_prompts": "samples.prompts",
    "sample_steps": "samples.steps",
    "sample_guidance": "samples.guidance",
    "sample_interval": "samples.interval",
    "sample_solver": "samples.solver",
    "sample_seed": "samples.seed",
    "samples_per_gpu": "samples.per_gpu",
}
"""Guide names that differ from the last part of the dotted path; all others are found by that last part."""


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
    negative_prompt: str = ""
    """What pictures should not show, where a row does not say."""
    height: PositiveInt | None = None
    """Height in pixels, where a row does not say; default: 480, for models trained here their own."""
    width: PositiveInt | None = None
    """Width in pixels, where a row does not say; default: 832, for models trained here their own."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the model."""
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
    scheduler: str | None = None
    """Another scheduler of diffusers that fits the model, such as EulerDiscrete or DPMSolverMultistep."""
    lora: list[str] = []
    """LoRA weights to add: PATH, or PATH:WEIGHT, or several."""
    cpu_offload: bool | Literal["auto"] = "auto"
    """Keep on the GPU only the part of the model that works; auto: where the model takes most of the card's memory."""
    engine: Literal["local", "ray"] = "local"
    """ray: run the workers on the Ray cluster that is there (an extra)."""
    worker_timeout: PositiveFloat = 600.0
    """Seconds without a denoising step after which a worker is given up and the others take its rows."""
    overwrite: bool = False
    """Begin anew in a folder that holds pictures made with other settings."""


class EvaluateSettings(Section):
    """muralist evaluate: how good the pictures of a folder are, in numbers, whoever made them."""

    images: str
    """Folder of pictures, searched with its sub-folders; a ledger.jsonl in it tells prompts and failures."""
    output_dir: str
    """Where report.json and the features go; the same command again goes on there."""
    reference: str | None = None
    """Folder of real pictures, or an .npz file by `muralist stats` or others (mu, sigma); none: only metrics that need
    no reference."""
    prompts_csv: str | None = None
    """Prompts, as `muralist generate` reads them; row ID has the files ID.* and ID_seedN.*; default: the ledger's."""
    inception_weights: str | None = None
    """Inception's weights of 2015-12-05, .pth or .pt; default: the file that MURALIST_INCEPTION names, or a cache's."""
    clip_path: str | None = None
    """Folder of a CLIP model as transformers saves it, for CLIP score and CMMD."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """Which GPUs; default: all visible. Without a GPU, one CPU process stands in for each, or NPROC processes."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Key of what is drawn: KID's subsets and the intervals."""


class StatsSettings(Section):
    """muralist stats SOURCE -o STATS.npz: what `evaluate` needs to know of a reference, computed once."""

    source: str
    """Folder of pictures, searched with its sub-folders."""
    output: str
    """The .npz file to write (-o): mu and sigma, as everybody's, and the features."""
    inception_weights: str | None = None
    """As of evaluate."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """As of evaluate."""


class ExportSettings(Section):
    """muralist export SOURCE DESTINATION: weights as a diffusers-style folder."""

    source: str
    """A run, a checkpoint folder, an official .pth file, or a .safetensors file."""
    destination: str
    """Folder to write."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """Which weights: as trained, or one of the two averages."""


class ReportSettings(Section):
    """muralist report FOLDERS ...: the page of one evaluation, or of several side by side."""

    folders: list[str]
    """What evaluate wrote: one folder, or several to compare."""
    output_dir: str = "report"
    """Folder that index.html is written into."""


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


class DemoSettings(Section):
    """muralist demo: train a small model on driving scenes and look at it."""

    results_dir: str = "results"
    """Where the run demo goes."""
    max_steps: PositiveInt | None = None
    """Stop early."""
