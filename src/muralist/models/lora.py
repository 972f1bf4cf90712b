"""LoRA (Hu et al. 2021): a pair of narrow trained layers beside each of some frozen ones, by PEFT; the extra `lora`.

The first of a pair starts as keyed noise and the second at zero, so a network with fresh ones computes what it did before.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from muralist import keyed_random
from muralist.errors import UserError, nearest
from muralist.hydit_flags import LAYERS
from muralist.keyed_random import Purpose

ADAPTER_FILE = "adapter_model.safetensors"
_TRAINED = ".lora_"
_BLOCKS = "blocks."
_PEFT_PREFIX = "base_model.model."


def require_peft() -> None:
    """Refuse to go on without the library."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "LoRA needs PEFT, which is not installed.", fix="Install it with `pip install 'muralist[lora]'`."
        )


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is part of LoRA."""
    return _TRAINED in name


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Pairs from a folder that PEFT wrote, as names and values have it here; those of the official script too."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("alpha_pattern") or config.get("use_dora"):
        raise UserError(f"The LoRA in {folder} is of a kind that is not read: alpha_pattern or DoRA.")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    stored = {name.removeprefix(_PEFT_PREFIX): value for name, value in load_file(folder / ADAPTER_FILE).items()}
    pairs: dict[str, Tensor] = {}
    for name, value in stored.items():
        layer, _, end = name.rpartition(_TRAINED)  # end: A.weight or B.weight
        if not layer.startswith(_BLOCKS) and not stored.get(f"{layer}{_TRAINED}B.weight", value).any():
            continue  # the official script puts one beside the text pooler, which cannot learn there
        names = _diffusers_layers(layer)
        which = end.partition(".")[0]
        parts = (value * scale).chunk(len(names)) if which == "B" else [value] * len(names)
        for own, part in zip(names, parts, strict=True):
            pairs[f"{own}{_TRAINED}{which}.default.weight"] = part.clone()
    return pairs


def _diffusers_layers(layer: str) -> list[str]:
    """The layers of diffusers' network that one of the official network's is made of, or the layer itself."""
    place, _, last = layer.rpartition(".")
    block = place.rpartition(".")[0]
    return [f"{block if end.startswith('attn') else place}.{end}" for end in LAYERS.get(last, (last,))]


@dataclass(frozen=True)
class Lora:
    """Which layers are adapted, and how narrow the pairs are."""

    rank: int
    targets: tuple[str, ...]  # the ends of layers' names

    def insert(self, network: nn.Module) -> None:
        """Freeze a network and put pairs without values beside the layers."""
        require_peft()
        from peft import inject_adapter_in_model

        self._check_targets(network)
        # Without values: PEFT would draw them from torch's global state.
        inject_adapter_in_model(self._config(), network, low_cpu_mem_usage=True)

    def initialise(self, network: nn.Module, seed: int) -> None:
        """Values for inserted pairs: the same seed, the same values everywhere."""
        trained = [(name, weight) for name, weight in network.named_parameters() if is_adapter(name)]
        fresh = {name: self._initial(name, tuple(w.shape), index, seed) for index, (name, w) in enumerate(trained)}
        network.load_state_dict(fresh, strict=False, assign=True)

    def _initial(self, name: str, shape: tuple[int, ...], index: int, seed: int) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros(shape)
        drawn = keyed_random.uniform(seed, Purpose.INIT, torch.tensor([index]), shape)[0]
        return (2.0 * drawn - 1.0) / math.sqrt(shape[1])  # PEFT's distribution

    def merge(self, network: nn.Module, weights: Mapping[str, Tensor], folder: Path | None = None) -> nn.Module:
        """The network with trained pairs added to its own weights; they are also written into a folder in PEFT's format."""
        require_peft()
        from peft import get_peft_model, get_peft_model_state_dict

        config = self._config()
        model: Any = get_peft_model(network, config, low_cpu_mem_usage=True)
        wanted = {name: weight.shape for name, weight in network.named_parameters() if is_adapter(name)}
        if wanted != {name: weight.shape for name, weight in weights.items()}:
            raise UserError(f"The weights are not those of LoRA of rank {self.rank} on {', '.join(self.targets)}.")
        network.load_state_dict(weights, strict=False, assign=True)
        if folder is not None:
            config.save_pretrained(folder)
            save_file(get_peft_model_state_dict(model), folder / ADAPTER_FILE, metadata={"format": "pt"})
        return model.merge_and_unload()

    def _config(self) -> Any:
        from peft import LoraConfig

        # What a pair adds is not scaled, as in the official HunyuanDiT script.
        config = LoraConfig(r=self.rank, lora_alpha=self.rank)
        config.target_modules = sorted(self.targets)  # PEFT's own set would be written in any order
        return config

    def _check_targets(self, network: nn.Module) -> None:
        """Every target must be layers of blocks: elsewhere are some whose weights are used without calling them."""
        layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        known = sorted({name.split(".", 2)[2] for name in layers if name.startswith(_BLOCKS)})
        for target in self.targets:
            found = [name for name, _ in network.named_modules() if name == target or name.endswith(f".{target}")]
            if not found or not all(name in layers and name.startswith(_BLOCKS) for name in found):
                raise UserError(
                    f"LoRA cannot be trained on {target!r}.",
                    f"A target is the end of the names of linear layers in the blocks; there are {', '.join(known)}.",
                    nearest(target, known),
                )
