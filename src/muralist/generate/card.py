"""Keeps a GPU at work: what goes to it and comes from it does not make its host wait, and its idle time is measured.

A GPU works through a queue that the host fills. The host falls behind only where it must wait for a result, and there the
queue runs empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

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

    Pipelines of diffusers send tokens, sizes and means, their schedulers a few numbers at every step, and UniPC solves two
    equations; each by itself waits until the queue is empty. The results are the same.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stands before every function of torch."""
        named = kwargs or {}
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **named).result
        if func is Tensor.to and _can_be_copied(args[0]):
            device, dtype = _target(*args[1:], *named.values())
            if _is_gpu(device):
                return to_device(args[0], device, dtype)
        of_numbers = func in (torch.tensor, torch.as_tensor) and not isinstance(next(iter(args), None), Tensor)
        if of_numbers and _is_gpu(named.get("device")):
            made = func(*args, **(named | {"device": "cpu"}))
            if _can_be_copied(made):
                return to_device(made, named["device"])
        return func(*args, **named)


def _target(*wanted: Any) -> tuple[Any, torch.dtype | None]:
    """Which device and type the arguments of `Tensor.to` name; no device where they name an order of the numbers."""
    device, dtype = None, None
    for value in wanted:
        if isinstance(value, torch.memory_format):
            return None, None
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and not isinstance(value, bool):  # whether to wait, whether to copy
            device = value
    return device, dtype


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether there is no more to a tensor than numbers on the host, in the order in which a copy would have them."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.requires_grad)
        and tensor.numel() > 0
        and (tensor.is_contiguous() or 0 in tensor.stride())
    )


class Ease:
    """Lets a pipeline's calls go on without waiting for a GPU, with `Unhurried` around everything but the large parts.

    These copy nothing and are thousands of kernels, before each of which it would stand; and what is compiled would be
    compiled again for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._mode = Unhurried()
        self._wanted = device.type == "cuda"

    @contextmanager
    def on(self) -> Iterator[None]:
        """For one call of a pipeline."""
        with self._mode if self._wanted else nullcontext():
            yield

    def paused(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """What is to be called in the place of a large part."""

        @functools.wraps(work)
        def run(*inputs: Any, **named: Any) -> Any:
            # Where it is not on top, it is off, or somebody else's mode would be taken away.
            with _pop_mode_temporarily() if _get_current_function_mode() is self._mode else nullcontext():
                return work(*inputs, **named)

        return run

    def end(self) -> None:
        """From now on everything is copied as torch does it."""
        self._wanted = False


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
