"""The process group of a run, started by python, torchrun, accelerate or srun alike; Accelerate sets it up."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, KwargsHandler
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muralist.core.errors import UserError
from muralist.settings import DistBackend, Strategy, accelerate_strategy
from muralist.train.watchdog import WAITING, Watchdog

log = logging.getLogger("muralist")
_STALE_LOCK = 600.0  # seconds without a change in the folder of an extension that is being compiled


class World:
    """All processes of a run, or the only one: rank, size, device and collectives; rank 0 is the main process."""

    def __init__(
        self,
        strategy: Strategy = "auto",
        timeout: float = 600.0,
        watchdog: Watchdog | None = None,
        backend: DistBackend = "auto",
    ) -> None:
        self.watchdog = watchdog
        self.timeout = timedelta(seconds=timeout + 60)  # later than the watchdog, which can name the missing process
        alone = "LOCAL_RANK" not in os.environ
        self.strategy: Strategy = "ddp" if alone else accelerate_strategy() if strategy == "auto" else strategy
        handlers: list[KwargsHandler] = []
        gpus, zero = torch.cuda.is_available(), self.strategy in ("zero2", "zero3")
        self._report_waiting()
        if not alone:
            # Kept, because it may host the server to which the process group connects too.
            self._store, rank, size = next(dist.rendezvous("env://", timeout=self.timeout))
            self.gpus = count_gpus(self._store, rank, size) if gpus else 0
            backends = process_group_backends(backend, size, self.gpus)
            handlers.append(InitProcessGroupKwargs(backend=backends, timeout=self.timeout))
        self.accelerator = Accelerator(
            cpu=not gpus and not zero,  # with cpu=True Accelerate ignores the DeepSpeed plugin
            kwargs_handlers=handlers,
            deepspeed_plugin=_deepspeed_plugin(int(self.strategy[-1])) if zero else None,
        )
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        if alone:
            self.gpus = int(gpus)
        if zero:
            from transformers.integrations import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()  # or transformers would shard every model it loads, frozen ones too

    @property
    def device_name(self) -> str:
        """The GPU's full name, or CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def banner(self) -> str:
        """Lines that show that the launch took effect."""
        kind = "NO" if self.size == 1 else "MULTI_GPU" if self.gpus else "MULTI_CPU"
        devices = f"GPUs: {self.gpus}" if self.gpus else f"CPU processes: {self.size}"
        lines = [f"Distributed environment: {kind}", f"Number of processes: {self.size}", f"Number of {devices}"]
        if 0 < self.gpus < self.size:
            lines.append(f"{self.size} processes share {self.gpus} GPU{'s' * (self.gpus > 1)}: collectives use gloo")
        return "\n".join(lines)

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """Mean of a tensor over the processes."""
        return self.all_reduce_sum(values) / self.size

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum of a tensor over the processes."""
        if self.size > 1:
            self._report_waiting()
            values = values.clone()
            dist.all_reduce(values)
        return values

    def all_reduce_min(self, value: int) -> int:
        """Smallest of the processes' values."""
        return -self.all_reduce_max(-value)

    def all_reduce_max(self, value: int) -> int:
        """Largest of the processes' values, so that a request to one process reaches all."""
        if self.size > 1:
            self._report_waiting()
            tensor = torch.tensor(value)
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return int(tensor)
        return value

    def barrier(self) -> None:
        """Wait for the other processes."""
        self.all_reduce_max(0)

    def _report_waiting(self) -> None:
        if self.watchdog:
            self.watchdog.report(WAITING)

    def close(self) -> None:
        """Destroy the process group; the caller has released model and optimizer (gloo aborts otherwise)."""
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def count_gpus(store: dist.Store, rank: int, size: int) -> int:
    """Count the different GPUs of all processes, by UUID: how many a process sees does not tell whether it shares one."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may be on other GPUs, with the same store
    store = dist.PrefixStore(f"muralist/gpus/{attempt}", store)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()  # as Accelerate chooses it
    store.set(str(rank), str(torch.cuda.get_device_properties(index).uuid))
    if rank == 0:
        store.set("count", str(len({store.get(str(other)) for other in range(size)})))
    return int(store.get("count"))


def process_group_backends(wanted: DistBackend, size: int, gpus: int) -> str:
    """Return the backends of a process group whose processes use `gpus` different GPUs; 0 stands for CPU processes.

    CPU tensors always go through gloo: through NCCL, the host would wait for its GPU at every small agreement.
    """
    if wanted == "nccl" and gpus < size:
        have = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU"
        raise UserError(
            f"--dist_backend nccl needs a GPU for each process: {size} processes have {have}.",
            "NCCL does not connect processes that share a GPU.",
            "Leave --dist_backend out to use gloo, or start one process per GPU.",
        )
    return "cpu:gloo,cuda:nccl" if wanted != "gloo" and gpus == size else "gloo"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process ended; gloo says so only in its message."""
    text = str(error).lower()
    told = isinstance(error, dist.DistError) or "gloo" in text or "closed by peer" in text
    return isinstance(error, RuntimeError) and told


def _deepspeed_plugin(stage: int) -> DeepSpeedPlugin:
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"--strategy zero{stage} needs DeepSpeed, which is not installed.",
            fix="Install it with `pip install 'muralist[deepspeed]'`, or use --strategy fsdp2, which needs no package.",
        )
    remove_stale_extension_locks()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but unused: the step is ours
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def remove_stale_extension_locks() -> None:
    """Remove lock files of killed extension builds: torch would wait for them at every later start, without a message.

    DeepSpeed compiles extensions through torch, which deletes its lock file only if the build is not killed. The lock
    does not say who holds it, so it counts as stale when nothing in the folder has changed for ten minutes.
    """
    from torch.utils.cpp_extension import get_default_build_root

    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    for lock in Path(own).glob("*/lock") if own else Path(get_default_build_root()).glob("*/*/lock"):
        with suppress(OSError):  # released, or removed by another process
            if time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir()) > _STALE_LOCK:
                lock.unlink()
                log.warning("Removed %s, the stale lock of an extension build that was killed.", lock)
            elif os.environ.get("LOCAL_RANK", "0") == "0":
                log.warning("DeepSpeed waits for a running extension build; if there is none, delete %s.", lock)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; others are returned as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    shared_gpu = tensor.device.type == "cuda" and dist.get_backend(tensor.device_mesh.get_group()) == "gloo"
    if shared_gpu and any(placement.is_shard() for placement in tensor.placements):
        # DTensor's gather of GPU tensors through gloo ends in a segmentation fault (torch 2.11); that of CPU tensors works.
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        shards = DTensor.from_local(
            tensor.to_local().cpu(), mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        return shards.full_tensor().to(tensor.device)
    return tensor.full_tensor()
