"""Inference optimizations: torch.compile, fused kernels, FP8, and copies that do not wait.

Images stay bit-identical from run to run: Inductor chooses its kernels by rules instead of timings, with one graph for
each image size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from muralist.core.hardware import can_compile, copy_to_device, nvidia_capability
from muralist.kernels.fp8 import QuantizedRows, fp8_matmul, is_aligned, quantize_rowwise

log = logging.getLogger(__name__)

_MAX_IMAGE_SIZES = 64  # in one prompt table; each has its own graph
_HOPPER = (9, 0)
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_MIN_FP8_SIDE = 1024  # below it quantization costs more than the matmul gains


@dataclass(frozen=True)
class Optimizations:
    """The optimizations of a pipeline."""

    compiled: bool = False  # the denoiser's blocks and the VAE's decoder
    single_frame_2d: bool = True  # single frames of a video VAE; and channels-last, the format for 2D convolutions
    cudnn_attention: bool = True  # preferred on Hopper and later
    fused_gelu: bool = True  # GELU in the GEMM before it
    fused_qk_norm_rope: bool = True  # of Wan's self-attention, where it is compiled
    cuda_graphs: bool = True  # for the passes of compiled denoisers and text encoders

    @classmethod
    def choose(cls, compiled: bool | str, device: torch.device) -> Optimizations:
        """As --compile says; auto: compile on GPUs where a compiler is available."""
        return cls(compiled=device.type == "cuda" and can_compile() if compiled == "auto" else bool(compiled))

    def apply(self, pipe: Any, networks: list[nn.Module], device: torch.device) -> dict[str, str]:
        """Prepare a diffusers pipeline; return the details that change the last bits of its images, for the ledger.

        The first batch compiles.
        """
        from muralist.generate import diffusers_patches

        vae = getattr(pipe, "vae", None)
        on_gpu = device.type == "cuda"
        if self.single_frame_2d and vae is not None:
            diffusers_patches.decode_single_frames_in_2d(vae)
            for part in (vae, *networks) if on_gpu else ():
                for module in part.modules():
                    if isinstance(module, nn.Conv2d):  # 2D convolutions are faster in this format
                        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.fused_gelu and on_gpu:
            for network in networks:
                diffusers_patches.fuse_linear_gelu(network)
        if not self.compiled:
            return {}
        details: dict[str, str] = {}
        compile_deterministically()
        for network in networks:
            if self.fused_qk_norm_rope and on_gpu and diffusers_patches.fuse_qk_norm_rope(network):
                details["rotation"] = "in one kernel"
            for block in diffusers_patches.repeated_blocks(network):
                block.compile(dynamic=False)
        decoder = getattr(vae, "decoder", None)
        if isinstance(decoder, nn.Module):
            decoder.compile(dynamic=False)
        return details

    @contextmanager
    def active(self, device: torch.device, eager: bool) -> Iterator[None]:
        """For one call of a pipeline; an `eager` call neither compiles nor runs compiled code."""
        with ExitStack() as stack:
            if self.compiled and eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.cudnn_attention and nvidia_capability(device) >= _HOPPER:
                stack.enter_context(sdpa_kernel(_ATTENTION, set_priority=True))
            yield


def compile_deterministically() -> None:
    """Let Inductor choose kernels by rules instead of timings, with one graph for each image size."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.deterministic = True  # timings would change kernels, and with them the order of sums
    dynamo.automatic_dynamic_shapes = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 * _MAX_IMAGE_SIZES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 64 * _MAX_IMAGE_SIZES)


class Fp8Linear(nn.Module):
    """A linear layer with row-wise FP8 inputs and weights; the original layer stays, for exact mode."""

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original = original
        self.exact = False
        weight, scale = quantize_rowwise(original.weight.detach())
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.in_features, self.out_features, self.bias = original.in_features, original.out_features, original.bias

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self.exact:
            return self.original(x)
        rows = quantize_rowwise(x.reshape(-1, x.shape[-1]))
        out = fp8_matmul(rows, QuantizedRows(self.weight, self.scale), fast_accum=False).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


def use_fp8(blocks: Iterable[nn.Module], min_side: int = _MIN_FP8_SIDE) -> list[Fp8Linear]:
    """Replace the large linear layers within these blocks by FP8 layers."""
    layers: list[Fp8Linear] = []
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is not nn.Linear or isinstance(parent, Fp8Linear):
                    continue
                sides = (layer.in_features, layer.out_features)
                if min(sides) >= min_side and is_aligned(*sides):
                    layers.append(Fp8Linear(layer))
                    setattr(parent, name, layers[-1])
    return layers


@contextmanager
def exact_matmuls(layers: Iterable[Fp8Linear]) -> Iterator[None]:
    """Let these layers compute with their original weights."""
    layers = list(layers)
    for layer in layers:
        layer.exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.exact = False


class NonBlockingCopies(TorchFunctionMode):
    """Copies small tensors to the GPU through pinned memory without waiting, and solves equations without a check.

    Pipelines send tokens, sizes and means, their schedulers some numbers at every step, and UniPC solves two equations;
    each waits until the GPU's queue is empty. The results are the same. `_pop_mode_temporarily`, private to torch,
    suspends the mode inside the networks, which copy nothing, launch thousands of kernels and would be compiled again.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._wanted = device.type == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept `Tensor.to`, `torch.tensor`, `torch.as_tensor` and `torch.linalg.solve`."""
        kwargs = kwargs or {}
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **kwargs).result
        if func is Tensor.to and _is_copyable(args[0]):
            device, dtype = _target(*args[1:], *kwargs.values())
            if _is_gpu(device):
                return copy_to_device(args[0], device, dtype)
        from_numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(next(iter(args), None), Tensor)
        if from_numbers and _is_gpu(kwargs.get("device")):
            created = func(*args, **(kwargs | {"device": "cpu"}))
            if _is_copyable(created):
                return copy_to_device(created, kwargs["device"])
        return func(*args, **kwargs)

    def active(self) -> AbstractContextManager[Any]:
        """For one call of a pipeline."""
        return self if self._wanted else nullcontext()

    def suspended(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a network so that it runs outside this mode."""

        @functools.wraps(work)
        def run(*args: Any, **kwargs: Any) -> Any:
            # Only where this mode is on top: another mode above it must stay.
            with _pop_mode_temporarily() if _get_current_function_mode() is self else nullcontext():
                return work(*args, **kwargs)

        return run

    def disable(self) -> None:
        """Leave every copy to torch from now on."""
        self._wanted = False


def _target(*arguments: Any) -> tuple[Any, torch.dtype | None]:
    """The device and dtype among the arguments of `Tensor.to`; no device where they name a memory format."""
    device, dtype = None, None
    for value in arguments:
        if isinstance(value, torch.memory_format):
            return None, None
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and not isinstance(value, bool):  # non_blocking, copy
            device = value
    return device, dtype


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_copyable(tensor: Tensor) -> bool:
    """Whether a tensor is plain data on the host, in the memory order that a copy would have."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.requires_grad)
        and tensor.numel() > 0
        and (tensor.is_contiguous() or 0 in tensor.stride())
    )
