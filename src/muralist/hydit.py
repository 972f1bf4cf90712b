"""The official HunyuanDiT training script's flags, in muralist's words.

    python hydit/train_deepspeed.py --ckpt-every 500 --ckpt-latest-every 100 --image-size 512 512

What a flag below means there it means here; flags of `muralist train` may be mixed in. `configs/waymo_base.yaml` says what
is not said.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from muralist.errors import UserError
from muralist.scale.slurm import adopt_ranks

CONFIG = Path("configs", "waymo_base.yaml")
_RENAMED = {
    "max-training-steps": "--max_steps",
    "lr": "--learning_rate",
    "warmup-num-steps": "--warmup_steps",
    "grad-accu-steps": "--gradient_accumulation_steps",
    "global-seed": "--seed",
    "index-file": "--data_path",
    "task-flag": "--run_name",
    "use-fp16": "--use_amp",
    "no-fp16": "--no_use_amp",
    "rank": "--lora_rank",
}
_SWITCHES = ("qk-norm", "rope-real", "use-flash-attn", "extra-fp16", "deepspeed", "save-optimizer-state", "learn-sigma")
"""What is always so here, or has its own way: attention and precision of the frozen parts follow the hardware."""
_FIXED = {
    "model": ("DiT-g/2",),
    "rope-img": ("base512",),
    "predict-type": ("v_prediction",),
    "noise-schedule": ("scaled_linear",),
    "mse-loss-weight-type": ("constant",),
}
"""Flags with one value that is true here; the noise schedule's betas are those of the model's folder."""


_TARGETS = {
    "Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "q_proj": ("attn2.to_q",),
    "kv_proj": ("attn2.to_k", "attn2.to_v"),
    "out_proj": ("to_out.0",),
}
"""Layers for LoRA as the official network names them; diffusers' has one for each of queries, keys and values."""
_ALL_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def train_words(arguments: Sequence[str]) -> list[str]:
    """The whole command line for `muralist train`: the recipe below what is said, DeepSpeed where it is installed."""
    adopt_ranks(os.environ)
    words, strategy = translate(arguments)
    if "--config" not in words:
        words = ["--config", str(CONFIG), *words]
    if "LOCAL_RANK" in os.environ and "--strategy" not in words:
        words += ["--strategy", strategy or _default_strategy()]
    return words


def translate(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Flags of `muralist train` for those of the official script, and the strategy its ZeRO stage asks for."""
    words: list[str] = []
    strategy: str | None = None
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, inline = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        flag = flag.replace("_", "-")
        if flag in _SWITCHES:
            continue
        if flag in _FIXED or flag in ("use-zero-stage", "ckpt-every-n-epoch"):
            value = inline if equals else queue.pop(0) if queue else ""
            if flag == "use-zero-stage":
                strategy = _strategy_of(value)
            elif flag == "ckpt-every-n-epoch":
                if value not in ("0", "1"):
                    raise UserError(f"--ckpt-every-n-epoch is {value}: here it is 0 or 1.")
                words += ["--at_epoch_end", "true" if value == "1" else "false"]
            elif value not in _FIXED[flag]:
                if flag == "model":
                    words += ["--model", value]  # `muralist train` says what there is
                    continue
                raise UserError(f"--{flag} is {value}: here it is {' or '.join(_FIXED[flag])}.")
            continue
        if flag == "target-modules":
            queue = [inline, *queue] if equals else queue
            names = list(takewhile(lambda name: not name.startswith("--"), queue))
            queue = queue[len(names) :]
            words += ["--lora_targets", *_targets(names)]
            continue
        if flag == "ckpt-every":  # there, every one of these stays
            queue = [inline, *queue] if equals else queue
            words += ["--ckpt_every", queue[0] if queue else "", "--keep_every"]
            continue
        words.append(_RENAMED.get(flag, word) + (f"={inline}" if equals and flag in _RENAMED else ""))
    return words, strategy


def _targets(names: Sequence[str]) -> Sequence[str]:
    if set(names) == set(_TARGETS):
        return _ALL_ATTENTION  # the same layers, in the words of the default: it is the same run
    return [layer for name in names for layer in _TARGETS.get(name, (name,))]


def _strategy_of(stage: str) -> str:
    if stage not in ("1", "2", "3"):
        raise UserError(f"--use-zero-stage is {stage}: expected 1, 2 or 3.")
    return f"zero{max(2, int(stage))}"  # stage 2 is stage 1 with gradients in parts too: nothing is lost by it


def _default_strategy() -> str:
    if importlib.util.find_spec("deepspeed") is not None:
        return "zero2"
    if os.environ.get("RANK", "0") == "0":
        print("DeepSpeed is not installed: training with FSDP2 instead, which needs nothing more.", flush=True)
    return "fsdp2"
