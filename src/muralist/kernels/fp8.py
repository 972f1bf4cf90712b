"""FP8 (e4m3) matmuls with row-wise scales, and linear layers that use them in training.

    y = x W^T + b      x and W quantized by row
    dx = dy W          dy quantized by row, W by column
    dW = dy^T x        in bf16: the sum runs over tokens, so FP8 would need a scale per channel

A row's result depends on that row alone; a scale per tensor would couple the samples of a batch. Weights stay in
float32 and are quantized in every pass. No scale is carried from step to step, so a resumed run computes what an
uninterrupted one does. Triton kernels that produce tokens or their gradients also write them in FP8 if they hold full
rows; otherwise a quantization kernel does it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muralist.core.hardware import nvidia_capability

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INV_FP8_MAX = 1.0 / FP8_MAX  # a factor: division by a constant rounds differently on CPUs, GPUs and in Triton
MIN_SCALE = 2.0**-100  # for rows of zeros; rows of gradients can be almost as small
ALIGNMENT = 16  # of both sides of a weight; the number of rows is free
_MIN_CAPABILITY = (8, 9)


class QuantizedRows(NamedTuple):
    """A matrix in FP8: values [R, K] times the scale [R, 1] of each row."""

    values: Tensor
    scale: Tensor


def has_fp8(device: torch.device) -> bool:
    """Return whether FP8 matmuls work on a device; tried, because some torch versions lack them for new GPUs."""
    if nvidia_capability(device) < _MIN_CAPABILITY:
        return False
    trial = quantize_rowwise(torch.ones(ALIGNMENT, ALIGNMENT, device=device))
    try:
        return bool(torch.isfinite(fp8_matmul(trial, trial)).all())
    except RuntimeError:
        return False


def why_no_fp8(device: torch.device) -> str:
    """Explain why a device has no FP8 matmuls."""
    if device.type != "cuda":
        return "There is no GPU here."
    name, (major, minor) = torch.cuda.get_device_name(device), nvidia_capability(device)
    if (major, minor) == (0, 0):
        return f"{name} is not an NVIDIA GPU."
    if (major, minor) < _MIN_CAPABILITY:
        return f"{name} has {major}.{minor}."
    return f"{name} has {major}.{minor}, but torch {torch.__version__} has no FP8 matmul for it."


def is_aligned(in_features: int, out_features: int) -> bool:
    """Return whether a layer's sides fit FP8 matmuls without padding."""
    return in_features % ALIGNMENT == 0 and out_features % ALIGNMENT == 0


def quantize_rowwise(rows: Tensor) -> QuantizedRows:
    """Quantize rows [R, K] to FP8; a row with a non-finite value contains NaN."""
    rows = rows.float()
    scale = (rows.abs().amax(dim=-1, keepdim=True) * INV_FP8_MAX).clamp(min=MIN_SCALE)
    return QuantizedRows((rows * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale)


def fp8_matmul(
    left: QuantizedRows, right: QuantizedRows, bias: Tensor | None = None, fast_accum: bool = True
) -> Tensor:
    """Compute left right^T + bias, [M, N] in bf16.

    `fast_accum` uses the tensor cores' own accumulator, which has fewer bits than float32: harmless over a few thousand
    terms.
    """
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale,
        right.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )


class Fp8Activation(NamedTuple):
    """Tokens [..., K] in bf16, and the same quantized by row; K is aligned."""

    original: Tensor
    values: Tensor
    scale: Tensor


def fp8_linear(x: Tensor | Fp8Activation, weight: Tensor, bias: Tensor, use_kernels: bool) -> Tensor:
    """Compute x W^T + b in bf16; `use_kernels`: quantize with Triton."""
    rows = _to_rows(x, use_kernels)
    out: Tensor = _Fp8Linear.apply(*rows, weight, bias, use_kernels)  # type: ignore[no-untyped-call]
    return out.reshape(*_original(x).shape[:-1], weight.shape[0])


def fp8_linear_swiglu(x: Tensor | Fp8Activation, weight: Tensor, bias: Tensor) -> Fp8Activation:
    """Compute SwiGLU of a linear layer with Triton kernels: silu of the first half of its channels times the second.

    The output's channels are padded with zeros to the alignment.
    """
    out, values, scale = _Fp8LinearSwiGLU.apply(*_to_rows(x, True), weight, bias)  # type: ignore[no-untyped-call]
    return Fp8Activation(out.reshape(*_original(x).shape[:-1], -1), values, scale)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, use_kernels: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.use_kernels = bias.dtype, use_kernels
        return _matmul(QuantizedRows(values, scale), weight, bias, chunks=1)[:, : weight.shape[0]]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[4] else None
        dy = _pad_channels(dy)
        dx, dweight = _gradients(dy, _quantize(dy, ctx.use_kernels), x, weight, chunks=1)
        return dx, None, None, dweight, dbias, None


class _Fp8LinearSwiGLU(torch.autograd.Function):
    """The layer and SwiGLU in one function, so that SwiGLU's backward kernel hands its gradient over in FP8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, scale: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from muralist.kernels.swiglu import swiglu_fp8

        h = _matmul(QuantizedRows(values, scale), weight, bias, chunks=2)
        out, out_values, out_scale = swiglu_fp8(h)
        ctx.save_for_backward(x, h, weight)
        ctx.bias_dtype = bias.dtype
        ctx.mark_non_differentiable(out_values, out_scale)
        return out, out_values, out_scale

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from muralist.kernels.swiglu import swiglu_fp8_backward

        x, h, weight = ctx.saved_tensors
        dh, dbias_sums, values, scale = swiglu_fp8_backward(h, dout)
        dx, dweight = _gradients(dh, QuantizedRows(values, scale), x, weight, chunks=2)
        dbias = _unpad_chunks(dbias_sums.sum(0)[:, None], weight[:, :1], chunks=2)[:, 0].to(ctx.bias_dtype)
        return dx, None, None, dweight, dbias


def _matmul(x: QuantizedRows, weight: Tensor, bias: Tensor, chunks: int) -> Tensor:
    """Compute x W^T + b with each chunk of the weight padded to the alignment."""
    padded = pad_chunks(weight, chunks, x.values.shape[1])
    return fp8_matmul(x, quantize_rowwise(padded), pad_chunks(bias[:, None], chunks, 1)[:, 0].to(torch.bfloat16))


def _gradients(dy: Tensor, dy_fp8: QuantizedRows, x: Tensor, weight: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a layer's input and weight."""
    values, scale = quantize_rowwise(pad_chunks(weight, chunks, x.shape[1]).t())
    dx = fp8_matmul(dy_fp8, QuantizedRows(values.contiguous(), scale), fast_accum=False)
    return dx, _unpad_chunks(dy.t() @ x, weight, chunks).to(weight.dtype)


def pad_chunks(matrix: Tensor, chunks: int, columns: int, alignment: int = ALIGNMENT) -> Tensor:
    """Pad a matrix [chunks * R, C] with zeros: every chunk to aligned rows, and the columns to `columns`."""
    rows = matrix.shape[0] // chunks
    pad_rows, pad_columns = -rows % alignment, columns - matrix.shape[1]
    if not (pad_rows or pad_columns):
        return matrix
    return F.pad(matrix.unflatten(0, (chunks, rows)), (0, pad_columns, 0, pad_rows)).flatten(0, 1)


def _unpad_chunks(matrix: Tensor, like: Tensor, chunks: int) -> Tensor:
    """Undo `pad_chunks`."""
    rows, columns = like.shape[0] // chunks, like.shape[1]
    return matrix.unflatten(0, (chunks, -1))[:, :rows, :columns].flatten(0, 1)


def _pad_channels(x: Tensor) -> Tensor:
    """Pad the channels of tokens with zeros to the alignment."""
    padding = -x.shape[-1] % ALIGNMENT
    return F.pad(x, (0, padding)) if padding else x


def _to_rows(x: Tensor | Fp8Activation, use_kernels: bool) -> Fp8Activation:
    """Flatten tokens to the rows of a matrix, and quantize them unless they are."""
    if isinstance(x, Fp8Activation):
        x = x._replace(original=x.original.to(torch.bfloat16))
        return Fp8Activation(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in x))
    rows = _pad_channels(x.to(torch.bfloat16).reshape(-1, x.shape[-1]))
    return Fp8Activation(rows, *_quantize(rows.detach(), use_kernels))


def _original(x: Tensor | Fp8Activation) -> Tensor:
    return x.original if isinstance(x, Fp8Activation) else x


def _quantize(rows: Tensor, use_kernels: bool) -> QuantizedRows:
    if not use_kernels:
        return quantize_rowwise(rows)
    from muralist.kernels import fp8_quantize

    return QuantizedRows(*fp8_quantize.quantize_rowwise(rows))
