"""Integrity and fingerprints of model folders in diffusers layout, from file names, sizes and headers.

Loading a damaged folder does not always fail: transformers builds a tokenizer without its vocabulary, and the images
are made from other tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from muralist.core.errors import UserError, first_line

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")  # of weights files: by diffusers and transformers
_SUFFIXES = (".safetensors", ".bin")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_VARIANT = re.compile(rf"({'|'.join(_STEMS)})\.([^.]+?)(-\d{{5}}-of-\d{{5}})?\.(safetensors|bin)")
_SCHEDULER_CONFIG, _TOKENIZER_CONFIG = "scheduler_config.json", "tokenizer_config.json"
_PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_TOKENIZER_JSON = "tokenizer.json"
_VOCABULARIES = (  # of a tokenizer: each is enough
    (_TOKENIZER_JSON,),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("tokenizer.model",),
    ("sentencepiece.bpe.model",),
)
_WITHOUT_VOCABULARY = ("ByT5",)  # its tokens are bytes
_WITHOUT_CHAT = ("ByT5", "CLIP", "T5", "Bert")  # beside a chat model, of pipelines with several text encoders
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_MAX_PROMPT = 1 << 20  # tokens; transformers' default for a tokenizer without a limit is 10**30
_SMALL_FILE = 1 << 20  # bytes of JSON that are parsed at every start; of larger files the last byte is checked
_FIX = "Copy the model again."
_FINGERPRINT_BYTES = 1 << 20
_FINGERPRINT_FILES = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")
_PICKLE_MODULES = (
    "torch",
    "collections",
)  # of the classes in a pickle of tensors; torch decides which of them it reads
_TO_SAFETENSORS = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({{k: v.clone() for k, v in torch.load('{0}', weights_only=False).items()}}, '{1}')\""
)


def check_integrity(folder: Path, components: Mapping[str, str], chat_template: bool = False) -> None:
    """Refuse a model in which a file that loading needs is missing, truncated or unsafe.

    `components` are its subfolders and their classes. With `chat_template` its tokenizer must have one.
    """
    for name, kind in components.items():
        component = folder / name
        missing: list[str] = []
        if kind.endswith("Scheduler"):
            missing = _absent(component, _SCHEDULER_CONFIG)
        elif "Tokenizer" in kind:
            missing = _missing_of_tokenizer(component, kind, chat_template)
        elif kind.endswith(("Processor", "FeatureExtractor")):
            if not any((component / file).is_file() for file in _PROCESSOR_CONFIGS):
                missing = [_PROCESSOR_CONFIGS[0]]
            elif not kind.endswith(("ImageProcessor", "FeatureExtractor")):  # an image processor with a tokenizer
                missing = _missing_of_tokenizer(component, kind, chat_template)
        elif not _is_other_kind(component):
            missing = _absent(component, "config.json") + _missing_weights(component)
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise UserError(
                f"The model in {folder} is incomplete: {name} lacks {', '.join(missing[:4])}{more}.",
                "Copying or downloading it was interrupted, or left files out.",
                _FIX,
            )
        for file in component.glob("*.json"):
            _check_json(file)
        for file in sorted(component.glob("*.safetensors")):
            read_header(file)
        for file in _pickles(component):
            check_pickle(file)


def _is_other_kind(component: Path) -> bool:
    """Whether a component is neither a model nor of the kinds above: it has a configuration of another name."""
    configs = {file.name for file in component.glob("*config.json")} - {"generation_config.json"}  # of language models
    return bool(configs) and "config.json" not in configs


def _absent(folder: Path, *files: str) -> list[str]:
    return [file for file in files if not (folder / file).is_file()]


def _missing_of_tokenizer(folder: Path, kind: str, chat_template: bool) -> list[str]:
    """Return what is missing of a tokenizer: its settings, one of the kinds of vocabulary, a chat template."""
    missing = _absent(folder, _TOKENIZER_CONFIG)
    settings = read_json(folder / _TOKENIZER_CONFIG)
    lacking = [_absent(folder, *files) for files in _VOCABULARIES]
    if all(lacking) and not kind.startswith(_WITHOUT_VOCABULARY):
        begun = [files for files, all_files in zip(lacking, _VOCABULARIES, strict=True) if len(files) < len(all_files)]
        missing += begun[0] if begun else [f"its vocabulary ({_TOKENIZER_JSON}, or vocab.json and merges.txt, ...)"]
    if (
        chat_template
        and not kind.startswith(_WITHOUT_CHAT)
        and "chat_template" not in settings
        and not any((folder / file).is_file() for file in _CHAT_TEMPLATES)
    ):
        missing.append(_CHAT_TEMPLATES[0])
    limit = settings.get("model_max_length", _MAX_PROMPT)
    if not missing and kind.startswith("CLIPTokenizer") and not (isinstance(limit, int) and limit < _MAX_PROMPT):
        missing.append(f"model_max_length in {_TOKENIZER_CONFIG}")  # pipelines pad prompts to it
    return missing


def _check_json(file: Path) -> None:
    """Refuse a damaged or truncated JSON file."""
    size = file.stat().st_size
    if size <= _SMALL_FILE:
        read_json(file)
        return
    with file.open("rb") as content:
        content.seek(-64, os.SEEK_END)
        if not content.read().rstrip().endswith((b"}", b"]")):
            raise UserError(f"{file} is truncated.", "Copying or downloading it was interrupted.", _FIX)


def _pickles(folder: Path) -> list[Path]:
    """Return the .bin weights that loading reads: those of a folder without safetensors."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.bin"))


def check_pickle(file: Path) -> None:
    """Refuse a file by torch.save() that asks to run code, or that is truncated; files of torch before 1.6 pass."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as content:
                if content.read(2) == b"PK":  # a zip file without its end
                    raise zipfile.BadZipFile("its end is missing")
            return
        with zipfile.ZipFile(file) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            code = _foreign_code(archive.read(pickled))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{file} is damaged or truncated: {first_line(error)}.", fix=_FIX) from None
    if code:
        safe = file.with_name(file.name.replace("pytorch_model.bin", "model.safetensors", 1))
        if file.name.startswith("diffusion"):
            safe = file.with_suffix(".safetensors")
        raise UserError(
            f"{file} was not read, because it asks to run {code}.",
            "Weights may hold tensors only; anything else could run foreign code.",
            f"If you trust it, convert it to safetensors: {_TO_SAFETENSORS.format(file, safe)}",
        )


def _foreign_code(pickled: bytes) -> str:
    """Return the first class or function in a pickle that is not one of torch's; empty if there is none."""
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str) and opcode.name != "GLOBAL":
            texts.append(argument)
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            module, name = texts[-2:] if opcode.name == "STACK_GLOBAL" else str(argument).split(" ", 1)
            if module.partition(".")[0] not in _PICKLE_MODULES:
                return f"{module.replace('__builtin__', 'builtins')}.{name}"  # its name in Python 2
    return ""


def stored_parameters(folder: Path) -> int:
    """Count the parameters in the weights files of a folder."""
    sets: dict[str, int] = {}  # the same weights may be there in several precisions, each in one file or in shards
    for file in sorted(folder.glob("*.safetensors")):
        shard = _SHARD.fullmatch(file.name)
        name = f"{shard[1]}{shard[4]}" if shard else file.name
        sets[name] = sets.get(name, 0) + sum(map(math.prod, read_header(file)[0].values()))
    return max(sets.values(), default=0)


def weight_bytes(folder: Path, components: Sequence[str], bytes_per_parameter: int) -> dict[str, int]:
    """Estimate the memory of each component's weights."""
    counts = {name: stored_parameters(folder / name) for name in components}
    return {name: count * bytes_per_parameter for name, count in counts.items() if count}


def _missing_weights(folder: Path) -> list[str]:
    """Return the names of missing weights files; of several sets of weights one complete set is enough."""
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    sets: list[set[str]] = []
    for whole in (f"{stem}{suffix}" for stem in _STEMS for suffix in _SUFFIXES):
        if whole in files:
            return []
        index = f"{whole}.index.json"
        stem, suffix = os.path.splitext(whole)  # noqa: PTH122
        shards = [match for name in files if (match := _SHARD.fullmatch(name)) and match.group(1, 4) == (stem, suffix)]
        wanted = (
            {f"{stem}-{number:05d}-of-{shards[0][3]}{suffix}" for number in range(1, int(shards[0][3]) + 1)}
            if shards
            else set()
        )
        if index in files:
            wanted |= {str(name) for name in read_json(folder / index).get("weight_map", {}).values()}
        if wanted:
            sets.append(wanted | {index})
    if sets:
        return min((sorted(names - files) for names in sets), key=len)
    if variant := next((match for name in sorted(files) if (match := _VARIANT.fullmatch(name))), None):
        return [
            f"{variant[1]}.{variant[4]} (it has only the variant {variant[2]}: remove .{variant[2]} from the names)"
        ]
    return ["its weights (a .safetensors file)"]


def read_header(file: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the shapes by name, and the metadata, of a safetensors file; its header is checked against its length."""
    try:
        with safe_open(file, "numpy") as content:
            shapes = {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
            return shapes, content.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is damaged or truncated: {str(error).rstrip('.')}.",
            "Copying or downloading it was interrupted.",
            _FIX,
        ) from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}.", fix=_FIX) from None
    return content if isinstance(content, dict) else {}


def check_base(base: Path, description: Mapping[str, Any]) -> None:
    """Refuse to go on without the model that a run fine-tuned; `description` is that of its checkpoint."""
    network, lora = description.get("network", "transformer"), description.get("lora")
    if not (base / network / "config.json").is_file():
        raise UserError(
            f"The model that this run fine-tuned is no longer at {base}.",
            "Its VAE, text encoders and tokenizers are needed.",
            "Put it back.",
        )
    if lora and fingerprint(base / network) != lora["base"]:
        raise UserError(
            f"The {network} in {base} is not the one that LoRA was trained on.",
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
