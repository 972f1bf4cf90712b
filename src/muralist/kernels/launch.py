"""Launching Triton kernels, precompiling them, and wrapping them as custom ops that torch.compile treats as opaque.

If torch.compile traced into a Triton kernel, it would generate the intermediate code of every call four times to find
out what the kernel writes: a third of the tracing time with 12 blocks. A custom op only needs the shapes of its
outputs.

Each kernel module registers its ops with autograd. An op of a block takes the bias of the GEMM before it: that GEMM
adds the bias without a gradient (`bias.detach()`), and the op's backward kernel, which reads the same values anyway,
also sums the bias gradient: one pass over all tokens less. The partial sums of the kernels' programs are reduced
outside the ops, because compiled reductions take half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor


class TmaDescriptor(NamedTuple):
    """A matrix and a tile shape; out-of-bounds elements are read as zero and not written."""

    matrix: Tensor
    tile: tuple[int, int]


class _DescriptorSignature(NamedTuple):
    """The properties of a TmaDescriptor that a kernel is specialized for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, int]


# One thread: of several calls with the same signature only the first compiles.
_compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
_requested: set[Any] = set()
_pending: dict[Any, list[Future[None]]] = {}


def _precompile(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Compile a kernel for these arguments in the background, if they are on a GPU and their sizes are concrete."""
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    # Pointers are assumed to be aligned. A call with one that is not compiles by itself.
    signatures = tuple(_signature(argument) for argument in arguments)
    if device.type != "cuda" or any(isinstance(size, torch.SymInt) for size in tree_leaves(signatures)):
        return
    request = kernel, device, signatures, tuple(options.items())
    if request not in _requested:
        _requested.add(request)
        _pending.setdefault(kernel, []).append(_compiler.submit(_compile, kernel, device, signatures, options))


def _signature(argument: Any) -> Any:
    if isinstance(argument, TmaDescriptor):
        matrix, tile = argument
        return _DescriptorSignature(matrix.dtype, tuple(matrix.shape), matrix.stride(), tile)
    return argument.dtype if isinstance(argument, Tensor) else argument


def _to_triton(argument: Any) -> Any:
    if isinstance(argument, _DescriptorSignature):
        dtype, shape, strides, tile = argument
        argument = TmaDescriptor(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), tile)
    if isinstance(argument, TmaDescriptor):
        return TensorDescriptor.from_tensor(argument.matrix, list(argument.tile))
    return argument


def wait_for_precompilation(kernel: Any) -> None:
    """Wait until no precompilation of this kernel is under way; an error there shows again in the call itself."""
    if _pending:
        wait(_pending.pop(kernel, ()))


def _compile(kernel: Any, device: torch.device, signatures: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    with torch.cuda.device(device):  # a new thread starts on the first GPU
        kernel.warmup(*map(_to_triton, signatures), grid=(1,), **options)


_fake_tensors = ContextVar("fake_tensors", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; with fake tensors, precompile it instead."""
    if _fake_tensors.get():
        _precompile(kernel, arguments, options)
        return
    wait_for_precompilation(kernel)
    kernel[grid](*map(_to_triton, arguments), **options)


def triton_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function that launches kernels as a custom op; its fake implementation runs it without launching."""

    def register(function: Callable[..., Any]) -> CustomOpDef:
        @wraps(function)
        def fake(*arguments: Any) -> Any:
            token = _fake_tensors.set(True)
            try:
                return function(*arguments)
            finally:
                _fake_tensors.reset(token)

        op = custom_op(name, function, mutates_args=())
        op.register_fake(fake)
        return op

    return register
