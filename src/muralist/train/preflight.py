"""Before a run starts: checks of its settings, the GPU memory it needs, and its summary."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes, format_count, format_duration
from muralist.models.hub import find_model
from muralist.models.spec import FAMILIES, families_with, find_family, frozen_bytes
from muralist.settings import (
    TRAIN_FLAT_NAMES,
    ModelSettings,
    Optimizer,
    OptimSettings,
    Strategy,
    TrainSettings,
    accelerate_strategy,
)
from muralist.settings.load import FlagTable, flatten
from muralist.settings.train import PIPELINE_OBJECTIVE
from muralist.train.schedule import TrainingClock, rates_by_gpus

if TYPE_CHECKING:
    import torch

    from muralist.train.dataset import TrainingData
    from muralist.train.step import TrainState

SMALL_BATCH = 256
CONTEXT = 1.2e9  # bytes per GPU of the CUDA context, library workspaces and allocator fragmentation
BYTES_ON_DISK = 20  # of a checkpoint per trained parameter: float32 weights, two moments, two EMAs
_IMAGENET_CLASSES = 1000
_MIN_PRODIGY_RATE = 0.1
_OPTIMIZER_BYTES = {"adamw": 8, "muon": 4, "adamw8bit": 2, "prodigy": 16}  # of state per trained parameter
_OPTIMIZER_PACKAGES = {"adamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that cannot work together."""
    check_model_settings(settings.model)
    if not settings.data.path:
        raise UserError(
            "No data set was given.", fix="Give --data_path FOLDER, or --data_path driving_world for the embedded set."
        )
    if (weights := settings.data.weights) and len(weights) != len(settings.data.paths):
        raise UserError(
            f"--data_weights has {len(weights)} numbers, and --data_path {len(settings.data.paths)} data sets.",
            fix="Give one number for each data set, in the same order.",
        )
    if weights and settings.data.multireso:
        raise UserError(
            "--data_weights is not supported with --multireso, which reads one data set.", fix="Leave one of them out."
        )
    if settings.data.multireso:
        _check_multireso(settings)
    elif settings.data.reso_step:
        raise UserError("--reso_step has no effect without --multireso.", fix="Give both, or leave --reso_step out.")
    if settings.data.global_batch_size and settings.optim.gradient_accumulation_steps > 1:
        raise UserError(
            "--global_batch_size and --gradient_accumulation_steps cannot both be given.",
            fix="With a total batch, accumulation is derived: leave --gradient_accumulation_steps out.",
        )
    if settings.optim.ema_decay and settings.optim.ema1_half_life != OptimSettings().ema1_half_life:
        raise UserError(
            "--ema_decay and --ema1_half_life cannot both be given.",
            "Both say how long the first EMA remembers: per optimizer step, or in images.",
            "Leave one of them out.",
        )
    check_strategy(settings, settings.distributed.strategy)
    _check_objective(settings)
    if settings.distill.teacher:
        _check_distillation(settings)
    _check_samples(settings)


def _check_objective(settings: TrainSettings) -> None:
    """Refuse settings of the objective that have no effect on the model."""
    family, defaults = find_family(settings.model.name), type(settings.objective)()
    for name in type(settings.objective).model_fields:
        given = getattr(settings.objective, name)
        if given != getattr(defaults, name) and name not in family.objective_settings:
            kind = "pipelines of diffusers" if name in PIPELINE_OBJECTIVE else "JiT"
            raise UserError(f"--{name} {given} has no effect on {family.name}: it is for {kind}.", fix="Leave it out.")


def _check_distillation(settings: TrainSettings) -> None:
    """Refuse settings that a student does not have: it starts as its teacher and samples in its own way."""
    family, distill, samples = find_family(settings.model.name), settings.distill, settings.samples
    if not family.distillation:
        raise UserError(
            f"{settings.model.name} cannot be distilled: that is for {families_with('distillation')}.",
            fix="Leave --distill.teacher out.",
        )
    find_model(distill.teacher or "", "TEACHER")
    low, high = distill.interval
    if low >= high:
        raise UserError(
            f"--distill.interval {low:g} {high:g} is empty.", fix="Give the lower time first, e.g. 0.1 1.0."
        )
    if not settings.model.enable_condition and distill.guidance not in ("auto", 1.0):
        raise UserError(
            f"--distill.guidance {distill.guidance:g} has no effect.",
            f"The teacher {distill.teacher} is unconditional: there is nothing to guide.",
            "Leave it out.",
        )
    if settings.optim.optimizer == "prodigy":
        raise UserError(
            "--optimizer prodigy is not for distillation.",
            "The critic learns faster than the student, and Prodigy has one learning rate for all weights.",
            "Use --optimizer adamw, adamw8bit or muon.",
        )
    if settings.checkpoint.init_from not in ("default", "none"):
        raise UserError(
            f"--init_from {settings.checkpoint.init_from} has no effect.",
            f"A student starts from the weights of its teacher, {distill.teacher}.",
            "Leave it out.",
        )
    for name in ("steps", "guidance", "interval", "solver", "official_last_step"):
        if (value := getattr(samples, name)) != getattr(type(samples)(), name):
            raise UserError(
                f"--{'' if name == 'official_last_step' else 'sample_'}{name} {value} has no effect.",
                f"The student makes its samples in {distill.steps} steps, with its guidance folded in.",
                "Leave it out.",
            )


def _check_samples(settings: TrainSettings) -> None:
    samples, model, family = settings.samples, settings.model, find_family(settings.model.name)
    if family.solvers and samples.solver not in ("auto", *family.solvers):
        raise UserError(
            f"--sample_solver {samples.solver} does not sample from {model.name}.",
            fix=f"Use {' or '.join(family.solvers)}, or leave it out.",
        )
    if samples.official_last_step and samples.solver == "abm2":
        raise UserError(
            "--sample_solver abm2 has no official last step.",
            "The official sampler has heun and euler.",
            "Leave --samples.official_last_step out, or use heun.",
        )
    if not family.uses_captions and not model.enable_condition:
        words = f"{model.name} is unconditional without --enable_condition: it is trained without classes."
        if samples.prompts not in ([], ["unconditional"]):
            raise UserError(
                f"--sample_prompts {samples.prompts[0]!r:.80} has no effect.",
                words,
                "Leave it out (--samples_per_gpu N makes N images), or add --enable_condition.",
            )
        if samples.guidance not in ("auto", 1.0):
            fix = "Leave it out or give auto, or add --enable_condition."
            raise UserError(f"--sample_guidance {samples.guidance:g} has no effect.", words, fix)
    low, high = samples.interval
    if low >= high:
        raise UserError(f"--sample_interval {low:g} {high:g} is empty.", fix="Give the lower time first, e.g. 0.1 1.0.")


def check_model_settings(model: ModelSettings) -> None:
    """Refuse a model that does not exist, is incomplete, or cannot be trained like this."""
    family = find_family(model.name)
    for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"):
        if model.training_parts != "lora" and (value := getattr(model, name)) != getattr(ModelSettings(), name):
            words = " ".join(value) if isinstance(value, list) else f"{value:g}"
            raise UserError(
                f"--{name} {words} has no effect without --training_parts lora.",
                fix=f"Give both, or leave --{name} out.",
            )
    _check_frozen_weights(model)
    if model.training_parts == "lora":
        if not family.supports_lora:
            supported = f"LoRA supports {families_with('supports_lora')}."
            raise UserError(f"{model.name} cannot be trained by LoRA.", supported, "Leave --training_parts out.")
        if not model.lora_targets:
            raise UserError("--lora_targets is empty.", fix="Name the layers for LoRA, or leave --lora_targets out.")
        from muralist.models.lora import require_peft

        require_peft()
    family.check(model)


def _check_frozen_weights(model: ModelSettings) -> None:
    if model.training_parts != "lora" and (model.swap_blocks or model.base_precision != "auto"):
        flag = f"--swap_blocks {model.swap_blocks}" if model.swap_blocks else f"--base_precision {model.base_precision}"
        raise UserError(
            f"{flag} is for LoRA: only frozen weights can be smaller, or in host memory.",
            fix=f"Give --training_parts lora, or leave {flag} out.",
        )
    if model.swap_blocks and not find_family(model.name).supports_swap:
        raise UserError(
            f"{model.name} does not support --swap_blocks.", fix="Leave it out, or give --model diffusers --model.path."
        )
    if model.base_precision == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "--base_precision nf4 needs bitsandbytes, which is not installed.",
            fix="Install it with `pip install 'muralist[optimizers]'`, or use --base_precision fp8.",
        )


def check_optimizer(optim: OptimSettings, strategy: Strategy) -> None:
    """Refuse an optimizer that is not installed, or that a strategy does not support."""
    name = optim.optimizer
    if strategy in ("zero2", "zero3") and name != "adamw":
        raise UserError(
            f"--optimizer {name} is not supported with --strategy {strategy}.",
            "DeepSpeed keeps flat shards of the weights and updates them by itself.",
            "Use --strategy ddp, or --optimizer adamw.",
        )
    if strategy == "fsdp2" and name in ("adamw8bit", "prodigy"):
        raise UserError(
            f"--optimizer {name} is not supported with --strategy fsdp2.",
            "Its package does not update sharded weights.",
            "Use --strategy ddp, or --optimizer adamw or muon.",
        )
    package = _OPTIMIZER_PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--optimizer {name} needs {package}, which is not installed.",
            fix="Install it with `pip install 'muralist[optimizers]'`, or use --optimizer adamw or muon.",
        )
    if name == "prodigy" and optim.blr is None and optim.learning_rate <= _MIN_PRODIGY_RATE:
        raise UserError(
            f"--learning_rate {optim.learning_rate:g} is too low for --optimizer prodigy.",
            "Prodigy estimates its step size, and the learning rate multiplies it.",
            "Give --learning_rate 1.",
        )


def check_strategy(settings: TrainSettings, strategy: Strategy, device: torch.device | None = None) -> None:
    """Refuse what a strategy or, once it is known, the device does not support; `auto` is known only in a process."""
    check_optimizer(settings.optim, strategy)
    _check_frozen_strategy(settings, strategy)
    zero = strategy in ("zero2", "zero3")
    if settings.optim.non_finite == "skip" and zero:
        raise UserError(
            f"--non_finite skip is not supported with --strategy {strategy}: DeepSpeed updates the weights by itself.",
            fix="Use --strategy fsdp2 or ddp, or leave --non_finite skip out.",
        )
    if settings.precision == "fp16" and strategy not in ("auto", "ddp"):
        raise UserError(
            f"--precision fp16 is not supported with --strategy {strategy}.",
            "Loss scaling, which fp16 needs, is implemented for ddp only.",
            "Use --precision bf16, which needs none, or --strategy ddp.",
        )
    fp8 = settings.precision == "fp8"
    if fp8 and not find_family(settings.model.name).supports_fp8:
        raise UserError(
            f"{settings.model.name} cannot be trained with --precision fp8.",
            f"FP8 training supports {families_with('supports_fp8')}.",
            "Use --precision bf16.",
        )
    if fp8 and zero:
        raise UserError(
            f"--precision fp8 is not supported with --strategy {strategy}.",
            "FP8 matmuls were never tested with weights that DeepSpeed gathers.",
            "Use --strategy fsdp2 or ddp, or leave --precision fp8 out.",
        )
    if device is None:
        return
    from muralist.kernels import fp8 as kernels
    from muralist.train.step import autocast_dtype

    if fp8 and not kernels.has_fp8(device):
        raise UserError(
            "--precision fp8 needs a GPU with FP8 matmuls: compute capability 8.9 or later (Ada, Hopper, Blackwell).",
            kernels.why_no_fp8(device),
            "Use --precision bf16, or leave it out.",
        )
    if strategy not in ("auto", "ddp") and str(autocast_dtype(settings, device)) == "torch.float16":
        raise UserError(
            f"--use_amp with --strategy {strategy} needs GPUs that support bf16.",
            "These GPUs do not, and loss scaling for fp16 is implemented for ddp only.",
            "Use --strategy ddp, or leave --use_amp out.",
        )


def _check_frozen_strategy(settings: TrainSettings, strategy: Strategy) -> None:
    model = settings.model
    swapped = f"--swap_blocks {model.swap_blocks}" if model.swap_blocks else ""
    stored = f"--base_precision {model.base_precision}" if model.base_precision in ("fp8", "nf4") else ""
    if strategy not in ("auto", "ddp") and (flag := swapped or stored):
        raise UserError(
            f"{flag} is not supported with --strategy {strategy}.",
            "Sharded weights are in the precision of training, and on the GPU.",
            f"Use --strategy ddp, or leave {flag} out.",
        )


def _check_multireso(settings: TrainSettings) -> None:
    family, img_size, step = find_family(settings.model.name), settings.model.img_size, settings.data.reso_step
    if family.single_size:
        what = f"{settings.model.name} makes images of one size. --multireso trains images of several shapes."
        raise UserError(what, fix="Leave --multireso out.")
    if settings.data.cache == "device":
        what = "--cache device needs images of one size. With --multireso they have several."
        raise UserError(what, fix="Leave --cache device out.")
    if isinstance(img_size, tuple):
        raise UserError(
            f"--multireso starts from a square, not from {img_size[0]} x {img_size[1]}.",
            "All sizes of --multireso have about the area of this square.",
            "Give one number as --img_size.",
        )
    token = family.pixels_per_token
    if step and (step % token or step > max(token, img_size // 2)):
        raise UserError(
            f"--reso_step {step} does not fit images of {img_size} pixels.",
            fix=f"Give a multiple of {token} that is at most half of --img_size.",
        )


def check_length(clock: TrainingClock) -> None:
    """Refuse a run without a step."""
    if clock.last_step < 1:
        raise UserError(
            f"{clock.epochs} epochs of {clock.samples:,} images are less than one batch of {clock.total_batch}.",
            fix="Lower --batch_size, raise --epochs, or add data.",
        )


def state_bytes(
    strategy: Strategy,
    trained: float,
    frozen: float,
    ranks: int,
    optimizer: Optimizer = "adamw",
    bytes_per_frozen: float = 4.0,
) -> float:
    """Bytes per process: float32 weights and, of trained ones, gradients, optimizer state (two moments) and two EMAs.

    ZeRO keeps another copy of the weights. Stage 2 shards everything but weights and EMAs.
    """
    if strategy == "zero2":
        return 12 * trained + bytes_per_frozen * frozen + 16 * trained / ranks
    if strategy == "zero3":
        return (28 * trained + bytes_per_frozen * frozen) / ranks
    full = (16.0 + _OPTIMIZER_BYTES[optimizer]) * trained + bytes_per_frozen * frozen
    return full / ranks if strategy == "fsdp2" else full


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a training needs on each GPU."""

    parameters: int
    state: float  # bytes that do not depend on the batch
    per_image: float | None  # bytes per image of a forward pass; None without a formula

    def total(self, images: int) -> float:
        """Bytes for a micro-batch of so many images; without a formula, of the state alone."""
        return self.state + CONTEXT + images * (self.per_image or 0.0)

    def largest_batch(self, memory: float) -> int | None:
        """The largest micro-batch that fits; None without a formula."""
        free = memory - self.state - CONTEXT
        return None if self.per_image is None else max(0, int(free / self.per_image))

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint on disk."""
        return float(BYTES_ON_DISK * self.parameters)


def estimate_memory(settings: TrainSettings, ranks: int, compiled: bool) -> MemoryEstimate:
    """Estimate the memory that a training needs on each GPU."""
    model = settings.model
    family = find_family(model.name)
    count = family.parameter_count(model, _IMAGENET_CLASSES)
    strategy: Strategy = settings.distributed.strategy
    strategy = "ddp" if ranks == 1 else accelerate_strategy() if strategy == "auto" else strategy
    lora = model.training_parts == "lora"
    trained, frozen = (0, count) if lora else (count, 0)
    per_image, teacher = family.activation_bytes(model, settings.mixed, compiled), 0.0
    if settings.distill.teacher:
        trained, per_image, teacher = with_critic(count, per_image, settings.distill.steps)
    state = state_bytes(strategy, trained, frozen, ranks, settings.optim.optimizer, frozen_bytes(settings))
    return MemoryEstimate(trained, state + teacher, per_image)


def with_critic(parameters: int, per_image: float | None, steps: int) -> tuple[int, float | None, float]:
    """Return what a distillation trains, the bytes of an image, and those of the teacher, which is not sharded.

    Student and critic have as many rows per image as the student has steps.
    """
    return 2 * parameters, per_image and 2 * steps * per_image, 4.0 * parameters


def settings_without_effect(settings: TrainSettings, processes: int = 0) -> list[str]:
    """Name the settings that were changed and have no effect beside the others, with the reason."""
    model, optim, family = settings.model, settings.optim, find_family(settings.model.name)
    no_captions = f"{model.name} is trained without captions"
    sharded = settings.distributed.strategy not in ("auto", "ddp")
    sampling = [f"samples.{name}" for name in type(settings.samples).model_fields if name != "per_gpu"]
    distilling = [f"distill.{name}" for name in type(settings.distill).model_fields]
    rules: dict[str, Sequence[str]] = {
        f"for {other.name} models only": [path for path in other.own_settings if path not in family.own_settings]
        for other in FAMILIES
    }
    rules |= {
        "--samples_per_gpu is 0": sampling if settings.samples.per_gpu == 0 else (),
        "there is no --use_wandb": () if settings.log.use_wandb else ("log.wandb_project", "log.wandb_name"),
        "for `muralist distill`": () if settings.distill.teacher else distilling,
        "there is one process": ("distributed.strategy",) if processes == 1 and sharded else (),
        "the learning rate is constant": ("optim.min_lr",) if optim.lr_schedule == "constant" else (),
        "--lr_schedule is not wsd": ("optim.lr_decay_fraction",) if optim.lr_schedule != "wsd" else (),
        "there is no --lr_rule": ("optim.lr_base_batch",) if optim.lr_rule == "none" and optim.blr is None else (),
        f"{model.name} is built from its name": () if family.pipeline_class else ("model.path",),
        "--num_workers 0 has no processes": () if settings.data.num_workers else ("data.persistent_workers",),
        no_captions: () if family.uses_captions else ("data.caption", "model.uncond_p"),
        "there is no --enable_condition": ("objective.label_drop_prob", "samples.interval")
        if not family.uses_captions and not model.enable_condition
        else (),
    }
    flags = FlagTable(TrainSettings, TRAIN_FLAT_NAMES).flags
    values, defaults = flatten(settings), flatten(TrainSettings())
    found = {
        why: [f"--{flags[path]}" for path in paths if values[path] != defaults[path]] for why, paths in rules.items()
    }
    return [f"{', '.join(names)} ({why})" for why, names in found.items() if names]


def run_summary(
    settings: TrainSettings, state: TrainState, clock: TrainingClock, data: TrainingData, gpu_bytes: int, seconds: float
) -> list[str]:
    """Lines for a person to check: `gpu_bytes` of a GPU-resident dataset, or 0, and the least `seconds` of the run."""
    optim, plan, rate = settings.optim, state.plan, state.rate
    trained, frozen = state.num_trained, state.num_frozen
    each = state.frozen_bytes / max(1, frozen)
    memory = state_bytes(state.world.strategy, trained, frozen, state.world.size, optim.optimizer, each)
    on_disk = (BYTES_ON_DISK - _OPTIMIZER_BYTES["adamw"] + _OPTIMIZER_BYTES[optim.optimizer]) * trained
    stop = min(clock.last_step, settings.max_steps or clock.last_step)
    precision = "fp32" if state.autocast is None else f"mixed precision ({str(state.autocast).removeprefix('torch.')})"
    half_lives = " and ".join(format_count(ema.half_life) for ema in state.emas)
    lines = [
        f"model      {state.spec.summary()}, {trained / 1e6:.1f}M "
        + (f"of {(trained + frozen) / 1e6:.1f}M parameters trained" if frozen else "parameters"),
        f"data       {' '.join(settings.data.paths)}: {clock.samples:,} images to train on, "
        f"{len(data.held_out_indices):,} held out"
        + (f"; training images are kept on the device ({format_bytes(gpu_bytes)})" if gpu_bytes else ""),
        f"found      {data.found}",
        *data.bucket_lines(plan.total),
        *data.share_lines(settings.data.paths),
        f"batch      {plan}",
        f"length     {clock.epochs} epochs x {clock.samples / clock.total_batch:,.1f} steps/epoch = "
        f"{clock.last_step:,} steps" + (f", stopping after {stop:,}" if stop < clock.last_step else ""),
        f"optimizer  {optim.optimizer}, {precision}; EMA half-lives {half_lives} images, at most 5% of the images seen",
        f"rate       {rate.peak:.3g} ({rate.reason}), warm-up {optim.warmup_steps} steps, then {optim.lr_schedule}"
        + (f" (decay from step {math.ceil(rate.decay_start / plan.total):,})" if rate.schedule == "wsd" else "")
        + (f" to {rate.minimum:.3g} at step {rate.decay_steps:,}" if rate.decay_steps else "")
        + f"; {rate.at((stop - 1) * plan.total):.3g} in the last step",
        f"memory     {memory / 1e9:.2f} GB per GPU for weights, gradients, optimizer and EMA "
        f"({state.strategy.layout}), plus activations; {on_disk / 1e9:.2f} GB of disk per checkpoint",
        f"time       at least {format_duration(seconds)} (at the measured matmul rate); an estimate follows",
    ]
    lines[1:1] = state.spec.notes()
    if warning := find_family(settings.model.name).warning(settings.model):
        lines.insert(1, f"warning    {warning}")
    if settings.model.enable_condition and find_family(settings.model.name).uses_captions:
        lines.append(f"warning    {settings.model.name} is trained on captions: --enable_condition adds no labels")
    if optim.warmup_steps >= stop:
        cut = "" if rate.schedule == "constant" else f", and {rate.schedule} does not begin"
        lines.append(f"warning    the warm-up is longer than the run: the rate stays below {rate.peak:.3g}{cut}")
    lines += [f"warning    without effect: {unused}" for unused in settings_without_effect(settings, state.world.size)]
    rule = "linear" if optim.blr is not None else optim.lr_rule
    if rule != "none":
        lines.append(f"rule       {rule} with the total batch: {rates_by_gpus(rate, rule, plan)} GPUs")
        if clock.total_batch < SMALL_BATCH:
            advice = "try the unscaled learning rate first, or a longer --warmup_steps"
            lines.append(f"note       the total batch is under {SMALL_BATCH}: {advice}")
    return lines
