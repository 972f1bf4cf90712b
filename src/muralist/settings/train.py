"""The settings of `muralist train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from muralist.settings.section import Fraction, FractionBelowOne, LocalPath, NonIdentity, Section

Strategy = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
DistBackend = Literal["auto", "nccl", "gloo"]
Optimizer = Literal["adamw", "muon", "adamw8bit", "prodigy"]
LrSchedule = Literal["constant", "cosine", "wsd"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
BasePrecision = Literal["auto", "fp32", "bf16", "fp8", "nf4"]


class DataSettings(Section):
    """The data set and its batches."""

    path: Annotated[str | list[str] | None, LocalPath] = None
    """Folder (one sub-folder per class, or flat), CSV/TSV/JSONL, WebDataset tar files, Parquet, .npz, a folder by
    `muralist pack`, a HunyuanDiT index, or driving_world (built in). Several paths are one data set; classes of the same
    name are one class."""
    weights: list[PositiveFloat] = []
    """Share of each of several data sets in the training samples, as numbers in the order of data_path: 3 1; default: by
    their number of images."""
    batch_size: PositiveInt = 64
    """Images per GPU and forward-backward pass; total batch = batch_size x GPUs x gradient_accumulation_steps."""
    global_batch_size: PositiveInt | None = None
    """Total batch of an optimizer step; gradient_accumulation_steps is then derived from it."""
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], NonIdentity] = "auto"
    """Images per forward pass; auto tries batch_size and halves it while memory is short (ddp, zero2). The result
    does not change."""
    caption: str | None = None
    """Source of the captions: a column name, or a template with {column} fields such as "A photo of {label}";
    default: the column or file with a usual name."""
    cameras: list[str] = []
    """Waymo: use only images of these cameras, out of FRONT FRONT_LEFT FRONT_RIGHT SIDE_LEFT SIDE_RIGHT; default:
    all."""
    on_broken: Annotated[Literal["stop", "skip"], NonIdentity] = "stop"
    """Broken images: stop ends the run with a checkpoint; skip trains on another image in place of each, chosen by seed and
    sample index alone, and lists them in the run's broken.txt."""
    max_samples: PositiveInt | None = None
    """Use only the first N images of the source."""
    multireso: bool = False
    """All models but JiT: aspect-ratio buckets; each image is trained at the bucket size nearest its own shape, with about
    the area of img_size."""
    reso_step: PositiveInt | None = None
    """With multireso: difference in pixels between neighboring bucket sizes; default: img_size / 16, rounded to a
    multiple of 16."""
    random_flip: bool = True
    """Flip each image horizontally with probability 0.5."""
    val_fraction: Fraction = 0.01
    """Fraction of the images held out for val/loss (at most 1,024) if the source has no validation part; 0: none."""
    num_workers: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], NonIdentity] = "auto"
    """Data loader processes per GPU; auto: the GPU's share of the CPU cores, at most 8, and one on CPU-only
    machines."""
    persistent_workers: Annotated[bool, NonIdentity] = True
    """Keep the data loader processes from epoch to epoch; false: start them anew for each, which frees their memory."""
    pin_memory: Annotated[bool, NonIdentity] = True
    """Load batches into pinned memory (with a GPU only)."""
    cache: Annotated[Literal["auto", "none", "device"], NonIdentity] = "auto"
    """device: copy all training images to the GPU once and gather batches there, with the same result; auto: do so on
    GPUs if they take at most a tenth of the free memory and 8 GB, and the run uses all of them; none: never."""

    @field_validator("path")
    @classmethod
    def _single_path(cls, path: str | list[str] | None) -> str | list[str] | None:
        if isinstance(path, list) and len(path) < 2:
            return path[0] if path else None
        return path

    @property
    def paths(self) -> list[str]:
        """The paths as a list."""
        return self.path if isinstance(self.path, list) else [self.path] if self.path else []


class ModelSettings(Section):
    """The network."""

    name: str = "JiT-B/4"
    """JiT-{B,L,H,G,S,T}/{patch}, for any patch size that divides both sides of img_size; HunyuanDiT; or diffusers, which
    --model.path implies: the pipeline at --model.path, of any class."""
    path: Annotated[str | None, LocalPath] = None
    """Pipeline to fine-tune: a folder in diffusers layout, or an id on the Hugging Face Hub; HunyuanDiT without it builds
    and trains a small model."""
    network: Literal["transformer", "transformer_2"] | None = None
    """Wan 2.2, which has two networks: transformer (high noise; default) or transformer_2 (low noise)."""
    img_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 64
    """Side of the square images in pixels, or height and width."""
    enable_condition: bool = False
    """Train with class labels (folder names); starts from the unconditional run with most images seen, unless
    --init_from is given."""
    attn_dropout: FractionBelowOne = 0.0
    """Dropout on attention weights, in the middle half of the blocks."""
    proj_dropout: FractionBelowOne = 0.0
    """Dropout on attention output and MLP hidden units, in the middle half of the blocks (0.2 for H and G in the
    paper)."""
    uncond_p: Fraction = 0.1
    """Probability of dropping a caption, which guidance needs; HunyuanDiT: for the first text encoder. Models with distilled
    guidance keep all captions."""
    uncond_p_t5: Fraction = 0.1
    """HunyuanDiT: the same for the second text encoder, drawn independently."""
    training_parts: Literal["all", "lora"] = "all"
    """Pipelines: all trains the full network; lora trains LoRA layers and freezes the rest."""
    lora_rank: PositiveInt = 64
    """LoRA rank."""
    lora_alpha: PositiveFloat | None = None
    """LoRA alpha: the adapter's output is scaled by alpha / rank; default: the rank, which is no scaling."""
    lora_dropout: FractionBelowOne = 0.0
    """Dropout of the input of LoRA layers, seeded per sample."""
    lora_targets: list[str] = ["to_q", "to_k", "to_v", "to_out.0"]
    """Layers of the blocks that get LoRA, by the end of their name: to_q (all attention), attn2.to_q, ff.net.0.proj,
    ...; pipelines: by default all linear layers of attention, whatever their names."""
    base_precision: BasePrecision = "auto"
    """LoRA: precision in which the frozen weights of the blocks are stored; fp8: a byte each; nf4: 4 bits, by bitsandbytes
    (both ddp); auto: bf16 for pipelines that train in bf16, which gives the same result as fp32, else fp32."""
    swap_blocks: Annotated[Annotated[int, Field(ge=0)], NonIdentity] = 0
    """LoRA of pipelines (ddp): keep the frozen weights of N blocks in host memory and copy each block to the GPU when it
    computes, one ahead; same result. --blocks_to_swap is an alias."""
    gradient_checkpointing: Annotated[bool, NonIdentity] = False
    """Recompute the activations of each block in the backward pass: far less memory, about a third more compute, same
    result. --activation_checkpointing is an alias."""

    @model_validator(mode="before")
    @classmethod
    def _implied_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("path") and not values.get("name"):
            return {**values, "name": "diffusers"}
        return values

    @field_validator("img_size")
    @classmethod
    def _square_size(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        return size[0] if isinstance(size, tuple) and size[0] == size[1] else size

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.img_size if isinstance(self.img_size, tuple) else (self.img_size, self.img_size)


Prediction = Literal["x", "v", "eps"]


class ObjectiveSettings(Section):
    """The training objective."""

    prediction: Prediction = "x"
    """What the network predicts: clean image (x), velocity (v) or noise (eps)."""
    loss: Prediction = "v"
    """The space in which the squared error is computed."""
    p_mean: float = -0.8
    """JiT: mean of the logit-normal distribution of t (t = 1 is data)."""
    p_std: PositiveFloat = 0.8
    """Standard deviation of that distribution, before the sigmoid."""
    noise_scale: PositiveFloat | Literal["auto"] = "auto"
    """Standard deviation of the noise; auto: 1 up to 256 px, img_size / 256 above."""
    t_eps: PositiveFloat = 0.05
    """Lower bound of 1 - t in the conversion to velocity."""
    label_drop_prob: Fraction = 0.1
    """Probability of dropping a label (needed for guidance)."""
    timestep_sampling: Literal["auto", "logit_normal", "uniform"] = "auto"
    """Pipelines: distribution of the noise levels; auto: logit_normal for flow matching, shifted as the scheduler's are, and
    uniform for DDPM."""
    min_snr_gamma: PositiveFloat | None = None
    """DDPM pipelines: weight the loss by Min-SNR with this gamma (5 in the paper); default: no weight."""


PIPELINE_OBJECTIVE = ("timestep_sampling", "min_snr_gamma")
"""Settings of the objective of pipelines, whose scheduler says the rest."""


class OptimSettings(Section):
    """The optimizer, the learning-rate schedule in images seen, and the two EMAs of the weights."""

    optimizer: Optimizer = "adamw"
    """adamw; muon: Muon for the matrices of the blocks, AdamW for the rest, at the learning rate and weight decay of AdamW
    (ddp, fsdp2); adamw8bit: AdamW with 8-bit state; prodigy: estimates its step size, with learning_rate 1 (both an extra;
    ddp)."""
    learning_rate: PositiveFloat = 2e-4
    """Learning rate after warm-up, before lr_rule."""
    blr: PositiveFloat | None = None
    """Base learning rate, instead of learning_rate: learning rate = blr x total batch / 256."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of learning_rate with the total batch: none, linear (x total batch / lr_base_batch) or sqrt."""
    lr_base_batch: PositiveInt = 256
    """The total batch that learning_rate was chosen for."""
    lr_schedule: LrSchedule = "constant"
    """After warm-up: constant; cosine: a half cosine to min_lr at the end of training (epochs or max_steps); wsd
    (warm-up, stable, decay): constant, then linear to min_lr there."""
    lr_decay_steps: PositiveInt | None = None
    """Optimizer step at which cosine and wsd reach min_lr; default: the last one, and epochs and max_steps are then part of
    the run's identity."""
    lr_decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Last part of the steps in which wsd decays; it begins after warm-up at the earliest."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Final learning rate of cosine and wsd."""
    warmup_steps: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps of linear warm-up."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches of batch_size images per optimizer step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; biases, norms and one-dimensional embeddings have none."""
    beta1: FractionBelowOne = 0.9
    """AdamW beta1."""
    beta2: FractionBelowOne = 0.95
    """AdamW beta2."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient norm to this value; none: no clipping."""
    non_finite: Annotated[Literal["stop", "skip"], NonIdentity] = "stop"
    """Steps with a NaN or infinite gradient: stop ends the run with the last good checkpoint; skip leaves the weights
    unchanged, counts the step (train/skipped_steps) and ends the run after ten in a row (ddp, fsdp2)."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the first EMA per step at the run's total batch, instead of ema1_half_life; also at most 5% of the
    images seen."""
    ema1_half_life: PositiveFloat = 7_097_472.0
    """Half-life of the first EMA in images (0.9999 per step of 1,024), at most 5% of the images seen."""
    ema2_half_life: PositiveFloat = 1_774_102.0
    """Half-life of the second EMA in images (0.9996 per step of 1,024), at most 5% of the images seen."""


class CheckpointSettings(Section):
    """Checkpoints, resume and initial weights."""

    every: Annotated[PositiveInt, NonIdentity] = 1000
    """Optimizer steps between checkpoints; the last step always has one."""
    latest_every: Annotated[PositiveInt | None, NonIdentity] = None
    """Optimizer steps between additional checkpoints; keep_last and keep_every decide which are kept."""
    at_epoch_end: Annotated[bool, NonIdentity] = False
    """Also save a checkpoint at the end of every epoch."""
    keep_last: Annotated[PositiveInt, NonIdentity] = 3
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[PositiveInt | None, NonIdentity] = None
    """Keep checkpoints whose step is a multiple of this for good."""
    resume: Annotated[str, NonIdentity, LocalPath] = "auto"
    """auto or latest: resume this run if it has a checkpoint; PATH: resume from that checkpoint, or fork the run at PATH:
    with another --run_name, batch and learning rate may differ; none: start at step 0, refused if the run has a
    checkpoint."""
    init_from: Annotated[str, LocalPath] = "default"
    """Initial weights: a run, a checkpoint, an export or its id on the Hugging Face Hub, an official .pth file, a LoRA file
    of diffusers or ComfyUI, a PEFT folder, auto (of the unconditional runs of this model and size, the one with most
    images seen) or none; default: auto with --enable_condition, else none."""

    @field_validator("resume")
    @classmethod
    def _latest_is_auto(cls, resume: str) -> str:
        return "auto" if resume == "latest" else resume


class SampleSettings(Section):
    """The sample images of every checkpoint."""

    prompts: Annotated[list[str], NonIdentity] = []
    """Class names or indices, or a text file with one prompt per line; each is sampled at every checkpoint, shared among
    the GPUs. Default: the first eight classes."""
    per_gpu: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], NonIdentity] = "auto"
    """Images per GPU and checkpoint, or more if there are more --sample_prompts; 0: none; auto: one per GPU, and 4 to 8 on
    a single GPU."""
    steps: Annotated[PositiveInt | Literal["auto"], NonIdentity] = "auto"
    """Sampler steps; auto: 10 for JiT and HunyuanDiT, the pipeline's own number for others."""
    guidance: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], NonIdentity] = "auto"
    """Classifier-free guidance scale (conditional models only); auto: 2.9 for JiT, 5 for HunyuanDiT, the
    pipeline's own for others."""
    interval: Annotated[tuple[Fraction, Fraction], NonIdentity] = (0.1, 1.0)
    """Interval of t in which guidance is on (JiT)."""
    solver: Annotated[Literal["auto", "heun", "euler", "abm2", "dpm++", "ddim"], NonIdentity] = "auto"
    """JiT: heun (auto; second order, two passes per step), abm2 (second order, one pass per step) or euler (first order,
    one pass per step); guidance doubles the passes. HunyuanDiT: dpm++ (auto; second order) or ddim."""
    official_last_step: Annotated[bool, NonIdentity] = False
    """Reproduce the official sampler, whose clamp of 1 - t leaves noise after the last step."""
    seed: Annotated[int, Field(ge=0, lt=2**62), NonIdentity] = 0
    """Seed of the first sample; sample i has seed + i, the same at every checkpoint."""

    @property
    def step_count(self) -> int:
        """The number of steps of models that do not come with one of their own."""
        return 10 if self.steps == "auto" else self.steps


def _whole_number(value: Any) -> Any:
    """Accept a number as flags write it."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


StudentSteps = Annotated[Literal[1, 2, 4], BeforeValidator(_whole_number)]


class DistillationSettings(Section):
    """Few-step distillation (muralist distill)."""

    teacher: Annotated[str | None, NonIdentity, LocalPath] = None
    """JiT to distill: a run, a checkpoint or an export. The student has its network, classes and image size, and starts
    from its weights."""
    weights: Literal["model", "ema1", "ema2"] = "ema1"
    """Which weights of the teacher: as trained, or one of the two EMAs."""
    steps: StudentSteps = 2
    """Network passes in which the student samples."""
    guidance: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Scale of classifier-free guidance that is folded into the student; auto: 2.9, or 1 for an unconditional teacher."""
    interval: tuple[Fraction, Fraction] = (0.1, 1.0)
    """Interval of t in which the teacher is guided."""


class LogSettings(Section):
    """Logging."""

    every: Annotated[PositiveInt, NonIdentity] = 10
    """Optimizer steps between lines of logs/train.log; metrics are written for every step."""
    use_tensorboard: Annotated[bool, NonIdentity] = True
    """Write TensorBoard files into the run's folder."""
    use_wandb: Annotated[bool, NonIdentity] = False
    """Also log to Weights & Biases (WANDB_MODE=offline works)."""
    wandb_project: Annotated[str, NonIdentity] = "muralist"
    """W&B project."""
    wandb_name: Annotated[str | None, NonIdentity] = None
    """W&B run name; default: the run's name."""
    profile: Annotated[PositiveInt | None, NonIdentity] = None
    """Profile N steps, a few after the first: writes a trace per process and a summary into the run's folder; none:
    off."""


class DistributedSettings(Section):
    """Training with several processes."""

    strategy: Annotated[Strategy, NonIdentity] = "auto"
    """ddp: replicate everything; fsdp2: shard everything; zero2, zero3: DeepSpeed ZeRO (an extra); auto: the strategy
    Accelerate was configured for, else ddp."""
    dist_backend: Annotated[DistBackend, NonIdentity] = "auto"
    """Collectives between GPUs: nccl; gloo: through host memory; auto: gloo if processes share a GPU, which NCCL does not
    support, else nccl."""
    dist_timeout: Annotated[PositiveFloat, NonIdentity] = 600.0
    """Seconds without a heartbeat after which a run ends and names the missing rank."""


class TrainSettings(Section):
    """muralist train: train a model on any number of processes."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optim: OptimSettings = OptimSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    samples: SampleSettings = SampleSettings()
    distill: DistillationSettings = DistillationSettings()
    log: LogSettings = LogSettings()
    distributed: DistributedSettings = DistributedSettings()
    epochs: Annotated[PositiveInt, NonIdentity] = 100
    """Passes over the data, which is where training ends."""
    max_steps: Annotated[PositiveInt | None, NonIdentity] = None
    """Stop after this optimizer step, even if epochs are left. A constant learning rate allows to raise it later; cosine and
    wsd end there, unless lr_decay_steps is given."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the sample order, the noise and the initial weights."""
    use_amp: bool = False
    """Mixed precision: bf16, or fp16 with loss scaling on GPUs without bf16."""
    precision: Precision = "auto"
    """fp32; bf16 or fp16: mixed precision, fp16 with loss scaling; fp8: run the large matmuls of JiT in FP8 on GPUs
    that support it (Ada, Hopper and later), the rest in bf16; auto: as use_amp says."""
    compile: Annotated[bool | Literal["auto"], NonIdentity] = "auto"
    """torch.compile the training step; auto: on GPUs, except LoRA of pipelines."""
    results_dir: Annotated[str, NonIdentity, LocalPath] = "results"
    """Folder that holds the runs."""
    run_name: Annotated[str | None, NonIdentity, LocalPath] = None
    """Folder under results_dir; default: derived from the settings, so that the same command finds its own run."""

    dry_run: Annotated[bool, NonIdentity] = False
    """Print the run summary and exit; nothing is trained or written."""

    @property
    def mixed(self) -> bool:
        """Whether matmuls run in 16 bits or fewer."""
        return self.use_amp if self.precision == "auto" else self.precision != "fp32"


class DistillSettings(TrainSettings):
    """muralist distill TEACHER: train a student that samples in one, two or four network passes.

    It takes the settings of `muralist train`. Model, classes and objective are those of the teacher, and so is the data
    set, unless --data_path is given.
    """


FlatNames = Mapping[str, str | Mapping[str, Mapping[str, Any]]]
"""Flat names: each is another name of a dotted path, or lists its own values with the settings that each stands for."""

DIFFUSERS_NAMES: FlatNames = {
    "resume_from_checkpoint": "checkpoint.resume",
    "resolution": "model.img_size",
    "train_data_dir": "data.path",
    "caption_column": "data.caption",
    "train_batch_size": "data.batch_size",
    "num_train_epochs": "epochs",
    "max_train_steps": "max_steps",
    "max_train_samples": "data.max_samples",
    "lr_warmup_steps": "optim.warmup_steps",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_weight_decay": "optim.weight_decay",
    "checkpointing_steps": "checkpoint.every",
    "checkpoints_total_limit": "checkpoint.keep_last",
    "validation_prompt": "samples.prompts",
    "validation_prompts": "samples.prompts",
    "dataloader_num_workers": "data.num_workers",
    "tracker_project_name": "log.wandb_project",
    "rank": "model.lora_rank",
    "snr_gamma": "objective.min_snr_gamma",
    "mixed_precision": {
        "no": {"precision": "fp32"},
        "fp16": {"precision": "fp16"},
        "bf16": {"precision": "bf16"},
        "fp8": {"precision": "fp8"},
    },
    "lr_scheduler": {
        "constant": {"optim.lr_schedule": "constant", "optim.warmup_steps": 0},
        "constant_with_warmup": {"optim.lr_schedule": "constant"},
        "cosine": {"optim.lr_schedule": "cosine"},
    },
    "scale_lr": {"true": {"optim.lr_rule": "linear", "optim.lr_base_batch": 1}, "false": {"optim.lr_rule": "none"}},
    "use_8bit_adam": {"true": {"optim.optimizer": "adamw8bit"}, "false": {"optim.optimizer": "adamw"}},
    "report_to": {
        "tensorboard": {"log.use_tensorboard": True, "log.use_wandb": False},
        "wandb": {"log.use_tensorboard": False, "log.use_wandb": True},
        "all": {"log.use_tensorboard": True, "log.use_wandb": True},
        "none": {"log.use_tensorboard": False, "log.use_wandb": False},
    },
}
"""Names of diffusers' training scripts and of Accelerate, which mean the same here."""

TRAIN_FLAT_NAMES: FlatNames = {
    "data_path": "data.path",
    "data_weights": "data.weights",
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
    "gradient_checkpointing": "model.gradient_checkpointing",
    "activation_checkpointing": "model.gradient_checkpointing",
    "lora_targets": "model.lora_targets",
    "lora_target": "model.lora_targets",
    "swap_blocks": "model.swap_blocks",
    "blocks_to_swap": "model.swap_blocks",
    "ema1_half_life": "optim.ema1_half_life",
    "ema_half_life": "optim.ema1_half_life",
    **DIFFUSERS_NAMES,
}
"""Flat names that differ from the last part of the dotted path; all others resolve by that last part."""

DISTILL_FLAT_NAMES: FlatNames = {
    **TRAIN_FLAT_NAMES,
    "weights": "distill.weights",
    "steps": "distill.steps",
    "guidance": "distill.guidance",
    "interval": "distill.interval",
}
"""Flat names of `muralist distill`, whose own settings have the short ones."""

_PROCESSES = "`muralist launch --nproc N train ...` starts several processes; torchrun, accelerate and srun work too."
_AUTOMATIC = "It is chosen automatically: leave it out."
_ONE_CYCLE = "--lr_schedule is constant, or falls once to --min_lr, as a half cosine or linearly (wsd): leave it out."
_CAPTIONS = "--caption is the source of the captions: a column, or a template with {column} fields."
_UPLOADS = "Nothing is uploaded: `muralist export` writes a folder, and `hf upload` publishes one."
TRAIN_MEANINGS = {
    "output_dir": "--results_dir is the folder of all runs, and --run_name the folder of this run in it.",
    "logging_dir": "Logs are written into the run's folder: --results_dir and --run_name.",
    "pretrained_model_name_or_path": "--model.path FOLDER is the model to fine-tune, --init_from PATH the first weights.",
    "dataset_name": "--data_path FOLDER_OR_FILE is the data set; data sets are not downloaded.",
    "use_ema": "Two EMAs of the weights are always kept; --ema_decay or --ema_half_life sets the first one.",
    "validation_steps": "Samples are drawn at every checkpoint: --ckpt_every N.",
    "validation_epochs": "Samples are drawn at every checkpoint: --ckpt_every N, or --at_epoch_end.",
    "num_validation_images": "--samples_per_gpu N is the number of samples.",
    "guidance_scale": "--sample_guidance X is the guidance of the samples.",
    "num_inference_steps": "--sample_steps N is the number of steps of the samples.",
    "center_crop": "Images are resized and cropped at the center always: leave it out.",
    "lora_target_modules": "--lora_targets LAYERS names the layers that get LoRA.",
    "network_dropout": "--lora_dropout X is the dropout of LoRA.",
    "network_dim": "--lora_rank N is the rank of LoRA.",
    "network_alpha": "--lora_alpha X is the alpha of LoRA.",
    "lora": "--training_parts lora trains LoRA layers.",
    "fp8_base": "--base_precision fp8 stores the frozen weights of LoRA training in FP8.",
    "load_in_4bit": "--base_precision nf4 stores the frozen weights of LoRA training in 4 bits.",
    "use_lora": "--training_parts lora trains LoRA layers.",
    "height": "--img_size HEIGHT WIDTH sets both sides.",
    "width": "--img_size HEIGHT WIDTH sets both sides.",
    "size": "--img_size N is the side of the images in pixels.",
    "dataset": "--data_path is the data set.",
    "data_dir": "--data_path is the data set.",
    "data": "--data_path is the data set.",
    "arch": "--model is the network, for example JiT-B/4.",
    "steps": "--max_steps N is the number of optimizer steps.",
    "iterations": "--max_steps N is the number of optimizer steps.",
    "num_epochs": "--epochs N is the number of passes over the data.",
    "optim": "--optimizer is the optimizer: adamw, muon, adamw8bit or prodigy.",
    "muon": "--optimizer muon trains with Muon.",
    "scheduler": "--lr_schedule is the schedule of the learning rate.",
    "warmup": "--warmup_steps N is the number of warm-up steps.",
    "warmup_epochs": "--warmup_steps N is the number of warm-up steps.",
    "grad_clip": "--max_grad_norm X clips the norm of the gradients.",
    "clip_grad": "--max_grad_norm X clips the norm of the gradients.",
    "gradient_clipping": "--max_grad_norm X clips the norm of the gradients.",
    "dropout": "--proj_dropout and --attn_dropout are the dropout probabilities of JiT.",
    "fp16": "--precision fp16 trains in mixed precision.",
    "bf16": "--precision bf16 trains in mixed precision.",
    "fp8": "--precision fp8 trains with FP8 matmuls.",
    "amp": "--use_amp trains in mixed precision; --precision says which.",
    "dtype": "--precision fp32, bf16, fp16 or fp8.",
    "save_steps": "--ckpt_every N saves a checkpoint every N steps.",
    "save_every": "--ckpt_every N saves a checkpoint every N steps.",
    "logging_steps": "--log_every N logs every N steps.",
    "wandb": "--use_wandb logs to Weights & Biases.",
    "tensorboard": "--use_tensorboard writes TensorBoard files.",
    "name": "--run_name is the folder of the run.",
    "gpus": _PROCESSES,
    "num_gpus": _PROCESSES,
    "nproc": _PROCESSES,
    "num_processes": _PROCESSES,
    "deepspeed": "--strategy zero2 or zero3 trains with DeepSpeed.",
    "fsdp": "--strategy fsdp2 shards weights and optimizer over the GPUs.",
    "workers": "--num_workers N is the number of data loader processes.",
    "allow_tf32": _AUTOMATIC,
    "enable_xformers_memory_efficient_attention": _AUTOMATIC,
    "local_rank": "torchrun, accelerate and srun set the rank in the environment: leave it out.",
    "adam_epsilon": "The epsilon of AdamW is 1e-8: leave it out.",
    "lr_num_cycles": _ONE_CYCLE,
    "lr_power": _ONE_CYCLE,
    "noise_offset": "The noise has no offset: leave it out.",
    "train_text_encoder": "Text encoders stay frozen: leave it out.",
    "instance_data_dir": "--data_path is the data set.",
    "instance_prompt": _CAPTIONS,
    "dataset_config_name": "--data_path FOLDER_OR_FILE is the data set; data sets are not downloaded.",
    "image_column": "The column of images is found by its usual names (image, path, file_name, ...): leave it out.",
    "variant": "Weights are read from files without a variant in their name; --precision is the precision of training.",
    "revision": "`hf download` fetches any revision into a folder; --model.path takes the folder.",
    "cache_dir": "The variable HF_HOME is the cache of models.",
    "push_to_hub": _UPLOADS,
    "hub_model_id": _UPLOADS,
    "hub_token": "The variable HF_TOKEN, or `hf auth login`, opens private and gated models.",
}
"""Answers to names of other programs that are not settings here: a name can be spelled like an unrelated setting."""


def accelerate_strategy() -> Strategy:
    """Return the strategy of `accelerate config`, which `accelerate launch` passes in the environment."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "zero3" if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3" else "zero2"
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "ddp"
