"""Integrity and fingerprints of model folders in diffusers layout, from file names, sizes and headers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from muralist.core.errors import UserError

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_NO_WEIGHTS = ("tokenizer_config.json", "scheduler_config.json", "preprocessor_config.json")
_FIX = "Copy the model again."
_FINGERPRINT_BYTES = 1 << 20
_FINGERPRINT_FILES = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")


def check_integrity(folder: Path, components: Sequence[str]) -> None:
    """Refuse a model with a missing or truncated weights file; `components` are its subfolders."""
    for name in components:
        component = folder / name
        if not (component / "config.json").is_file() or any((component / file).is_file() for file in _NO_WEIGHTS):
            continue  # tokenizers and schedulers have no weights
        if missing := _missing_files(component):
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise UserError(
                f"The model in {folder} is incomplete: {name} lacks {', '.join(missing[:4])}{more}.",
                "Copying or downloading it was interrupted, or left files out.",
                _FIX,
            )
        for file in sorted(component.glob("*.safetensors")):
            _shapes(file)


def stored_parameters(folder: Path) -> int:
    """Count the parameters in the weights files of a folder."""
    sets: dict[str, int] = {}  # the same weights may be there in several precisions, each in one file or in shards
    for file in sorted(folder.glob("*.safetensors")):
        shard = _SHARD.fullmatch(file.name)
        name = f"{shard[1]}{shard[4]}" if shard else file.name
        sets[name] = sets.get(name, 0) + sum(map(math.prod, _shapes(file)))
    return max(sets.values(), default=0)


def weight_bytes(folder: Path, components: Sequence[str], bytes_per_parameter: int) -> dict[str, int]:
    """Estimate the memory of each component's weights."""
    counts = {name: stored_parameters(folder / name) for name in components}
    return {name: count * bytes_per_parameter for name, count in counts.items() if count}


def _missing_files(folder: Path) -> list[str]:
    """Return the names of missing weights files; of several sets of weights one complete set is enough."""
    files = {path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)}
    if any(not _SHARD.fullmatch(name) for name in files):
        return []
    wanted = [set(_read_json(index).get("weight_map", {}).values()) for index in sorted(folder.glob("*.index.json"))]
    for shard in (match for name in files if (match := _SHARD.fullmatch(name))):
        stem, _, count, suffix = shard.groups()
        wanted.append({f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)})
    if not wanted:
        return ["its weights (a .safetensors file)"]
    return min((sorted(names - files) for names in wanted), key=len)


def _shapes(file: Path) -> list[list[int]]:
    """Return the shapes of the tensors in a safetensors file; opening it checks its header against its length."""
    try:
        with safe_open(file, "numpy") as content:
            return [content.get_slice(name).get_shape() for name in content.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is damaged or truncated: {str(error).rstrip('.')}.",
            "Copying or downloading it was interrupted.",
            _FIX,
        ) from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.", fix=_FIX) from None


def check_base(base: Path, lora: Mapping[str, Any] | None) -> None:
    """Refuse to go on without the model that a run fine-tuned; `lora` is the checkpoint's description."""
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


def fingerprint(path: Path) -> str:
    """Identify the files of a folder, or one file, by names, sizes and the first and last megabyte of each.

    No two trainings leave the same, and hashing gigabytes at every start would take too long.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for pattern in _FINGERPRINT_FILES for file in path.glob(pattern))
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            digest.update(f"{file.name} {size}".encode() + content.read(_FINGERPRINT_BYTES))
            content.seek(-min(_FINGERPRINT_BYTES, size), os.SEEK_END)
            digest.update(content.read())
    return digest.hexdigest()[:16]
