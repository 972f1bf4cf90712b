"""The kernels that write 8 bits, as operations that torch.compile knows; models/fp8_training.py has their gradients."""

from __future__ import annotations

from torch import Tensor

from muralist.models.fused import norm, ops, rounding, swiglu
from muralist.models.fused.launch import operation


@operation("muralist::rounded")
def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, K] in 8 bits, and the scale [R, 1] of each."""
    return rounding.rounded(rows)


@operation("muralist::gated_norm_8_bits")
def gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor | None, gate: Tensor, weight: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The residual, y, inverse root mean squares, y in 8 bits and its scales."""
    residual, y, inverse, values, row_scale = norm.forward(x, branch, gate, weight, shift, scale, rounded=True)
    return residual, y, inverse, values, row_scale


gated_norm.register_autograd(ops.norm_gradients, setup_context=ops.keep_norm)


@operation("muralist::swiglu_8_bits")
def gated_linear_unit(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu of the first half times the second, that in 8 bits, and its scales."""
    out, values, scale = swiglu.forward(h, rounded=True)
    return out, values, scale


@operation("muralist::swiglu_backward_8_bits")
def gated_linear_unit_backward(h: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h and, to be added up, of its bias; the former in 8 bits, and its scales."""
    dh, sums, values, scale = swiglu.backward(h, dout, rounded=True)
    return dh, sums, values, scale
