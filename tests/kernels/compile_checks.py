"""A small network with the custom ops through torch.compile: traced, partitioned into forward and backward, and run.

`python -m tests.kernels.compile_checks` compares it with plain PyTorch, on a GPU by Inductor; with TRITON_INTERPRET=1
anywhere, graphs being run as they are. With `ahead`, it has kernels compiled for an H100 that need not be there.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from muralist.kernels import ops
from muralist.models.jit import JiT
from tests.kernels.kernel_checks import difference


def passes(network: JiT, step: Any, device: str) -> list[Tensor]:
    """The output, with gradients and without, and the gradient of every parameter."""
    network.zero_grad()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 8, 8, generator=generator).to(device)
    inputs = images, torch.tensor([0.2, 0.7], device=device), torch.tensor([0, 1], device=device)
    output = step(*inputs)
    (output - images).square().mean().backward()
    with torch.no_grad():
        alone = step(*inputs)
    return [output, alone, *(weight.grad.clone() for weight in network.parameters() if weight.grad is not None)]


def network_through_the_compiler(device: str, interpreted: bool) -> None:
    """The block is computed again in the backward pass; print the largest difference, and our operations in each graph."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[set[str]] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    network = JiT(
        8, 4, hidden_size=64, depth=1, num_heads=1, num_classes=2, bottleneck_dim=8, in_context_len=3,
        in_context_start=0, gradient_checkpointing=True,
    )  # fmt: skip
    network.init_weights(0)
    generator = torch.Generator().manual_seed(2)
    for weight in network.parameters():  # also those that start at zero
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    network.to(device)
    ops.use_kernels = lambda x: False
    plain = passes(network, network, device)
    ops.use_kernels = lambda x: True
    ours = passes(network, torch.compile(network, backend=backend if interpreted else "inductor"), device)
    assert len(ours) == len(plain) > 20
    print(f"difference {max(difference(*pair) for pair in zip(ours, plain, strict=True)):.2e}")
    for graph in graphs:
        print("graph", *sorted(name for name in graph if "muralist" in name or "triton" in name))


def kernels_ahead() -> None:
    """Ask for shapes on a GPU; print which kernels that compiled, and how many more a call then compiles."""
    import triton
    from torch._subclasses import FakeTensorMode
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from muralist.kernels import gemm_epilogue, launch, swiglu

    class Driver:
        """Of one H100."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment,misc]
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda fn, **_: compiled.append(fn.name.rpartition(".")[2])
    with FakeTensorMode():
        for rows in (48, 96, 96):
            h, bias = torch.empty(rows, 32, device="cuda"), torch.empty(32, device="cuda")
            assert swiglu.swiglu(h, bias).shape == (rows, 16)
        x, weight = (torch.empty(size, 64, device="cuda", dtype=torch.bfloat16) for size in (128, 256))
        assert gemm_epilogue.linear_swiglu(x, weight, torch.empty(256, device="cuda")).shape == (128, 128)
    for kernel in (swiglu._swiglu_forward, gemm_epilogue._gemm_swiglu):
        launch.wait_for_precompilation(kernel)
    print("ahead", *compiled)
    kind = torch.float32
    swiglu._swiglu_forward.warmup(kind, kind, kind, kind, 16, grid=(1,), BLOCK=16, QUANTIZE=False, num_warps=4)
    print("more", len(compiled) - 2)


if __name__ == "__main__":
    if sys.argv[1:] == ["ahead"]:
        kernels_ahead()
    else:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted:
            ops._have_hopper_kernels = lambda: True
            ops._HALF = (torch.float32,)  # type: ignore[assignment]  # bf16 is not for the interpreter
        network_through_the_compiler("cpu" if interpreted else "cuda", interpreted)
