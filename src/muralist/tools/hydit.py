"""The flags of the official HunyuanDiT training script, translated to those of `muralist train`.

    python hydit/train_deepspeed.py --ckpt-every 500 --ckpt-latest-every 100 --image-size 512 512

A flag has the same meaning as in the official script, or is refused with a sentence. Flags of `muralist train` may be
mixed in. Defaults come from `configs/waymo_base.yaml`, or the same file of the package.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from muralist.core.errors import UserError
from muralist.core.slurm import set_rank_environment
from muralist.models.configs import HUNYUAN_BETA_END, HUNYUAN_BETA_START, HUNYUAN_LAYERS
from muralist.models.hub import find_model
from muralist.settings.load import CONFIGS

CONFIG = "waymo_base.yaml"
_HELP_WIDTH = 118  # without a terminal
_MODEL = "DiT-g/2"
_ALL_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


RENAMED = {
    "use-fp16": "--use_amp",
    "no-fp16": "--no_use_amp",
    "rank": "--lora_rank",
    "lora-ckpt": "--init_from",
    "max-training-steps": "--max_steps",
    "lr": "--learning_rate",
    "warmup-num-steps": "--warmup_steps",
    "grad-accu-steps": "--gradient_accumulation_steps",
    "global-seed": "--seed",
    "task-flag": "--run_name",
    "index-file": "--data_path",
    "ema-decay": "--ema_decay",
    "infer-steps": "--sample_steps",
    "cfg-scale": "--sample_guidance",
}
"""Flags of `muralist train` under another name."""
RENAMED_VALUES = {
    "ckpt-every-n-epoch": ("--at_epoch_end", {"0": "false", "1": "true"}),
    "sampler": ("--sample_solver", {"ddim": "ddim", "dpmms": "dpm++"}),
}
"""Flags of `muralist train` under another name, with other values."""
IGNORED = {
    "extra-fp16": 0,  # the precision of frozen parts and the attention backend follow the hardware
    "use-flash-attn": 0,
    "qk-norm": 0,
    "rope-real": 0,
    "learn-sigma": 0,
    "gc-interval": 1,  # a training step leaves nothing to Python's garbage collector
    "save-optimizer-state": 0,
    "use-ema": 0,
    "deepspeed": 0,
    "local-rank": 1,  # added by DeepSpeed's launcher, which also sets LOCAL_RANK
}
"""Flags that are always on or have no effect here, and the number of values that follow them."""
_FOLDER = "the model folder defines it"
FIXED = {
    "norm": (["layer"], ""),
    "rope-img": (["base512"], ""),
    "text-states-dim": (["1024"], _FOLDER),
    "text-states-dim-t5": (["2048"], _FOLDER),
    "text-len": (["77"], ""),
    "text-len-t5": (["256"], ""),
    "predict-type": (["v_prediction"], ""),
    "noise-schedule": (["scaled_linear"], ""),
    "mse-loss-weight-type": (["constant"], ""),
    "noise-offset": (["0.0"], ""),
    "gc-rate": (["1.0"], "--gradient-checkpointing applies to all blocks"),
    "ema-dtype": (["fp32", "none"], "EMA weights have the precision of the weights"),
    "load-key": (["ema"], "samples use the EMA weights"),
}
"""Flags with one value here, or several of the same meaning, and the reason."""
OF_MODEL = ("use-style-cond", "size-cond", "beta-start", "beta-end")
"""Properties of the model folder, with which the command line must agree."""
_HALF_LIFE = "EMA weights warm up automatically, and --ema_decay or --ema1_half_life N says how long they remember"
_OFFICIAL_WEIGHTS = (
    "weights in the official layout are not supported; convert them with convert_hunyuandit_to_diffusers.py of "
    "diffusers, and give the folder as --model.path"
)
_RESUMES = "muralist resumes a run automatically, and --resume PATH names a checkpoint"
REFUSED = {
    "output-merge-path": "`muralist export RUN FOLDER` merges LoRA weights after training",
    "warmup-min-lr": "warm-up starts at the learning rate divided by --warmup_steps + 1; leave it out",
    "resume-module-root": f"{_OFFICIAL_WEIGHTS}; {_RESUMES}",
    "resume-ema-root": f"{_OFFICIAL_WEIGHTS}; {_RESUMES}",
    "resume-split": f"{_RESUMES}; leave it out",
    "no-strict": "weights must match the model exactly; leave it out",
    "reset-loader": "--init_from RUN with another --run_name starts from its weights and the first image",
    "target-ratios": "the shapes of --multireso follow from --reso-step; leave it out",
    **dict.fromkeys(("ema-warmup", "ema-warmup-power", "ema-reset-decay"), _HALF_LIFE),
    "cpu-offloading": "training does not offload to host memory; --use-zero-stage 3 shards everything over the GPUs, "
    "and --gradient-checkpointing and --training-parts lora need less memory",
    "dit-weight": _OFFICIAL_WEIGHTS,
}
"""Flags without an equivalent, and the alternative."""
SAME = (
    *("batch-size", "seed", "image-size", "training-parts", "epochs", "log-every", "ckpt-latest-every", "num-workers"),
    *("weight-decay", "uncond-p", "uncond-p-t5", "results-dir", "resume", "random-flip", "gradient-checkpointing"),
    *("multireso", "reso-step"),
)
"""Flags that `muralist train` has too."""
SPECIAL = {
    "use-zero-stage": "--strategy zero2 for stages 1 and 2, zero3 for stage 3",
    "target-modules": "--lora_targets, with the layer names of diffusers",
    "ckpt-every": "--ckpt_every and --keep_every: every one of these checkpoints is kept",
    "model": f"--model; {_MODEL} is the default",
}
"""Flags with a translation of their own."""
_TRANSLATED = {*SPECIAL, *RENAMED_VALUES, *IGNORED, *FIXED, *OF_MODEL}


def help_page() -> str:
    """List the flags of the official script: what each becomes, and which ones are refused."""
    accepted = dict.fromkeys(SAME, "the same in `muralist train`") | RENAMED | SPECIAL
    for flag, (name, values) in RENAMED_VALUES.items():
        accepted[flag] = f"{name}: " + ", ".join(f"{given} is {own}" for given, own in values.items())
    accepted |= dict.fromkeys(IGNORED, "accepted without effect: always on, automatic or not needed here")
    for flag, (allowed, because) in FIXED.items():
        accepted[flag] = f"{' or '.join(allowed)} only{because and f': {because}'}"
    accepted |= dict.fromkeys(OF_MODEL, "must agree with the model folder")
    console = Console(width=None if Console().is_terminal else _HELP_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print("[bold]muralist hydit: fine-tune HunyuanDiT with the flags of its official script.[/]")
        console.print(f"Defaults come from configs/{CONFIG}. Flags of `muralist train --help` may be mixed in.\n")
        for title, flags in (("accepted, and what they mean here", accepted), ("refused", REFUSED)):
            table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", show_header=False)
            table.add_column(style="cyan", no_wrap=True)
            table.add_column()
            for flag, meaning in sorted(flags.items()):
                table.add_row(f"--{flag}", meaning)
            console.print(table, "")
    return capture.get().rstrip()


class TranslatedFlags(NamedTuple):
    """A translated command line."""

    flags: list[str]  # flags of `muralist train`
    strategy: str | None  # strategy of the requested ZeRO stage
    model_flags: dict[str, str]  # flags with which the model folder must agree


def translate_flags(arguments: Sequence[str]) -> list[str]:
    """Translate a command line, and add the default configuration and strategy."""
    set_rank_environment(os.environ)
    flags, strategy, model_flags = translate(arguments)
    given = {word.partition("=")[0] for word in flags}
    if "--config" not in given:
        own = Path("configs", CONFIG)  # of a clone
        flags = ["--config", str(own if own.is_file() else CONFIGS / CONFIG), *flags]
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
        if flag in REFUSED:
            raise UserError(f"--{flag} is not supported: {REFUSED[flag]}.")
        if flag in RENAMED:
            flags.append(f"{RENAMED[flag]}={inline}" if equals else RENAMED[flag])
            continue
        if flag not in _TRANSLATED:
            if word != "--resume" or _values(queue):  # the official switch without a value: runs resume automatically
                flags.append(word)
            continue
        queue = [inline, *queue] if equals else queue
        values = _values(queue)
        used, value = min(1, len(values)), values[0] if values else ""
        if flag in IGNORED:
            used = min(max(IGNORED[flag], bool(equals)), len(values))
        elif flag in OF_MODEL:
            model_flags[flag], used = " ".join(values), len(values)
        elif flag in FIXED:
            allowed, because = FIXED[flag]
            if not any(_is_same(value, other) for other in allowed):
                raise _wrong_value(flag, value, allowed, because)
        elif flag in RENAMED_VALUES:
            name, renamed = RENAMED_VALUES[flag]
            if value not in renamed:
                raise _wrong_value(flag, value, renamed)
            flags += [name, renamed[value]]
        elif flag == "use-zero-stage":
            if value not in ("1", "2", "3"):
                raise UserError(f"--use-zero-stage is {value}: expected 1, 2 or 3.")
            strategy = f"zero{max(2, int(value))}"  # stage 2 is stage 1 with sharded gradients as well
        elif flag == "target-modules":
            flags += ["--lora_targets", *_lora_targets(values)]
            used = len(values)
        elif flag == "ckpt-every":  # the official script keeps each of these checkpoints
            flags += ["--ckpt_every", value, "--keep_every", value]
        elif value != _MODEL:
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
    schedule, conditions = {"beta_start": HUNYUAN_BETA_START, "beta_end": HUNYUAN_BETA_END["1.2"]}, False
    with suppress(OSError, ValueError):  # train refuses a folder that is not a model
        if path:
            folder = find_model(path, "--model.path")
            schedule = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
            config = json.loads((folder / "transformer" / "config.json").read_text())
            conditions = config.get("use_style_cond_and_image_meta_size", True)  # the default of diffusers
        for flag, value in model_flags.items():
            if flag in ("beta-start", "beta-end"):
                actual = schedule[flag.replace("-", "_")]
                if not _is_same(value, str(actual)):
                    raise _wrong_value(flag, value, [f"{actual:g}"], _FOLDER)
            elif not conditions:
                raise UserError(f"--{flag} is for models before version 1.2, and this is a later one: leave it out.")


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
