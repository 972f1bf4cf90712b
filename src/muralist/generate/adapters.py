"""--lora PATH or PATH:WEIGHT: trained additions to a pipeline's network, in diffusers' or in PEFT's format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muralist.data.paths import exists
from muralist.errors import UserError, nearest

PEFT_CONFIG = "adapter_config.json"


class Adapter(NamedTuple):
    """Where it lies, and how strongly it counts."""

    path: Path
    weight: float

    @property
    def is_peft(self) -> bool:
        """Whether it is a folder as PEFT writes it, for the network alone."""
        return (self.path / PEFT_CONFIG).is_file()


def parse_adapter(text: str) -> Adapter:
    """A path, with a number after a colon as its weight."""
    head, colon, tail = text.rpartition(":")
    try:
        weight = float(tail) if colon and not exists(Path(text)) else None
    except ValueError:
        weight = None
    return Adapter(Path(text), 1.0) if weight is None else Adapter(Path(head), weight)


def check_adapters(texts: Sequence[str]) -> list[Adapter]:
    """Those that are asked for; one that is not there is refused."""
    adapters = [parse_adapter(text) for text in texts]
    for adapter in adapters:
        if not math.isfinite(adapter.weight):
            raise UserError(f"The LoRA at {adapter.path} cannot count {adapter.weight} times.")
        if not exists(adapter.path):
            parent = adapter.path.parent
            names = [other.name for other in parent.iterdir()] if parent.is_dir() else []
            fix = nearest(adapter.path.name, names) or "Give a folder or a .safetensors file on this machine."
            raise UserError(f"There is no LoRA at {adapter.path}.", fix=fix)
    if adapters:
        from muralist.models.lora import require_peft

        require_peft()
    return adapters


def add_adapters(pipe: Any, adapters: Sequence[Adapter]) -> None:
    """Add them to a pipeline; PEFT's are merged into its network, others stay beside it."""
    for adapter in adapters:
        if adapter.is_peft:
            _merge(pipe, adapter)
    beside = [adapter for adapter in adapters if not adapter.is_peft]
    if not beside:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"{type(pipe).__name__} takes LoRA only as a folder of PEFT, with an {PEFT_CONFIG}.",
            f"{beside[0].path} has none.",
            "For LoRA trained here, give the folder lora/ of its export.",
        )
    names = [f"lora_{number}" for number in range(len(beside))]
    for name, adapter in zip(names, beside, strict=True):
        try:
            pipe.load_lora_weights(str(adapter.path), adapter_name=name, local_files_only=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise _does_not_fit(adapter, pipe, error) from error
    try:
        pipe.set_adapters(names, [adapter.weight for adapter in beside])
    except ValueError as error:
        raise _does_not_fit(beside[0], pipe, error) from error


def _merge(pipe: Any, adapter: Adapter) -> None:
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
    from peft.tuners.lora import LoraLayer

    part = "transformer" if getattr(pipe, "transformer", None) is not None else "unet"
    network = getattr(pipe, part)
    dtype = network.dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what does not fit; that is looked at below
            model: Any = PeftModel.from_pretrained(network.float(), str(adapter.path), local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise _does_not_fit(adapter, pipe, error) from error
    wanted, given = set(get_peft_model_state_dict(model)), set(load_peft_weights(str(adapter.path)))
    if wanted != given:  # PEFT itself goes on with what fits
        raise _does_not_fit(adapter, pipe, KeyError(f"{min(wanted ^ given)} is only on one side"))
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(adapter.weight)
    setattr(pipe, part, model.merge_and_unload().to(dtype))


def _does_not_fit(adapter: Adapter, pipe: Any, error: Exception) -> UserError:
    said = " ".join(str(error).split())[:300]
    return UserError(f"The LoRA at {adapter.path} does not fit {type(pipe).__name__}.", f"The reason: {said}")
