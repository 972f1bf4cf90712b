"""The contract of a run: impossible settings are refused before anything heavy loads, the rest is said before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from muralist.errors import UserError
from muralist.models import variants
from muralist.models.complete import check_whole
from muralist.scale.memory import BYTES_ON_DISK
from muralist.settings import ModelSettings, Strategy, TrainSettings
from muralist.train.schedule import BatchPlan, Clock, LearningRate, rates_by_gpus
from muralist.words import duration, gigabytes

if TYPE_CHECKING:
    import torch

SMALL_BATCH = 256
_HUNYUAN_PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
_TOKEN = variants.HUNYUAN_PIXELS_PER_TOKEN
NO_CAPTIONS = (
    "The images have no captions (all that were looked at): HunyuanDiT will learn pictures, but not to follow a prompt. "
    "--data.caption names a column that holds them, or is a text such as 'A photo of {label}'; in a folder, picture.txt "
    "beside picture.jpg is one."
)


def check(settings: TrainSettings) -> None:
    """Refuse what cannot work, in one sentence."""
    check_model(settings.model)
    if not settings.data.path:
        raise UserError(
            "No data was named.", fix="Give --data_path FOLDER, or --data_path driving_world for the embedded set."
        )
    _check_multireso(settings)
    if settings.data.global_batch_size and settings.optim.gradient_accumulation_steps > 1:
        raise UserError(
            "--global_batch_size and --gradient_accumulation_steps cannot both be given.",
            fix="With a total batch, accumulation is derived: leave --gradient_accumulation_steps out.",
        )
    check_skipping(settings, settings.distributed.strategy)
    check_precision(settings, settings.distributed.strategy)
    low, high = settings.samples.interval
    if low >= high:
        raise UserError(f"--sample_interval {low:g} {high:g} is empty.", fix="Give the lower time first, e.g. 0.1 1.0.")


def check_model(model: ModelSettings) -> None:
    """Refuse a model that does not exist, is not whole, or cannot be trained like this."""
    if model.training_parts == "lora":
        _check_lora(model)
    if variants.is_hunyuan(model.name):
        _check_hunyuan(model)
    else:
        _, patch = variants.parse_name(model.name)
        variants.check_image_size(patch, variants.square(model.img_size))


def check_skipping(settings: TrainSettings, strategy: Strategy) -> None:
    """Refuse to skip steps where the update is not ours; what `auto` means is known only to a process of the run."""
    if settings.optim.non_finite == "skip" and strategy in ("zero2", "zero3"):
        raise UserError(
            f"--non_finite skip cannot be with --strategy {strategy}: DeepSpeed changes the weights by itself.",
            fix="Use --strategy fsdp2 or ddp, or leave --non_finite skip out.",
        )


def check_precision(settings: TrainSettings, strategy: Strategy, device: torch.device | None = None) -> None:
    """Refuse 8 bits for models, strategies and, once it is known, devices that know nothing of them."""
    if settings.precision != "fp8":
        return
    if variants.is_hunyuan(settings.model.name):
        raise UserError(
            f"{settings.model.name} cannot be trained with --precision fp8.",
            "8-bit products are there for JiT.",
            "Use --use_amp, which is bf16.",
        )
    if strategy in ("zero2", "zero3"):
        raise UserError(
            f"--precision fp8 cannot be with --strategy {strategy}.",
            "How DeepSpeed's gathered weights and 8-bit products go together was never tried.",
            "Use --strategy fsdp2 or ddp, or leave --precision fp8 out.",
        )
    if device is None:
        return
    from muralist.models.fp8_products import can_fp8, why_not_fp8

    if not can_fp8(device):
        raise UserError(
            "--precision fp8 needs a GPU with 8-bit products: compute capability 8.9 or later (Ada, Hopper, Blackwell).",
            why_not_fp8(device),
            "Use --use_amp, which is bf16, or leave both out.",
        )


def _check_multireso(settings: TrainSettings) -> None:
    data, img_size = settings.data, settings.model.img_size
    if not data.multireso:
        if data.reso_step:
            raise UserError("--reso_step says nothing without --multireso.", fix="Give both, or leave it out.")
        return
    if not variants.is_hunyuan(settings.model.name):
        raise UserError(
            f"{settings.model.name} makes square pictures only.",
            "--multireso is there for HunyuanDiT.",
            "Leave --multireso out.",
        )
    if data.cache == "device":
        raise UserError(
            "--cache device needs pictures of one size.",
            "With --multireso they have several.",
            "Leave --cache device out.",
        )
    if isinstance(img_size, tuple):
        raise UserError(
            f"--multireso starts from a square, not from {img_size[0]} x {img_size[1]}.",
            "All its sizes have about the area of this square.",
            "Give one number as --img_size.",
        )
    if data.reso_step and (data.reso_step % _TOKEN or data.reso_step > max(_TOKEN, img_size // 2)):
        raise UserError(
            f"--reso_step {data.reso_step} does not fit pictures of {img_size} pixels.",
            fix=f"Give a multiple of {_TOKEN} that is at most half of --img_size.",
        )


def _check_hunyuan(model: ModelSettings) -> None:
    variants.check_hunyuan_size(model.size)
    if model.path and not Path(model.path, "transformer", "config.json").is_file():
        raise UserError(
            f"{model.path} is not a HunyuanDiT in diffusers layout: it has no transformer/config.json.",
            fix="Give the folder of a HunyuanDiTPipeline as --model.path, or leave it out to train a small one.",
        )
    if model.path:
        check_whole(Path(model.path), _HUNYUAN_PARTS)


def _check_lora(model: ModelSettings) -> None:
    if not variants.is_hunyuan(model.name):
        raise UserError(
            f"{model.name} cannot be trained by LoRA.", "It is there for HunyuanDiT.", "Leave --training_parts out."
        )
    if not model.lora_targets:
        raise UserError("LoRA has no layers to be beside.", fix="Name some with --lora_targets, or leave it out.")
    from muralist.models.lora import require_peft

    require_peft()


def check_length(clock: Clock) -> None:
    """Refuse a run of no steps."""
    if clock.last_step < 1:
        raise UserError(
            f"{clock.epochs} epochs of {clock.samples:,} images are less than one batch of {clock.total_batch}.",
            fix="Lower --batch_size, raise --epochs, or add data.",
        )


def lines(
    settings: TrainSettings,
    plan: BatchPlan,
    clock: Clock,
    rate: LearningRate,
    model: str,
    trained: int,
    beside: int,
    memory: float,
    layout: str,
    held_out: int,
    floor_seconds: float,
    sizes: list[str],
    on_device: int,
) -> list[str]:
    """What is about to happen, for a person to check; `beside` counts frozen parameters that checkpoints leave out.

    `on_device` are the bytes of the pictures where they lie on the device.
    """
    optim = settings.optim
    steps_per_epoch = clock.samples / clock.total_batch
    stop = min(clock.last_step, settings.max_steps or clock.last_step)
    text = [
        f"model      {model}, {trained / 1e6:.1f}M "
        + (f"of {(trained + beside) / 1e6:.1f}M parameters trained" if beside else "parameters"),
        f"data       {' '.join(settings.data.paths)}: {clock.samples:,} images to train on, {held_out:,} held out"
        + (f"; the former lie on the device ({gigabytes(on_device)})" if on_device else ""),
        *sizes,
        f"batch      {plan}",
        f"length     {clock.epochs} epochs x {steps_per_epoch:,.1f} steps/epoch = {clock.last_step:,} steps"
        + (f", stopping after {stop:,}" if stop < clock.last_step else ""),
        f"rate       {rate.peak:.3g} ({rate.reason}), warm-up {optim.warmup_steps} steps, then {optim.lr_schedule}",
        f"memory     {memory / 1e9:.2f} GB per GPU for weights, gradients, optimizer and averages "
        f"({layout}), plus activations; {BYTES_ON_DISK * trained / 1e9:.2f} GB of disk per checkpoint",
        f"time       at least {duration(floor_seconds)} (all operations at the measured matmul rate); the pace shows soon",
    ]
    rule = "linear" if optim.blr is not None else optim.lr_rule
    if rule != "none":
        text.append(f"rule       {rule} with the total batch: {rates_by_gpus(rate, rule, plan)} GPUs")
    if rule != "none" and clock.total_batch < SMALL_BATCH:
        text.append(
            f"note       the total batch is under {SMALL_BATCH}: scaling the learning rate may not be needed; "
            "try the original first; a longer --warmup_steps helps"
        )
    return text
