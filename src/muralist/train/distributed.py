"""The processes of a run: started by python, torchrun, accelerate or srun alike, carried by Accelerate."""

from __future__ import annotations

import gc
import importlib.util
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from torch import Tensor

from muralist.errors import UserError
from muralist.launch import configured_strategy
from muralist.settings import Strategy
from muralist.train.build_lock import clear_stale_locks
from muralist.train.heartbeat import WAITING, Heartbeat


class Engine:
    """What the loop needs of a process group, one process included."""

    def __init__(self, strategy: Strategy = "auto", timeout: float = 600.0, heartbeat: Heartbeat | None = None) -> None:
        self.heartbeat = heartbeat
        self.timeout = timedelta(seconds=timeout + 60)  # later than the heartbeat, which can name what is missing
        alone = "LOCAL_RANK" not in os.environ
        self.strategy: Strategy = "ddp" if alone else configured_strategy() if strategy == "auto" else strategy
        # Gradients live in the buckets that are exchanged: no copy.
        handlers: list[KwargsHandler] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        gpus, zero = torch.cuda.is_available(), self.strategy in ("zero2", "zero3")
        if not alone:
            # Small agreements between hosts go through gloo: through NCCL each would make the host wait for its GPU.
            backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            handlers.append(InitProcessGroupKwargs(backend=backend, timeout=self.timeout))
        self._report_waiting()
        self.accelerator = Accelerator(
            cpu=not gpus and not zero,  # told that there is only a CPU, Accelerate would leave DeepSpeed out
            kwargs_handlers=handlers,
            deepspeed_plugin=_deepspeed_plugin(int(self.strategy[-1])) if zero else None,
        )
        if zero:
            from transformers.integrations import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()  # or transformers would cut every model it loads, frozen ones too, into parts

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
    def device_name(self) -> str:
        """What that is called: a card's full name, or CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.accelerator.is_main_process

    def banner(self) -> str:
        """The proof that the launch took effect, as guide 2 prints it."""
        gpus = self.device.type == "cuda"
        kind = "NO" if self.size == 1 else "MULTI_GPU" if gpus else "MULTI_CPU"
        what = "GPUs" if gpus else "CPU processes"
        return f"Distributed environment: {kind}\nNumber of processes: {self.size}\nNumber of {what}: {self.size}"

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        return self.total(values) / self.size

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.size > 1:
            self._report_waiting()
            values = values.clone()
            dist.all_reduce(values)
        return values

    def smallest(self, value: int) -> int:
        """The smallest of the processes' values."""
        return -self.largest(-value)

    def largest(self, value: int) -> int:
        """The largest of the processes' values: how one process's request reaches all."""
        if self.size > 1:
            self._report_waiting()
            agreed = torch.tensor(value)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            return int(agreed)
        return value

    def wait(self) -> None:
        """Meet the other processes."""
        self.largest(0)

    def _report_waiting(self) -> None:
        if self.heartbeat:
            self.heartbeat.report(WAITING)

    def end(self) -> None:
        """Leave the process group; the caller has let go of model and optimizer (gloo aborts otherwise)."""
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone; gloo says so only in its text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "closed by peer" in str(error).lower()


def _deepspeed_plugin(stage: int) -> DeepSpeedPlugin:
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"--strategy zero{stage} needs DeepSpeed, which is not installed.",
            fix="Install it with `pip install 'muralist[deepspeed]'`, or use --strategy fsdp2, which needs nothing more.",
        )
    clear_stale_locks()  # it may compile as early as when it meets the other processes
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, not used: the step is ours
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
