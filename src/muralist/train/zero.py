"""DeepSpeed's ZeRO: gradients and optimizer state in parts (stage 2), weights too (stage 3); the extra `deepspeed`.

DeepSpeed keeps its parts as flat pieces of its own cut. Checkpoints are put together from them, so that they are the same
as those of any other strategy.
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

from muralist.models.family import Family
from muralist.train import checkpoint
from muralist.train.distributed import Engine
from muralist.train.ema import WeightAverage
from muralist.train.loss_module import LossModule
from muralist.train.strategy import Replicated, Snapshot, gathered_network, units, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Replicated):
    """ZeRO stage 2 or 3; all processes put a checkpoint together and the main one writes it."""

    saves_alone = False

    def __init__(self, engine: Engine, stage: int) -> None:
        super().__init__(engine)
        self.stage, self.in_parts = stage, stage == 3
        self.words = (
            "optimizer state " + ("and weights " if self.in_parts else "") + "in parts over the GPUs (DeepSpeed)"
        )
        self.mesh = init_device_mesh(engine.device.type, (engine.size,))
        self.deepspeed: Any = None

    def wrap(self, module: LossModule, optimizer: torch.optim.Optimizer, compiled: bool, graphs: bool) -> nn.Module:
        """Hand module and optimizer to DeepSpeed; it takes over from backward to step."""
        warnings.filterwarnings(
            "ignore", category=FutureWarning, message=".*is deprecated. Please use `torch.distributed"
        )
        if self.in_parts:
            from deepspeed.utils import set_z3_leaf_module

            for unit in units(module.network):  # type: ignore[arg-type]
                set_z3_leaf_module(unit, getattr(unit, "gathered_as_one", False))
        self.deepspeed, _ = self.engine.accelerator.prepare(module, optimizer)
        # DeepSpeed makes this state at the first step, but links only the first group of parameters to it.
        for flat in self._flat_weights():
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)}
            optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in _MOMENTS}
        if self.stage == 2:
            self.deepspeed.optimizer._lazy_init_hp_params_optimizer_state()
        return self.deepspeed

    def _flat_weights(self) -> list[Tensor]:
        zero = self.deepspeed.optimizer
        return zero.single_partition_of_fp32_groups if self.stage == 2 else zero.fp32_partitioned_groups_flat

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed where a step ends: its own counting knows nothing of ours."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which DeepSpeed averages over the processes."""
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def update(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        most: float | None,
        skip: bool = False,
        change: Callable[[], None] | None = None,
    ) -> Tensor:
        """Let DeepSpeed clip and step; the loop has refused to skip steps here."""
        self.deepspeed.optimizer.clip_grad = most or 0.0
        self.deepspeed.step()
        return torch.as_tensor(self.deepspeed.get_global_grad_norm(), device=self.engine.device)

    def trained(self, network: nn.Module) -> dict[str, Tensor]:
        """The trained weights: whole under stage 2; flat parts, as DeepSpeed cuts them, under stage 3."""
        return {name: self._as_it_lies(p) for name, p in network.named_parameters() if p.requires_grad}

    def _as_it_lies(self, parameter: Any) -> Tensor:
        if self.stage == 2:
            return parameter.detach()
        piece, count = parameter.ds_tensor.detach(), parameter.ds_numel
        held = min(len(piece), max(0, count - self.engine.rank * len(piece)))  # the last pieces are padded
        return DTensor.from_local(
            piece[:held], self.mesh, [Shard(0)], run_check=False, shape=torch.Size([count]), stride=(1,)
        )

    def load_averages(self, averages: list[WeightAverage], states: list[dict[str, Tensor]]) -> None:
        """Go on from whole averages, which are flat here under stage 3."""
        if self.stage == 3:
            states = [{name: value.flatten() for name, value in state.items()} for state in states]
        super().load_averages(averages, states)

    def load_optimizer(self, path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read the whole state and keep this process's pieces of it."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        shapes = {name: _shape(parameter) for name, parameter in network.named_parameters() if parameter.requires_grad}
        state = {f"{name}.{key}": torch.zeros(shape) for name, shape in shapes.items() for key in _MOMENTS}
        state |= {f"{name}.step": torch.zeros(()) for name in shapes}
        checkpoint.read_state(path, state)
        for name, parameter in network.named_parameters():
            for key in _MOMENTS if parameter.requires_grad else ():
                value = state[f"{name}.{key}"].flatten()
                if self.stage == 2:
                    safe_set_full_optimizer_state(parameter, value.to(self.engine.device), key)
                else:
                    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                    padded = nn.functional.pad(value, (0, size * self.engine.size - len(value)))
                    piece = padded[self.engine.rank * size :][:size].to(self.engine.device)
                    safe_set_local_optimizer_state(parameter, piece, key)
        for flat in self._flat_weights():
            optimizer.state[flat]["step"].copy_(state[f"{next(iter(shapes))}.step"])

    def snapshot(
        self, family: Family, network: nn.Module, optimizer: torch.optim.Optimizer, averages: list[WeightAverage]
    ) -> Snapshot | None:
        """Put everything together, one tensor at a time, in the main process's host memory."""
        from deepspeed.utils import safe_get_full_optimizer_state

        model: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        shapes = {name: _shape(parameter) for name, parameter in network.named_parameters()}
        (step, *_) = [optimizer.state[flat]["step"] for flat in self._flat_weights()]
        for name, parameter in network.named_parameters():
            if family.stores(name):
                self._keep(model, name, whole(self._as_it_lies(parameter)).view(shapes[name]))
            if parameter.requires_grad:
                self._keep(state, f"{name}.step", step)
                for key in _MOMENTS:
                    self._keep(state, f"{name}.{key}", safe_get_full_optimizer_state(parameter, key))
        for name, buffer in network.named_buffers():
            if name in network.state_dict() and family.stores(name):
                self._keep(model, name, buffer)
        weights = {"model": model}
        for number, average in enumerate(averages, start=1):
            weights[f"ema{number}"] = dict(model)
            for name, value in average.items():
                self._keep(weights[f"ema{number}"], name, whole(value).view(shapes[name]))
        return Snapshot(weights, state) if self.engine.is_main else None

    def _keep(self, tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.engine.is_main:
            tensors[name] = tensor.detach().to("cpu", copy=True)

    def drawing_network(self, family: Family, network: nn.Module, average: WeightAverage) -> nn.Module | None:
        """Under stage 3 a whole copy, gathered once."""
        if self.stage == 2:
            return super().drawing_network(family, network, average)
        lying = {name: self._as_it_lies(parameter) for name, parameter in network.named_parameters()}
        return gathered_network(self.engine, family, lying | dict(average.items()))


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
