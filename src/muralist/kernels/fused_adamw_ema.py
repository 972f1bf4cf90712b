"""AdamW and both EMAs of the weights in one kernel that reads and writes each value once.

Run one after the other, the optimizer and the EMAs read every weight three times: 52 bytes per parameter instead of
44. The optimizer state stays where torch.optim.AdamW keeps it, so checkpoints do not change. One launch covers all
tensors: the kernel finds them in tables of pointers, and each program updates one block of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LAUNCH = {"BLOCK": 2048, "num_warps": 4}
_ALIGNMENT = 16  # bytes of one vectorized load, if all tensors allow it


@triton.jit
def _pointer(table, index, ALIGNED: tl.constexpr):
    """Return the pointer that a table holds at an index."""
    pointer = tl.load(table + index).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _lerp(ema, weight, t):
    """torch.lerp(ema, weight, t): exactly the weight at t = 1."""
    return tl.where(t < 0.5, ema + t * (weight - ema), weight - (weight - ema) * (1 - t))


@triton.jit
def _adamw_ema(
    grad_table, weight_table, exp_avg_table, exp_avg_sq_table, ema1_table, ema2_table,
    size_table, weight_decay_table, tensor_index_table, block_index_table,
    lr, step_size, inv_bias_correction2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, ema1_weight, ema2_weight,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor_index = tl.load(tensor_index_table + program)
    size = tl.load(size_table + tensor_index)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    offset = tl.load(block_index_table + program) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    weight_ptr = _pointer(weight_table, tensor_index, ALIGNED) + offset
    exp_avg_ptr = _pointer(exp_avg_table, tensor_index, ALIGNED) + offset
    exp_avg_sq_ptr = _pointer(exp_avg_sq_table, tensor_index, ALIGNED) + offset
    ema1_ptr = _pointer(ema1_table, tensor_index, ALIGNED) + offset
    ema2_ptr = _pointer(ema2_table, tensor_index, ALIGNED) + offset
    grad = tl.load(_pointer(grad_table, tensor_index, ALIGNED) + offset, mask=mask)
    weight = tl.load(weight_ptr, mask=mask)
    exp_avg = beta1 * tl.load(exp_avg_ptr, mask=mask) + one_minus_beta1 * grad
    exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr, mask=mask) + one_minus_beta2 * grad * grad
    weight -= lr * tl.load(weight_decay_table + tensor_index) * weight
    weight -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * inv_bias_correction2 + eps)
    tl.store(exp_avg_ptr, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr, exp_avg_sq, mask=mask)
    tl.store(weight_ptr, weight, mask=mask)
    tl.store(ema1_ptr, _lerp(tl.load(ema1_ptr, mask=mask), weight, ema1_weight), mask=mask)
    tl.store(ema2_ptr, _lerp(tl.load(ema2_ptr, mask=mask), weight, ema2_weight), mask=mask)


class FusedAdamWEma:
    """Replaces the `step` of an AdamW and the updates of two EMAs; the optimizer state must exist."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], emas: Sequence[Sequence[Tensor]]
    ):
        self.optimizer, self.weights = optimizer, list(parameters)
        states = [optimizer.state[weight] for weight in self.weights]
        self.steps = [state["step"] for state in states]
        self.step_count = int(self.steps[0])  # counted on the host: reading it from the device would synchronize
        tensors = [self.weights, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")), *emas]
        pointers = [[tensor.data_ptr() for tensor in row] for row in tensors]
        groups = optimizer.param_groups
        weight_decays = {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}
        sizes = [weight.numel() for weight in self.weights]
        blocks = [range(-(-size // _LAUNCH["BLOCK"])) for size in sizes]
        self.tables = [self._to_device(row, torch.int64) for row in pointers]
        self.tables.append(self._to_device(sizes, torch.int64))
        self.tables.append(self._to_device([weight_decays[id(weight)] for weight in self.weights], torch.float32))
        self.tables.append(self._to_device([n for n, indices in enumerate(blocks) for _ in indices], torch.int32))
        self.tables.append(self._to_device([block for indices in blocks for block in indices], torch.int64))
        self.num_programs = sum(map(len, blocks))
        self.aligned = not any(size % 4 for size in sizes) and all(map(_are_aligned, pointers))
        self.grad_pointers: list[int] = []
        self.grad_table = torch.empty(0)

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Return whether all weights and gradients are contiguous float32, with one step count and one learning rate."""
        steps = torch.stack([optimizer.state[weight]["step"] for weight in parameters])
        tensors = [tensor for weight in parameters for tensor in (weight, weight.grad)]
        usable = all(one is not None and one.dtype is torch.float32 and one.is_contiguous() for one in tensors)
        one_rate = len({group["lr"] for group in optimizer.param_groups}) == 1
        return usable and one_rate and bool((steps == steps[0]).all())

    def step(self, ema_weights: Sequence[float]) -> None:
        """Update weights and EMAs with the current gradients; `ema_weights` are 1 - decay of each EMA."""
        self._update_grad_table()
        self.step_count += 1
        torch._foreach_add_(self.steps, 1)
        group = self.optimizer.param_groups[0]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        _adamw_ema[(self.num_programs,)](
            self.grad_table, *self.tables,
            lr, lr / (1 - beta1**self.step_count), (1 - beta2**self.step_count) ** -0.5,
            beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], *ema_weights,
            ALIGNED=self.aligned, **_LAUNCH,
        )  # fmt: skip

    def _update_grad_table(self) -> None:
        """Find the gradients; a CUDA graph writes them to the same memory in every step."""
        pointers = [weight.grad.data_ptr() for weight in self.weights]  # type: ignore[union-attr]
        if pointers != self.grad_pointers:
            assert all(weight.grad is not None and weight.grad.is_contiguous() for weight in self.weights)
            self.aligned &= _are_aligned(pointers)
            self.grad_pointers, self.grad_table = pointers, self._to_device(pointers, torch.int64)

    def _to_device(self, values: Any, dtype: torch.dtype) -> Tensor:
        device = self.weights[0].device
        table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return table.to(device, non_blocking=True)


def _are_aligned(pointers: Sequence[int]) -> bool:
    return not any(pointer % _ALIGNMENT for pointer in pointers)
