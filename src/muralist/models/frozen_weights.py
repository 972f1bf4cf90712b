"""Frozen weights of LoRA training in less memory: in bf16, FP8 or 4 bits, or in host memory (`--swap_blocks`).

Only the weights of linear layers in a network's repeated blocks change: nearly all of its parameters. Under bf16 autocast,
bf16 storage gives the same numbers as float32, because autocast rounds these weights anyway.

FP8 (e4m3) has one scale per output channel, a power of two: a weight is then exact in bf16. 4-bit weights are NF4 in
blocks of 64, quantized and dequantized by bitsandbytes, the extra `optimizers`. A layer dequantizes its weight in the
forward and again in the backward pass, so that never more than a few dequantized weights exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.kernels.fp8 import FP8, FP8_MAX, MIN_SCALE
from muralist.models.integrity import read_json
from muralist.settings.train import BasePrecision

_NF4_BLOCK = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CHUNK = 1 << 25  # bytes of pinned memory: torch rounds each allocation up to a power of two
_ALIGNMENT = 256  # bytes
_INDEX, _WEIGHTS = "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained, with its weight in another precision or in host memory."""

    scale: Tensor | None

    def __init__(self, layer: nn.Linear, precision: BasePrecision) -> None:
        """Take over the shape and bias of a layer; its weight comes by `store`."""
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.bias, self.precision = layer.bias, precision
        self.swap: BlockSwap | None = None
        self.register_buffer("scale", None)
        self.store(torch.empty(layer.weight.shape, device="meta"))

    @torch.no_grad()
    def store(self, weight: Tensor, device: torch.device | str = "cpu") -> None:
        """Quantize a weight where it is, and keep the result on a device."""
        if weight.is_meta:
            device = "meta"
        values, scale = _quantize(weight, self.precision)
        self.weight = nn.Parameter(values.to(device, copy=True), requires_grad=False)  # not the mapped file
        self.scale = None if scale is None else scale.to(device)

    def forward(self, input: Tensor) -> Tensor:
        """Compute x W^T + b in the precision of autocast, or else of the input."""
        kind = input.device.type
        x = input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.swap is not None:
            return _Swapped.apply(x, bias, self)  # type: ignore[no-any-return, no-untyped-call]
        if self.weight.dtype == x.dtype:
            return F.linear(x, self.weight, bias)
        return _Dequantized.apply(  # type: ignore[no-any-return, no-untyped-call]
            x, bias, self.weight, self.scale, self
        )

    def dequantize(self, values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that stored values stand for."""
        if scale is None:
            return values.to(dtype)
        if self.precision == "fp8":
            return values.view(FP8).to(dtype) * scale.to(dtype)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        shape = torch.Size((self.out_features, self.in_features))
        state = QuantState(absmax=scale, shape=shape, dtype=dtype, blocksize=_NF4_BLOCK, quant_type="nf4")
        return dequantize_4bit(values, state)


def _quantize(weight: Tensor, precision: BasePrecision) -> tuple[Tensor, Tensor | None]:
    """Return stored values and their scale; bytes of integer type, so that no cast of the network changes them."""
    if precision in _DTYPES:
        return weight.to(_DTYPES[precision]), None
    if weight.is_meta:
        count, (rows, _) = weight.numel(), weight.shape
        shapes = (weight.shape, (rows, 1)) if precision == "fp8" else ((-(-count // 2), 1), (-(-count // _NF4_BLOCK),))
        return torch.empty(shapes[0], dtype=torch.uint8, device="meta"), torch.empty(shapes[1], device="meta")
    weight = weight.float()
    if precision == "fp8":
        largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=MIN_SCALE)
        scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
        return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), scale
    from bitsandbytes.functional import quantize_4bit

    values, state = quantize_4bit(weight, blocksize=_NF4_BLOCK, quant_type="nf4")
    return values, state.absmax


class _Dequantized(torch.autograd.Function):
    """A linear layer that keeps its stored weight for the backward pass, not the dequantized one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, values: Tensor, scale: Tensor | None, layer: FrozenLinear
    ) -> Tensor:
        ctx.save_for_backward(values, scale)
        ctx.layer = layer
        return F.linear(x, layer.dequantize(values, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _input_gradient(dy, ctx.layer.dequantize(*ctx.saved_tensors, dy.dtype)), None, None, None, None


class _Swapped(torch.autograd.Function):
    """The same for a layer in host memory: its weight is fetched again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        assert layer.swap is not None
        return F.linear(x, layer.dequantize(*layer.swap.fetch(layer, x.device), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        stored = ctx.layer.swap.fetch(ctx.layer, dy.device)
        return _input_gradient(dy, ctx.layer.dequantize(*stored, dy.dtype)), None, None


def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Multiply as torch's own linear layer does, for the same bits: as one matrix of rows."""
    return (dy.reshape(-1, dy.shape[-1]) @ weight).view(*dy.shape[:-1], weight.shape[1])


class _Place(NamedTuple):
    """Where a layer's stored tensors are: the block, and offset, shape and dtype of each in its bytes."""

    block: int
    parts: list[tuple[int, torch.Size, torch.dtype]]


class BlockSwap:
    """Blocks whose stored weights are in pinned host memory, and two buffers on the device, each for one block.

    While a block computes, the next one is copied on a stream of its own. The next one is the following block in the
    forward pass and the preceding one in the backward pass.
    """

    def __init__(self, blocks: Sequence[Sequence[FrozenLinear]]) -> None:
        """Move the weights of blocks to host memory."""
        self._places: dict[FrozenLinear, _Place] = {}
        self._host = [self._pack(number, layers) for number, layers in enumerate(blocks)]
        self._buffers: list[Tensor] = []
        self._held = [-1, -1]  # the block in each buffer
        self._current = -1
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []

    def _pack(self, number: int, layers: Sequence[FrozenLinear]) -> list[Tensor]:
        """Pack the stored tensors of a block into chunks of pinned memory."""
        flat: list[Tensor] = []
        offset = 0
        for layer in layers:
            place = self._places[layer] = _Place(number, [])
            for tensor in (layer.weight, layer.scale):
                if tensor is None:
                    continue
                place.parts.append((offset, tensor.shape, tensor.dtype))
                size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                padded = torch.zeros(size, dtype=torch.uint8)
                padded[: tensor.nbytes] = tensor.detach().reshape(-1).view(torch.uint8).cpu()
                flat.append(padded)
                offset += size
            layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            layer.scale, layer.swap = None, self
        chunks = torch.cat(flat).split(_CHUNK)
        return [chunk.pin_memory() if torch.cuda.is_available() else chunk.clone() for chunk in chunks]

    def fetch(self, layer: FrozenLinear, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return a layer's stored weight and scale on the device; valid until another block is fetched."""
        block, parts = self._places[layer]
        if block != self._current:
            self._enter(block, device)
        held = self._buffers[self._held.index(block)]
        found = [held[at : at + shape.numel() * kind.itemsize].view(kind).view(shape) for at, shape, kind in parts]
        return found[0], found[1] if len(found) > 1 else None

    def _enter(self, block: int, device: torch.device) -> None:
        """Wait for the copy of a block, and begin that of the block after it."""
        if not self._buffers:
            size = max(sum(map(len, chunks)) for chunks in self._host)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in self._held]
            if device.type == "cuda":
                self._stream, self._copied = torch.cuda.Stream(device), [torch.cuda.Event() for _ in self._held]
        ahead = block - 1 if block < self._current else block + 1
        self._copy(block, keep=self._current)
        self._current = block
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_event(self._copied[self._held.index(block)])
        if 0 <= ahead < len(self._host):
            self._copy(ahead, keep=block)

    def _copy(self, block: int, keep: int) -> None:
        """Copy a block, unless it is on the device, into the buffer that does not hold the block `keep`."""
        if block in self._held:
            return
        number = 1 if self._held[0] == keep else 0
        self._held[number] = block
        targets = self._buffers[number].split(_CHUNK)
        if self._stream is None:
            for target, chunk in zip(targets, self._host[block], strict=False):
                target[: len(chunk)].copy_(chunk)
            return
        # Work that still reads the buffer is on the stream of the caller.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, chunk in zip(targets, self._host[block], strict=False):
                target[: len(chunk)].copy_(chunk, non_blocking=True)
            self._copied[number].record(self._stream)


def prepare(network: nn.Module, block_names: Sequence[str], precision: BasePrecision) -> None:
    """Replace the linear layers in the blocks of a network on the meta device."""
    for block in _blocks(network, block_names):
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    setattr(parent, name, FrozenLinear(layer, precision))


@torch.no_grad()
def load(network: nn.Module, tensors: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu") -> None:
    """Assign weights to a prepared network on the meta device, one at a time; quantized on a device, kept on the CPU."""
    for name, value in tensors:
        path, _, leaf = name.rpartition(".")
        try:
            module = network.get_submodule(path)
        except AttributeError:
            continue  # reported below, unless nothing is missing
        shape = (
            (module.out_features, module.in_features) if isinstance(module, FrozenLinear) and leaf == "weight" else None
        )
        held = getattr(module, leaf, None)
        expected = shape or (held.shape if isinstance(held, Tensor) else value.shape)
        if value.shape != expected:
            raise UserError(
                f"The weights of {type(network).__name__} do not fit its config: {name} is {[*value.shape]} instead of "
                f"{[*expected]}.",
                "It is of another model, or of an older version of diffusers.",
                "Copy the model again, or give --base_precision fp32, which also reads older files.",
            )
        if isinstance(module, FrozenLinear) and leaf == "weight":
            module.store(value.to(device))
        elif module._buffers.get(leaf) is not None:
            module._buffers[leaf] = value.to(module._buffers[leaf].dtype, copy=True)  # type: ignore[union-attr]
        elif leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value.to(torch.float32, copy=True), requires_grad=False)
    if missing := [name for name, weight in network.named_parameters() if weight.is_meta]:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(
            f"The weights of {type(network).__name__} are incomplete: {missing[0]}{others} missing.",
            "Their names are not those of this version of diffusers.",
            "Give --base_precision fp32, which also reads older files.",
        )


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a network's folder, one file in memory at a time."""
    files = sorted(set(read_json(folder / _INDEX).get("weight_map", {}).values())) or [_WEIGHTS]
    if not (folder / files[0]).is_file():
        raise UserError(
            f"{folder} has no {files[0]}.",
            "Frozen weights in less than float32 are read from safetensors files only.",
            "Give --base_precision fp32, or a folder that was saved with safetensors.",
        )
    for file in files:
        yield from load_file(folder / file).items()


def swap_blocks(network: nn.Module, block_names: Sequence[str], count: int) -> None:
    """Keep the linear layers of `count` blocks, evenly spread, in host memory; these blocks are not compiled."""
    if not count:
        return
    blocks = [block for block in _blocks(network, block_names) if _layers(block)]
    if count > len(blocks):
        raise UserError(
            f"--swap_blocks {count} is too many: {type(network).__name__} has {len(blocks)} blocks.",
            fix=f"Give at most --swap_blocks {len(blocks)}.",
        )
    chosen = [blocks[math.ceil((number + 1) * len(blocks) / count) - 1] for number in range(count)]
    BlockSwap([_layers(block) for block in chosen])
    for block in chosen:
        block.compile = lambda *_, **__: None  # type: ignore[assignment]  # streams cannot be compiled


def count_swapped(network: nn.Module, block_names: Sequence[str]) -> tuple[int, int]:
    """Return how many blocks a network can swap, and the parameters that stay on the device when all are swapped.

    These are the parameters outside of the blocks' linear layers, and two buffers of the largest block.
    """
    counts = []
    for block in _blocks(network, block_names):
        linear = (layer for layer in block.modules() if type(layer) is nn.Linear)
        counts.append(sum(layer.weight.numel() for layer in linear))
    swapped = [count for count in counts if count]
    total = sum(parameter.numel() for parameter in network.parameters())
    return len(swapped), total - sum(swapped) + 2 * max(swapped, default=0)


def count_frozen(network: nn.Module, is_saved: Callable[[str], bool]) -> tuple[int, int]:
    """Count the parameters that checkpoints do not hold, and their bytes without those in host memory."""
    frozen = [parameter for name, parameter in network.named_parameters() if not is_saved(name)]
    layers = _layers(network)
    count = sum(map(Tensor.numel, frozen)) + sum(
        layer.in_features * layer.out_features - layer.weight.numel() for layer in layers
    )
    return count, sum(p.nbytes for p in frozen) + sum(x.scale.nbytes for x in layers if x.scale is not None)


def _layers(module: nn.Module) -> list[FrozenLinear]:
    return [layer for layer in module.modules() if isinstance(layer, FrozenLinear)]


def _blocks(network: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the blocks of a network, without those that are inside of others."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in network.modules():
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found
