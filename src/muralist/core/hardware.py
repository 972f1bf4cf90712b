"""The CPUs, GPUs and cache folder of this machine, and copies between host and GPU that do not wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from muralist.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def available_cpus() -> int:
    """Count the cores this process may use, which on a cluster are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_compile() -> bool:
    """Return whether Triton and the C compiler it needs are installed."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)


def nvidia_capability(device: torch.device | None = None) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, by default the current one, and (0, 0) for any other device.

    Kernels and FP8 are chosen by it alone: on AMD GPUs, torch reports architectures such as gfx942 as (9, 4).
    """
    import torch

    if torch.version.hip is not None or (device is not None and device.type != "cuda"):
        return 0, 0
    return torch.cuda.get_device_capability(device)


def cache_dir() -> Path:
    """Return the user's cache folder of muralist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "muralist"


def requested_processes() -> int | None:
    """Return NPROC, the number of processes per machine, or None if it is not set."""
    wanted = os.environ.get("NPROC", "")
    if wanted and not (wanted.isdecimal() and int(wanted)):
        raise UserError(f"NPROC is {wanted!r}: expected an integer above 0.")
    return int(wanted) if wanted else None


def default_processes() -> int:
    """Return NPROC, else the number of entries in CUDA_VISIBLE_DEVICES, else of GPUs, else 1."""
    if chosen := requested_processes():
        return chosen
    if visible := [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]:
        return len(visible)
    import torch

    return max(1, torch.cuda.device_count())


def select_devices(gpu_ids: Sequence[int]) -> dict[str, str]:
    """Return {label: device} for the workers: the chosen GPUs or all of them; without GPUs, CPU processes."""
    if len(set(gpu_ids)) < len(gpu_ids):
        raise UserError(f"--gpu_ids {' '.join(map(str, gpu_ids))} names a GPU twice.", fix="Name each GPU once.")
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return {str(label): "cpu" for label in gpu_ids or range(default_processes())}
    check_gpu_ids(gpu_ids, count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {str(gpu): f"cuda:{gpu}" for gpu in gpu_ids or range(count)}


def share_devices(devices: dict[str, str]) -> dict[str, str]:
    """Let NPROC processes share the devices, where NPROC is larger than their number."""
    names = list(devices.values())
    processes = requested_processes() or 0
    return {str(label): names[label % len(names)] for label in range(processes)} if processes > len(names) else devices


def check_gpu_ids(gpu_ids: Sequence[int], count: int, visible: str | None) -> None:
    """Raise if a GPU id does not exist."""
    if missing := [gpu for gpu in gpu_ids if gpu >= count]:
        seen = f"CUDA_VISIBLE_DEVICES is {visible}" if visible else "counted from 0"
        raise UserError(
            f"GPU {missing[0]} does not exist: {count} are visible ({seen}).",
            fix=f"Give --gpu_ids from 0 to {count - 1}, or leave it out to use all.",
        )


def copy_to_device(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to a device without waiting for it."""
    import torch

    if device is not None and torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        # Cast on the device: casting during the copy goes through pageable memory.
        # Contiguous: expanded tensors, such as time steps, cannot be pinned as they are.
        return tensor.contiguous().pin_memory().to(device=device, non_blocking=True).to(dtype or tensor.dtype)
    return tensor.to(device=device, dtype=dtype, copy=True)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory; the copy is complete when the stream reaches it."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    import torch

    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return kept.copy_(tensor.detach(), non_blocking=True)
