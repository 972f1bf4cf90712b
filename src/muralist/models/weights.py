"""Reading weights for all commands: runs, checkpoints, exports, LoRA folders, .safetensors and .pth files.

No code in a file is ever run: safetensors hold tensors only, and a .pth is unpickled with torch's restricted reader,
with argparse.Namespace as the only addition, because official checkpoints store their flags in one.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import Advance, loading_progress
from muralist.core.hardware import available_cpus
from muralist.core.run_dir import atomic_folder, check_exists
from muralist.models.integrity import check_base, read_header
from muralist.models.lora import ADAPTER_FILE, convert_adapter
from muralist.models.lora_files import LORA_FILE, stored_scale, write_lora
from muralist.models.spec import find_family_by_key
from muralist.settings import ExportSettings
from muralist.settings.tools import LoraFormat

WeightSet = Literal["model", "ema1", "ema2"]

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
OFFICIAL_FILE = "checkpoint-last.pth"
TRAINING_ONLY = "critic."
"""Prefix of weights in a checkpoint that only a resumed training reads: those of the critic of a distillation."""
_DESCRIPTION = "muralist.model"  # in the metadata of a student's weights
MAX_PIXELS = 1 << 16  # along one side, so that a wrong size in a file cannot exhaust the memory
_OFFICIAL_NAMES = {"model": "model", "ema1": "model_ema1", "ema2": "model_ema2"}
_OFFICIAL_PREFIX = "net."
_PAGE_BYTES, _CHUNK_BYTES = 4096, 1 << 24
_SCAN_THREADS = 4  # 12 GB then take less than a second, also where eight processes load at once


def export(settings: ExportSettings, assembled: tuple[dict[str, Tensor], str] | None = None) -> str:
    """Write weights as a folder in diffusers layout, and describe it.

    `assembled` has other weights of the source than its files, and says what they are.
    """
    source = Path(settings.source)
    fix = "Give a run, a checkpoint or a weights file on this machine; a model of the Hugging Face Hub needs no export."
    check_exists(source, "model", fix)
    weights, kind = assembled or (read_weights(source, settings.weights), f"{settings.weights} weights")
    description = read_description(source)
    destination = Path(settings.destination)
    if settings.lora_format is None:
        spec = find_family_by_key(description.get("family", "jit")).spec_class()
        written = spec.export(weights, description or spec.describe_export(source), destination)
    else:
        written = "the LoRA alone, " + _export_lora(weights, description, settings.lora_format, destination)
    return f"{settings.destination}: {kind} of {source}, {written}"


def _export_lora(weights: Mapping[str, Tensor], description: Mapping[str, Any], kind: LoraFormat, folder: Path) -> str:
    if not description.get("lora"):
        raise UserError(
            f"--lora_format {kind} needs a LoRA, and these weights are a full network.", fix="Leave --lora_format out."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder.absolute()} exists.", fix="Name a folder that does not exist yet.")
    check_base(Path(description["folder"]), description)
    with atomic_folder(folder) as temporary:
        return write_lora(weights, description, kind, temporary, folder.name)


def read_weights(
    path: str | Path, which: WeightSet = "ema1", shapes_only: bool = False, training: bool = False
) -> dict[str, Tensor]:
    """Read weights by name onto the CPU from a run, a checkpoint, an export, a LoRA folder or a file.

    `which` selects a set of weights in runs, checkpoints and official .pth files; the others hold a single set. With
    `shapes_only` the tensors are on the meta device, and the gigabytes of the file are neither read nor verified.
    `training` includes those that only a resumed training reads.
    """
    file = weights_file(Path(path), which)
    if not file.is_file():
        raise UserError(f"There are no weights at {file}.", fix="Check the path.")
    if file.name == ADAPTER_FILE:
        return _read_adapter(file)
    if file.suffix not in (".safetensors", ".pth", ".pt"):
        raise UserError(
            f"{file} is not a weights file.", fix="Give a .safetensors or .pth file, or a folder that holds one."
        )
    content = read_file(file, shapes_only)
    weights: dict[str, Tensor] = content if file.suffix == ".safetensors" else _select_official(file, content, which)
    if file.suffix == ".safetensors" and (scale := stored_scale(read_header(file)[1])) != 1:
        weights = {name: value * scale if ".lora_B." in name else value for name, value in weights.items()}
    if not training:
        weights = {name: value for name, value in weights.items() if not name.startswith(TRAINING_ONLY)}
    # Data is copied, because the file is mapped: copies outlive it, and other sets and the optimizer take no memory.
    device, copy = ("meta", False) if shapes_only else ("cpu", file.suffix != ".safetensors")
    return {name: value.to(device, copy=copy) for name, value in weights.items()}


def weights_file(path: Path, which: WeightSet) -> Path:
    """Find the file of a set of weights in a folder."""
    if not path.is_dir():
        return path
    if (checkpoint := latest_checkpoint(path)) != path:
        return checkpoint / f"{which}.safetensors"
    names = (f"{which}.safetensors", WEIGHTS_FILE, OFFICIAL_FILE, ADAPTER_FILE, LORA_FILE, f"{path.name}.safetensors")
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UserError(
            f"There are no {which} weights in the folder {path}.",
            f"It holds none of {', '.join(names)}.",
            "Give a run, a checkpoint, an export or an official output folder.",
        )
    return found[0]


def has_single_weight_set(path: Path) -> bool:
    """Return whether there is nothing to select: exports and .safetensors files hold no EMA beside their weights."""
    return path.suffix == ".safetensors" or (path / WEIGHTS_FILE).is_file()


def latest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run; any other path is returned as it is."""
    file = path / "checkpoints" / "latest"
    if not file.is_file():
        return path
    try:
        name = file.read_text().strip()
    except (OSError, ValueError):
        name = ""
    if not re.fullmatch(r"step_[0-9]{7,20}", name):  # never a path that leads elsewhere
        raise UserError(f"{file} is damaged: it does not name a checkpoint.", fix="Give the checkpoint's own folder.")
    return file.parent / name


class _Description(BaseModel):
    """The fields of a model's description that other commands rely on."""

    model_config = ConfigDict(strict=True)

    family: str = "jit"
    model: str
    img_size: (
        Annotated[int, Field(ge=1, le=MAX_PIXELS)]
        | Annotated[list[Annotated[int, Field(ge=1, le=MAX_PIXELS)]], Field(min_length=2, max_length=2)]
    )
    label_names: list[str] = []
    objective: dict[str, str | int | float] = {}
    folder: str = ""
    lora: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_family(self) -> _Description:
        find_family_by_key(self.family).check_description(self.model_dump())
        return self


def read_description(source: Path) -> dict[str, Any]:
    """Read the model's description from the manifest of a checkpoint or a run, or the file of a student's weights.

    It is empty for other weights.
    """
    file = source if source.is_file() else latest_checkpoint(source) / "manifest.json"
    try:
        description = _description_in(file) if file.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        kind = "checkpoint manifest" if file.suffix == ".json" else "description of a model"
        raise UserError(f"{file} is damaged: it is not a {kind}.") from None
    if description:
        try:
            _Description.model_validate(description)
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"{file} is damaged: invalid model description ({reason}).") from None
    return description


def _description_in(file: Path) -> dict[str, Any]:
    if file.suffix == ".json":
        return dict(json.loads(file.read_text())["model"])
    if file.suffix != ".safetensors":
        return {}
    try:
        _, metadata = read_header(file)
    except UserError:
        return {}  # reading its weights says what is wrong
    return dict(json.loads(metadata.get(_DESCRIPTION, "{}")))


def description_metadata(description: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata for a file of weights: of a student the description, because it has a sampler of its own."""
    return {_DESCRIPTION: json.dumps(description)} if description.get("distilled") else {}


def read_file(file: Path, shapes_only: bool = False) -> Any:
    """Read a .safetensors file, or any other as torch.save() wrote it, without running code; damage is a UserError.

    With `shapes_only` the tensors are mapped, and their data is not read yet.
    """
    try:
        with nullcontext() if shapes_only else loading_progress(str(file), file) as advance:
            if file.suffix == ".safetensors":
                return _read_safetensors(file, advance)
            return _unpickle(file, advance, verified=not shapes_only)
    except Exception as error:  # a foreign file can make a reader raise anything
        code = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code is None:
            raise damaged_file(file, error) from None
        raise UserError(
            f"{file} was not read, because it asks to run {code[1]}.",
            "A checkpoint may hold tensors, plain values and argparse.Namespace; anything else could run foreign code.",
            "If you trust the file, save its weights as .safetensors where it was made.",
        ) from None


def first_non_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or Inf, or None; reads memory once, at the speed of several cores."""

    def is_finite(value: Tensor) -> bool:
        if not value.is_floating_point() or value.element_size() < 2 or not value.numel() or value.is_meta:
            return True
        low, high = value.aminmax()  # 40 times as fast as isfinite(): no temporary, vectorized, NaN propagates
        return math.isfinite(low) and math.isfinite(high)

    named = list(weights)
    with ThreadPoolExecutor(min(_SCAN_THREADS, available_cpus())) as threads:
        found = threads.map(is_finite, (value.detach() for _, value in named))
        return next((name for (name, _), finite in zip(named, found, strict=True) if not finite), None)


def check_finite_file(file: Path, fix: str) -> None:
    """Refuse a .safetensors file in which a tensor holds NaN or Inf."""
    try:
        name = first_non_finite(load_file(file).items())
    except (OSError, SafetensorError) as error:
        raise damaged_file(file, error) from None
    if name:
        raise UserError(
            f"{file} holds NaN or Inf in the tensor {name}.", "Every image would be made of such values.", fix
        )


def damaged_file(file: Path, error: Exception) -> UserError:
    """Return the error for a file that cannot be read."""
    return UserError(
        f"{file} cannot be read: it is truncated, damaged, or not what its name says.",
        f"The reader reported: {first_line(error)}.",
        "Copy the file again from where it was written.",
    )


def _read_safetensors(file: Path, advance: Advance | None) -> dict[str, Tensor]:
    weights = load_file(file)
    if advance:  # touch the mapped pages now: otherwise the first use would read them, without progress
        for value in weights.values():
            for chunk in value.reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
                chunk[::_PAGE_BYTES].sum()
                advance(chunk.numel())
    return weights


def _unpickle(file: Path, advance: Advance | None, verified: bool) -> Any:
    is_zip = zipfile.is_zipfile(file)  # files of torch before 1.6 are not
    if is_zip and verified:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():  # zipfile verifies checksums; torch does not for a mapped file
                with archive.open(member) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        if advance:
                            advance(len(chunk))
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)


def _read_adapter(file: Path) -> dict[str, Tensor]:
    try:
        config = json.loads((file.parent / "adapter_config.json").read_text())
        return convert_adapter(config, load_file(file), file.parent)
    except UserError:
        raise
    except Exception as error:  # as in read_file
        raise damaged_file(file, error) from None


def _select_official(file: Path, content: Any, which: WeightSet) -> dict[str, Tensor]:
    """Return one set of weights of an official checkpoint, without the wrapper's prefix."""
    key = _OFFICIAL_NAMES[which]
    state = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(state, dict):
        keys = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{file} has no weights named {key}.", f"It holds: {keys}.", "Choose another set of weights.")
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if wrong:
        raise UserError(f"{file} holds something other than a tensor under {key}: {wrong[0]}.")
    return {name.removeprefix(_OFFICIAL_PREFIX): value.detach() for name, value in state.items()}
