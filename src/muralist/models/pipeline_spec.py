"""What the specs of pipelines in diffusers layout share: loading, LoRA, saving and export of the network that is trained."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.formatting import loading_progress
from muralist.core.run_dir import atomic_folder
from muralist.models import frozen_weights
from muralist.models.blocks import block_classes, checkpoint_blocks
from muralist.models.components import component_class, load_network
from muralist.models.integrity import check_base, fingerprint
from muralist.models.lora import Lora, is_adapter
from muralist.models.lora_files import LORA_FILE, PEFT_FOLDER, read_lora, write_beside
from muralist.models.pipeline_class import read_index
from muralist.models.spec import ModelSpec
from muralist.models.weights import read_description
from muralist.settings.train import BasePrecision


class PipelineSpec(ModelSpec):
    """The network of a pipeline's folder, of which all weights or a LoRA are trained."""

    folder: Path
    """The pipeline."""
    network_name: str = "transformer"
    network_class: Any
    lora: Lora | None = None
    """None: all weights are trained."""
    base_precision: BasePrecision = "fp32"
    """Of frozen weights."""
    swapped_blocks: int = 0
    gradient_checkpointing: bool = False
    seed: int = 0

    @abstractmethod
    def _build_network(self) -> nn.Module:
        """Build the network on the meta device."""

    @property
    @abstractmethod
    def _device(self) -> torch.device:
        """Where frozen weights are stored."""

    def network(self) -> nn.Module:
        """Load the network, in float32 unless frozen weights are stored otherwise; fresh LoRA does not change its output."""
        folder = self.folder / self.network_name
        with loading_progress(f"{self.network_name} of {self.folder}", folder):
            if self._has_frozen_layers:
                network = self._empty_network()
                frozen_weights.load(network, frozen_weights.stored_tensors(folder), self._device)
                frozen_weights.swap_blocks(network, block_classes(network), self.swapped_blocks)
            else:
                network = load_network(folder)
        network = self._prepare(network.train())
        if self.lora:
            self.lora.init_weights(network, self.seed)
        return network

    def meta_model(self) -> nn.Module:
        """Build the network on the meta device."""
        return self._prepare(self._empty_network())

    @property
    def _has_frozen_layers(self) -> bool:
        return self.base_precision != "fp32" or self.swapped_blocks > 0

    def _empty_network(self) -> nn.Module:
        network = self._build_network()
        if self._has_frozen_layers:
            frozen_weights.prepare(network, block_classes(network), self.base_precision)
        return network

    def _prepare(self, network: Any) -> nn.Module:
        network._no_split_modules = block_classes(network)
        if self.lora:
            self.lora.insert(network)
        if self.gradient_checkpointing:
            self._checkpoint(network)
        return network

    def _checkpoint(self, network: Any) -> None:
        checkpoint_blocks(network)

    @torch.no_grad()
    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Load the weights of a run that trains the same parameters."""
        own = {name: value.shape for name, value in network.state_dict().items() if self.is_saved(name)}
        weights = read_lora(weights, list(own), self.network_class.__name__) or weights
        if own != {name: value.shape for name, value in weights.items()}:
            self._refuse_weights(weights, origin)
        if self.lora:  # weights that are not of a run have scale 1
            adapter = read_description(Path(origin)).get("lora")
            weights = self.lora.rescaled(weights, Lora.from_description(adapter).scale if adapter else 1.0)
        network.load_state_dict(weights, strict=False)

    def _refuse_weights(self, weights: Mapping[str, Tensor], origin: str) -> None:
        what = f"The weights of {origin} do not fit the {self.network_name} of {self.folder}."
        full, given_full = self.lora is None, not any(map(is_adapter, weights))
        if full != given_full:
            here, there = ("the full network", "LoRA weights") if full else ("LoRA", "a full network")
            raise UserError(
                what,
                f"This run trains {here}, and they are {there}.",
                f"Merge them with `muralist export {origin} FOLDER`, and train with --model.path FOLDER.",
            )
        same = "Give LoRA of the same network, --lora_rank and --lora_targets."
        raise UserError(what, "They have other names or shapes.", "Give weights of the same network." if full else same)

    def is_saved(self, name: str) -> bool:
        """Save everything; with LoRA, only the adapter: the rest is in the model's folder."""
        return self.lora is None or is_adapter(name)

    def flops_per_image(self) -> int:
        """Forward FLOPs and twice as many backward (LoRA: as many); VAE and text encoders are not counted."""
        return (2 if self.lora else 3) * self._forward_flops

    @property
    @abstractmethod
    def _forward_flops(self) -> int: ...

    @cached_property
    def _lora_description(self) -> dict[str, Any] | None:
        return self.lora.describe(fingerprint(self.folder / self.network_name)) if self.lora else None

    @staticmethod
    def trained_components(
        weights: Mapping[str, Tensor], description: Mapping[str, Any], dtype: torch.dtype
    ) -> dict[str, nn.Module]:
        """Load the components that replace those of the base pipeline in `muralist generate`."""
        network = _trained_network(weights, description)
        nn.Module.to(network, dtype)  # diffusers' own `to` logs a warning
        return {_network_name(description): network}

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        """Write the trained network with the other components of the pipeline that it was trained from.

        LoRA is merged into the network, and also written alone as the pipeline loads it.
        """
        base, lora, name = Path(description["folder"]), description.get("lora"), _network_name(description)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder.absolute()} exists.", fix="Name a folder that does not exist yet.")
        check_base(base, description)
        class_name = read_index(base, "the run")[0]
        with atomic_folder(folder) as temporary:
            shutil.copytree(
                base, temporary, ignore=shutil.ignore_patterns(name, LORA_FILE, PEFT_FOLDER, ".*"), dirs_exist_ok=True
            )
            _trained_network(weights, description).save_pretrained(temporary / name)
            alone = f"; the LoRA alone, {write_beside(weights, description, temporary)}" if lora else ""
        return f"for {class_name}.from_pretrained{alone}"


def _network_name(description: Mapping[str, Any]) -> str:
    name: str = description.get("network", PipelineSpec.network_name)
    return name


def _trained_network(weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> Any:
    """Build the network with trained weights in float32; LoRA is merged."""
    base, name, lora = Path(description["folder"]), _network_name(description), description.get("lora")
    if lora:
        return Lora.from_description(lora).merge(load_network(base / name), weights)
    network_class = component_class(base / name)
    network = network_class.from_config(network_class.load_config(base, subfolder=name))
    network.load_state_dict(weights)
    return network
