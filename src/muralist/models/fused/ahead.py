"""Kernels are compiled by a thread while torch.compile still traces the network that will start them.

Triton compiles a kernel when it is first started, one after the other: 10 to 20 seconds for those of a JiT, of which our
attention takes most. Tracing and what follows takes longer, and Triton leaves Python to others while it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from muralist.models.fused.tiles import Kind, Tiles

# One thread: calls that need the same code follow each other, and only the first compiles.
_compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
_asked_for: set[Any] = set()
_pending: dict[Any, list[Future[None]]] = {}


def compile_for(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Compile what such a call needs, if it is for a GPU and its numbers are known; returns at once."""
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    # Addresses are taken to be aligned. Where one is not, the call itself compiles.
    kinds = tuple(_kind(argument) for argument in arguments)
    if device.type != "cuda" or any(isinstance(number, torch.SymInt) for number in tree_leaves(kinds)):
        return
    wanted = kernel, device, kinds, tuple(options.items())
    if wanted not in _asked_for:
        _asked_for.add(wanted)
        _pending.setdefault(kernel, []).append(_compiler.submit(_compile, kernel, device, kinds, options))


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument.kind() if isinstance(argument, Tiles) else argument


def finish(kernel: Any) -> None:
    """Wait until nothing of this kernel is being compiled; what went wrong there, the call itself will tell."""
    if _pending:
        wait(_pending.pop(kernel, ()))


def _compile(kernel: Any, device: torch.device, kinds: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    with torch.cuda.device(device):  # a thread begins with the first
        described = (kind.described() if isinstance(kind, Kind) else kind for kind in kinds)
        kernel.warmup(*described, grid=(1,), **options)
