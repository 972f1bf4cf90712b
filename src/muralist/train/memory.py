"""GPU memory of a training: weights, gradients, optimizer state, EMA weights, activations; the largest batch."""

from __future__ import annotations

from dataclasses import dataclass

from muralist.models.spec import find_family
from muralist.settings import Strategy, TrainSettings, accelerate_strategy

CONTEXT = 1.2e9
"""Bytes per GPU of the CUDA context, library workspaces and allocator fragmentation."""
IMAGENET_CLASSES = 1000
BYTES_ON_DISK = 20
"""Bytes of a checkpoint per trained parameter: float32 weights, two moments, two EMAs."""


def state_bytes(strategy: Strategy, trained: float, frozen: float, ranks: int) -> float:
    """Bytes per process: float32 weights and, of trained ones, gradients, two moments and two EMAs.

    ZeRO keeps another copy of the weights. Stage 2 shards everything but weights and EMAs.
    """
    if strategy == "zero2":
        return 12 * trained + 4 * frozen + 16 * trained / ranks
    if strategy == "zero3":
        return (28 * trained + 4 * frozen) / ranks
    full = 24.0 * trained + 4.0 * frozen
    return full / ranks if strategy == "fsdp2" else full


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a training needs on each GPU."""

    parameters: int
    state: float
    """Bytes that do not depend on the batch."""
    per_image: float | None
    """Bytes per image of a forward pass; None without a formula."""

    def total(self, images: int) -> float:
        """Bytes for a micro-batch of so many images; without a formula, of the state alone."""
        return self.state + CONTEXT + images * (self.per_image or 0.0)

    def largest_batch(self, memory: float) -> int | None:
        """The largest micro-batch that fits; None without a formula."""
        if self.per_image is None:
            return None
        return max(0, int((memory - self.state - CONTEXT) / self.per_image))

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint on disk."""
        return float(BYTES_ON_DISK * self.parameters)


def estimate_memory(settings: TrainSettings, ranks: int, compiled: bool) -> MemoryEstimate:
    """Estimate the memory that a training needs on each GPU."""
    model = settings.model
    family = find_family(model.name)
    count = family.parameter_count(model, IMAGENET_CLASSES)
    strategy: Strategy = settings.distributed.strategy
    strategy = "ddp" if ranks == 1 else accelerate_strategy() if strategy == "auto" else strategy
    lora = model.training_parts == "lora"
    state = state_bytes(strategy, 0 if lora else count, count if lora else 0, ranks)
    per_image = family.activation_bytes(model, settings.mixed, compiled)
    return MemoryEstimate(0 if lora else count, state, per_image)
