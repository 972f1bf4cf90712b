"""Compare a LoRA with the model it is for, by names and shapes in the headers of their files.

diffusers ignores adapter weights whose names it does not find: the images would be those without the LoRA.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError
from muralist.models.integrity import check_pickle, read_header

PEFT_CONFIG = "adapter_config.json"
_PEFT_FILE, _DIFFUSERS_FILE = "adapter_model.safetensors", "pytorch_lora_weights.safetensors"
_MATRIX = re.compile(
    r"(?P<layer>.+?)\.(lora_linear_layer\.|lora\.)?(?P<kind>lora_A|lora_B|lora_down|lora_up|down|up)(\.default)?\.weight"
)
_DOWN = ("lora_A", "lora_down", "down")
_KOHYA = {"lora_unet_": "", "lora_transformer_": "", "lora_te_": "text_encoder", "lora_te1_": "text_encoder",
          "lora_te2_": "text_encoder_2", "lora_te3_": "text_encoder_3"}  # fmt: skip
_MADE_FOR = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name", "base_model")
_TEXT_KEYS = re.compile(r".*attn2[._]to_k")  # their input is the text embedding, whose width tells model kinds apart
_FIX = "Give a LoRA that was made for this model, or the model that it was made for as --model_path."


class _Layer(NamedTuple):
    """One layer of a LoRA: its name in the file, the component and the layer it is for, and its widths if stored."""

    stored: str
    component: str | None  # None: the name must be converted first, by diffusers
    name: str
    inputs: int | None
    outputs: int | None


def check_lora(path: Path, folder: Path, components: Sequence[str], pipeline_class: str) -> Path | None:
    """Refuse a LoRA of which a layer is missing in the model or has another shape; returns its .safetensors file."""
    file = _weights_file(path)
    if file.suffix == ".bin":
        check_pickle(file)
        return None
    shapes, metadata = read_header(file)
    denoiser = "transformer" if "transformer" in components else "unet"
    layers = _layers(shapes, denoiser, is_peft=(path / PEFT_CONFIG).is_file())
    if not layers:
        raise UserError(f"{file} holds no LoRA layers.", f"Its first tensor is {min(shapes, default='none')}.", _FIX)
    used = {denoiser, *(layer.component for layer in layers)}
    weights = {part: _linear_shapes(folder / part) for part in components if part in used}
    for layer in layers:
        if problem := _problem(layer, weights, denoiser):
            made_for = _made_for(path, metadata)
            raise UserError(
                f"The LoRA at {path} does not fit {pipeline_class}: {problem}.",
                f"It was made for {made_for}." if made_for else "",
                _FIX,
            )
    return file


def _weights_file(path: Path) -> Path:
    """Find the file that PEFT or diffusers reads."""
    if path.is_file():
        return path
    names = [file.name for pattern in ("*.safetensors", "*.bin") for file in sorted(path.glob(pattern))]
    chosen = [name for name in (_PEFT_FILE, _DIFFUSERS_FILE) if name in names] or names
    if not chosen:
        raise UserError(
            f"The folder {path} holds no LoRA.",
            fix=f"Give a folder or a Hub id with {_DIFFUSERS_FILE} or {_PEFT_FILE}, or a .safetensors file.",
        )
    return path / chosen[0]


def _layers(shapes: Mapping[str, Sequence[int]], denoiser: str, is_peft: bool) -> list[_Layer]:
    found: dict[str, dict[bool, Sequence[int]]] = {}
    for key, shape in shapes.items():
        if (matrix := _MATRIX.fullmatch(key)) and len(shape) > 1:
            found.setdefault(matrix["layer"], {})[matrix["kind"] in _DOWN] = shape
    layers = []
    for stored, matrices in sorted(found.items()):
        component, name = _target(stored, denoiser, is_peft)
        down, up = matrices.get(True), matrices.get(False)
        layers.append(_Layer(stored, component, name, down[1] if down else None, up[0] if up else None))
    return layers


def _target(stored: str, denoiser: str, is_peft: bool) -> tuple[str | None, str]:
    """Return the component and the layer that a stored name stands for."""
    if is_peft:
        return denoiser, stored.removeprefix("base_model.model.")
    for prefix, component in _KOHYA.items():  # kohya's scripts write underscores for dots
        if stored.startswith(prefix):
            return component or denoiser, stored.removeprefix(prefix)
    head, _, rest = stored.partition(".")
    if head.startswith(("unet", "transformer", "text_encoder")) and "blocks" not in head and ".processor." not in rest:
        return head, rest
    return None, stored


def _linear_shapes(folder: Path) -> dict[str, Sequence[int]]:
    """Return the shape of each layer's weight in a component; empty where its weights are not safetensors."""
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= read_header(file)[0]
    return {
        key.removesuffix(".weight").removeprefix("text_model."): shape
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) > 1
    }


def _problem(layer: _Layer, weights: Mapping[str, Mapping[str, Sequence[int]]], denoiser: str) -> str:
    """Describe why a layer does not fit; empty if it does, or if only diffusers can tell."""
    part = layer.component or denoiser
    if part not in weights:
        return f"the model has no {part}"
    known = weights[part]
    if not known:  # weights that are not safetensors
        return ""
    name = layer.name.removeprefix("text_model.").removeprefix("text_model_")
    shape = known.get(name)
    if shape is None and "." not in layer.stored:  # as kohya's scripts write it
        shape = {key.replace(".", "_"): value for key, value in known.items()}.get(name)
        if shape is None or layer.component is None:  # names of the original network, which diffusers converts
            widths = {value[1] for key, value in known.items() if _TEXT_KEYS.fullmatch(key)}
            if _TEXT_KEYS.fullmatch(name) and widths and layer.inputs is not None and layer.inputs not in widths:
                return f"{layer.stored} reads text embeddings {layer.inputs} wide, the model's are {min(widths)} wide"
            return ""
    if shape is None:
        return "" if layer.component is None else f"{layer.component} has no layer {name}"
    if (layer.inputs or shape[1], layer.outputs or shape[0]) != (shape[1], shape[0]):
        own = f"{layer.outputs or '?'} x {layer.inputs or '?'}"
        return f"its layer {layer.stored} is {own}, the model's is {shape[0]} x {shape[1]}"
    return ""


def _made_for(path: Path, metadata: Mapping[str, str]) -> str:
    """Return the model that a LoRA says it was made for; empty if it does not."""
    config: Any = {}
    if (file := path / PEFT_CONFIG).is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}.", fix="Copy the LoRA again.") from None
    named = [str(metadata[key]) for key in _MADE_FOR if metadata.get(key)]
    if isinstance(config, dict) and config.get("base_model_name_or_path"):
        named.insert(0, str(config["base_model_name_or_path"]))
    return named[0] if named else ""
