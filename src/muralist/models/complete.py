"""Whether a folder in diffusers layout is whole, told from names, sizes and the first bytes of its files alone."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muralist.errors import UserError

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_PART = re.compile(r"-\d{5}-of-\d{5}")
_WITHOUT_WEIGHTS = ("tokenizer_config.json", "scheduler_config.json", "preprocessor_config.json")
_LONGEST_HEADER = 100_000_000  # as the safetensors library has it
_COPY = "Copy the model anew."


def check_whole(folder: Path, parts: Sequence[str]) -> None:
    """Refuse a model of which a weights file is missing or cut short; `parts` are its folders."""
    for part in parts:
        place = folder / part
        if not (place / "config.json").is_file() or any((place / name).is_file() for name in _WITHOUT_WEIGHTS):
            continue  # a tokenizer or a scheduler has no weights
        if missing := _missing(place):
            raise UserError(
                f"The model in {folder} is not whole: {part} lacks {', '.join(missing[:4])}"
                + (f" and {len(missing) - 4} more." if len(missing) > 4 else "."),
                "Copying or downloading it was interrupted, or left files out.",
                _COPY,
            )
        for file in sorted(place.glob("*.safetensors")):
            _header(file)


def stored_parameters(folder: Path) -> int:
    """How many numbers the weights in a folder hold."""
    sets: dict[str, int] = {}  # the same weights may lie there in several precisions, each in one file or in parts
    for file in sorted(folder.glob("*.safetensors")):
        name = _PART.sub("", file.name)
        sets[name] = sets.get(name, 0) + sum(math.prod(tensor["shape"]) for tensor in _header(file).values())
    return max(sets.values(), default=0)


def weight_bytes(folder: Path, parts: Sequence[str], bytes_per_number: int) -> dict[str, int]:
    """Memory of each part's weights, by its name."""
    counts = {part: stored_parameters(folder / part) for part in parts}
    return {part: count * bytes_per_number for part, count in counts.items() if count}


def _missing(folder: Path) -> list[str]:
    """Names of weights files that ought to be there; where there are several sets, one that is whole is enough."""
    files = {path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)}
    if any(not _SHARD.fullmatch(name) for name in files):
        return []
    wanted: list[set[str]] = []
    for index in sorted(folder.glob("*.index.json")):
        wanted.append(set(_read(index).get("weight_map", {}).values()))
    for shard in (match for name in files if (match := _SHARD.fullmatch(name))):
        stem, _, count, suffix = shard.groups()
        wanted.append({f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)})
    if not wanted:
        return ["its weights (a .safetensors file)"]
    lacking = [sorted(names - files) for names in wanted]
    return min(lacking, key=len)


def _header(file: Path) -> dict[str, Any]:
    """The tensors that a safetensors file says it holds, after a look at whether it is long enough for them."""
    size = file.stat().st_size
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            if length > min(size, _LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            tensors = json.loads(content.read(length))
        tensors.pop("__metadata__", None)
        promised = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}.", "It is not a safetensors file, or cut short.", _COPY) from None
    if size != promised:
        raise UserError(f"{file} is cut short: {size:,} of {promised:,} bytes are there.", fix=_COPY)
    return tensors


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.", fix=_COPY) from None
