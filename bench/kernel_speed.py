"""Time the kernels of a JiT-B block, configuration by configuration, beside PyTorch's own.

python bench/kernel_speed.py NAME [attention] [gemm] [fp8]

attention: forward and backward of the attention kernel, beside cuDNN and Flash. gemm: GEMMs with a fused epilogue, beside
cuBLAS with a separate kernel. fp8: the three GEMMs of each layer (y = x W^T, dx = dy W, dW = dy^T x) in bf16 and FP8,
with scales per row or per matrix and with fast or float32 accumulation, and the quantization kernel.

Every kernel is first compared with float64 on a few samples; one that does not compile, does not launch or is wrong is
listed as left out. Times are of CUDA graphs, without the host. Writes bench/results/NAME.json after every row. With
TRITON_INTERPRET=1 attention and gemm run on a CPU, on small shapes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from bench.measure_training import RESULTS, hardware, versions
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from muralist.core.run_dir import atomic_write_json
from muralist.kernels import attention, fp8_quantize, gemm_epilogue, qk_norm_rope, swiglu
from muralist.kernels.attention import BackwardConfig, ForwardConfig
from muralist.kernels.fp8 import quantize_rowwise
from muralist.kernels.gemm_epilogue import GemmConfig
from muralist.kernels.ops import apply_rope, rms_norm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MADE: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16 if ON_GPU else torch.float32}
SHAPES = [(64, 288), (128, 288), (256, 288), (256, 256)] if ON_GPU else [(2, 9)]  # samples and tokens
WIDTH, HEADS, HIDDEN = (768, 12, 2048) if ON_GPU else (64, 1, 32)
BOUND = 2e-2  # of the norm of the reference, in bf16
CHECKED = 3  # samples
FORWARD = [(64, 8, 4, 3), (64, 8, 4, 2), (64, 8, 4, 4), (64, 2, 4, 2), (128, 4, 8, 2)]
BACKWARD = [(128, 32, 4, 3), (128, 32, 4, 4), (128, 32, 8, 3), (64, 32, 4, 3), (256, 32, 8, 3)]
SWIGLU = [
    (128, 128, 64, 4, 3, 0), (128, 256, 64, 8, 3, 0), (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1),
    (128, 128, 64, 4, 3, 2), (256, 128, 64, 8, 3, 0), (64, 256, 64, 4, 2, 0), (128, 128, 64, 8, 3, 0),
    (128, 128, 32, 4, 4, 0),
]  # fmt: skip
QKV = [
    (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 3, 0), (128, 128, 64, 8, 4, 1), (256, 128, 64, 8, 3, 1),
    (128, 128, 64, 4, 2, 0), (128, 128, 32, 4, 4, 0), (64, 256, 64, 4, 2, 0),
]  # fmt: skip
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION} if ON_GPU else {}


class Record:
    """The rows measured so far, on disk after each."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.json"
        self.content: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "hardware": hardware(),
            "versions": versions("triton"),
            "layouts": {kind.__name__: kind._fields for kind in (ForwardConfig, BackwardConfig, GemmConfig)},
            "rows": [],
            "left out": {},
        }

    def add(
        self,
        labels: dict[str, str],
        operations: float,
        work: Callable[[], Any],
        check: Callable[[], float] | None = None,
    ) -> None:
        """Time one way to compute something; `check` returns its difference from float64."""
        try:
            wrong = check() if check else 0.0
            if not wrong <= BOUND:
                raise ValueError(f"{wrong:.1e} away from float64")
            spent = milliseconds(work)
        except Exception as problem:  # a failure of one configuration must not stop the others
            self.content["left out"][" ".join(labels.values())] = f"{type(problem).__name__}: {problem}"[:300]
        else:
            rate = round(operations / spent / 1e9, 1)
            self.content["rows"].append(labels | {"us": round(spent * 1e3, 1), "T/s": rate, "difference": wrong})
            print(self.content["rows"][-1], flush=True)
        atomic_write_json(self.path, self.content)


def milliseconds(work: Callable[[], Any]) -> float:
    """Time one call, without the host's part."""
    if ON_GPU:
        return float(triton.testing.do_bench_cudagraph(work, rep=10))
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def difference(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, over the norm of the reference."""
    pairs = zip(ours, exact, strict=True)
    return max(float((mine.double() - reference).norm() / reference.norm()) for mine, reference in pairs)


def attention_rows(record: Record, samples: int, tokens: int) -> None:
    """Forward and backward; V is a third of the qkv layer's output, as in the network."""

    def values(qkv: Tensor) -> Tensor:
        return qkv.unflatten(-1, (3, HEADS, -1))[:, :, 2]

    def both(q: Tensor, k: Tensor, qkv: Tensor, dout: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, values(qkv))]
        out = F.scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves)).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def ours_backward(q: Tensor, k: Tensor, qkv: Tensor, dout: Tensor, config: BackwardConfig) -> list[Tensor]:
        dq, dk, dqkv, _ = attention.backward(q, k, qkv, *attention.forward(q, k, qkv), dout, config)
        return [dq, dk, values(dqkv)]

    q, k, dout = torch.randn(3, samples, tokens, HEADS, WIDTH // HEADS, **MADE)
    qkv = torch.randn(samples, tokens, 3 * WIDTH, **MADE)
    few = [tensor[:CHECKED] for tensor in (q, k, qkv, dout)]
    exact = both(*(tensor.double() for tensor in few))
    operations = 4.0 * samples * tokens**2 * WIDTH  # of the forward pass
    labels = {"kernel": "attention", "shape": f"{samples}x{tokens}"}
    for forth in map(ForwardConfig._make, FORWARD):
        record.add(
            labels | {"pass": "forward", "way": str(tuple(forth))},
            operations,
            partial(attention.forward, q, k, qkv, forth),
            lambda forth=forth: difference([attention.forward(*few[:3], forth)[0]], exact[:1]),
        )
    kept = attention.forward(q, k, qkv)
    for back in map(BackwardConfig._make, BACKWARD):
        record.add(
            labels | {"pass": "backward", "way": str(tuple(back))},
            2.5 * operations,
            partial(attention.backward, q, k, qkv, *kept, dout, back),
            lambda back=back: difference(ours_backward(*few, back), exact[1:]),
        )
    heads = [tensor.transpose(1, 2) for tensor in (q, k, values(qkv))]
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            forward = partial(F.scaled_dot_product_attention, *heads)
            record.add(labels | {"pass": "forward", "way": name}, operations, forward)
            together = labels | {"pass": "forward and backward", "way": name}
            record.add(
                together, 3.5 * operations, partial(both, q, k, qkv, dout), lambda: difference(both(*few), exact)
            )


def gemm_rows(record: Record, samples: int, tokens: int) -> None:
    """w12 with SwiGLU, and the qkv layer with QK norm and RoPE."""
    norms = torch.randn(2, WIDTH // HEADS, device=DEVICE)

    def exact_swiglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        gate, value = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)
        return F.silu(gate) * value

    def exact_qkv(x: Tensor, weight: Tensor, bias: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        qkv = F.linear(x.double(), weight.double(), bias.double()).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = (apply_rope(rms_norm(part, norm), rope) for part, norm in zip((q, k), norms, strict=True))
        return torch.stack((q, k, v), dim=2).permute(0, 3, 2, 1, 4).flatten(2)

    x = torch.randn(samples, tokens, WIDTH, **MADE)
    angle = torch.randn(tokens, WIDTH // HEADS // 2, device=DEVICE)
    rope = angle.cos(), angle.sin()
    more = *norms, *rope
    head_dim = WIDTH // HEADS
    layers: dict[str, tuple[int, list[Any], Callable[..., Tensor], Callable[..., Tensor], Callable[..., Any]]] = {
        "w12": (2 * HIDDEN, SWIGLU, gemm_epilogue.swiglu, exact_swiglu, swiglu.forward),
        "qkv": (
            3 * WIDTH,
            QKV,
            lambda x, weight, bias, config: gemm_epilogue.qkv_norm_rope(x, weight, bias, *more, head_dim, config),
            partial(exact_qkv, rope=rope),
            lambda out: qk_norm_rope.forward(out, *more, HEADS, with_values=False),
        ),
    }
    for name, (outputs, configs, fused, exact, kernel) in layers.items():
        weight, bias = torch.randn(outputs, WIDTH, **MADE) / WIDTH**0.5, torch.randn(outputs, **MADE)
        operations = 2.0 * samples * tokens * WIDTH * outputs
        labels = {"kernel": name, "shape": f"{samples}x{tokens}"}
        record.add(labels | {"way": "cuBLAS alone"}, operations, partial(F.linear, x, weight, bias))
        separate = partial(lambda kernel, *layer: kernel(F.linear(*layer)), kernel, x, weight, bias)
        record.add(labels | {"way": "cuBLAS and a kernel"}, operations, separate)
        reference = exact(x[:CHECKED], weight, bias)
        for config in map(GemmConfig._make, configs):
            check = partial(fused, x[:CHECKED], weight, bias, config)
            record.add(
                labels | {"way": str(tuple(config))},
                operations,
                partial(fused, x, weight, bias, config),
                lambda check=check, reference=reference: difference([check()], [reference]),
            )


def fp8_rows(record: Record) -> None:
    """The four layers of a block, and the quantization kernel (operations are bytes: bf16 read, FP8 written)."""
    tokens = 256 * 288
    layers = {"qkv": (WIDTH, 3 * WIDTH), "proj": (WIDTH, WIDTH), "w12": (WIDTH, 2 * HIDDEN), "w3": (HIDDEN, WIDTH)}
    for name, (inputs, outputs) in layers.items():
        x, dy = torch.randn(tokens, inputs, **MADE), torch.randn(tokens, outputs, **MADE)
        weight = torch.randn(outputs, inputs, **MADE)
        kinds = {"forward": (x, weight), "input": (dy, weight.t()), "weight": (dy.t(), x.t())}
        for kind, (left, right) in kinds.items():
            labels, operations = {"kernel": f"fp8 {name}", "pass": kind}, 2.0 * tokens * inputs * outputs
            record.add(labels | {"way": "bf16"}, operations, partial(torch.matmul, left, right.t()))
            (a, a_scale), (b, b_scale) = (quantize_rowwise(matrix.contiguous()) for matrix in (left, right))
            one = torch.ones((), device=DEVICE)
            for scales, pair in {"rows": (a_scale, b_scale.t()), "whole": (one, one)}.items():
                for fast in (True, False):
                    matmul = partial(torch._scaled_mm, a, b.t(), *pair, out_dtype=torch.bfloat16, use_fast_accum=fast)
                    way = f"fp8 {scales} {'fast' if fast else 'exact'}"
                    record.add(labels | {"way": way}, operations, matmul)
    for width in sorted({WIDTH, 3 * WIDTH, HIDDEN, 2 * HIDDEN}):
        rows = torch.randn(tokens, width, **MADE)
        quantize = partial(fp8_quantize.quantize_rowwise, rows)
        record.add(
            {"kernel": "quantization", "shape": f"{tokens}x{width}", "way": "kernel"}, 3.0 * rows.numel(), quantize
        )


BENCHES = ("attention", "gemm", "fp8")


def main() -> None:
    """Measure the given kernels, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in bench/results")
    parser.add_argument("kernels", nargs="*", choices=[*BENCHES, []], default=[])
    options = parser.parse_args()
    record = Record(options.name)
    torch.manual_seed(0)
    chosen = options.kernels or BENCHES
    for samples, tokens in SHAPES:
        if "attention" in chosen:
            attention_rows(record, samples, tokens)
        if "gemm" in chosen:
            gemm_rows(record, samples, tokens)
    if "fp8" in chosen:
        fp8_rows(record)
    print("left out:", record.content["left out"])


if __name__ == "__main__":
    main()
