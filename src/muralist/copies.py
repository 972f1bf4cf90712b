"""Copies between a GPU and its host that make neither wait: page-locked memory, in the order of the GPU's queue."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """A copy on a device, in the order of its queue; the host goes on at once."""
    if device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        # Cast on the device: a cast on the way goes through ordinary memory.
        # Contiguous: what is expanded, as time steps are, cannot be page-locked as it lies.
        return tensor.contiguous().pin_memory().to(device=device, non_blocking=True).to(dtype or tensor.dtype)
    return tensor.to(device=device, dtype=dtype, copy=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory: there once the device's queue has come so far, which later copies back rely on."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor.detach(), non_blocking=True)
