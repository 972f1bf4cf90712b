"""How a kernel is started: so that torch.compile sees it, or as it is where Triton only interprets."""

from __future__ import annotations

from typing import Any

from torch.library import wrap_triton
from triton import knobs


def launcher(kernel: Any) -> Any:
    """What takes a grid and then the arguments."""
    return kernel if knobs.runtime.interpret else wrap_triton(kernel)
