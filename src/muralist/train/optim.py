"""Optimizers, and their state as named tensors that checkpoints hold.

AdamW is torch's. Muon is ours: torch.optim.Muon orthogonalizes one matrix after the other, which takes more than twice
as long for JiT-B (docs/decisions.md). 8-bit AdamW and Prodigy come from bitsandbytes and prodigyopt, the extra `optimizers`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from muralist.settings import OptimSettings
from muralist.train import checkpoint
from muralist.train.distributed import full_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
LR_SCALE = "lr_scale"  # entry of a parameter group, as in timm
_MUON_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic, by Keller Jordan
_NEWTON_SCHULZ_STEPS = 5
_ADAMW_RMS = 0.2  # of a usual AdamW update in units of the learning rate (Liu et al. 2025, "Muon is scalable")
_PROGRESS = ("d", "d_max", "d_numerator", "k")  # what Prodigy learns about its step size, kept in its parameter groups


def build_optimizer(
    network: nn.Module, settings: OptimSettings, lr_scale: Callable[[str], float] = lambda _: 1.0
) -> Optimizer:
    """Build the optimizer; vectors (biases, norms) have no weight decay, as in the official JiT code.

    `lr_scale` gives the learning rate of a weight, by its name, as a multiple of the run's: the entry LR_SCALE of
    its group.
    """
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    hidden = [p for name, p in trained.items() if p.ndim == 2 and name.startswith("blocks.")]
    if settings.optimizer == "muon":
        trained = {name: p for name, p in trained.items() if not any(p is matrix for matrix in hidden)}
    members: defaultdict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in trained.items():
        members[lr_scale(name), parameter.ndim <= 1].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": members[key], "weight_decay": 0.0 if key[1] else settings.weight_decay, LR_SCALE: key[0]}
        for key in sorted(members)
    ]
    betas = settings.beta1, settings.beta2
    if settings.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=0.0, betas=betas)
    if settings.optimizer == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy(groups, lr=1.0, betas=betas, use_bias_correction=True, safeguard_warmup=True)
    if settings.optimizer == "muon":
        return Muon(hidden, settings.weight_decay, AdamW(groups, lr=0.0, betas=betas, fused=True) if groups else None)
    return AdamW(groups, lr=0.0, betas=betas, fused=True)


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, and AdamW for all other weights.

    The update of a matrix is its momentum with all singular values near 1. It is scaled to the RMS of an AdamW update, so
    that both share one learning rate and one weight decay.
    """

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float, others: AdamW | None) -> None:
        super().__init__([{"params": list(matrices), "weight_decay": weight_decay, LR_SCALE: 1.0}], {"lr": 0.0})
        self.matrices, self.others = list(matrices), others
        if others:
            self.param_groups += others.param_groups  # the same objects: a learning rate reaches both
            self.state = others.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients."""
        if self.others:
            self.others.step()
        by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in self.matrices:
            if matrix.grad is not None:
                by_shape[matrix.shape].append(matrix)
        for matrices in by_shape.values():
            self._update(matrices, [matrix.grad for matrix in matrices if matrix.grad is not None])

    def _update(self, matrices: list[Tensor], gradients: list[Tensor]) -> None:
        """Update matrices of one shape as one batch; sharded ones are gathered, and every process updates its shards."""
        group = self.param_groups[0]
        momenta = [self.init_state(matrix)["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - _MUON_MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, momenta, _MUON_MOMENTUM)
        updates = orthogonalize(torch.stack([full_tensor(one) for one in nesterov])).float().unbind()
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        scale = _ADAMW_RMS * math.sqrt(max(matrices[0].shape))
        torch._foreach_add_(matrices, [_shard_like(*pair) for pair in zip(updates, matrices, strict=True)],
                            alpha=-group["lr"] * scale)  # fmt: skip

    def init_state(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the state of a matrix, and create it if there is none."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return state


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix, [N, rows, columns], near 1; in bf16 on GPUs, as in the original."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _shard_like(full: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return full
    # Every process has the full tensor and keeps its shard: nothing is sent.
    return distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)


def optimizer_tensors(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name; AdamW's and Muon's is created, so that a checkpoint can be read into it."""
    tensors: dict[str, Tensor] = {}
    matrices = {id(matrix) for matrix in optimizer.matrices} if isinstance(optimizer, Muon) else set()
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if id(parameter) in matrices:
            state = optimizer.init_state(parameter)  # type: ignore[attr-defined]
        elif not state and isinstance(optimizer, AdamW | Muon):
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {key: torch.zeros_like(parameter) for key in MOMENTS}
        tensors |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
    for number, group in enumerate(optimizer.param_groups):
        for key in _PROGRESS:
            if key in group:
                tensors[f"param_groups.{number}.{key}"] = torch.tensor(group[key], dtype=torch.float64)
    return tensors


def load_optimizer(path: Path, network: nn.Module, optimizer: Optimizer, sharded: bool) -> None:
    """Load the optimizer's state from a checkpoint."""
    if isinstance(optimizer, AdamW | Muon):
        checkpoint.read_state(path, optimizer_tensors(network, optimizer), sharded)
        return
    # The state of other optimizers has shapes of its own, and Python numbers among its values.
    tensors = checkpoint.read_whole_state(path)
    for name, parameter in network.named_parameters():
        for full_name in [full_name for full_name in tensors if full_name.startswith(f"{name}.")]:
            value, key = tensors[full_name], full_name.removeprefix(f"{name}.")
            optimizer.state[parameter][key] = int(value) if key == "step" else value.to(parameter.device)
    for number, group in enumerate(optimizer.param_groups):
        for key in _PROGRESS:
            if key in group:
                group[key] = type(group[key])(tensors[f"param_groups.{number}.{key}"])
