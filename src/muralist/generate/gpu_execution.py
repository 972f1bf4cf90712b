"""Keep the GPU's queue full: CUDA graphs, host-to-device copies that do not wait, and the measurement of idle time.

A GPU works through a queue of kernels that the host fills. The queue runs empty where the host waits for a result, and
where Python takes longer to launch some thousand kernels than the GPU to run them. A CUDA graph holds the same kernels
in the same order on the same memory and is launched at once, so images stay bit-identical.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from muralist.core.hardware import copy_to_device, copy_to_host

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
_MAX_GRAPHS = 16  # each keeps its list of kernels on the GPU
_MAX_STEPS_AHEAD = 2  # of the host before the GPU: with more, heartbeats would come long before the work
_CONSTANTS = (int, float, bool, str, type(None))

Work = Callable[[], Any]
Capture = Callable[[Work], tuple[Any, Callable[[], None]]]
"""Captures work as a graph: its static output, and the function that replays the graph."""


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


class GraphedCallable:
    """A forward pass that, while `enabled`, is captured at the first call with each input shape and then replayed."""

    def __init__(self, forward: Callable[..., Any], capture: Capture) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._capture = forward, capture
        self._graphs: dict[Any, _Graph | None] = {}
        self.enabled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pass; the first call with a shape is a replay too."""
        leaves, structure = tree_flatten((args, kwargs))
        if not self.enabled or not _all_supported(leaves):
            return self._forward(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A tensor on the host would be captured with the value that it has now.
        if len({tensor.device for tensor in tensors}) != 1:
            return self._forward(*args, **kwargs)
        key = (str(structure), *map(_signature, leaves))
        if key not in self._graphs:
            self._graphs[key] = self._captured(leaves, structure) if len(self._graphs) < _MAX_GRAPHS else None
        graph = self._graphs[key]
        if graph is None:
            return self._forward(*args, **kwargs)
        for static, tensor in zip(graph.inputs, tensors, strict=True):
            static.copy_(tensor)
        graph.replay()
        return tree_map_only(Tensor, torch.clone, graph.output)  # the next replay overwrites the static output

    @property
    def holds_memory(self) -> bool:
        """Whether at least one graph was captured."""
        return any(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._graphs.clear()

    def _captured(self, leaves: Sequence[Any], structure: Any) -> _Graph | None:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, structure)
        name = getattr(self, "__qualname__", "")
        try:
            output, replay = self._capture(lambda: self._forward(*args, **kwargs))
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


def _all_supported(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: one is replayed at a time, and its output is cloned."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Work) -> tuple[Any, Callable[[], None]]:
        """Run the work once, which compiles and loads its kernels, then capture it."""
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
            self._release_pool()
            raise
        return output, graph.replay

    def _release_pool(self) -> None:
        """Stop allocating to the pool of a failed capture, which older versions of torch do not."""
        with suppress(RuntimeError):  # newer versions have done so
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = None


class CudaGraphs:
    """The CUDA graphs of one pipeline: its denoisers and text encoders, captured where `capture` is given."""

    def __init__(self, capture: Capture | None) -> None:
        self.capture = capture
        self._callables: list[GraphedCallable] = []
        self._steps: list[torch.cuda.Event] = []

    @classmethod
    def on_device(cls, wanted: bool, device: torch.device) -> CudaGraphs:
        """Use CUDA graphs where they are wanted and the device is a GPU."""
        return cls(CudaCapture() if wanted and device.type == "cuda" else None)

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to be called in place of a forward pass."""
        if self.capture is None:
            return forward
        self._callables.append(GraphedCallable(forward, self.capture))
        return self._callables[-1]

    @contextmanager
    def enabled(self, wanted: bool) -> Iterator[None]:
        """For one call of the pipeline; disables graphs for good if memory runs out and graphs may hold some of it."""
        self._set(wanted)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and any(each.enabled or each.holds_memory for each in self._callables):
                log.warning("Out of memory: CUDA graphs are off from now on.")
                self.disable()
            raise
        finally:
            self._set(False)

    def disable(self) -> None:
        """Free all graphs and run every pass kernel by kernel from now on."""
        self._set(False)
        for each in self._callables:
            each.clear()
        self._callables.clear()

    def step(self) -> None:
        """Mark the end of a denoising step and wait until the GPU is at most two steps behind: heartbeats stay true."""
        if not any(each.enabled for each in self._callables):
            return
        event = torch.cuda.Event()
        event.record()
        self._steps.append(event)
        if len(self._steps) > _MAX_STEPS_AHEAD:
            self._steps.pop(0).synchronize()

    def _set(self, enabled: bool) -> None:
        for each in self._callables:
            each.enabled = enabled
        self._steps.clear()


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


class GpuClock:
    """Measures for which fraction of the time a GPU had work, with CUDA events; on other devices it measures nothing.

    `enter` and `leave` mark where the host begins and ends to fill the queue. The GPU's time between a `leave` and the
    next `enter` is idle time. Gaps between the kernels of one filling are not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._left: Any = None
        self._last_end: Any = None
        self._gaps: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        """Mark that work follows."""
        if self._is_gpu and self._left is not None:
            self._gaps.append((self._left, self._event()))
            self._left = None

    def leave(self) -> None:
        """Mark that no work follows for now."""
        if self._is_gpu:
            self._left = self._event()

    def batch(self) -> BatchTiming | None:
        """Return the marks since the end of the last batch, after `leave`; None for the first batch."""
        if not self._is_gpu:
            return None
        start, gaps = self._last_end, self._gaps
        self._last_end, self._gaps = self._left, []
        return None if start is None else BatchTiming(start, self._left, gaps)

    def reset(self) -> None:
        """Treat the next batch as the first: the work before it was not ordinary generation."""
        self._left = self._last_end = None
        self._gaps = []

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class BatchTiming(NamedTuple):
    """The CUDA events of one batch."""

    start: Any
    end: Any
    gaps: list[tuple[Any, Any]]

    def busy(self) -> float:
        """The fraction of time with work between the end of the last batch and the end of this one."""
        self.end.synchronize()
        total = self.start.elapsed_time(self.end)
        idle = sum(before.elapsed_time(after) for before, after in self.gaps)
        return max(0.0, 1.0 - idle / total) if total > 0 else 1.0


class PendingCopy:
    """A batch of images that is being copied from the device; implements `PendingBatch`."""

    def __init__(self, pixels: Tensor, finite: Tensor, timing: BatchTiming | None, non_finite: Exception) -> None:
        """Start copying pixels [B, ..., H, W, 3] in uint8; `wait` raises `non_finite` unless `finite`."""
        self._pixels, self._finite = copy_to_host(pixels), copy_to_host(finite)
        self._copied: Any = None
        if pixels.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._timing, self._non_finite = timing, non_finite
        self.ready = self._copied is None
        self.gpu_busy: float | None = None

    def wait(self) -> list[Any]:
        """Return the images."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._timing is not None:
            self.gpu_busy = self._timing.busy()
        if not bool(self._finite):
            raise self._non_finite
        return list(self._pixels.numpy())
