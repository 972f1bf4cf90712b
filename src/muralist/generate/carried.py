"""Weights on their way to a GPU: through page-locked memory and by several threads.

torch brings one after the other, each from where it lies. That is a file mapped into memory, which is read page by page, by
one thread, into a page-locked buffer of the driver: a fraction of what the bus can carry. The bytes are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from muralist.machine import usable_cores

_LANES = 4  # threads; with more, they would wait for each other
_PIECE = 1 << 24  # bytes
_LARGE = 1 << 20  # bytes


def carry(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Bring the large weights of modules to a device; what is small or unusual is left where it is, for `Module.to`."""
    weights = {id(weight): weight for module in modules for weight in module.parameters() if _is_plain(weight)}
    try:
        lanes = [_lane(device) for _ in range(min(_LANES, usable_cores()) if weights else 0)]
    except RuntimeError:
        return  # this machine grants no page-locked memory, and torch's own way needs none
    there = {key: torch.empty_like(weight, device=device) for key, weight in weights.items()}
    pieces: deque[tuple[Tensor, Tensor]] = deque()
    for key, weight in weights.items():
        pieces.extend(zip(_bytes(weight).split(_PIECE), _bytes(there[key]).split(_PIECE), strict=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # memory that was in use before is written by other queues now
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        for carried in [pool.submit(_carry, pieces, lane, device) for lane in lanes]:
            carried.result()
    for key, weight in weights.items():
        weight.data = there[key]


def _is_plain(weight: nn.Parameter) -> bool:
    """Whether a copy of its bytes is a copy of it, and worth a thread."""
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and weight.numel() * weight.element_size() >= _LARGE
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _lane(device: torch.device) -> Tensor:
    return torch.empty(_PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _carry(pieces: deque[tuple[Tensor, Tensor]], lane: Tensor, device: torch.device) -> None:
    """Carry pieces as long as there are any."""
    queue = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(queue) if queue else nullcontext():
        while pieces:
            try:
                source, target = pieces.popleft()
            except IndexError:
                return  # another thread had the last
            part = lane[: len(source)].copy_(source)
            target.copy_(part, non_blocking=True)
            if queue:
                queue.synchronize()
