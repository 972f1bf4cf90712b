"""Files of a LoRA alone, for programs that others wrote: diffusers, ComfyUI and PEFT; and such files read back.

In each of them the scale alpha / rank is applied by the reader: it is part of the weights, or of PEFT's config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from muralist.core.errors import UserError
from muralist.models.integrity import read_json
from muralist.models.lora import ADAPTER_FILE, PEFT_PREFIX, Lora
from muralist.models.pipeline_class import INDEX_FILE
from muralist.settings.tools import LoraFormat

LORA_FILE = "pytorch_lora_weights.safetensors"
PEFT_FOLDER = "lora"  # inside an exported pipeline
_METADATA_KEY = "lora_adapter_metadata"  # of files by diffusers' `save_lora_weights`
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"  # of the network's own names
_TRANSFORMER, _DIFFUSION_MODEL, _KOHYA = "transformer.", "diffusion_model.", "lora_unet_"


class _Layout(NamedTuple):
    """How a file names the layers of a network: a prefix, and patterns with what replaces them.

    `NAME:q/qkv` says that the layer is part q of a layer NAME whose rows are those of q, k and v, all as many.
    """

    prefix: str
    renames: tuple[tuple[str, str], ...] = ()

    def place(self, layer: str) -> tuple[str, str, str]:
        """Return the name in the file, the part of the layer there, and all its parts; no parts for most layers."""
        for pattern, replacement in self.renames:
            layer = re.sub(pattern, replacement, layer)
        name, _, parts = layer.partition(":")
        part, _, parts = parts.partition("/")
        return self.prefix + (name.replace(".", "_") if self.prefix == _KOHYA else name), part, parts

    @property
    def matrices(self) -> tuple[str, str]:
        """The ends of the names of A and B."""
        return (
            (".lora_down.weight", ".lora_up.weight") if self.prefix == _KOHYA else (".lora_A.weight", ".lora_B.weight")
        )


# Checked against `model_lora_keys_unet` of ComfyUI (comfy/lora.py, commit acbf08c). Where ComfyUI knows diffusers' names of
# a network whose own layers are fused, those are used: the file keeps its rank, and diffusers opens it too.
_COMFY = {
    "UNet2DConditionModel": _Layout(_KOHYA),
    "SD3Transformer2DModel": _Layout(_TRANSFORMER),
    "AuraFlowTransformer2DModel": _Layout(_TRANSFORMER),
    "PixArtTransformer2DModel": _Layout(_TRANSFORMER),
    "FluxTransformer2DModel": _Layout(_TRANSFORMER),
    "ChromaTransformer2DModel": _Layout(_TRANSFORMER),
    "QwenImageTransformer2DModel": _Layout(_DIFFUSION_MODEL),
    "ZImageTransformer2DModel": _Layout(_DIFFUSION_MODEL),
    "LTXVideoTransformer3DModel": _Layout(_DIFFUSION_MODEL),
    "HiDreamImageTransformer2DModel": _Layout(_DIFFUSION_MODEL),
    "WanTransformer3DModel": _Layout(_DIFFUSION_MODEL, (
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])$", r".\1"),
        (r"\.to_out\.0$", ".o"),
        (r"\.add_([kv])_proj$", r".\1_img"),
        (r"\.ffn\.net\.(\d)(\.proj)?$", r".ffn.\1"),
    )),
    "Flux2Transformer2DModel": _Layout(_DIFFUSION_MODEL, (
        (r"^transformer_blocks\.(\d+)\.attn\.to_([qkv])$", r"double_blocks.\1.img_attn.qkv:\2/qkv"),
        (r"^transformer_blocks\.(\d+)\.attn\.add_([qkv])_proj$", r"double_blocks.\1.txt_attn.qkv:\2/qkv"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0$", r"double_blocks.\1.img_attn.proj"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_add_out$", r"double_blocks.\1.txt_attn.proj"),
        (r"^transformer_blocks\.(\d+)\.ff\.linear_in$", r"double_blocks.\1.img_mlp.0"),
        (r"^transformer_blocks\.(\d+)\.ff\.linear_out$", r"double_blocks.\1.img_mlp.2"),
        (r"^transformer_blocks\.(\d+)\.ff_context\.linear_in$", r"double_blocks.\1.txt_mlp.0"),
        (r"^transformer_blocks\.(\d+)\.ff_context\.linear_out$", r"double_blocks.\1.txt_mlp.2"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj$", r"single_blocks.\1.linear1"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_out$", r"single_blocks.\1.linear2"),
    )),
    "HunyuanDiT2DModel": _Layout(_DIFFUSION_MODEL, (
        (r"\.attn1\.to_([qkv])$", r".attn1.Wqkv:\1/qkv"),
        (r"\.attn2\.to_q$", ".attn2.q_proj"),
        (r"\.attn2\.to_([kv])$", r".attn2.kv_proj:\1/kv"),
        (r"\.to_out\.0$", ".out_proj"),
        (r"\.ff\.net\.0\.proj$", ".mlp.fc1"),
        (r"\.ff\.net\.2$", ".mlp.fc2"),
        (r"\.norm1\.linear$", ".default_modulation.1"),
    )),
}  # fmt: skip
_DIFFUSERS = tuple(_Layout(prefix) for prefix in (_TRANSFORMER, "unet.", ""))


def write_lora(
    weights: Mapping[str, Tensor], description: Mapping[str, Any], kind: LoraFormat, folder: Path, title: str = ""
) -> str:
    """Write an adapter alone into an existing folder, and say what it is for; `description` is that of its checkpoint."""
    base, network = Path(description["folder"]), description.get("network", "transformer")
    lora = Lora.from_description(description["lora"])
    if kind == "peft":
        lora.peft_config().save_pretrained(folder)
        plain = {PEFT_PREFIX + name.replace(".default.", "."): value.contiguous() for name, value in weights.items()}
        save_file(plain, folder / ADAPTER_FILE, metadata={"format": "pt"})
        return "for PEFT"
    name = LORA_FILE
    if kind == "comfy":
        network_class = read_json(base / network / "config.json").get("_class_name")
        if network_class not in _COMFY:
            raise UserError(
                f"There is no ComfyUI layout for {network_class}.",
                f"There is one for {', '.join(_COMFY)}.",
                f"Give another --lora_format: {', '.join(each for each in get_args(LoraFormat) if each != kind)}.",
            )
        layout, name, purpose = _COMFY[network_class], f"{title}.safetensors", "for ComfyUI"
    else:
        pipeline = str(read_json(base / INDEX_FILE).get("_class_name"))
        if not loads_lora(pipeline):
            raise UserError(
                f"{pipeline} of diffusers has no load_lora_weights.",
                "Its network takes LoRA from PEFT.",
                "Give --lora_format peft.",
            )
        # diffusers expects the name of the first network for the second too.
        layout = _Layout(_TRANSFORMER if network.startswith("transformer") else f"{network}.")
        purpose = "for load_lora_weights" + (
            "(..., load_into_transformer_2=True)" if network == "transformer_2" else ""
        )
    unit, metadata = Lora(lora.rank, lora.targets), {"format": "pt", "base_model": base.name}
    save_file(_to_file(unit.rescaled(weights, lora.scale), layout), folder / name, metadata=metadata)
    return f"{purpose}, in {name}"


def loads_lora(pipeline: str) -> bool:
    """Return whether a pipeline class of diffusers has `load_lora_weights`."""
    import diffusers

    return hasattr(getattr(diffusers, pipeline, None), "load_lora_weights")


def write_beside(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
    """Write an adapter into an exported pipeline, as its class loads it, and say where."""
    if loads_lora(str(read_json(Path(description["folder"]) / INDEX_FILE).get("_class_name"))):
        return write_lora(weights, description, "diffusers", folder)
    (folder / PEFT_FOLDER).mkdir()
    return f"{write_lora(weights, description, 'peft', folder / PEFT_FOLDER)}, in {PEFT_FOLDER}/"


def _to_file(weights: Mapping[str, Tensor], layout: _Layout) -> dict[str, Tensor]:
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for layer in _layers(weights):
        name, part, parts = layout.place(layer)
        groups.setdefault((name, parts), {})[part] = layer
    tensors: dict[str, Tensor] = {}
    for (name, parts), group in groups.items():
        pairs = {part: (weights[layer + _A], weights[layer + _B]) for part, layer in group.items()}
        a, b = pairs[""] if "" in pairs else _fuse(pairs, parts)
        for end, matrix in zip(layout.matrices, (a, b), strict=True):
            tensors[name + end] = matrix.contiguous()
        if layout.prefix == _KOHYA:
            tensors[f"{name}.alpha"] = torch.tensor(float(len(a)))
    return tensors


def _fuse(pairs: Mapping[str, tuple[Tensor, Tensor]], parts: str) -> tuple[Tensor, Tensor]:
    """Return the adapter of a layer that holds several: A of all, and B with each one's block; other rows are 0."""
    first = next(iter(pairs.values()))[1]
    a, b, column = torch.cat([pairs[part][0] for part in parts if part in pairs]), [], 0
    for part in parts:
        rows = first.new_zeros(len(first), len(a))
        if part in pairs:
            block = pairs[part][1]
            rows[:, column : column + block.shape[1]] = block
            column += block.shape[1]
        b.append(rows)
    return a, torch.cat(b)


def read_lora(stored: Mapping[str, Tensor], own: Sequence[str], network_class: str) -> dict[str, Tensor] | None:
    """Return an adapter of scale 1 by the network's own names, from a file in any layout; None if it has other layers."""
    names = _layers(own)
    if not all(
        value.numel() == 1 if name.endswith(".alpha") else value.ndim == 2 and len(value)
        for name, value in stored.items()
    ):
        return None
    for layout in (*_DIFFUSERS, *([_COMFY[network_class]] if network_class in _COMFY else ())):
        places = {layer: layout.place(layer) for layer in names}
        ends = (*layout.matrices, ".alpha")
        expected = {place[0] + end for place in places.values() for end in ends}
        if stored.keys() <= expected and {name for name in expected if not name.endswith(".alpha")} <= stored.keys():
            pairs = {layer: _from_file(stored, layout, places[layer], list(places.values())) for layer in names}
            return {layer + end: pairs[layer][index] for layer in names for index, end in enumerate((_A, _B))}
    return None


def _from_file(
    stored: Mapping[str, Tensor], layout: _Layout, place: tuple[str, str, str], places: Sequence[tuple[str, str, str]]
) -> tuple[Tensor, Tensor]:
    name, part, parts = place
    a, b = (stored[name + end] for end in layout.matrices)
    if (alpha := stored.get(f"{name}.alpha")) is not None:
        b = b * (float(alpha) / len(a))
    if parts:
        b = b.chunk(len(parts))[parts.index(part)]
        present = [each for each in parts if (name, each, parts) in places]
        blocks = b.chunk(len(present), dim=1)
        others = [block for each, block in zip(present, blocks, strict=False) if each != part]
        if len(blocks) == len(present) and not any(block.any() for block in others):  # a file of `_fuse`
            a, b = a.chunk(len(present))[present.index(part)], blocks[present.index(part)]
    return a.clone(), b.clone()


def _layers(names: Mapping[str, Any] | Sequence[str]) -> list[str]:
    return [name.removesuffix(_A) for name in names if name.endswith(_A)]


def stored_scale(metadata: Mapping[str, str]) -> float:
    """Return the scale that diffusers wrote into the metadata of a LoRA, or 1."""
    try:
        config = json.loads(metadata.get(_METADATA_KEY, "{}"))
        values = {key.rpartition(".")[2]: value for key, value in config.items()}
        return float(values["lora_alpha"]) / float(values["r"]) if "lora_alpha" in values else 1.0
    except (ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
        return 1.0
