"""Asynchronous copies between host and GPU through pinned memory, in stream order."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to a device without waiting for it."""
    if device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        # Cast on the device: casting during the copy goes through pageable memory.
        # Contiguous: expanded tensors, such as time steps, cannot be pinned as they are.
        return tensor.contiguous().pin_memory().to(device=device, non_blocking=True).to(dtype or tensor.dtype)
    return tensor.to(device=device, dtype=dtype, copy=True)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory; the copy is complete when the stream reaches it."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor.detach(), non_blocking=True)
