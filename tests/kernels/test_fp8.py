"""FP8 training: quantization, a layer against float64, and a small JiT that learns."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from muralist.kernels import fp8, ops
from muralist.kernels.fp8 import FP8, FP8_MAX, MIN_SCALE, QuantizedRows, fp8_matmul, has_fp8, quantize_rowwise
from muralist.kernels.ops import Linear
from muralist.models.jit import JiT

E4M3 = 2.0**-4  # the largest relative error of a value that is rounded to four bits, the first of which is not stored


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def test_each_row_uses_the_full_range() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 64) * torch.logspace(-12, 12, 6)[:, None]
    values, scale = quantize_rowwise(rows)
    assert values.dtype == FP8 and scale.shape == (6, 1)
    assert torch.equal(values.float().abs().amax(1), torch.full((6,), FP8_MAX))
    assert torch.allclose(scale, rows.abs().amax(1, keepdim=True) / FP8_MAX, rtol=1e-6, atol=0)
    off = (values.float() * scale - rows).abs()
    # Values far below the largest of their row are multiples of the smallest number there is.
    assert (off <= torch.maximum(E4M3 * rows.abs(), scale * 2.0**-10) * 1.0001).all()


def test_rows_of_zeros_and_of_tiny_values() -> None:
    values, scale = quantize_rowwise(torch.tensor([[0.0, -0.0], [1e-38, -3e-39], [1e-25, 0.0]]))
    assert values.float().isfinite().all() and (values[0].float() == 0).all()
    assert scale.flatten().tolist() == pytest.approx([MIN_SCALE, MIN_SCALE, 1e-25 / FP8_MAX])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_stay_non_finite(bad: float) -> None:
    rows = torch.ones(3, 32)
    rows[1, 4] = bad
    out = fp8_matmul(quantize_rowwise(rows), quantize_rowwise(torch.ones(16, 32)))
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]].float(), torch.full((2, 16), 32.0))


def test_matmul_of_quantized_values() -> None:
    torch.manual_seed(0)
    left, right, bias = (
        quantize_rowwise(torch.randn(7, 48)),
        quantize_rowwise(torch.randn(32, 48)),
        torch.randn(32).bfloat16(),
    )

    def exact(matrix: QuantizedRows) -> Tensor:
        return matrix.values.double() * matrix.scale

    reference = exact(left) @ exact(right).t() + bias.double()
    assert relative(fp8_matmul(left, right, bias), reference) < 3e-3  # the output is bf16
    assert relative(fp8_matmul(left, right, bias, fast_accum=False), reference) < 3e-3


@pytest.mark.parametrize("tokens", [1, 37, 64])
def test_a_layer_forward_and_backward_is_near_float64(tokens: int) -> None:
    torch.manual_seed(0)
    layer = Linear(96, 160)
    layer.fp8 = True
    x = torch.randn(2, tokens, 96).bfloat16().requires_grad_()
    dy = torch.randn(2, tokens, 160).bfloat16()
    layer(x).backward(dy)
    exact, weight, bias = x.detach().double(), layer.weight.detach().double(), layer.bias.detach().double()
    y = layer(x)
    assert y.dtype == torch.bfloat16 and y.shape == (2, tokens, 160)
    assert 0.01 < relative(y.detach(), exact @ weight.t() + bias) < 0.05
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert 0.01 < relative(x.grad, dy.double() @ weight) < 0.05
    assert layer.weight.grad.dtype == torch.float32
    assert relative(layer.weight.grad, torch.einsum("btn,btk->nk", dy.double(), exact)) < 4e-3  # bf16
    assert relative(layer.bias.grad, dy.double().sum((0, 1))) < 1e-6
    with torch.no_grad():  # held-out loss and samples: as if nothing had been asked for
        assert torch.equal(layer(x.float()), torch.nn.functional.linear(x.float(), layer.weight, layer.bias))


def test_quantized_tokens_are_not_quantized_again() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 32).bfloat16(), torch.randn(16, 32), torch.zeros(16)
    values, scale = quantize_rowwise(x.flatten(0, 1))
    both = fp8.Fp8Activation(x, values.view(2, 3, 32), 2 * scale)
    once = fp8.fp8_linear(x, weight, bias, use_kernels=False)
    assert torch.equal(fp8.fp8_linear(both, weight, bias, use_kernels=False), 2 * once)


def test_unaligned_sides_are_padded() -> None:
    torch.manual_seed(0)
    layer, tokens, dy = Linear(34, 21), torch.randn(5, 34).bfloat16().requires_grad_(), torch.randn(5, 21).bfloat16()
    layer.fp8 = True
    y = layer(tokens)
    y.backward(dy)
    exact, weight = tokens.detach().double(), layer.weight.detach().double()
    assert y.shape == (5, 21)
    assert relative(y.detach(), exact @ weight.t() + layer.bias.detach().double()) < 0.05
    assert tokens.grad is not None and layer.weight.grad is not None
    assert tokens.grad.shape == (5, 34) and relative(tokens.grad, dy.double() @ weight) < 0.05
    assert relative(layer.weight.grad, dy.double().t() @ exact) < 4e-3


def small(gradient_checkpointing: bool, fp8: bool = True) -> JiT:
    """A network all of whose large layers fit."""
    network = JiT(
        16,
        8,
        hidden_size=64,
        depth=2,
        num_heads=4,
        num_classes=2,
        in_context_len=0,
        mlp_ratio=3.0,
        gradient_checkpointing=gradient_checkpointing,
    )
    network.init_weights(0)
    if fp8:
        network.use_fp8()
    return network


@pytest.mark.slow
def test_fp8_network_compiles_to_one_graph() -> None:
    network = small(gradient_checkpointing=True)
    inputs = torch.randn(2, 3, 16, 16), torch.rand(2), torch.tensor([0, 1])
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(*inputs).float().square().mean().backward()
    gradient = network.blocks[0].mlp.w12.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor) and gradient.isfinite().all()


def losses(gradient_checkpointing: bool, fp8: bool) -> list[float]:
    """Losses of thirty steps on eight images."""
    network = small(gradient_checkpointing, fp8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 1, 1, generator=generator).expand(-1, -1, 16, 16)
    curve = []
    for _ in range(30):
        t = torch.rand(8, generator=generator)
        noisy = torch.lerp(torch.randn(images.shape, generator=generator), images, t[:, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            output = network(noisy, t, torch.arange(8) % 2)
        loss = (output.float() - images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def test_thirty_steps_learn_like_bf16_and_equal_with_gradient_checkpointing() -> None:
    ours, exact = losses(gradient_checkpointing=False, fp8=True), losses(gradient_checkpointing=False, fp8=False)
    assert ours != exact and sum(ours[-5:]) < 0.6 * sum(ours[:5])
    assert sum(ours[-5:]) == pytest.approx(sum(exact[-5:]), rel=0.03)
    assert losses(gradient_checkpointing=True, fp8=True) == ours


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not has_fp8(torch.device("cuda")), reason="needs FP8 matmuls")
@pytest.mark.parametrize("width", [192, 128])  # of which the first has 512 hidden channels, the second 341
def test_kernels_and_plain_pytorch_agree_on_a_gpu(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.kernel_checks import network_gradients

    gradients = partial(network_gradients, width, heads=4, autocast=True)
    fused, again, exact = gradients(fp8=True), gradients(fp8=True), gradients(fp8=False)
    monkeypatch.setattr(ops, "use_kernels", lambda x: False)
    plain = gradients(fp8=True)
    assert len(fused) == len(plain) == len(exact) > 60
    for ours, same, reference, in_16_bits in zip(fused, again, plain, exact, strict=True):
        assert torch.equal(ours, same)
        assert relative(ours, reference.double()) < 0.1
        assert relative(ours, in_16_bits.double()) < 0.2
    assert relative(fused[0], exact[0].double()) > 1e-4  # FP8 was used
