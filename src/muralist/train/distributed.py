"""The processes of a run: started by python, torchrun or accelerate alike, carried by Accelerate."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn


class Engine:
    """What the loop needs of a process group, one process included."""

    def __init__(self) -> None:
        # Gradients live in the buckets that are exchanged: no copy.
        replicated = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[replicated])

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.accelerator.process_index

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.accelerator.is_main_process

    def banner(self) -> str:
        """The proof that the launch took effect, as guide 2 prints it."""
        kind = self.accelerator.distributed_type.value if self.size > 1 else "NO"
        what = "GPUs" if self.device.type == "cuda" else "CPU processes"
        return f"Distributed environment: {kind}\nNumber of processes: {self.size}\nNumber of {what}: {self.size}"

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over the processes."""
        return self.accelerator.prepare_model(module) if self.size > 1 else module

    def exchange(self, module: nn.Module, now: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged only in the last part of a step."""
        return nullcontext() if now or self.size == 1 else self.accelerator.no_sync(module)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        return self._reduced(values, dist.ReduceOp.SUM) / self.size

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def smallest(self, value: int) -> int:
        """The smallest of the processes' values."""
        if self.size == 1:
            return value  # asked at every step: a tensor would make the host wait for the device
        return int(self._reduced(torch.tensor(value, device=self.device), dist.ReduceOp.MIN))

    def largest(self, value: int) -> int:
        """The largest of the processes' values: how one process's request reaches all."""
        if self.size == 1:
            return value
        return int(self._reduced(torch.tensor(value, device=self.device), dist.ReduceOp.MAX))

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, operation)
        return values

    def wait(self) -> None:
        """Meet the other processes."""
        self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Leave the process group; the caller has let go of model and optimizer (gloo aborts otherwise)."""
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone; gloo says so only in its text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "closed by peer" in str(error).lower()
