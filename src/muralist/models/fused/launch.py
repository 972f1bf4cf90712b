"""How kernels are started, and how a function that starts some becomes an operation into which torch.compile does not look.

Where torch looks into kernels, it makes the intermediate code of every call anew, four times over, to learn what is written:
with 12 blocks a third of the time that tracing takes. Of an operation it wants to know only what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from torch.library import CustomOpDef, custom_op

from muralist.models.fused import ahead
from muralist.models.fused.tiles import Tiles

_shapes_only = ContextVar("shapes_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel; where tensors have only shapes, it is compiled for when they have values."""
    if _shapes_only.get():
        ahead.compile_for(kernel, arguments, options)
        return
    ahead.finish(kernel)
    described = (argument.described() if isinstance(argument, Tiles) else argument for argument in arguments)
    kernel[grid](*described, **options)


def operation(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function an operation; to tell torch.compile the shapes, it runs without its kernels."""

    def made(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def shapes(*arguments: Any) -> Any:
            token = _shapes_only.set(True)
            try:
                return function(*arguments)
            finally:
                _shapes_only.reset(token)

        defined = custom_op(name, function, mutates_args=())
        defined.register_fake(shapes)
        return defined

    return made
