"""Speed of GEMMs with a fused epilogue, configuration by configuration, beside cuBLAS and a separate kernel.

python bench/gemm_epilogue_speed.py NAME [SHAPE ...]        a shape is SAMPLESxTOKENS

The layers are those of JiT-B: 768 channels, 12 heads, 2,048 hidden channels. Every configuration is first compared with
float64 on three samples; one that does not compile or is wrong is listed and skipped. Times are of CUDA graphs, without
the host. Writes bench/results/NAME.json as it goes. With TRITON_INTERPRET=1 it runs on a CPU, for small shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench.attention_speed import BOUND, milliseconds
from bench.measure_training import RESULTS, hardware, versions
from bench.turns import alone
from torch import Tensor

from muralist.core.run_dir import atomic_write_json
from muralist.kernels import gemm_epilogue, qk_norm_rope, swiglu
from muralist.kernels.gemm_epilogue import GemmConfig
from muralist.kernels.ops import apply_rope, rms_norm

SHAPES = ["64x288", "128x288", "256x288", "64x256"]
WIDTH, HEADS, HIDDEN = 768, 12, 2048
CHECKED = 3  # samples
CONFIGS = {
    "swiglu": [
        (128, 128, 64, 4, 3, 0), (128, 256, 64, 8, 3, 0), (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1),
        (128, 128, 64, 4, 3, 2), (256, 128, 64, 8, 3, 0), (64, 256, 64, 4, 2, 0), (128, 128, 64, 8, 3, 0),
        (128, 128, 32, 4, 4, 0),
    ],
    "qkv": [
        (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 3, 0), (128, 128, 64, 8, 4, 1), (256, 128, 64, 8, 3, 1),
        (128, 128, 64, 4, 2, 0), (128, 128, 32, 4, 4, 0), (64, 256, 64, 4, 2, 0),
    ],
}  # fmt: skip


class Layer(NamedTuple):
    """A layer, computed in three ways."""

    operations: int
    gemm: Callable[[], Any]
    separate: Callable[[], Any]
    fused: Callable[[GemmConfig], Tensor]
    exact: Callable[[], Tensor]


def swiglu_layer(samples: int, tokens: int, made: dict[str, Any]) -> Layer:
    """w12 and SwiGLU."""
    x, weight, bias = (
        torch.randn(shape, **made) for shape in ((samples, tokens, WIDTH), (2 * HIDDEN, WIDTH), 2 * HIDDEN)
    )
    weight /= WIDTH**0.5

    def exact() -> Tensor:
        gate, value = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)
        return F.silu(gate) * value

    return Layer(
        2 * samples * tokens * WIDTH * 2 * HIDDEN,
        lambda: F.linear(x, weight, bias),
        lambda: swiglu.forward(F.linear(x, weight, bias)),
        lambda config: gemm_epilogue.swiglu(x, weight, bias, config),
        exact,
    )


def qkv_layer(samples: int, tokens: int, made: dict[str, Any]) -> Layer:
    """The qkv layer, QK norm and RoPE."""
    x, weight, bias = (
        torch.randn(shape, **made) for shape in ((samples, tokens, WIDTH), (3 * WIDTH, WIDTH), 3 * WIDTH)
    )
    weight /= WIDTH**0.5
    norms = torch.randn(2, WIDTH // HEADS, device=x.device)
    angle = torch.randn(tokens, WIDTH // HEADS // 2, device=x.device)
    rope = angle.cos(), angle.sin()

    def exact() -> Tensor:
        qkv = F.linear(x.double(), weight.double(), bias.double()).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = (apply_rope(rms_norm(part, norm), rope) for part, norm in zip((q, k), norms, strict=True))
        return torch.stack((q, k, v), dim=2).permute(0, 3, 2, 1, 4).flatten(2)

    return Layer(
        2 * samples * tokens * WIDTH * 3 * WIDTH,
        lambda: F.linear(x, weight, bias),
        lambda: qk_norm_rope.forward(F.linear(x, weight, bias), *norms, *rope, HEADS, with_values=False),
        lambda config: gemm_epilogue.qkv_norm_rope(x, weight, bias, *norms, *rope, WIDTH // HEADS, config),
        exact,
    )


LAYERS = {"swiglu": swiglu_layer, "qkv": qkv_layer}


def main() -> None:
    """Check every configuration, then measure every shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions("triton"),
        "layouts": GemmConfig._fields,
        "rows": [],
        "left out": {},
    }
    for which, layer_of in LAYERS.items():
        torch.manual_seed(0)
        good = []
        few = layer_of(CHECKED, 288 if device.type == "cuda" else 9, made)
        exact = few.exact()
        for config in map(GemmConfig._make, CONFIGS[which]):
            try:
                wrong = float((few.fused(config).double() - exact).norm() / exact.norm())
                if not wrong <= BOUND:
                    raise ValueError(f"{wrong:.1e} away from float64")
                good.append(config)
            except Exception as problem:  # a failure of one configuration must not stop the others
                result["left out"][f"{which} {tuple(config)}"] = f"{type(problem).__name__}: {problem}"[:300]
        with alone():
            for shape in options.shapes:
                layer = layer_of(*map(int, shape.split("x")), made)
                ways: dict[str, Callable[[], Any]] = {"cuBLAS alone": layer.gemm, "cuBLAS and a kernel": layer.separate}
                ways |= {str(tuple(config)): partial(layer.fused, config) for config in good}
                for way, work in ways.items():
                    spent = milliseconds(work, device)
                    rate = layer.operations / spent / 1e9
                    row = {
                        "layer": which,
                        "shape": shape,
                        "way": way,
                        "us": round(spent * 1e3, 1),
                        "TFLOP/s": round(rate),
                    }
                    result["rows"].append(row)
                    print(row, flush=True)
                atomic_write_json(RESULTS / f"{options.name}.json", result)
    print(result["left out"])


if __name__ == "__main__":
    main()
