"""Reads weights for everybody, wherever they were written, and writes the diffusers-style folder that others load.

Nothing here runs code out of a file: safetensors hold tensors only, and a .pth is unpickled by torch's restricted
reader, with argparse.Namespace (the official checkpoints keep their flags in one) as the only addition.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from muralist import __version__
from muralist.errors import UserError
from muralist.loading import Advance, loading
from muralist.models.jit import JiT
from muralist.models.lora import ADAPTER_FILE, read_adapter
from muralist.models.variants import MLP_RATIO, VARIANTS
from muralist.runfolder import disk_error, flush_folder, no_space, write_json

Which = Literal["model", "ema1", "ema2"]

CLASS_NAME = "JiTTransformer2DModel"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
OFFICIAL_FILE = "checkpoint-last.pth"
_OFFICIAL_NAMES = {"model": "model", "ema1": "model_ema1", "ema2": "model_ema2"}
_OFFICIAL_PREFIX = "net."
_MOST_PIXELS = (
    1 << 16
)  # along one side; of nothing is there more than this, so that a lie in a file does not fill the memory
_PAGE, _READ_AT_ONCE = 4096, 1 << 24  # bytes
_MOST_TOKENS, _MOST_BLOCKS = 1024, 1000  # tokens along one side
_Side = Annotated[int, Field(ge=1, le=_MOST_PIXELS)]
# What a network is; `recomputed` is how it is trained.
_JIT_ARGUMENTS = tuple(name for name in inspect.signature(JiT).parameters if name != "recomputed")
_FRACTIONS = ("mlp_ratio", "attn_drop", "proj_drop")  # of them; the others count something


def read_weights(path: str | Path, which: Which = "ema1") -> dict[str, Tensor]:
    """Weights by name, on the CPU, from a run, a checkpoint, an export, a .safetensors file or an official .pth file.

    An export, a LoRA folder of PEFT's and a .safetensors file hold one set of weights, and give that one whichever is asked
    for.
    """
    file = weights_file(Path(path), which)
    if not file.is_file():
        raise UserError(f"There are no weights at {file}.", fix="Check the path.")
    if file.name == ADAPTER_FILE:
        return _read_adapter(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    if file.suffix in (".pth", ".pt"):
        return _read_official(file, which)
    raise UserError(
        f"{file} is not a weights file.", fix="Give a .safetensors or .pth file, or a folder that holds one."
    )


def read_description(source: Path) -> dict[str, Any]:
    """What a checkpoint, or a run's latest one, says of its model in its manifest; nothing for weights made elsewhere."""
    manifest = latest_checkpoint(source) / "manifest.json"
    try:
        description = dict(json.loads(manifest.read_text())["model"]) if manifest.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{manifest} is damaged: it is not a checkpoint manifest.") from None
    if description:
        try:
            _Description.model_validate(description)
        except ValidationError as error:
            first = error.errors()[0]
            said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"{manifest} is damaged: its model is not described as it should be ({said}).") from None
    return description


class _Description(BaseModel):
    """What other commands rely on in a description; the families write more."""

    model_config = ConfigDict(strict=True)

    family: Literal["jit", "hunyuandit"] = "jit"
    model: str
    img_size: _Side | Annotated[list[_Side], Field(min_length=2, max_length=2)]
    label_names: list[str] = []
    objective: dict[str, str | int | float] = {}
    folder: str = ""
    lora: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> _Description:
        if self.family == "hunyuandit" and not self.folder:
            raise ValueError("the folder of the model that was fine-tuned is missing")
        if self.family == "jit" and not isinstance(self.img_size, int):
            raise ValueError("JiT makes square pictures")
        return self


def _latest(run: Path) -> Path | None:
    """The checkpoint that a run names as its latest; None for a folder that is no run."""
    file = run / "checkpoints" / "latest"
    if not file.is_file():
        return None
    try:
        name = file.read_text().strip()
    except (OSError, ValueError):
        name = ""
    if not re.fullmatch(r"step_[0-9]{7,20}", name):  # not a path that leads elsewhere
        raise UserError(f"{file} is damaged: it does not name a checkpoint.", fix="Give the checkpoint's own folder.")
    return file.parent / name


def latest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a run; any other path is what it is."""
    return _latest(path) or path


def holds_one_set(path: Path) -> bool:
    """Whether there is nothing to choose: an export and a .safetensors file have no averages beside their weights."""
    return path.suffix == ".safetensors" or (path / WEIGHTS_FILE).is_file()


def weights_file(path: Path, which: Which) -> Path:
    """The file inside a folder that holds the wanted weights."""
    if not path.is_dir():
        return path
    if latest := _latest(path):
        return latest / f"{which}.safetensors"
    names = (f"{which}.safetensors", WEIGHTS_FILE, OFFICIAL_FILE, ADAPTER_FILE)
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UserError(
            f"There are no {which} weights in the folder {path}.",
            f"It holds none of {', '.join(names)}.",
            "Give a run, a checkpoint, an export or an official output folder.",
        )
    return found[0]


def _damaged(file: Path, error: Exception) -> UserError:
    said = (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")
    return UserError(
        f"{file} cannot be read: it is cut short, damaged, or not what its name says.",
        f"The reader said: {said}.",
        "Copy the file anew from where it was written.",
    )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with loading(str(file), file) as advance:
            weights = load_file(file)
            if advance:
                _read_through(weights, advance)
            return weights
    except Exception as error:  # what a foreign file can make a reader raise has no end
        raise _damaged(file, error) from None


def _read_through(weights: Mapping[str, Tensor], advance: Advance) -> None:
    """Touch what is only mapped: else it would be read, unseen, where it is first used."""
    for value in weights.values():
        for part in value.reshape(-1).view(torch.uint8).split(_READ_AT_ONCE):
            part[::_PAGE].sum()
            advance(part.numel())


def _read_adapter(file: Path) -> dict[str, Tensor]:
    try:
        return read_adapter(file.parent)
    except UserError:
        raise
    except Exception as error:  # as above
        raise _damaged(file, error) from None


def _read_official(file: Path, which: Which) -> dict[str, Tensor]:
    """One set of weights out of an official checkpoint, its names without the wrapper's prefix."""
    with loading(str(file), file) as advance:
        checkpoint = _unpickle(file, advance)
    key = _OFFICIAL_NAMES[which]
    state = checkpoint.get(key) if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        holds = ", ".join(map(str, list(checkpoint)[:8])) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise UserError(f"{file} has no weights named {key}.", f"It holds: {holds}.", "Choose another set of weights.")
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise UserError(f"{file} holds something other than a tensor under {key}: {strange[0]}.")
    # Cloned, because the file is mapped: the copy outlives it, and the other sets and the optimizer take no memory.
    return {name.removeprefix(_OFFICIAL_PREFIX): value.detach().clone() for name, value in state.items()}


def _unpickle(file: Path, advance: Advance | None) -> Any:
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():  # torch checks no checksum of a mapped file; reading to the end does
                with archive.open(member) as stream:
                    while part := stream.read(_READ_AT_ONCE):
                        if advance:
                            advance(len(part))
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what a foreign file can make a reader raise has no end
        named = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named is None:
            raise _damaged(file, error) from None
        raise UserError(
            f"{file} was not read, because it asks to run {named[1]}.",
            "A checkpoint may hold tensors, plain values and argparse.Namespace; anything else could run foreign code.",
            "If you trust the file, save its weights as .safetensors where it was made.",
        ) from None


def infer_jit_config(state: Mapping[str, Tensor], in_context_start: int | None = None) -> dict[str, Any]:
    """The network's arguments, from the shapes of its weights.

    The block where context tokens enter leaves no trace in the weights: it is that of the variant of the same width and
    depth, unless it is given.
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
        in_context_start = _known_start(hidden, depth) if context else 0
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
    _require_fit(config, state)
    return config


def _known_start(hidden: int, depth: int) -> int:
    for variant in VARIANTS.values():
        if (variant.hidden_size, variant.depth) == (hidden, depth):
            return variant.in_context_start
    raise UserError(
        f"The block at which context tokens enter is unknown for {hidden} channels and {depth} blocks.",
        "The weights do not tell, and no known variant has these sizes.",
        f"Load from a folder whose {CONFIG_FILE} names in_context_start.",
    )


def _require_fit(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse weights that a network of these arguments could not load."""
    try:
        _require_sizes(config)
        with torch.device("meta"):
            network = JiT(**jit_arguments(config))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise UserError("No network has these sizes.", f"The reason: {str(error).splitlines()[0]}.") from None
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            want, have = expected.get(name, "nothing"), given.get(name, "nothing")
            raise UserError("The weights do not fit the network.", f"For {name} it takes {want} and they hold {have}.")


def _require_sizes(config: Mapping[str, Any]) -> None:
    """Refuse what is no size before anything of that size is made."""
    for name, value in jit_arguments(config).items():
        largest = 1e6 if name == "num_classes" else _MOST_PIXELS
        kind = int | float if name in _FRACTIONS else int
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value <= largest:
            raise ValueError(f"{name} is {value!r:.60}")
    if config["input_size"] // max(1, config["patch_size"]) > _MOST_TOKENS or config["depth"] > _MOST_BLOCKS:
        raise ValueError(
            f"{config['input_size']} pixels in patches of {config['patch_size']}, {config['depth']} blocks"
        )


def jit_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the network's constructor takes out of a folder's config."""
    return {name: config[name] for name in _JIT_ARGUMENTS}


def write_jit_folder(folder: str | Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write config.json and the weights as one folder that appears whole; an earlier export there is replaced.

    The config holds the network's arguments and what else a reader should know, such as `label_names` and `objective`.
    """
    final = Path(folder).absolute()
    if final.exists() and not (final.is_dir() and (_is_export(final) or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not an export.", fix="Name a folder that does not exist yet.")
    _require_fit(config, state)
    aside, old = (final.with_name(f".{final.name}.{os.getpid()}.{word}") for word in ("tmp", "old"))
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    try:
        aside.mkdir(parents=True)
        write_json(aside / CONFIG_FILE, {"_class_name": CLASS_NAME, "_muralist_version": __version__, **config})
        save_file(tensors, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors lets only the owner read; an export is for others, as far as the user's mask allows.
        shutil.copymode(aside / CONFIG_FILE, aside / WEIGHTS_FILE)
        with (aside / WEIGHTS_FILE).open("rb") as file:
            os.fsync(file.fileno())
        flush_folder(aside)
        if final.exists():
            final.replace(old)
        aside.replace(final)
        flush_folder(final.parent)
    except (OSError, SafetensorError) as error:
        if old.exists() and not final.exists():
            old.replace(final)
        raise no_space(disk_error(error), final) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)


def _is_export(folder: Path) -> bool:
    try:
        return bool(read_config(folder))
    except UserError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """The config of an exported folder."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not an exported model: it has no {CONFIG_FILE}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from None
    if not isinstance(config, dict) or config.get("_class_name") != CLASS_NAME:
        raise UserError(f"{file} does not describe a JiT network.", f"Its _class_name is not {CLASS_NAME}.")
    missing = [name for name in _JIT_ARGUMENTS if name not in config]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}.", fix="Export the model again.")
    try:
        _require_sizes(config)
    except ValueError as error:
        raise UserError(
            f"No network has the sizes that {file} names.", f"{error}.", "Export the model again."
        ) from None
    return config


def read_jit_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of an exported folder."""
    path = Path(folder)
    config, state = read_config(path), read_weights(path / WEIGHTS_FILE)
    _require_fit(config, state)
    return config, state
