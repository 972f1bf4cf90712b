"""The Triton kernels, in Triton's interpreter and on a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")


def check(module: str = "kernel_checks", *words: str, **environment: str) -> str:
    command = [sys.executable, "-m", f"tests.kernels.{module}", *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_agree_with_float64() -> None:
    assert check(TRITON_INTERPRET="1").count("ok ") == 18


def test_compiled_graphs_hold_custom_ops_only() -> None:
    difference, forward, backward, alone = check("compile_checks", TRITON_INTERPRET="1").splitlines()
    assert float(difference.split()[1]) < 1e-5
    operations = {f"muralist.{name}.default" for name in ("adaln_rmsnorm", "attention", "swiglu")}
    gradients = {f"muralist.{name}_backward.default" for name in ("adaln_rmsnorm", "attention", "swiglu")}
    assert set(forward.split()[1:]) == operations
    assert set(backward.split()[1:]) == operations | gradients  # blocks are computed again
    without_gradients = {
        f"muralist.{name}.default" for name in ("adaln_rmsnorm", "linear_qkv_attention", "linear_swiglu")
    }
    assert set(alone.split()[1:]) == without_gradients


def test_kernels_are_precompiled_during_tracing(tmp_path: Path) -> None:
    said = check("compile_checks", "ahead", TRITON_CACHE_DIR=str(tmp_path))
    assert said == "ahead _swiglu_forward _gemm_swiglu\nmore 0\n"


def test_attention_kernel_is_for_few_tokens_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    from muralist.kernels import ops

    def ours(tokens: int, head_dim: int, dtype: torch.dtype) -> bool:
        return ops._has_attention_kernel(torch.empty(1, tokens, 64, dtype=dtype, device="meta"), head_dim)

    monkeypatch.setattr(ops, "_have_hopper_kernels", lambda: True)
    assert ours(5, 64, torch.bfloat16) and ours(288, 64, torch.float16) and ours(320, 64, torch.bfloat16)
    assert not ours(321, 64, torch.bfloat16)
    assert not ours(288, 80, torch.bfloat16)
    assert not ours(288, 64, torch.float32)
    monkeypatch.setattr(ops, "_have_hopper_kernels", lambda: False)
    assert not ours(288, 64, torch.bfloat16)


def test_amd_gpus_use_no_kernels_and_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    from muralist.kernels import fp8, ops

    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 4))  # gfx942
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    monkeypatch.setattr(ops, "can_compile", lambda: True)
    find_kernels, is_hopper = ops._find_kernels.__wrapped__, ops._is_hopper.__wrapped__  # not cached
    monkeypatch.setattr(torch.version, "hip", None)
    assert find_kernels() and is_hopper()
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert not find_kernels() and not is_hopper()
    assert not fp8.has_fp8(device)
    assert fp8.why_no_fp8(device) == "AMD Instinct MI300X is not an NVIDIA GPU."


def test_fused_epilogues_accept_symbolic_batch_sizes() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from muralist.kernels import attention, gemm_epilogue

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(6, 50, 64), static_shapes=False)
    with mode:
        made = gemm_epilogue.linear_swiglu(x, torch.empty(256, 64), torch.empty(256))
        also = attention.linear_qkv_attention(
            x, torch.empty(192, 64), torch.empty(192), *torch.empty(2, 64), *torch.empty(2, 50, 32), 1
        )
    assert isinstance(made.shape[0], torch.SymInt) and isinstance(also.shape[0], torch.SymInt)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_on_a_gpu_in_both_precisions() -> None:
    eight = torch.cuda.get_device_capability() >= (8, 9)
    assert check().count("ok ") == 52 + 6 * eight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_compiled_network_with_kernels_on_a_gpu() -> None:
    assert float(check("compile_checks").split()[1]) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_network_with_kernels_trains_like_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from muralist.kernels import ops
    from tests.kernels.kernel_checks import network_gradients

    fused = network_gradients(192, heads=3)
    monkeypatch.setattr(ops, "use_kernels", lambda x: False)
    plain = network_gradients(192, heads=3)
    assert len(fused) == len(plain) > 60
    for ours, reference in zip(fused, plain, strict=True):
        assert (ours - reference).norm() <= 1e-4 * reference.norm() + 1e-9
