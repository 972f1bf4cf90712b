"""Memory of a training on each GPU: weights, gradients, optimizer and averages; activations per image; what fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muralist.launch import configured_strategy
from muralist.models import variants
from muralist.settings import ModelSettings, Strategy, TrainSettings

# Bytes kept for the backward pass for each channel, position and block of JiT. Not compiled: counted, as autograd saves
# them (tests/scale/test_memory.py). Compiled: bf16 from a measured peak (bench/results/cifar10_jit_s2_h200.json), fp32 in
# the same proportion.
_KEPT = {("eager", "fp32"): 120.0, ("eager", "bf16"): 81.0, ("compiled", "bf16"): 45.0, ("compiled", "fp32"): 67.0}
# What stays where blocks are recomputed: what goes into each (tokens and a branch), and what lies before and after them.
_INPUTS, _OUTSIDE = {"fp32": 8.0, "bf16": 4.0}, {"fp32": 19.0, "bf16": 14.0}
CONTEXT = 1.2e9
"""CUDA's own memory, the workspaces of its libraries and what an allocator cannot use, per GPU."""
IMAGENET_CLASSES = 1000
BYTES_ON_DISK = 20
"""Of a checkpoint, for each trained parameter: float32 weights, two moments, two averages."""


def state_bytes(strategy: Strategy, trained: float, frozen: float, ranks: int) -> float:
    """Bytes of each process: float32 weights, and of the trained ones gradients, two moments, two averages.

    ZeRO keeps another copy of the weights. Stage 2 has weights and averages whole and the rest in parts.
    """
    if strategy == "zero2":
        return 12 * trained + 4 * frozen + 16 * trained / ranks
    if strategy == "zero3":
        return (28 * trained + 4 * frozen) / ranks
    whole = 24.0 * trained + 4.0 * frozen
    return whole / ranks if strategy == "fsdp2" else whole


def activation_bytes(name: str, img_size: int, bf16: bool, compiled: bool, recomputed: bool = False) -> float:
    """Bytes that one image keeps for the backward pass of a JiT; recomputed: what goes into blocks, and one block whole."""
    letter, patch = variants.parse_name(name)
    variant, tokens = variants.VARIANTS[letter], variants.tokens_per_image(patch, img_size)
    longer = variant.depth - variant.in_context_start
    positions = variant.depth * tokens + longer * variant.in_context_len
    precision = "bf16" if bf16 else "fp32"
    kept = _KEPT["compiled" if compiled else "eager", precision]
    if recomputed:
        outside = _OUTSIDE[precision] * tokens
        one_block = kept * (tokens + variant.in_context_len)
        return (_INPUTS[precision] * positions + outside + one_block) * variant.hidden_size
    return kept * positions * variant.hidden_size


@dataclass(frozen=True)
class Need:
    """What a training needs on each GPU."""

    parameters: int
    state: float
    """Bytes, whatever the batch."""
    per_image: float | None
    """Bytes of each image of a forward pass; None where there is no formula."""

    def total(self, images: int) -> float:
        """Bytes for so many images at once; without a formula, the state alone."""
        return self.state + CONTEXT + images * (self.per_image or 0.0)

    def largest_batch(self, memory: float) -> int | None:
        """How many images at once fit; None where there is no formula."""
        if self.per_image is None:
            return None
        return max(0, int((memory - self.state - CONTEXT) / self.per_image))

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint on disk."""
        return float(BYTES_ON_DISK * self.parameters)


def parameters(model: ModelSettings, classes: int = IMAGENET_CLASSES) -> int:
    """Parameters of a model, told without building it; 0 for a small HunyuanDiT, which takes next to nothing."""
    if not variants.is_hunyuan(model.name):
        letter, patch = variants.parse_name(model.name)
        return variants.parameter_count(letter, patch, classes if model.enable_condition else 1)
    if model.path is None:
        return 0
    from muralist.models.complete import stored_parameters

    return stored_parameters(Path(model.path) / "transformer")


def need_of(settings: TrainSettings, ranks: int, compiled: bool) -> Need:
    """What a training's settings ask of each GPU."""
    model = settings.model
    count = parameters(model)
    strategy: Strategy = settings.distributed.strategy
    strategy = "ddp" if ranks == 1 else configured_strategy() if strategy == "auto" else strategy
    lora = model.training_parts == "lora"
    state = state_bytes(strategy, 0 if lora else count, count if lora else 0, ranks)
    per_image = None
    if not variants.is_hunyuan(model.name):
        side, recomputed = variants.square(model.img_size), model.gradient_checkpointing
        per_image = activation_bytes(model.name, side, settings.mixed, compiled, recomputed)
    return Need(0 if lora else count, state, per_image)
