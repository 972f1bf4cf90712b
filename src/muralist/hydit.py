"""The official HunyuanDiT training script's flags, in muralist's words.

    python hydit/train_deepspeed.py --ckpt-every 500 --ckpt-latest-every 100 --image-size 512 512

What a flag means there it means here, or it is refused with a sentence (hydit_flags.py); flags of `muralist train` may be
mixed in. `configs/waymo_base.yaml` says what is not said.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from muralist.errors import UserError
from muralist.hydit_flags import FLAGS, LAYERS, Always, Fixed, OfModel, Refused, Renamed
from muralist.scale.slurm import adopt_ranks

CONFIG = Path("configs", "waymo_base.yaml")
_MODEL = "DiT-g/2"
_ALL_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


class Translation(NamedTuple):
    """An official command line in other words."""

    words: list[str]  # for `muralist train`
    strategy: str | None  # that the ZeRO stage asks for
    claims: dict[str, str]  # flags that the model's folder must agree with


def train_words(arguments: Sequence[str]) -> list[str]:
    """The whole command line for `muralist train`: the recipe below what is said, DeepSpeed where it is installed."""
    adopt_ranks(os.environ)
    words, strategy, claims = translate(arguments)
    named = {word.partition("=")[0] for word in words}
    if "--config" not in named:
        if not CONFIG.is_file():
            raise UserError(
                f"There is no {CONFIG} in {Path.cwd()}: it says what the command does not.",
                fix="Run the command in the project's root, or give --config PATH.",
            )
        words = ["--config", str(CONFIG), *words]
    if "LOCAL_RANK" in os.environ and "--strategy" not in named:
        words += ["--strategy", strategy or _default_strategy()]
    if claims:
        _check_claims(claims, words)
    return words


def translate(arguments: Sequence[str]) -> Translation:
    """Flags of `muralist train` for those of the official script."""
    words: list[str] = []
    strategy: str | None = None
    claims: dict[str, str] = {}
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, inline = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        flag = flag.replace("_", "-")
        rule = FLAGS.get(flag)
        if isinstance(rule, Refused):
            raise UserError(f"--{flag} is not there: {rule.instead}.")
        special = flag in ("use-zero-stage", "target-modules", "ckpt-every", "model")
        if rule is None and not special:
            if word == "--resume" and not _values(queue):
                continue  # there it is a switch; here a run goes on by itself
            words.append(word)
            continue
        if isinstance(rule, Renamed) and not rule.values:
            words.append(f"{rule.to}={inline}" if equals else rule.to)
            continue
        queue = [inline, *queue] if equals else queue
        values = _values(queue)
        taken = min(1, len(values))
        value = values[0] if values else ""
        match rule:
            case Always(count):
                taken = min(max(count, bool(equals)), len(values))
            case OfModel():
                claims[flag], taken = " ".join(values), len(values)
            case Fixed(allowed, because):
                if not any(_same(value, one) for one in allowed):
                    raise _other_value(flag, value, allowed, because)
            case Renamed(name, wordings):
                if value not in wordings:
                    raise _other_value(flag, value, wordings)
                words += [name, wordings[value]]
        if flag == "use-zero-stage":
            strategy = _strategy_of(value)
        elif flag == "target-modules":
            words += ["--lora_targets", *_targets(values)]
            taken = len(values)
        elif flag == "ckpt-every":  # there, every one of these stays
            words += ["--ckpt_every", value, "--keep_every", value]
        elif flag == "model" and value != _MODEL:
            words += ["--model", value]  # `muralist train` says what there is
        queue = queue[taken:]
    return Translation(words, strategy, claims)


def _values(queue: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not word.startswith("--"), queue))


def _same(value: str, other: str) -> bool:
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


def _other_value(flag: str, value: str, allowed: Iterable[str], because: str = "") -> UserError:
    return UserError(f"--{flag} is {value}: here it is {' or '.join(allowed)}{because and f'; {because}'}.")


def _check_claims(claims: dict[str, str], words: Sequence[str]) -> None:
    """Compare what a command line says of the model with its folder, or with the small model where there is none."""
    from muralist.config import load
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings

    path = load(TrainSettings, words, TRAIN_FLAT_NAMES).model.path
    with suppress(OSError, ValueError):  # a folder that is no model is refused later, in its own words
        facts = _facts_of(Path(path)) if path else _facts_of_small()
        for flag, value in claims.items():
            true = facts[flag.replace("-", "_")]
            if true is False:
                raise UserError(
                    f"--{flag} is for models before version 1.2, and this is not one of them: leave it out."
                )
            if true is not True and not _same(value, str(true)):
                raise _other_value(flag, value, [f"{true:g}"], "the model's folder says it")


def _facts_of(folder: Path) -> dict[str, Any]:
    schedule = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    config = json.loads((folder / "transformer" / "config.json").read_text())
    conditions = bool(config.get("use_style_cond_and_image_meta_size", True))  # diffusers' own default
    return schedule | {"use_style_cond": conditions, "size_cond": conditions}


def _facts_of_small() -> dict[str, Any]:
    from muralist.models.small_hunyuan import BETA_END, BETA_START

    return {"beta_start": BETA_START, "beta_end": BETA_END["1.2"], "use_style_cond": False, "size_cond": False}


def _targets(names: Sequence[str]) -> Sequence[str]:
    if set(names) == set(LAYERS):
        return _ALL_ATTENTION  # the same layers, in the words of the default: it is the same run
    return [layer for name in names for layer in LAYERS.get(name, (name,))]


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
