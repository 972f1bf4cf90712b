"""What this machine has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from muralist.errors import UserError
from muralist.launch import chosen_processes


def usable_cores() -> int:
    """Count the cores this process may use, which on a cluster are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_compile() -> bool:
    """Whether Triton is installed, and the C compiler that it calls."""
    compilers = (os.environ.get("CC"), "gcc", "clang")
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)


def user_cache() -> Path:
    """The folder of this user for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "muralist"


def choose_devices(gpu_ids: Sequence[int]) -> dict[str, str]:
    """Label and device of each worker: the GPUs that were named, else all; without GPUs, CPU processes stand in."""
    if len(set(gpu_ids)) < len(gpu_ids):
        raise UserError(f"--gpu_ids {' '.join(map(str, gpu_ids))} names a GPU twice.", fix="Name each GPU once.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        listed = [entry for entry in (visible or "").split(",") if entry]
        labels = list(gpu_ids) or list(range(chosen_processes() or len(listed) or 1))
        return {str(label): "cpu" for label in labels}
    refuse_missing(gpu_ids, count, visible)
    return {str(gpu): f"cuda:{gpu}" for gpu in gpu_ids or range(count)}


def refuse_missing(gpu_ids: Sequence[int], count: int, visible: str | None) -> None:
    """Refuse ids of GPUs that are not there."""
    if missing := [gpu for gpu in gpu_ids if gpu >= count]:
        seen = f"CUDA_VISIBLE_DEVICES is {visible}" if visible else "counted from 0"
        raise UserError(
            f"There is no GPU {missing[0]}: {count} can be seen ({seen}).",
            fix=f"Give --gpu_ids from 0 to {count - 1}, or leave it out to use all.",
        )
