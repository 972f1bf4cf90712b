"""Passes of networks and text encoders recorded once and replayed: the host says one word where it said two thousand.

A pass of a large one is some thousand kernels, each handed to the card by Python. Where that takes longer than the
kernels themselves, the card waits. A recording (a CUDA graph) holds the same kernels in the same order with the same memory,
so pictures stay the same to the bit. Every pass, the first too, is a replay.
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

from muralist.generate.card import is_out_of_memory

log = logging.getLogger(__name__)

_MOST = 16  # recordings: each keeps its list of kernels on the card
_AHEAD = 2  # steps that the host may be ahead of the card: more would only make its signs of life wrong
_PLAIN = (int, float, bool, str, type(None))

Work = Callable[[], Any]
Record = Callable[[Work], tuple[Any, Callable[[], None]]]


class _Recording(NamedTuple):
    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]


class Recorder:
    """Stands in a network's place; while `on`, inputs of each shape are recorded at their first pass."""

    def __init__(self, forward: Callable[..., Any], record: Record) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._record = forward, record
        self._recordings: dict[Any, _Recording | None] = {}
        self.on = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the network says to these."""
        leaves, structure = tree_flatten((inputs, named))
        if not self.on or not _all_known(leaves):
            return self._forward(*inputs, **named)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if (
            len({tensor.device for tensor in tensors}) != 1
        ):  # a number that lies on the host would be recorded as it is now
            return self._forward(*inputs, **named)
        key = (str(structure), *map(_kind, leaves))
        if key not in self._recordings:
            self._recordings[key] = self._recorded(leaves, structure) if len(self._recordings) < _MOST else None
        recording = self._recordings[key]
        if recording is None:
            return self._forward(*inputs, **named)
        for place, tensor in zip(recording.inputs, tensors, strict=True):
            place.copy_(tensor)
        recording.replay()
        return tree_map_only(Tensor, torch.clone, recording.output)  # the next replay writes there again

    @property
    def holds_memory(self) -> bool:
        """Whether there is a recording."""
        return any(recording is not None for recording in self._recordings.values())

    def forget(self) -> None:
        """Give the memory of all recordings back."""
        self._recordings.clear()

    def _recorded(self, leaves: Sequence[Any], structure: Any) -> _Recording | None:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs, named = tree_unflatten(own, structure)
        try:
            output, replay = self._record(lambda: self._forward(*inputs, **named))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # It asks the card for a number, which a recording cannot do.
            log.info("%s cannot be recorded and is run step by step: %s", getattr(self, "__qualname__", ""), error)
            return None
        if not _all_known(tree_flatten(output)[0]):
            log.info("%s returns more than tensors and is run step by step.", getattr(self, "__qualname__", ""))
            return None  # such as a cache, in which the next replay would write
        return _Recording([leaf for leaf in own if isinstance(leaf, Tensor)], output, replay)


def _all_known(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf


class CardRecords:
    """Records on a GPU; all recordings share memory, because only one is replayed at a time and its result is copied."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Work) -> tuple[Any, Callable[[], None]]:
        """Run it once, which compiles and loads what it needs, then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # In the stream's own context: where recording fails, torch may leave it current. Threads that write pictures may
            # talk to the card meanwhile.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                output = work()
        except RuntimeError:
            self._end()
            raise
        return output, graph.replay

    def _end(self) -> None:
        """Take the memory of a recording that failed out of use, which older versions of torch do not."""
        with suppress(RuntimeError):  # it has
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = None


class Recorders:
    """Those of one pipeline: its networks and text encoders are recorded where `record` is given."""

    def __init__(self, record: Record | None) -> None:
        self.record = record
        self._recorders: list[Recorder] = []
        self._marks: list[Any] = []

    @classmethod
    def of(cls, wanted: bool, device: torch.device) -> Recorders:
        """For pipelines on a device: recording is a thing of GPUs."""
        return cls(CardRecords() if wanted and device.type == "cuda" else None)

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What is to be called in a network's place."""
        if self.record is None:
            return forward
        self._recorders.append(Recorder(forward, self.record))
        return self._recorders[-1]

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        """For one call of the pipeline; when memory runs out in it and recordings may be why, there are none any more."""
        self._turn(wanted)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) and any(recorder.on or recorder.holds_memory for recorder in self._recorders):
                log.warning("Memory is short: passes of the networks are not recorded any more.")
                self.give_up()
            raise
        finally:
            self._turn(False)

    def give_up(self) -> None:
        """From now on every pass is run step by step."""
        self._turn(False)
        for recorder in self._recorders:
            recorder.forget()
        self._recorders.clear()

    def step(self) -> None:
        """A step has been handed to the card: wait until the one before the last is done, and show life truly."""
        if not any(recorder.on for recorder in self._recorders):
            return
        mark = torch.cuda.Event()
        mark.record()
        self._marks.append(mark)
        if len(self._marks) > _AHEAD:
            self._marks.pop(0).synchronize()

    def _turn(self, on: bool) -> None:
        for recorder in self._recorders:
            recorder.on = on
        self._marks.clear()
