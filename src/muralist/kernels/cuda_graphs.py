"""CUDA graphs of networks that are only evaluated, without gradients: those of a pipeline.

A graph holds the same kernels in the same order on the same memory and is launched at once, so that the GPU never waits
for Python to launch thousands of kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
_MAX_GRAPHS = 16  # of one network; each keeps its list of kernels on the GPU
_MAX_STEPS_AHEAD = 2  # of the host before the GPU: with more, heartbeats would come long before the work
_CONSTANTS = (int, float, bool, str, type(None))


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
    """The CUDA graphs of some networks: one for each input shape of each.

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
