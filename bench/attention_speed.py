"""Speed of the attention kernel for short sequences, configuration by configuration, beside PyTorch's backends.

python bench/attention_speed.py NAME [SHAPE ...] [--budget SECONDS]

A shape is SAMPLESxHEADSxTOKENSxHEAD_DIM, such as 256x12x288x64. Every configuration is first compared with float64 on
a few samples; one that does not compile, does not launch or is wrong is listed and skipped. Times are of CUDA graphs,
without the host. After the first sweep of a number of tokens only the configuration in use and the fastest are
measured. Writes bench/results/NAME.json as it goes. With TRITON_INTERPRET=1 it runs on a CPU, for small shapes.
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
from muralist.kernels import attention
from muralist.kernels.attention import BackwardConfig, ForwardConfig

SHAPES = ["256x12x288x64", "256x12x256x64", "64x12x288x64", "128x16x288x64"]
BOUND = 2e-2  # of the norm of the reference, in bf16
CHECKED = 4  # samples
FORWARD = [
    ForwardConfig(block_q=queries, tiles=tiles, num_warps=warps, num_stages=stages)
    for queries, tiles, warps, stages in (
        (64, 8, 4, 3), (64, 8, 4, 2), (64, 8, 4, 4), (64, 2, 4, 2), (128, 4, 8, 2)
    )
]  # fmt: skip
BACKWARD = [
    BackwardConfig(block_k=keys, block_q=queries, num_warps=warps, num_stages=stages)
    for keys, queries, warps, stages in (
        (128, 32, 4, 3), (128, 32, 4, 4), (128, 32, 8, 3), (64, 32, 4, 3), (256, 32, 8, 3)
    )
]  # fmt: skip
WIDTHS = (16, 24, 20, 10, 10, 10)  # of the printed columns
OTHERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION}


class Case:
    """Inputs of one shape, as in the network: V is a third of the qkv layer's output."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.shape = shape
        self.batch, self.heads, self.tokens, self.head_dim = map(int, shape.split("x"))
        generator = torch.Generator(device).manual_seed(self.tokens)
        made = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
        size = self.batch, self.tokens, self.heads, self.head_dim
        self.q, self.k, self.dout = (torch.randn(size, generator=generator, **made) for _ in range(3))
        self.qkv = torch.randn((*size[:2], 3 * self.heads * self.head_dim), generator=generator, **made)
        self.operations = 4 * self.batch * self.heads * self.tokens**2 * self.head_dim  # of the forward pass

    def values(self, qkv: Tensor) -> Tensor:
        """The last third, [B, tokens, heads, head_dim]."""
        return qkv.unflatten(-1, (3, self.heads, self.head_dim))[:, :, 2]

    def first(self) -> list[Tensor]:
        """Queries, keys, the layer's output and the result's gradient of a few samples."""
        return [tensor[:CHECKED] for tensor in (self.q, self.k, self.qkv, self.dout)]

    def reference(self) -> list[Tensor]:
        """Result and gradients of a few samples in float64."""
        q, k, qkv, dout = (tensor.double() for tensor in self.first())
        leaves = [tensor.requires_grad_() for tensor in (q, k, self.values(qkv))]
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        out = ((q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(dim=-1) @ v).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """Time one call, without the host's part."""
    if device.type == "cuda":
        return float(triton.testing.do_bench_cudagraph(work, rep=10))
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def difference(ours: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """The largest difference, over the norm of the reference."""
    return max(
        float((mine.double() - reference).norm() / reference.norm())
        for mine, reference in zip(ours, references, strict=True)
    )


def forward_rows(
    case: Case, config: ForwardConfig, references: list[Tensor], device: torch.device
) -> list[dict[str, Any]]:
    """Measure our forward pass with one configuration."""
    wrong = difference([attention.forward(*case.first()[:3], config)[0]], references[:1])
    work = partial(attention.forward, case.q, case.k, case.qkv, config)
    return [row(case, "forward", str(tuple(config)), wrong, work, 1.0, device)]


def backward_rows(
    case: Case, config: BackwardConfig, references: list[Tensor], device: torch.device
) -> list[dict[str, Any]]:
    """Measure our backward pass with one configuration."""
    *inputs, dout = case.first()
    dq, dk, dqkv, _ = attention.backward(*inputs, *attention.forward(*inputs), dout, config)
    wrong = difference([dq, dk, case.values(dqkv)], references[1:])
    kept = attention.forward(case.q, case.k, case.qkv)
    work = partial(attention.backward, case.q, case.k, case.qkv, *kept, case.dout, config)
    return [row(case, "backward", str(tuple(config)), wrong, work, 2.5, device)]


def row(
    case: Case, which: str, name: str, wrong: float, work: Callable[[], Any], factor: float, device: torch.device
) -> dict[str, Any]:
    """Return one row of the table; FLOPs are those of the forward pass times a factor."""
    if not wrong <= BOUND:
        raise ValueError(f"{wrong:.1e} away from float64")
    spent = milliseconds(work, device)
    return {
        "shape": case.shape,
        "pass": which,
        "layout": name,
        "ms": round(spent, 4),
        "TFLOP/s": round(case.operations * factor / spent / 1e9, 1),
        "difference": float(f"{wrong:.1e}"),
    }


def other_rows(case: Case, name: str, references: list[Tensor], device: torch.device) -> list[dict[str, Any]]:
    """Measure a backend of PyTorch: forward, forward with backward, and the difference."""

    def both(q: Tensor, k: Tensor, qkv: Tensor, dout: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in (q, k, case.values(qkv))]
        out = F.scaled_dot_product_attention(*leaves)
        return [
            tensor.transpose(1, 2).detach() for tensor in (out, *torch.autograd.grad(out, leaves, dout.transpose(1, 2)))
        ]

    def alone() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in (case.q, case.k, case.values(case.qkv)))
            )

    with sdpa_kernel(OTHERS[name]):
        wrong = difference(both(*case.first()), references)
        first = row(case, "forward", name, wrong, alone, 1.0, device)
        work = partial(both, case.q, case.k, case.qkv, case.dout)
        second = row(case, "forward and backward", name, wrong, work, 3.5, device)
    between = second["ms"] - first["ms"]
    third = {"pass": "backward", "ms": round(between, 4), "TFLOP/s": round(case.operations * 2.5 / between / 1e9, 1)}
    return [first, first | third, second]


def main() -> None:
    """Measure every shape and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--budget", type=float, default=90, help="seconds; cases beyond are listed as skipped")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions("triton"),
        "layouts": {"forward": ForwardConfig._fields, "backward": BackwardConfig._fields},
        "rows": [],
        "left out": {},
    }

    def attempt(case: Case, name: str, work: Callable[..., list[dict[str, Any]]], *arguments: Any) -> None:
        name = f"{case.shape} {name}"
        if time.monotonic() - started > options.budget:
            result["left out"][name] = "no time"
        else:
            try:
                for made in work(case, *arguments, device):
                    result["rows"].append(made)
                    print(
                        "".join(f"{value!s:>{width}}" for value, width in zip(made.values(), WIDTHS, strict=True)),
                        flush=True,
                    )
            except Exception as problem:  # a failure of one configuration must not stop the others
                result["left out"][name] = f"{type(problem).__name__}: {problem}"[:300]
                print(f"{name}: {result['left out'][name]}", flush=True)
        atomic_write_json(RESULTS / f"{options.name}.json", result)

    swept: dict[tuple[int, int], tuple[list[ForwardConfig], list[BackwardConfig]]] = {}
    for shape in options.shapes:
        case = Case(shape, device)
        references = case.reference()
        forwards, backwards = swept.get((case.tokens, case.head_dim), (FORWARD, BACKWARD))
        for other in OTHERS:
            attempt(case, other, other_rows, other, references)
        for forth in forwards:
            attempt(case, str(forth), forward_rows, forth, references)
        for back in backwards:
            attempt(case, str(back), backward_rows, back, references)
        mine = [made for made in result["rows"] if made["shape"] == shape]
        swept.setdefault(
            (case.tokens, case.head_dim),
            (
                best(mine, forwards, attention.FORWARD_CONFIG),
                best(mine, backwards, attention.BACKWARD_CONFIG),
            ),
        )
    print(f"{time.monotonic() - started:.0f} s")


def best(rows: list[dict[str, Any]], configs: list[Any], used: Any) -> list[Any]:
    """Return the configuration in use and the two fastest."""
    which = "forward" if isinstance(used, ForwardConfig) else "backward"
    times = {made["layout"]: made["ms"] for made in rows if made["pass"] == which}
    measured = [config for config in configs if str(tuple(config)) in times]
    fastest = sorted(measured, key=lambda config: times[str(tuple(config))])[:2]
    return list(dict.fromkeys([used, *fastest]))


if __name__ == "__main__":
    main()
