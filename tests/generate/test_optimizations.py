"""Inference optimizations: the same images with and without, as far as a CPU can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from muralist.generate import diffusers_patches, diffusers_pipeline, optimizations
from muralist.generate.denoising import denoisers
from muralist.generate.optimizations import Fp8Linear, Optimizations, exact_matmuls, use_fp8
from muralist.kernels.fp8 import has_fp8, quantize_rowwise
from tests.support.pipeline_calls import CAR, CPU, generate, load

Build = Callable[[str], Path]
GPU = torch.device("cuda:0")


def test_execution_info_names_the_fused_kernels_of_compiled_pipelines(tiny_pipeline: Build) -> None:
    """Without compilation none of our kernels is compiled either: the user may have no compiler."""
    pipe: Any = load(tiny_pipeline("wan21"))._pipe  # type: ignore[attr-defined]
    processor = diffusers_patches.FusedWanAttnProcessor
    assert Optimizations(compiled=False).apply(pipe, denoisers(pipe), GPU) == {}
    assert not any(isinstance(block.attn1.processor, processor) for block in pipe.transformer.blocks)
    assert Optimizations(compiled=True).apply(pipe, denoisers(pipe), GPU) == {"rotation": "in one kernel"}
    other: Any = load(tiny_pipeline("hunyuan"))._pipe  # type: ignore[attr-defined]
    assert Optimizations(compiled=True).apply(other, denoisers(other), GPU) == {}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("name", "kinds"), [("hunyuan", 2), ("wan21", 1)])  # half of HunyuanDiT's blocks have a skip
def test_blocks_of_one_kind_are_traced_once(name: str, kinds: int, fp8: bool, tiny_pipeline: Build) -> None:
    """The compile cache does not keep traces, so a second start waits for them."""
    torch._dynamo.reset()
    pipeline: Any = load(tiny_pipeline(name))
    network, traced = pipeline._pipe.transformer, CompileCounter()
    blocks = diffusers_patches.repeated_blocks(network)
    assert use_fp8(blocks, min_side=16) if fp8 else diffusers_patches.fuse_linear_gelu(network)
    assert diffusers_patches.fuse_qk_norm_rope(network) == (len(blocks) if name == "wan21" else 0)
    for block in blocks:
        block.compile(dynamic=False, backend=traced)
    generate(pipeline, CAR)
    assert traced.frame_count == kinds < len(blocks)


def test_weights_are_on_the_device_before_they_are_optimized(
    tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    pipeline, to, apply = (
        diffusers_pipeline.DiffusionPipeline,
        diffusers_pipeline.DiffusionPipeline.to,
        Optimizations.apply,
    )
    monkeypatch.setattr(pipeline, "to", lambda self, *args: (events.append(f"to {args[0]}"), to(self, *args))[1])
    monkeypatch.setattr(Optimizations, "apply", lambda *args: (events.append("apply"), apply(*args))[1])
    load(tiny_pipeline("sd"))
    assert events == [f"to {CPU}", "apply"]


def test_auto_compiles_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizations, "can_compile", lambda: True)
    assert not Optimizations.choose("auto", CPU).compiled
    assert Optimizations.choose("auto", GPU).compiled
    monkeypatch.setattr(optimizations, "can_compile", lambda: False)
    assert not Optimizations.choose("auto", GPU).compiled
    assert Optimizations.choose(True, CPU).compiled and not Optimizations.choose(False, GPU).compiled


@pytest.mark.parametrize(("name", "compiled"), [("wan21", True), ("zimage", False)])
def test_pipelines_with_embeddings_of_any_length_are_not_compiled(
    name: str, compiled: bool, tiny_pipeline: Build
) -> None:
    assert load(tiny_pipeline(name), compile=True).execution_info() == ({"compiled": "yes"} if compiled else {})


def test_fp8_rows_have_their_own_scale_and_lose_little() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).bfloat16().requires_grad_(False)
    fp8 = Fp8Linear(layer)
    rows = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    output = fp8(rows)
    error = (output - layer(rows)).float().norm() / layer(rows).float().norm()
    assert 0.005 < error < 0.06
    louder = torch.cat([rows[:1], 1000 * rows[1:]])  # with one scale for all, the first row would vanish
    assert torch.equal(fp8(louder)[:1], output[:1])
    with exact_matmuls([fp8]):
        assert torch.equal(fp8(rows), layer(rows))
    assert torch.equal(fp8(rows), output)


def test_fp8_quantization_of_zeros_and_of_the_largest_value() -> None:
    values, scale = quantize_rowwise(torch.tensor([[0.0, 0.0], [3.0, -6.0]]))
    assert torch.equal(values.float(), torch.tensor([[0.0, 0.0], [224.0, -448.0]]))
    assert torch.allclose(values.float() * scale, torch.tensor([[0.0, 0.0], [3.0, -6.0]]), rtol=1e-6, atol=0)


def test_only_large_layers_with_sides_of_multiples_of_16_become_fp8() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(32, 64), nn.Sequential(nn.Linear(128, 64)))
    changed = use_fp8([block], min_side=64)
    assert [(layer.in_features, layer.out_features) for layer in changed] == [(64, 64), (128, 64)]
    assert isinstance(block[0], Fp8Linear) and type(block[1]) is nn.Linear and isinstance(block[3][0], Fp8Linear)
    assert use_fp8([block], min_side=64) == []  # a second time changes nothing
    assert not has_fp8(CPU)
