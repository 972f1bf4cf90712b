"""AdamW and both averages of the weights in one pass over the parameters, by a kernel that touches each byte once.

One after the other, the optimizer and the averages read every weight three times: 52 bytes a parameter instead of 44. The
optimizer's state stays where torch.optim.AdamW keeps it, so checkpoints are the same. A kernel that takes all tensors at
once finds them in tables of addresses; every program of it has a part of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muralist.train.ema import WeightAverage

_LAUNCH = {"BLOCK": 2048, "num_warps": 4}
_ALIGNMENT = 16  # bytes that a thread reads at once, where all tensors allow it


@triton.jit
def _tensor(table_ptr, which, ALIGNED: tl.constexpr):
    """The tensor whose address is in a table."""
    pointer = tl.load(table_ptr + which).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _averaged(average, weight, toward):
    """As torch.lerp: exactly the weight where `toward` is 1."""
    return tl.where(toward < 0.5, average + toward * (weight - average), weight - (weight - average) * (1 - toward))


@triton.jit
def _adamw_and_averages(
    gradients_ptr, weights_ptr, firsts_ptr, seconds_ptr, averages1_ptr, averages2_ptr,
    sizes_ptr, decays_ptr, owners_ptr, parts_ptr,
    rate, step_size, correction, beta1, rest1, beta2, rest2, epsilon, toward1, toward2,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners_ptr + program)
    size = tl.load(sizes_ptr + owner)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    place = tl.load(parts_ptr + program) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    weight_ptr = _tensor(weights_ptr, owner, ALIGNED) + place
    first_ptr = _tensor(firsts_ptr, owner, ALIGNED) + place
    second_ptr = _tensor(seconds_ptr, owner, ALIGNED) + place
    average1_ptr = _tensor(averages1_ptr, owner, ALIGNED) + place
    average2_ptr = _tensor(averages2_ptr, owner, ALIGNED) + place
    gradient = tl.load(_tensor(gradients_ptr, owner, ALIGNED) + place, mask=inside)
    weight = tl.load(weight_ptr, mask=inside)
    first = beta1 * tl.load(first_ptr, mask=inside) + rest1 * gradient
    second = beta2 * tl.load(second_ptr, mask=inside) + rest2 * gradient * gradient
    weight -= rate * tl.load(decays_ptr + owner) * weight
    weight -= step_size * first / (tl.sqrt(second) * correction + epsilon)
    tl.store(first_ptr, first, mask=inside)
    tl.store(second_ptr, second, mask=inside)
    tl.store(weight_ptr, weight, mask=inside)
    tl.store(average1_ptr, _averaged(tl.load(average1_ptr, mask=inside), weight, toward1), mask=inside)
    tl.store(average2_ptr, _averaged(tl.load(average2_ptr, mask=inside), weight, toward2), mask=inside)


class OnePass:
    """Takes the place of an AdamW's `step` and of the averages' updates; its state must be there, as in a checkpoint."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor], averages: list[WeightAverage]):
        self.optimizer, self.weights = optimizer, list(trained)
        states = [optimizer.state[weight] for weight in self.weights]
        self.steps = [state["step"] for state in states]
        self.taken = int(self.steps[0])  # counted here from now on: asking the device would wait for it
        kept = [self.weights, *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))]
        kept += [average.values for average in averages]
        addresses = [[tensor.data_ptr() for tensor in row] for row in kept]
        decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
        sizes = [weight.numel() for weight in self.weights]
        parts = [range(-(-size // _LAUNCH["BLOCK"])) for size in sizes]
        self.tables = [self._on_device(row, torch.int64) for row in addresses]
        self.tables.append(self._on_device(sizes, torch.int64))
        self.tables.append(self._on_device([decays[id(weight)] for weight in self.weights], torch.float32))
        self.tables.append(self._on_device([n for n, part in enumerate(parts) for _ in part], torch.int32))
        self.tables.append(self._on_device([number for part in parts for number in part], torch.int64))
        self.programs = sum(map(len, parts))
        self.aligned = not any(size % 4 for size in sizes) and all(map(_aligned, addresses))
        self.gradients: list[int] = []
        self.gradient_table = torch.empty(0)

    @staticmethod
    def suits(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> bool:
        """Whether all weights and gradients are rows of float32 in memory, and have gone equally far."""
        steps = torch.stack([optimizer.state[weight]["step"] for weight in trained])
        both = [one for weight in trained for one in (weight, weight.grad)]
        rows = all(one is not None and one.dtype is torch.float32 and one.is_contiguous() for one in both)
        return rows and bool((steps == steps[0]).all())

    def step(self, toward: Sequence[float]) -> None:
        """One step with the gradients as they are; each average goes so far toward the new weights."""
        self._find_gradients()
        self.taken += 1
        torch._foreach_add_(self.steps, 1)
        group = self.optimizer.param_groups[0]
        rate, (beta1, beta2) = group["lr"], group["betas"]
        _adamw_and_averages[(self.programs,)](
            self.gradient_table, *self.tables,
            rate, rate / (1 - beta1**self.taken), (1 - beta2**self.taken) ** -0.5,
            beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], *toward,
            ALIGNED=self.aligned, **_LAUNCH,
        )  # fmt: skip

    def _find_gradients(self) -> None:
        """Where the gradients lie; a recorded step leaves them at the same place every time."""
        places = [weight.grad.data_ptr() for weight in self.weights]  # type: ignore[union-attr]
        if places != self.gradients:
            assert all(weight.grad is not None and weight.grad.is_contiguous() for weight in self.weights)
            self.aligned &= _aligned(places)
            self.gradients, self.gradient_table = places, self._on_device(places, torch.int64)

    def _on_device(self, values: Any, dtype: torch.dtype) -> Tensor:
        device = self.weights[0].device
        table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return table.to(device, non_blocking=True)


def _aligned(addresses: Sequence[int]) -> bool:
    return not any(address % _ALIGNMENT for address in addresses)
