"""DeepSpeed ZeRO: gradients and optimizer state sharded (stage 2), weights too (stage 3); the extra `deepspeed`.

DeepSpeed keeps flat shards of its own layout. Checkpoints are assembled from them, so that they are the same as those
of any other strategy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from muralist.models.spec import ModelSpec
from muralist.train import checkpoint
from muralist.train.distributed import World
from muralist.train.optim import EMA
from muralist.train.parallel import DataParallel, LossWrapper, Snapshot, blocks, full_tensor, gather_network

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedZero(DataParallel):
    """ZeRO stage 2 or 3; all processes assemble a checkpoint and the main one writes it."""

    main_saves_alone = False

    def __init__(self, world: World, stage: int) -> None:
        super().__init__(world)
        self.stage, self.is_sharded = stage, stage == 3
        self.layout = f"optimizer state {'and weights ' if self.is_sharded else ''}sharded over the GPUs (DeepSpeed)"
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.deepspeed: Any = None

    def wrap(
        self, module: LossWrapper, optimizer: torch.optim.Optimizer, compiled: bool, cuda_graphs: bool
    ) -> nn.Module:
        """Hand module and optimizer to DeepSpeed, which takes over backward and step."""
        warnings.filterwarnings(
            "ignore", category=FutureWarning, message=".*is deprecated. Please use `torch.distributed"
        )
        if self.is_sharded:
            from deepspeed.utils import set_z3_leaf_module

            for unit in blocks(module.network):  # type: ignore[arg-type]
                set_z3_leaf_module(unit, getattr(unit, "is_zero3_leaf", False))
        self.deepspeed, _ = self.world.accelerator.prepare(module, optimizer)
        # DeepSpeed creates this state at the first step, but links only the first parameter group to it.
        for flat in self._flat_weights():
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)}
            optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in _MOMENTS}
        if self.stage == 2:
            self.deepspeed.optimizer._lazy_init_hp_params_optimizer_state()
        return self.deepspeed

    def _flat_weights(self) -> list[Tensor]:
        zero = self.deepspeed.optimizer
        return zero.single_partition_of_fp32_groups if self.stage == 2 else zero.fp32_partitioned_groups_flat

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Set where a step ends: DeepSpeed counts its own accumulation steps otherwise."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which DeepSpeed averages over the processes."""
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def optimizer_step(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        max_grad_norm: float | None,
        skip_non_finite: bool = False,
        fused_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """Let DeepSpeed clip and step; skipping steps was refused before."""
        self.deepspeed.optimizer.clip_grad = max_grad_norm or 0.0
        self.deepspeed.step()
        return torch.as_tensor(self.deepspeed.get_global_grad_norm(), device=self.world.device)

    def trained_weights(self, network: nn.Module) -> dict[str, Tensor]:
        """The trained weights: full under stage 2; DeepSpeed's flat shards under stage 3."""
        return {name: self._local(p) for name, p in network.named_parameters() if p.requires_grad}

    def _local(self, parameter: Any) -> Tensor:
        if self.stage == 2:
            return parameter.detach()
        shard, count = parameter.ds_tensor.detach(), parameter.ds_numel
        held = min(len(shard), max(0, count - self.world.rank * len(shard)))  # the last shards are padded
        return DTensor.from_local(
            shard[:held], self.mesh, [Shard(0)], run_check=False, shape=torch.Size([count]), stride=(1,)
        )

    def load_emas(self, emas: list[EMA], states: list[dict[str, Tensor]]) -> None:
        """Load full EMA weights, which are flat here under stage 3."""
        if self.stage == 3:
            states = [{name: value.flatten() for name, value in state.items()} for state in states]
        super().load_emas(emas, states)

    def load_optimizer(self, path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read the full state and keep this process's shards of it."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        shapes = {name: _shape(parameter) for name, parameter in network.named_parameters() if parameter.requires_grad}
        state = {f"{name}.{key}": torch.zeros(shape) for name, shape in shapes.items() for key in _MOMENTS}
        state |= {f"{name}.step": torch.zeros(()) for name in shapes}
        checkpoint.read_state(path, state)
        for name, parameter in network.named_parameters():
            for key in _MOMENTS if parameter.requires_grad else ():
                value = state[f"{name}.{key}"].flatten()
                if self.stage == 2:
                    safe_set_full_optimizer_state(parameter, value.to(self.world.device), key)
                else:
                    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                    padded = nn.functional.pad(value, (0, size * self.world.size - len(value)))
                    shard = padded[self.world.rank * size :][:size].to(self.world.device)
                    safe_set_local_optimizer_state(parameter, shard, key)
        for flat in self._flat_weights():
            optimizer.state[flat]["step"].copy_(state[f"{next(iter(shapes))}.step"])

    def snapshot(
        self, spec: ModelSpec, network: nn.Module, optimizer: torch.optim.Optimizer, emas: list[EMA]
    ) -> Snapshot | None:
        """Assemble everything, one tensor at a time, in the main process's host memory."""
        from deepspeed.utils import safe_get_full_optimizer_state

        model: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        shapes = {name: _shape(parameter) for name, parameter in network.named_parameters()}
        (step, *_) = [optimizer.state[flat]["step"] for flat in self._flat_weights()]
        for name, parameter in network.named_parameters():
            if spec.is_saved(name):
                self._keep(model, name, full_tensor(self._local(parameter)).view(shapes[name]))
            if parameter.requires_grad:
                self._keep(state, f"{name}.step", step)
                for key in _MOMENTS:
                    self._keep(state, f"{name}.{key}", safe_get_full_optimizer_state(parameter, key))
        for name, buffer in network.named_buffers():
            if name in network.state_dict() and spec.is_saved(name):
                self._keep(model, name, buffer)
        weights = {"model": model}
        for number, ema in enumerate(emas, start=1):
            weights[f"ema{number}"] = dict(model)
            for name, value in ema.items():
                self._keep(weights[f"ema{number}"], name, full_tensor(value).view(shapes[name]))
        return Snapshot(weights, state) if self.world.is_main else None

    def _keep(self, tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.world.is_main:
            tensors[name] = tensor.detach().to("cpu", copy=True)

    def inference_network(self, spec: ModelSpec, network: nn.Module, ema: EMA) -> nn.Module | None:
        """Under stage 3, gather a full copy."""
        if self.stage == 2:
            return super().inference_network(spec, network, ema)
        shards = {name: self._local(parameter) for name, parameter in network.named_parameters()}
        return gather_network(self.world, spec, shards | dict(ema.items()))


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
