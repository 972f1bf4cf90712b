"""`muralist export`: weights as a folder in diffusers layout, and reading such folders of JiT back."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from muralist import __version__
from muralist.core.errors import UserError
from muralist.core.run_dir import atomic_folder, atomic_write_json
from muralist.models.configs import JIT_CONFIGS, MLP_RATIO
from muralist.models.integrity import fingerprint
from muralist.models.jit import JiT
from muralist.models.lora import Lora
from muralist.models.spec import find_family_by_key
from muralist.models.weights import MAX_PIXELS, WEIGHTS_FILE, damaged_file, read_description, read_weights
from muralist.settings import ExportSettings

JIT_CLASS_NAME = "JiTTransformer2DModel"
CONFIG_FILE = "config.json"
ADAPTER_FOLDER = "lora"
_MAX_TOKENS_PER_SIDE, _MAX_DEPTH = 1024, 1000
# The arguments that define a network; gradient_checkpointing is about training.
_JIT_ARGUMENTS = tuple(name for name in inspect.signature(JiT).parameters if name != "gradient_checkpointing")
_FLOAT_ARGUMENTS = ("mlp_ratio", "attn_drop", "proj_drop")


def export(settings: ExportSettings) -> str:
    """Write the folder and describe it."""
    source = Path(settings.source)
    weights, description = read_weights(source, settings.weights), read_description(source)
    spec = find_family_by_key(description.get("family", "jit")).spec_class()
    written = spec.export(weights, description, Path(settings.destination))
    return f"{settings.destination}: {settings.weights} weights of {source}, {written}"


# JiT


def infer_jit_config(state: Mapping[str, Tensor], in_context_start: int | None = None) -> dict[str, Any]:
    """Infer the network's arguments from the shapes of its weights.

    `in_context_start` does not show in the weights: unless given, it is that of the named configuration of the same
    width and depth.
    """
    try:
        bottleneck, channels, patch, _ = state["x_embedder.proj1.weight"].shape
        (head_dim,) = state["blocks.0.attn.q_norm.weight"].shape
        _, tokens, hidden = state["pos_embed"].shape
        rows, _ = state["y_embedder.embedding_table.weight"].shape
        heads = hidden // head_dim
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            "These are not the weights of a JiT network.", f"Missing or of another shape: {error}."
        ) from None
    depth = sum(name.endswith(".attn.qkv.weight") for name in state)
    context = state["in_context_posemb"].shape[1] if "in_context_posemb" in state else 0
    if in_context_start is None:
        in_context_start = _known_in_context_start(hidden, depth) if context else 0
    config = {
        "input_size": math.isqrt(tokens) * patch,
        "patch_size": patch,
        "in_channels": channels,
        "hidden_size": hidden,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": MLP_RATIO,
        "attn_drop": 0.0,
        "proj_drop": 0.0,
        "num_classes": rows - 1,
        "bottleneck_dim": bottleneck,
        "in_context_len": context,
        "in_context_start": in_context_start,
    }
    _check_fit(config, state)
    return config


def _known_in_context_start(hidden: int, depth: int) -> int:
    for config in JIT_CONFIGS.values():
        if (config.hidden_size, config.depth) == (hidden, depth):
            return config.in_context_start
    raise UserError(
        f"in_context_start is unknown for {hidden} channels and {depth} blocks.",
        "It does not show in the weights, and no named configuration has these sizes.",
        f"Load from a folder whose {CONFIG_FILE} holds in_context_start.",
    )


def _check_fit(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse weights that a network of these arguments cannot load."""
    try:
        _check_sizes(config)
        with torch.device("meta"):
            network = JiT(**jit_arguments(config))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise UserError("No network has these sizes.", f"The reason: {str(error).splitlines()[0]}.") from None
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            want, have = expected.get(name, "nothing"), given.get(name, "nothing")
            raise UserError(
                "The weights do not fit the network.", f"{name}: the network has {want}, the weights {have}."
            )


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for impossible sizes before anything of that size is allocated."""
    for name, value in jit_arguments(config).items():
        largest = 1e6 if name == "num_classes" else MAX_PIXELS
        kind = int | float if name in _FLOAT_ARGUMENTS else int
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value <= largest:
            raise ValueError(f"{name} is {value!r:.60}")
    if config["input_size"] // max(1, config["patch_size"]) > _MAX_TOKENS_PER_SIDE or config["depth"] > _MAX_DEPTH:
        raise ValueError(
            f"{config['input_size']} pixels in patches of {config['patch_size']}, {config['depth']} blocks"
        )


def jit_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of the network's constructor from a folder's config."""
    return {name: config[name] for name in _JIT_ARGUMENTS}


def write_jit_folder(folder: str | Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write config.json and the weights; an earlier export at this path is replaced.

    The config holds the network's arguments and further facts for readers, such as `label_names` and `objective`.
    """
    final = Path(folder)
    if final.exists() and not (final.is_dir() and (_is_jit_folder(final) or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not an export.", fix="Name a folder that does not exist yet.")
    _check_fit(config, state)
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    facts = {"_class_name": JIT_CLASS_NAME, "_muralist_version": __version__}
    with atomic_folder(final, replace=True) as temporary:
        atomic_write_json(temporary / CONFIG_FILE, facts | dict(config))
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})


def _is_jit_folder(folder: Path) -> bool:
    try:
        return bool(read_config(folder))
    except UserError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the config of an exported JiT."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not an exported model: it has no {CONFIG_FILE}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_file(file, error) from None
    if not isinstance(config, dict) or config.get("_class_name") != JIT_CLASS_NAME:
        raise UserError(f"{file} does not describe a JiT network.", f"Its _class_name is not {JIT_CLASS_NAME}.")
    missing = [name for name in _JIT_ARGUMENTS if name not in config]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}.", fix="Export the model again.")
    try:
        _check_sizes(config)
    except ValueError as error:
        raise UserError(f"No network has the sizes in {file}.", f"{error}.", "Export the model again.") from None
    return config


def read_jit_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the weights of an exported JiT."""
    path = Path(folder)
    config, state = read_config(path), read_weights(path / WEIGHTS_FILE)
    _check_fit(config, state)
    return config, state


# Pipelines of diffusers with a trained transformer


def write_pipeline(
    folder: Path, weights: Mapping[str, Tensor], base: Path, lora: Mapping[str, Any] | None = None
) -> None:
    """Write the trained transformer with the other components of the model it was trained from.

    LoRA is merged into the transformer, and also written alone in PEFT's format; `lora` is the checkpoint's
    description.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder.absolute()} exists.", fix="Name a folder that does not exist yet.")
    check_base(base, lora)
    with atomic_folder(folder) as temporary:
        adapter = temporary / ADAPTER_FOLDER
        unwanted = shutil.ignore_patterns("transformer", ADAPTER_FOLDER, ".*")
        shutil.copytree(base, temporary, ignore=unwanted, dirs_exist_ok=True)
        if lora:
            adapter.mkdir()
        trained_transformer(weights, base, lora, adapter).save_pretrained(temporary / "transformer")


def check_base(base: Path, lora: Mapping[str, Any] | None) -> None:
    """Refuse to go on without the model that a run fine-tuned."""
    if not (base / "transformer" / "config.json").is_file():
        raise UserError(
            f"The model that this run fine-tuned is no longer at {base}.",
            "Its VAE, text encoders and tokenizers are needed.",
            "Put it back.",
        )
    if lora and fingerprint(base / "transformer") != lora["base"]:
        raise UserError(
            f"The transformer in {base} is not the one that LoRA was trained on.",
            "Merged, they would generate other images than in training.",
            "Put back the original model.",
        )


def trained_transformer(
    weights: Mapping[str, Tensor], base: Path, lora: Mapping[str, Any] | None, adapter: Path | None = None
) -> Any:
    """Build the transformer with trained weights in float32; LoRA is merged, and also written to `adapter`."""
    from diffusers import HunyuanDiT2DModel

    if lora:
        network = HunyuanDiT2DModel.from_pretrained(base, subfolder="transformer", local_files_only=True).float()
        return Lora(lora["rank"], tuple(lora["targets"])).merge(network, weights, adapter)
    network = HunyuanDiT2DModel.from_config(HunyuanDiT2DModel.load_config(base, subfolder="transformer"))
    network.load_state_dict(weights)
    return network
