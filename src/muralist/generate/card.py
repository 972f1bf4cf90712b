"""Keeps a GPU at work: what goes to it and comes from it does not make its host wait, and its idle time is measured.

A GPU works through a queue that the host fills. The host falls behind only where it must wait for a result, and there the
queue runs empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from muralist.copies import to_device, to_host

_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, the host's or the GPU's."""
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _NO_MEMORY)
    )


class Unhurried(TorchFunctionMode):
    """Within it, small things go to the GPU without waiting for it, and nobody looks whether an equation could be solved.

    Schedulers of diffusers send a few numbers at every step, and UniPC solves two equations; each by itself waits until the
    queue is empty. The results are the same.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stands before every function of torch."""
        named = kwargs or {}
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **named).result
        if func is torch.Tensor.to and args[0].device.type == "cpu":
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **named)
            if device is not None and device.type == "cuda":
                return to_device(args[0], device, dtype)
        return func(*args, **named)


class CardClock:
    """For which part of the time a GPU had work, by its own clock; on other devices nothing is measured.

    `enter` and `leave` stand where the host begins and ends to fill the queue. What passes on the GPU between a `leave` and
    the next `enter` is time in which the queue was empty. Pauses between the kernels of one filling are not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._left: Any = None
        self._end_of_last: Any = None
        self._pauses: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        """Work follows."""
        if self._events and self._left is not None:
            self._pauses.append((self._left, self._mark()))
            self._left = None

    def leave(self) -> None:
        """No work follows for now."""
        if self._events:
            self._left = self._mark()

    def batch(self) -> BatchTime | None:
        """What was marked since the last batch ended; to be asked after `leave`. None for the first."""
        if not self._events:
            return None
        began, pauses = self._end_of_last, self._pauses
        self._end_of_last, self._pauses = self._left, []
        return None if began is None else BatchTime(began, self._left, pauses)

    def forget(self) -> None:
        """The next batch is a first one again: what came before it was no work of the usual kind."""
        self._left = self._end_of_last = None
        self._pauses = []

    @staticmethod
    def _mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class BatchTime:
    """The marks of one batch, readable once the GPU has passed them."""

    def __init__(self, began: Any, ended: Any, pauses: list[tuple[Any, Any]]) -> None:
        self._began, self._ended, self._pauses = began, ended, pauses

    def busy(self) -> float:
        """The part of the time between the end of the last batch and of this one in which there was work."""
        self._ended.synchronize()
        whole = self._began.elapsed_time(self._ended)
        idle = sum(before.elapsed_time(after) for before, after in self._pauses)
        return max(0.0, 1.0 - idle / whole) if whole > 0 else 1.0


class Copying:
    """A batch of pictures on its way from the device."""

    def __init__(self, pixels: Tensor, whole: Tensor, time: BatchTime | None, overflowed: Exception) -> None:
        """Pixels [B, ..., H, W, 3] in uint8, and whether all numbers behind them were finite."""
        self._pixels, self._whole = to_host(pixels), to_host(whole)
        self._arrived: Any = None
        if pixels.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._time, self._overflowed = time, overflowed
        self.there = self._arrived is None
        self.gpu_busy: float | None = None

    def wait(self) -> list[Any]:
        """The pictures, or the error if some numbers were not finite."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._time is not None:
            self.gpu_busy = self._time.busy()
        if not bool(self._whole):
            raise self._overflowed
        return list(self._pixels.numpy())
