"""--lora PATH or PATH:WEIGHT: LoRA adapters for a pipeline's denoiser, in diffusers' or in PEFT's format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError, closest_match
from muralist.core.run_dir import exists

PEFT_CONFIG = "adapter_config.json"
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class LoraAdapter(NamedTuple):
    """An adapter's path and weight."""

    path: Path
    weight: float

    @property
    def is_peft(self) -> bool:
        """Whether it is a folder as PEFT writes it, for the denoiser alone."""
        return (self.path / PEFT_CONFIG).is_file()


def parse_adapter(text: str) -> LoraAdapter:
    """Parse a path, optionally followed by a colon and a weight."""
    head, colon, tail = text.rpartition(":")
    try:
        weight = float(tail) if colon and not exists(Path(text)) else None
    except ValueError:
        weight = None
    return LoraAdapter(Path(text), 1.0) if weight is None else LoraAdapter(Path(head), weight)


def check_adapters(texts: Sequence[str]) -> list[LoraAdapter]:
    """Parse adapters, and refuse those that do not exist."""
    adapters = [parse_adapter(text) for text in texts]
    for adapter in adapters:
        if not math.isfinite(adapter.weight):
            raise UserError(
                f"The weight of the LoRA at {adapter.path} is {adapter.weight}.", fix="Give a finite weight."
            )
        if not exists(adapter.path):
            parent = adapter.path.parent
            names = [other.name for other in parent.iterdir()] if parent.is_dir() else []
            fix = closest_match(adapter.path.name, names) or "Give a folder or a .safetensors file on this machine."
            raise UserError(f"There is no LoRA at {adapter.path}.", fix=fix)
    if adapters:
        from muralist.models.lora import require_peft

        require_peft()
    return adapters


def add_adapters(pipe: Any, adapters: Sequence[LoraAdapter]) -> None:
    """Add adapters to a pipeline: merge PEFT's into the denoiser, load others beside it."""
    for adapter in adapters:
        if adapter.is_peft:
            _merge(pipe, adapter)
    unmerged = [adapter for adapter in adapters if not adapter.is_peft]
    if not unmerged:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"{type(pipe).__name__} takes LoRA only as a PEFT folder with an {PEFT_CONFIG}.",
            f"{unmerged[0].path} has none.",
            "For LoRA trained here, give the folder lora/ of its export.",
        )
    names = [f"lora_{index}" for index in range(len(unmerged))]
    for name, adapter in zip(names, unmerged, strict=True):
        try:
            pipe.load_lora_weights(str(adapter.path), adapter_name=name, local_files_only=True)
        except _LOAD_ERRORS as error:
            raise _mismatch(adapter, pipe, error) from error
    try:
        pipe.set_adapters(names, [adapter.weight for adapter in unmerged])
    except ValueError as error:
        raise _mismatch(unmerged[0], pipe, error) from error


def _merge(pipe: Any, adapter: LoraAdapter) -> None:
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
    from peft.tuners.lora import LoraLayer

    part = "transformer" if getattr(pipe, "transformer", None) is not None else "unet"
    network = getattr(pipe, part)
    dtype = network.dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of missing keys, which are checked below
            model: Any = PeftModel.from_pretrained(network.float(), str(adapter.path), local_files_only=True)
    except _LOAD_ERRORS as error:
        raise _mismatch(adapter, pipe, error) from error
    expected, given = set(get_peft_model_state_dict(model)), set(load_peft_weights(str(adapter.path)))
    if expected != given:  # PEFT loads the rest without an error
        key = min(expected ^ given)
        side = "the adapter" if key in given else "the model"
        raise _mismatch(adapter, pipe, KeyError(f"{key} is only in {side}"))
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(adapter.weight)
    setattr(pipe, part, model.merge_and_unload().to(dtype))


def _mismatch(adapter: LoraAdapter, pipe: Any, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"The LoRA at {adapter.path} does not fit {type(pipe).__name__}.", f"The reason: {reason}")
