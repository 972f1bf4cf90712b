"""The matmul rate of the hardware at hand: what model FLOPs are measured against (MFU)."""

from __future__ import annotations

import time

import torch


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product on random data: the best of a few, half a second at most."""
    side = 8192 if device.type == "cuda" else 768
    generator = torch.Generator(device="cpu").manual_seed(0)
    a, b = (torch.rand(side, side, generator=generator).to(device, dtype) - 0.5 for _ in range(2))
    best, deadline = float("inf"), time.perf_counter() + 0.5
    for round_number in range(12):
        _finish(device)
        start = time.perf_counter()
        a @ b
        _finish(device)
        if round_number > 1:  # the first rounds load kernels and wake the clocks
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() > deadline:
                break
    return 2 * side**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
