"""The repeated blocks of a network: which they are, and their activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def block_classes(network: nn.Module) -> list[str]:
    """The classes of the blocks that a network repeats, as diffusers lists them, or as its own lists of modules show.

    A class that holds others of them is left out: the stages of a U-Net hold its ResNet and transformer blocks.
    """
    listed: list[str] = [*(getattr(network, "_repeated_blocks", None) or ())]
    listed += getattr(network, "_no_split_modules", None) or ()
    modules = network.modules() if listed else network.children()
    blocks = {type(block).__name__: block for part in modules if isinstance(part, nn.ModuleList) for block in part}
    chosen = {name for name in blocks if not listed or name in listed}
    held = {name: {type(module).__name__ for module in list(blocks[name].modules())[1:]} for name in chosen}
    return sorted(name for name in chosen if not held[name] & chosen)


def checkpoint_blocks(network: nn.Module) -> None:
    """Recompute every block in the backward pass."""
    names = block_classes(network)
    for module in network.modules():
        if type(module).__name__ in names:
            module.forward = _Recomputed(module.forward)  # type: ignore[method-assign]


def compile_block(block: nn.Module) -> None:
    """Compile a block; with checkpointing, what is computed twice, as for a checkpoint around a compiled block."""
    if isinstance(block.forward, _Recomputed) and "compile" not in vars(block):  # a swapped block has its own `compile`
        block.forward.compute = torch.compile(block.forward.compute)
    else:
        block.compile()


class _Recomputed:
    """The forward of a block whose activations are computed again in the backward pass."""

    def __init__(self, compute: Any) -> None:
        self.compute = compute

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return checkpointed(self.compute)(*inputs, **named)


def checkpointed(forward: Any) -> Any:
    """Wrap a forward in activation checkpointing."""

    def run(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return run
