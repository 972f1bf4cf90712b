"""LoRA (Hu et al. 2021) by PEFT, the extra `lora`: low-rank matrices A and B added to frozen linear layers.

A starts as seeded noise and B at zero, so that a fresh adapter does not change the network's output.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muralist.core import rng
from muralist.core.errors import UserError, closest_match
from muralist.core.rng import Purpose, SampleKeys
from muralist.models.configs import HUNYUAN_LAYERS
from muralist.settings import ModelSettings

ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER_MARK = ".lora_"
_OFFICIAL = re.compile(r"blocks\.\d+\.attn[12]")  # attention of the official HunyuanDiT
_IN_BLOCK = re.compile(r"\.\d+\.")
_BLOCK_PREFIX = re.compile(r".*(block|layer|attention|resnet)\w*\.\d+\.")
DEFAULT_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of attention, as nearly all networks of diffusers name them."""
PEFT_PREFIX = "base_model.model."
_SHOWN_TARGETS = 8


def require_peft() -> None:
    """Refuse to go on without PEFT."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "LoRA needs PEFT, which is not installed.", fix="Install it with `pip install 'muralist[lora]'`."
        )


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name belongs to an adapter."""
    return _ADAPTER_MARK in name


def convert_adapter(config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Convert a LoRA in PEFT's format to our names and unit scale; layers of the official HunyuanDiT are split."""
    if config.get("alpha_pattern") or config.get("use_dora"):
        raise UserError(f"The LoRA in {folder} is not supported: it has an alpha_pattern or is a DoRA.")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    stored = {name.removeprefix(PEFT_PREFIX): value for name, value in tensors.items()}
    weights: dict[str, Tensor] = {}
    for name, value in stored.items():
        layer, _, end = name.rpartition(_ADAPTER_MARK)  # end: A.weight or B.weight
        if not _IN_BLOCK.search(layer) and not stored.get(f"{layer}{_ADAPTER_MARK}B.weight", value).any():
            continue  # the official script adds one to the text pooler, where it cannot learn
        layers = _diffusers_layers(layer)
        matrix = end.partition(".")[0]
        chunks = (value * scale).chunk(len(layers)) if matrix == "B" else [value] * len(layers)
        for target, chunk in zip(layers, chunks, strict=True):
            weights[f"{target}{_ADAPTER_MARK}{matrix}.default.weight"] = chunk.clone()
    return weights


def _diffusers_layers(layer: str) -> list[str]:
    """Return the diffusers layers that a layer of the official network is split into, or the layer itself."""
    place, _, last = layer.rpartition(".")
    if not _OFFICIAL.fullmatch(place):
        return [layer]
    block = place.rpartition(".")[0]
    return [f"{block if end.startswith('attn') else place}.{end}" for end in HUNYUAN_LAYERS.get(last, (last,))]


class _SampleDropout(nn.Module):
    """Dropout of a LoRA's input, with a mask for each sample: PEFT's own would draw it from torch's global RNG."""

    site: Tensor

    def __init__(self, probability: float, site: int) -> None:
        super().__init__()
        self.probability, self.seed = probability, 0
        # An int would be a constant of a compiled block, so that every block would be compiled again. On the CPU, because
        # the network may be on the meta device.
        self.register_buffer("site", torch.tensor(site, device="cpu"), persistent=False)
        self.sample_indices: Tensor | None = None  # of the batch, set by `set_dropout_keys`

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training only."""
        if not self.training or self.sample_indices is None:
            return x
        return rng.dropout(x, self.probability, SampleKeys(self.seed, self.sample_indices), self.site)


def set_dropout_keys(network: nn.Module, keys: SampleKeys) -> None:
    """Let the masks of LoRA dropout be those of a batch, also when blocks are computed again in the backward pass."""
    for module in network.modules():
        if isinstance(module, _SampleDropout):
            module.seed, module.sample_indices = keys.seed, keys.sample_indices


@dataclass(frozen=True)
class Lora:
    """The rank of an adapter, the layers it targets, its alpha, and the dropout of its input."""

    rank: int
    targets: tuple[str, ...]  # suffixes of layer names
    alpha: float | None = None  # None: the rank
    dropout: float = 0.0

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Lora:
        """Return the adapter that a checkpoint's description names."""
        targets, dropout = tuple(description["targets"]), description.get("dropout", 0.0)
        return cls(description["rank"], targets, description.get("alpha"), dropout)

    @classmethod
    def from_settings(cls, model: ModelSettings) -> Lora | None:
        """Return the adapter that a run trains, if it trains one."""
        if model.training_parts != "lora":
            return None
        return cls(model.lora_rank, tuple(model.lora_targets), model.lora_alpha, model.lora_dropout)

    def describe(self, base: str) -> dict[str, Any]:
        """Return the field `lora` of a checkpoint's description; `base` is the fingerprint of the frozen weights."""
        description = {"rank": self.rank, "targets": list(self.targets), "base": base}
        description |= {"alpha": self.alpha} if self.alpha is not None else {}
        return description | ({"dropout": self.dropout} if self.dropout else {})

    def for_network(self, network: nn.Module) -> Lora:
        """Return the adapter with the targets that a network has, if they are the default ones.

        They are all linear layers of attention in its blocks, whatever their names, or, without attention, of the blocks.
        """
        if self.targets != DEFAULT_TARGETS:
            return self
        modules = dict(network.named_modules())
        layers = [name for name, module in modules.items() if isinstance(module, nn.Linear) and _IN_BLOCK.search(name)]
        chosen = [name for name in layers if _is_attention(_holder(name, modules))]
        return replace(self, targets=_shortest_suffixes(chosen or layers, modules))

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return (self.alpha or self.rank) / self.rank

    def rescaled(self, weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Return weights of an adapter of another scale with the same effect at the scale of this one."""
        return {name: value * (scale / self.scale) if ".lora_B." in name else value for name, value in weights.items()}

    def insert(self, network: nn.Module) -> None:
        """Freeze a network and add adapters without values."""
        require_peft()
        from peft import inject_adapter_in_model

        self._check_targets(network)
        # On the meta device: PEFT would draw the values from torch's global RNG.
        inject_adapter_in_model(self.peft_config(), network, low_cpu_mem_usage=True)
        if self.dropout:
            adapted: list[Any] = [layer.lora_dropout for layer in network.modules() if hasattr(layer, "lora_dropout")]
            for site, dropouts in enumerate(adapted):
                dropouts["default"] = _SampleDropout(self.dropout, site)

    def init_weights(self, network: nn.Module, seed: int) -> None:
        """Initialize inserted adapters; the values depend on the seed alone."""
        fresh = {name: torch.zeros(weight.shape) for name, weight in network.named_parameters() if is_adapter(name)}
        for index, (name, weight) in enumerate(fresh.items()):
            if ".lora_A." in name:
                drawn = rng.uniform(seed, Purpose.INIT, torch.tensor([index]), tuple(weight.shape))[0]
                fresh[name] = (2.0 * drawn - 1.0) / math.sqrt(weight.shape[1])  # PEFT's distribution
        network.load_state_dict(fresh, strict=False, assign=True)

    def merge(self, network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
        """Merge a trained adapter into the network's weights."""
        require_peft()
        from peft import get_peft_model

        model: Any = get_peft_model(network, self.peft_config(), low_cpu_mem_usage=True)
        wanted = {name: weight.shape for name, weight in network.named_parameters() if is_adapter(name)}
        if wanted != {name: weight.shape for name, weight in weights.items()}:
            raise UserError(f"The weights are not a LoRA of rank {self.rank} on {', '.join(self.targets)}.")
        network.load_state_dict(weights, strict=False, assign=True)
        return model.merge_and_unload()

    def peft_config(self) -> Any:
        """Return PEFT's LoraConfig."""
        from peft import LoraConfig

        # By default scale 1, as in the official HunyuanDiT script.
        alpha: Any = self.rank if self.alpha is None else self.alpha  # PEFT takes fractions, although it says int
        config = LoraConfig(r=self.rank, lora_alpha=alpha, lora_dropout=self.dropout)
        config.target_modules = sorted(self.targets)  # PEFT makes a set of it, whose order is not reproducible
        return config

    def summary(self) -> str:
        """Rank, alpha and targets, for the run summary."""
        alpha = f" and alpha {self.alpha:g}" if self.alpha is not None else ""
        more = len(self.targets) - _SHOWN_TARGETS
        targets = " ".join(self.targets[:_SHOWN_TARGETS]) + (f" and {more} more" if more > 0 else "")
        return f"LoRA of rank {self.rank}{alpha} on {targets}"

    def _check_targets(self, network: nn.Module) -> None:
        """Every target must match linear layers of blocks only: other layers' weights are used without calling them."""
        layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        known = sorted({_within_block(name) for name in layers if _IN_BLOCK.search(name)})
        for target in self.targets:
            found = [name for name, _ in network.named_modules() if name == target or name.endswith(f".{target}")]
            other = next((name for name in found if name not in layers or not _IN_BLOCK.search(name)), None)
            if found and other is None:
                continue
            what = f"No layer matches the LoRA target {target!r}."
            if other is not None:
                what = f"The LoRA target {target!r} matches {other}, which is not a linear layer of a block."
            raise UserError(
                what,
                f"A target is a suffix of a layer name; the layers are {', '.join(known)}.",
                closest_match(target, known),
            )


def _holder(name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that a layer belongs to; containers are passed over."""
    parent = name.rpartition(".")[0]
    while isinstance(modules[parent], nn.ModuleList | nn.Sequential | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    return modules[parent]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.casefold()
    return "attention" in name or name.endswith("attn")


def _shortest_suffixes(layers: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest suffixes that match these layers and no other module; the default targets come first."""
    wanted = set(layers)
    others = [name for name in names if name not in wanted]
    taken = {".".join(name.split(".")[-count:]) for name in others for count in range(1, name.count(".") + 2)}
    found: set[str] = set()
    for layer in wanted:
        parts = layer.split(".")
        suffixes = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found.add(next(suffix for suffix in suffixes if suffix not in taken))
    order = {target: index for index, target in enumerate(DEFAULT_TARGETS)}
    return tuple(sorted(found, key=lambda target: (order.get(target, len(order)), target)))


def _within_block(name: str) -> str:
    """Return the name of a layer within its block: `attn.to_q` for `blocks.3.attn.to_q`."""
    return _BLOCK_PREFIX.sub("", name) if _BLOCK_PREFIX.match(name) else _IN_BLOCK.split(name, maxsplit=1)[-1]
