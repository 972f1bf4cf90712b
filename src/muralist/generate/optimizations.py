"""Inference optimizations: torch.compile, fused kernels, FP8, CUDA graphs, and copies that do not wait.

Images stay bit-identical from run to run: Inductor chooses its kernels by rules instead of timings, with one graph for
each image size. A CUDA graph holds the same kernels in the same order on the same memory and is launched at once, so
that the GPU never waits for Python to launch thousands of kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

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
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
_MAX_GRAPHS = 16  # of one network; each keeps its list of kernels on the GPU
_MAX_STEPS_AHEAD = 2  # of the host before the GPU: with more, heartbeats would come long before the work
_CONSTANTS = (int, float, bool, str, type(None))


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the host's or the GPU's memory is exhausted."""
    message = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in message for sign in _OUT_OF_MEMORY)
    )


class _Graph(NamedTuple):
    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]


class CudaGraphs:
    """The CUDA graphs of one pipeline: one for each input shape of its denoisers and text encoders.

    All share one memory pool: one graph is replayed at a time, and its output is cloned.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self.active = False
        self._graphs: list[dict[Any, _Graph | None]] = []  # of each wrapped forward pass, by its inputs
        self._steps: list[torch.cuda.Event] = []
        self._pool: Any = None

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Capture a forward pass, while graphs are enabled, at the first call with each input shape; then replay it."""
        if not self._wanted:
            return forward
        graphs: dict[Any, _Graph | None] = {}
        self._graphs.append(graphs)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # A tensor on the host would be captured with the value that it has now.
            one_device = len({tensor.device for tensor in tensors}) == 1
            if not self.active or not _all_supported(leaves) or not one_device:
                return forward(*args, **kwargs)
            key = (str(structure), *map(_signature, leaves))
            if key not in graphs:
                graphs[key] = self._graph(forward, leaves, structure) if len(graphs) < _MAX_GRAPHS else None
            graph = graphs[key]
            if graph is None:
                return forward(*args, **kwargs)
            for static, tensor in zip(graph.inputs, tensors, strict=True):
                static.copy_(tensor)
            graph.replay()
            return tree_map_only(Tensor, torch.clone, graph.output)  # the next replay overwrites the static output

        return run

    def _graph(self, forward: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> _Graph | None:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, structure)
        name = getattr(forward, "__qualname__", "")
        try:
            output, replay = self._capture(lambda: forward(*args, **kwargs))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            log.info("%s runs without a CUDA graph, because it reads values back from the GPU: %s", name, error)
            return None
        if not _all_supported(tree_flatten(output)[0]):
            # Such as a key-value cache, whose tensors the next replay would overwrite.
            log.info("%s runs without a CUDA graph, because it returns more than tensors.", name)
            return None
        return _Graph([leaf for leaf in static if isinstance(leaf, Tensor)], output, replay)

    def _capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run work once, which compiles its kernels, then capture it; returns its static output and the replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Inside the stream's own context: a failed capture may leave the stream current. Thread-local, because
            # threads that save images may use the GPU meanwhile.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                output = work()
        except RuntimeError:
            with suppress(RuntimeError):  # torch may have ended the allocation to the pool of a failed capture or not
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = None
            raise
        return output, graph.replay

    @contextmanager
    def enabled(self, wanted: bool) -> Iterator[None]:
        """For one call of the pipeline; disables graphs for good if memory runs out and graphs may hold some of it."""
        self._steps.clear()
        self.active = wanted and self._wanted
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and (self.active or self.hold_memory):
                log.warning("Out of memory: CUDA graphs are off from now on.")
                self.disable()
            raise
        finally:
            self.active = False

    @property
    def hold_memory(self) -> bool:
        """Whether at least one graph was captured."""
        return any(graph is not None for graphs in self._graphs for graph in graphs.values())

    def disable(self) -> None:
        """Free all graphs and run every pass kernel by kernel from now on."""
        self._wanted = self.active = False
        for graphs in self._graphs:
            graphs.clear()

    def step(self) -> None:
        """Mark the end of a denoising step and wait until the GPU is at most two steps behind: heartbeats stay true."""
        if not self.active:
            return
        event = torch.cuda.Event()
        event.record()
        self._steps.append(event)
        if len(self._steps) > _MAX_STEPS_AHEAD:
            self._steps.pop(0).synchronize()


def _all_supported(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves)


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


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
