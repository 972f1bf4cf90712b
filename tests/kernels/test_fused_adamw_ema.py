"""Fused AdamW and EMA, in Triton's interpreter and on a GPU if there is one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from muralist.data.loader import Batch
from muralist.settings import OptimSettings
from muralist.train.optim import build_optimizer, optimizer_tensors
from muralist.train.step import EMA
from tests.train.test_step import make_state

triton = pytest.importorskip("triton", reason="Triton is not installed")
LEARNING_RATE, TOTAL = 1e-2, 10
HALF_LIVES = (300.0, 5.0)  # one slow and one fast EMA


class Shapes(nn.Module):
    """Tensors shorter and longer than one block of the kernel; `odd` sizes prevent vectorized loads."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 100), (12,), (33, 7) if odd else (33, 8), (2048,)]
        self.values = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


class Run:
    """Steps with random gradients, separate or fused."""

    def __init__(self, fused: ModuleType | None, odd: bool, device: str) -> None:
        self.network = Shapes(odd).to(device)
        self.optimizer = build_optimizer(self.network, OptimSettings(weight_decay=0.1))
        trained = dict(self.network.named_parameters())
        self.emas = [EMA(trained, half_life) for half_life in HALF_LIVES]
        self.fused, self.kernel = fused, None

    def steps(self, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number + 1)
            for parameter in self.network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE / (1 + number)
            images = 1000 * number * TOTAL  # beyond the EMA ramp
            if self.fused is None:
                self.optimizer.step()
                for ema in self.emas:
                    ema.update(list(self.network.parameters()), images, TOTAL)
                continue
            if self.kernel is None:
                optimizer_tensors(self.network, self.optimizer)
                self.kernel = self.fused.FusedAdamWEma(
                    self.optimizer, list(self.network.parameters()), [ema.values for ema in self.emas]
                )
            self.kernel.step([ema.lerp_weight(images, TOTAL) for ema in self.emas])

    def tensors(self) -> dict[str, Tensor]:
        found = {f"weight.{name}": value.detach() for name, value in self.network.named_parameters()}
        found |= optimizer_tensors(self.network, self.optimizer)
        for number, ema in enumerate(self.emas):
            found |= {f"ema{number}.{name}": value for name, value in ema.items()}
        return found


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from muralist.kernels import fused_adamw_ema

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        yield importlib.reload(fused_adamw_ema)
    importlib.reload(fused_adamw_ema)


def assert_same(fused: ModuleType, odd: bool, device: str) -> None:
    ours, torchs = Run(fused, odd, device), Run(None, odd, device)
    before = {name: value.clone() for name, value in ours.tensors().items() if name.startswith("weight")}
    for run in (ours, torchs):
        run.steps(range(4))
    expected = torchs.tensors()
    for name, value in ours.tensors().items():
        torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=1e-7, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert name not in before or (value - before[name]).abs().mean() > 1e-3
    assert float(ours.tensors()["values.0.step"]) == 4


@pytest.mark.parametrize("odd", [False, True])
def test_fused_step_equals_adamw_and_ema(interpreted: ModuleType, odd: bool) -> None:
    assert_same(interpreted, odd, "cpu")


def test_after_the_first_step_the_emas_are_the_weights(interpreted: ModuleType) -> None:
    run = Run(interpreted, odd=False, device="cpu")
    run.steps(range(1))
    found = run.tensors()
    for name, value in run.network.named_parameters():
        assert torch.equal(found[f"ema0.{name}"], value) and torch.equal(found[f"ema1.{name}"], value)


def test_resuming_from_a_state_gives_equal_bits(interpreted: ModuleType) -> None:
    through, first, second = (Run(interpreted, odd=True, device="cpu") for _ in range(3))
    through.steps(range(4))
    first.steps(range(2))
    with torch.no_grad():
        for mine, stored in zip(second.tensors().values(), first.tensors().values(), strict=True):
            mine.copy_(stored)
    second.steps(range(2, 4))
    for name, value in through.tensors().items():
        assert torch.equal(second.tensors()[name], value), name


def test_a_training_step_is_fused_or_separate_never_both(interpreted: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8, generator=generator)
    batch = Batch(images, torch.zeros(8, dtype=torch.long), [], torch.arange(8))
    separate, together = (make_state(trained="final_layer") for _ in range(2))  # few weights: the interpreter is slow
    assert separate.fused_adamw_ema is None, "no fused step on the CPU"
    optimizer_tensors(together.network, together.optimizer)
    trained = [parameter for parameter in together.network.parameters() if parameter.requires_grad]
    together.fused_adamw_ema = interpreted.FusedAdamWEma(
        together.optimizer, trained, [ema.values for ema in together.emas]
    )
    for state in (separate, together):
        state.max_grad_norm = 0.1
        for ema in state.emas:
            ema.half_life = HALF_LIVES[0]
        for number in range(2):
            state.images = 10_000 * (1 + number)
            state.step([batch])
    for mine, theirs in zip(together.emas, separate.emas, strict=True):
        for (name, value), (_, expected) in zip(mine.items(), theirs.items(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-7, msg=lambda text: f"{name}: {text}")  # noqa: B023
    changed = zip(together.network.parameters(), separate.network.parameters(), strict=True)
    assert max(float((mine - theirs).detach().abs().max()) for mine, theirs in changed) < 1e-7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("odd", [False, True])
def test_fused_step_on_a_gpu(odd: bool) -> None:
    from muralist.kernels import fused_adamw_ema

    assert_same(fused_adamw_ema, odd, "cuda")
