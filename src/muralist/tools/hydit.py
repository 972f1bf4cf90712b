"""The flags of the official HunyuanDiT training script, translated to those of `muralist train`.

    python hydit/train_deepspeed.py --ckpt-every 500 --ckpt-latest-every 100 --image-size 512 512

A flag has the same meaning as in the official script, or is refused with a sentence. Flags of `muralist train` may be
mixed in. Defaults come from `configs/waymo_base.yaml`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError
from muralist.core.slurm import set_rank_environment
from muralist.models.configs import HUNYUAN_BETA_END, HUNYUAN_BETA_START, HUNYUAN_LAYERS

CONFIG = Path("configs", "waymo_base.yaml")
_MODEL = "DiT-g/2"
_ALL_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class RenamedFlag:
    """A flag of `muralist train` under another name, perhaps with other values."""

    to: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class IgnoredFlag:
    """A flag that is always on, or has no effect here; followed by this many values."""

    values: int = 0


@dataclass(frozen=True)
class FixedValue:
    """A flag that has one value here, or several with the same meaning."""

    values: tuple[str, ...]
    because: str = ""


@dataclass(frozen=True)
class ModelFlag:
    """A property of the model folder, with which the command line must agree."""


@dataclass(frozen=True)
class RefusedFlag:
    """A flag without an equivalent; names the alternative."""

    instead: str


_HALF_LIFE = "EMA weights have a half-life in images, --ema1_half_life N, and warm up automatically"
_OFFICIAL_WEIGHTS = (
    "weights in the official layout are not supported; convert them with convert_hunyuandit_to_diffusers.py of "
    "diffusers, and give the folder as --model.path"
)
_RESUMES = "muralist resumes a run automatically, and --resume PATH names a checkpoint"
_FOLDER = "the model folder defines it"

FLAGS: Mapping[str, RenamedFlag | IgnoredFlag | FixedValue | ModelFlag | RefusedFlag] = {
    # Model
    "use-fp16": RenamedFlag("--use_amp"),
    "no-fp16": RenamedFlag("--no_use_amp"),
    "extra-fp16": IgnoredFlag(),  # the precision of frozen parts and the attention backend follow the hardware
    "use-flash-attn": IgnoredFlag(),
    "qk-norm": IgnoredFlag(),
    "norm": FixedValue(("layer",)),
    "rope-img": FixedValue(("base512",)),
    "rope-real": IgnoredFlag(),
    "text-states-dim": FixedValue(("1024",), _FOLDER),
    "text-states-dim-t5": FixedValue(("2048",), _FOLDER),
    "text-len": FixedValue(("77",)),
    "text-len-t5": FixedValue(("256",)),
    "use-style-cond": ModelFlag(),
    "size-cond": ModelFlag(),
    # LoRA
    "rank": RenamedFlag("--lora_rank"),
    "lora-ckpt": RenamedFlag("--init_from"),
    "output-merge-path": RefusedFlag("`muralist export RUN FOLDER` merges LoRA weights after training"),
    # Diffusion
    "learn-sigma": IgnoredFlag(),
    "predict-type": FixedValue(("v_prediction",)),
    "noise-schedule": FixedValue(("scaled_linear",)),
    "beta-start": ModelFlag(),
    "beta-end": ModelFlag(),
    "mse-loss-weight-type": FixedValue(("constant",)),
    "noise-offset": FixedValue(("0.0",)),
    # Training
    "max-training-steps": RenamedFlag("--max_steps"),
    "lr": RenamedFlag("--learning_rate"),
    "warmup-num-steps": RenamedFlag("--warmup_steps"),
    "warmup-min-lr": RefusedFlag("warm-up starts at the learning rate divided by --warmup_steps + 1; leave it out"),
    "grad-accu-steps": RenamedFlag("--gradient_accumulation_steps"),
    "global-seed": RenamedFlag("--seed"),
    "task-flag": RenamedFlag("--run_name"),
    "ckpt-every-n-epoch": RenamedFlag("--at_epoch_end", {"0": "false", "1": "true"}),
    "gc-interval": IgnoredFlag(1),  # a training step leaves nothing to Python's garbage collector
    "gc-rate": FixedValue(("1.0",), "--gradient-checkpointing applies to all blocks"),
    "resume-module-root": RefusedFlag(f"{_OFFICIAL_WEIGHTS}; {_RESUMES}"),
    "resume-ema-root": RefusedFlag(f"{_OFFICIAL_WEIGHTS}; {_RESUMES}"),
    "resume-split": RefusedFlag(f"{_RESUMES}; leave it out"),
    "no-strict": RefusedFlag("weights must match the model exactly; leave it out"),
    "save-optimizer-state": IgnoredFlag(),
    # Data
    "index-file": RenamedFlag("--data_path"),
    "reset-loader": RefusedFlag("--init_from RUN with another --run_name starts from its weights and the first image"),
    "target-ratios": RefusedFlag("the shapes of --multireso follow from --reso-step; leave it out"),
    # EMA
    "use-ema": IgnoredFlag(),
    "ema-dtype": FixedValue(("fp32", "none"), "EMA weights have the precision of the weights"),
    "ema-decay": RefusedFlag(_HALF_LIFE),
    "ema-warmup": RefusedFlag(_HALF_LIFE),
    "ema-warmup-power": RefusedFlag(_HALF_LIFE),
    "ema-reset-decay": RefusedFlag(_HALF_LIFE),
    # Memory and processes
    "deepspeed": IgnoredFlag(),
    "local-rank": IgnoredFlag(1),  # added by DeepSpeed's launcher, which also sets LOCAL_RANK
    "cpu-offloading": RefusedFlag(
        "training does not offload to host memory; --use-zero-stage 3 shards everything over the GPUs, and "
        "--gradient-checkpointing and --training-parts lora need less memory"
    ),
    # Samples
    "infer-steps": RenamedFlag("--sample_steps"),
    "cfg-scale": RenamedFlag("--sample_guidance"),
    "sampler": RenamedFlag("--sample_solver", {"ddim": "ddim", "dpmms": "dpm++"}),
    "load-key": FixedValue(("ema",), "samples use the EMA weights"),
    "dit-weight": RefusedFlag(_OFFICIAL_WEIGHTS),
}
_SPECIAL_FLAGS = ("use-zero-stage", "target-modules", "ckpt-every", "model")


class TranslatedFlags(NamedTuple):
    """A translated command line."""

    flags: list[str]
    """Flags of `muralist train`."""
    strategy: str | None
    """Strategy of the requested ZeRO stage."""
    model_flags: dict[str, str]
    """Flags with which the model folder must agree."""


def translate_flags(arguments: Sequence[str]) -> list[str]:
    """Translate a command line, and add the default configuration and strategy."""
    set_rank_environment(os.environ)
    flags, strategy, model_flags = translate(arguments)
    given = {word.partition("=")[0] for word in flags}
    if "--config" not in given:
        if not CONFIG.is_file():
            raise UserError(
                f"There is no {CONFIG} in {Path.cwd()}, which holds the default settings.",
                fix="Run the command in the root of the repository, or give --config PATH.",
            )
        flags = ["--config", str(CONFIG), *flags]
    if "LOCAL_RANK" in os.environ and "--strategy" not in given:
        flags += ["--strategy", strategy or _default_strategy()]
    if model_flags:
        _check_model_flags(model_flags, flags)
    return flags


def translate(arguments: Sequence[str]) -> TranslatedFlags:
    """Translate flags of the official script to flags of `muralist train`."""
    flags: list[str] = []
    strategy: str | None = None
    model_flags: dict[str, str] = {}
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, inline = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        flag = flag.replace("_", "-")
        rule = FLAGS.get(flag)
        if isinstance(rule, RefusedFlag):
            raise UserError(f"--{flag} is not supported: {rule.instead}.")
        if rule is None and flag not in _SPECIAL_FLAGS:
            if word != "--resume" or _values(queue):  # the official switch without a value: runs resume automatically
                flags.append(word)
            continue
        if isinstance(rule, RenamedFlag) and not rule.values:
            flags.append(f"{rule.to}={inline}" if equals else rule.to)
            continue
        queue = [inline, *queue] if equals else queue
        values = _values(queue)
        used = min(1, len(values))
        value = values[0] if values else ""
        match rule:
            case IgnoredFlag(count):
                used = min(max(count, bool(equals)), len(values))
            case ModelFlag():
                model_flags[flag], used = " ".join(values), len(values)
            case FixedValue(allowed, because):
                if not any(_is_same(value, other) for other in allowed):
                    raise _wrong_value(flag, value, allowed, because)
            case RenamedFlag(name, renamed_values):
                if value not in renamed_values:
                    raise _wrong_value(flag, value, renamed_values)
                flags += [name, renamed_values[value]]
        if flag == "use-zero-stage":
            if value not in ("1", "2", "3"):
                raise UserError(f"--use-zero-stage is {value}: expected 1, 2 or 3.")
            strategy = f"zero{max(2, int(value))}"  # stage 2 is stage 1 with sharded gradients as well
        elif flag == "target-modules":
            flags += ["--lora_targets", *_lora_targets(values)]
            used = len(values)
        elif flag == "ckpt-every":  # the official script keeps each of these checkpoints
            flags += ["--ckpt_every", value, "--keep_every", value]
        elif flag == "model" and value != _MODEL:
            flags += ["--model", value]  # `muralist train` lists the known models
        queue = queue[used:]
    return TranslatedFlags(flags, strategy, model_flags)


def _values(queue: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not word.startswith("--"), queue))


def _is_same(value: str, other: str) -> bool:
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


def _wrong_value(flag: str, value: str, allowed: Iterable[str], because: str = "") -> UserError:
    return UserError(f"--{flag} is {value}: expected {' or '.join(allowed)}{because and f'; {because}'}.")


def _check_model_flags(model_flags: dict[str, str], flags: Sequence[str]) -> None:
    """Compare flags with the model folder, or with the small model if no folder is given."""
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
    from muralist.settings.load import load

    path = load(TrainSettings, flags, TRAIN_FLAT_NAMES).model.path
    with suppress(OSError, ValueError):  # train refuses a folder without a model
        properties = _read_properties(Path(path)) if path else _small_model_properties()
        for flag, value in model_flags.items():
            actual = properties[flag.replace("-", "_")]
            if actual is False:
                raise UserError(f"--{flag} is for models before version 1.2, and this is a later one: leave it out.")
            if actual is not True and not _is_same(value, str(actual)):
                raise _wrong_value(flag, value, [f"{actual:g}"], _FOLDER)


def _read_properties(folder: Path) -> dict[str, Any]:
    schedule = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    config = json.loads((folder / "transformer" / "config.json").read_text())
    conditions = bool(config.get("use_style_cond_and_image_meta_size", True))  # the default of diffusers
    return schedule | {"use_style_cond": conditions, "size_cond": conditions}


def _small_model_properties() -> dict[str, Any]:
    betas = {"beta_start": HUNYUAN_BETA_START, "beta_end": HUNYUAN_BETA_END["1.2"]}
    return betas | {"use_style_cond": False, "size_cond": False}


def _lora_targets(names: Sequence[str]) -> Sequence[str]:
    if set(names) == set(HUNYUAN_LAYERS):
        return _ALL_ATTENTION  # the default, written like the default so that the run has the same name
    return [layer for name in names for layer in HUNYUAN_LAYERS.get(name, (name,))]


def _default_strategy() -> str:
    if importlib.util.find_spec("deepspeed") is not None:
        return "zero2"
    if os.environ.get("RANK", "0") == "0":
        print("DeepSpeed is not installed: training with FSDP2 instead.", flush=True)
    return "fsdp2"
