"""The settings of `muralist train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from muralist.settings.section import Apart, Fraction, FractionBelowOne, Section

Strategy = Literal["auto", "ddp", "fsdp2", "zero2", "zero3"]
Precision = Literal["auto", "fp8"]


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
    cache: Annotated[Literal["auto", "none", "device"], Apart] = "auto"
    """device: bring all training images to the GPU once and gather every batch there, same result; auto: on GPUs, where
    they take at most a tenth of the free memory and 8 GB, and the run comes to all of them."""

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
    """Compute the activations of each block again in the backward pass instead of keeping them: far less memory, about a
    third more work, same result. --activation_checkpointing is the same."""

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
    non_finite: Annotated[Literal["stop", "skip"], Apart] = "stop"
    """What a step with a NaN or infinite gradient does: stop ends the run with the last good checkpoint; skip leaves the
    weights as they are, counts it (train/skipped_steps) and goes on, until ten come in a row (ddp, fsdp2)."""
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
    profile: Annotated[PositiveInt | None, Apart] = None
    """Record so many steps, a few after the first, kernel by kernel: a trace for each process in the run's folder, and a
    summary; none: nothing."""


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
    precision: Precision = "auto"
    """fp8: JiT's large products in 8 bits where the GPU has them (Ada, Hopper and later), the rest in bf16; auto: what
    use_amp says."""
    compile: Annotated[bool | Literal["auto"], Apart] = "auto"
    """torch.compile the training step; auto: on GPUs."""
    results_dir: Annotated[str, Apart] = "results"
    """Where runs live."""
    run_name: Annotated[str | None, Apart] = None
    """Folder under results_dir; default: derived from the settings, so that the same command finds its own run."""

    @property
    def mixed(self) -> bool:
        """Whether products are in 16 bits or fewer."""
        return self.use_amp or self.precision == "fp8"


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
    "gradient_checkpointing": "model.gradient_checkpointing",
    "activation_checkpointing": "model.gradient_checkpointing",
}
"""Guide names that differ from the last part of the dotted path; all others are found by that last part."""
