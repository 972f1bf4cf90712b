"""Noise that depends on a picture's seed alone: not on the precision, the device or the rest of the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.utils import torch_utils
from torch import Tensor

from muralist.copies import to_device

_NAME = "randn_tensor"


@contextmanager
def own_noise(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Let diffusers draw each picture's noise from its own CPU generator in float32, wherever it draws.

    By itself it draws in the model's precision, in which the same seed is other noise; and some schedulers are not handed
    the generators at all. Both are mended by putting another function in place of the one that all its modules use.
    """
    original = getattr(torch_utils, _NAME)

    def draw(
        shape: Sequence[int],
        generator: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
    ) -> Tensor:
        drawers = generator if isinstance(generator, list) else list(generators) if generator is None else [generator]
        if len(drawers) != shape[0]:
            return original(shape, generator=generator, device=device, dtype=dtype, layout=layout)
        rows = [torch.randn((1, *shape[1:]), generator=drawer, dtype=torch.float32) for drawer in drawers]
        return to_device(torch.cat(rows), device, dtype)

    users = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "diffusers"]
    # Looked up in their dictionaries: asking a lazy module for a name would import what it stands for.
    users = [module for module in users if vars(module).get(_NAME) is original]
    for module in users:
        setattr(module, _NAME, draw)
    try:
        yield
    finally:
        for module in users:
            setattr(module, _NAME, original)
