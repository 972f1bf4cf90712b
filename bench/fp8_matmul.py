"""Time the GEMMs of a JiT block in bf16 and FP8 on one GPU, shape by shape, and the quantization.

python bench/fp8_matmul.py NAME [--tokens 73728] [--width 768] [--hidden 2048]

Forward is y = x W^T, input is dx = dy W, weight is dW = dy^T x. FP8 uses one scale per row (rows) or per
matrix (whole), with fast accumulation (fast) or float32 accumulation (exact). Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench.measure_training import RESULTS, hardware
from torch import Tensor

from muralist.core.run_dir import atomic_write_json
from muralist.kernels.fp8 import quantize_rowwise
from muralist.kernels.ops import use_kernels


def seconds_of(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the shortest of three means, timed by CUDA events."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():  # without a GPU there is nothing to measure
        return float("nan")
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best


def matmuls(left: Tensor, right: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return ways to compute left [M, K] times right [N, K] transposed."""
    (a, a_scale), (b, b_scale) = quantize_rowwise(left), quantize_rowwise(right)
    one = torch.ones((), device=left.device)

    zeros = torch.zeros(len(right), device=left.device, dtype=torch.bfloat16)

    def scaled(first: Tensor, second: Tensor, fast: bool, bias: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            a, b.t(), first, second, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return {
        "fp8 rows fast": scaled(a_scale, b_scale.t(), True),
        "fp8 rows fast, bias": scaled(a_scale, b_scale.t(), True, zeros),
        "fp8 rows exact": scaled(a_scale, b_scale.t(), False),
        "fp8 whole fast": scaled(one, one, True),
        "fp8 whole exact": scaled(one, one, False),
    }


def measure(tokens: int, inputs: int, outputs: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the TFLOP/s of the three GEMMs of a layer."""
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    dy = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    kinds: dict[str, tuple[Callable[[], Tensor], Tensor, Tensor]] = {
        "forward": (lambda: x @ weight.t(), x, weight),
        "input": (lambda: dy @ weight, dy, weight.t().contiguous()),
        "weight": (lambda: dy.t() @ x, dy.t().contiguous(), x.t().contiguous()),
    }
    work = 2 * tokens * inputs * outputs / 1e12
    table = {}
    for kind, (plain, left, right) in kinds.items():
        variants = {"bf16": plain} | matmuls(left, right)
        table[kind] = {name: round(work / seconds_of(call), 1) for name, call in variants.items()}
    return table


def quantization_rates(tokens: int, widths: list[int], device: torch.device) -> dict[str, float]:
    """Return the TB/s of the quantization kernel: bf16 read and FP8 written."""
    from muralist.kernels import fp8_quantize

    rates = {}
    for width in widths:
        rows = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        rates[str(width)] = round(3 * rows.numel() / seconds_of(partial(fp8_quantize.quantize_rowwise, rows)) / 1e12, 2)
        different = (
            (fp8_quantize.quantize_rowwise(rows)[0].float() != quantize_rowwise(rows).values.float()).float().mean()
        )
        assert different < 1e-3, f"{different:.2%} of the values differ from PyTorch's rounding"
    return rates


def main() -> None:
    """Measure the four layers of a block."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--tokens", type=int, default=256 * 288)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, hidden, tokens = options.width, options.hidden, options.tokens
    sides = {"qkv": (width, 3 * width), "proj": (width, width), "w12": (width, 2 * hidden), "w3": (hidden, width)}
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "torch": torch.__version__,
        "tokens": tokens,
        "TFLOP/s": {},
    }
    for name, (inputs, outputs) in sides.items():
        result["TFLOP/s"][name] = table = measure(tokens, inputs, outputs, device)
        for kind, row in table.items():
            print(name, kind, row, flush=True)
    if use_kernels(torch.empty(0, device=device)):
        widths = sorted({width, 3 * width, hidden, 2 * hidden})
        result["quantization, TB/s"] = quantization_rates(tokens, widths, device)
        print("quantization", result["quantization, TB/s"], flush=True)
    atomic_write_json(RESULTS / f"{options.name}.json", result)


if __name__ == "__main__":
    main()
