"""AdamW and the averages in one pass, run by Triton's interpreter here and by the GPU where there is one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from muralist.data.loader import Batch
from muralist.settings import OptimSettings
from muralist.train.checkpoint import optimizer_tensors
from muralist.train.ema import WeightAverage
from muralist.train.stepper import build_optimizer
from tests.train.test_stepper import make_stepper

triton = pytest.importorskip("triton", reason="Triton is not installed")
LEARNING_RATE, TOTAL = 1e-2, 10
HALF_LIVES = (300.0, 5.0)  # averages that go a little toward the weights in a step, and most of the way


class Shapes(nn.Module):
    """Tensors shorter and longer than what one program of the kernel has; `odd` ones cannot be read four at a time."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 100), (12,), (33, 7) if odd else (33, 8), (2048,)]
        self.values = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


class Run:
    """Some steps with made-up gradients, apart or in one pass."""

    def __init__(self, one_pass: ModuleType | None, odd: bool, device: str) -> None:
        self.network = Shapes(odd).to(device)
        self.optimizer = build_optimizer(self.network, OptimSettings(weight_decay=0.1))
        trained = dict(self.network.named_parameters())
        self.averages = [WeightAverage(trained, half_life) for half_life in HALF_LIVES]
        self.one_pass, self.kernel = one_pass, None

    def steps(self, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number + 1)
            for parameter in self.network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE / (1 + number)
            images = 1000 * number * TOTAL  # so many that averages are no longer as short as the run
            if self.one_pass is None:
                self.optimizer.step()
                for average in self.averages:
                    average.update(dict(self.network.named_parameters()), images, TOTAL)
                continue
            if self.kernel is None:
                optimizer_tensors(self.network, self.optimizer)
                self.kernel = self.one_pass.OnePass(self.optimizer, list(self.network.parameters()), self.averages)
            self.kernel.step([average.toward(images, TOTAL) for average in self.averages])

    def tensors(self) -> dict[str, Tensor]:
        found = {f"weight.{name}": value.detach() for name, value in self.network.named_parameters()}
        found |= optimizer_tensors(self.network, self.optimizer)
        for number, average in enumerate(self.averages):
            found |= {f"average{number}.{name}": value for name, value in average.items()}
        return found


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from muralist.train import one_pass

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        yield importlib.reload(one_pass)
    importlib.reload(one_pass)


def assert_same(one_pass: ModuleType, odd: bool, device: str) -> None:
    ours, torchs = Run(one_pass, odd, device), Run(None, odd, device)
    before = {name: value.clone() for name, value in ours.tensors().items() if name.startswith("weight")}
    for run in (ours, torchs):
        run.steps(range(4))
    expected = torchs.tensors()
    for name, value in ours.tensors().items():
        torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=1e-7, msg=lambda text: f"{name}: {text}")  # noqa: B023
        assert name not in before or (value - before[name]).abs().mean() > 1e-3
    assert float(ours.tensors()["values.0.step"]) == 4


@pytest.mark.parametrize("odd", [False, True])
def test_one_pass_changes_what_adamw_and_the_averages_change(interpreted: ModuleType, odd: bool) -> None:
    assert_same(interpreted, odd, "cpu")


def test_after_the_first_step_the_averages_are_the_weights(interpreted: ModuleType) -> None:
    run = Run(interpreted, odd=False, device="cpu")
    run.steps(range(1))
    found = run.tensors()
    for name, value in run.network.named_parameters():
        assert torch.equal(found[f"average0.{name}"], value) and torch.equal(found[f"average1.{name}"], value)


def test_going_on_from_a_state_ends_the_same_to_the_bit(interpreted: ModuleType) -> None:
    through, first, second = (Run(interpreted, odd=True, device="cpu") for _ in range(3))
    through.steps(range(4))
    first.steps(range(2))
    with torch.no_grad():
        for mine, stored in zip(second.tensors().values(), first.tensors().values(), strict=True):
            mine.copy_(stored)
    second.steps(range(2, 4))
    for name, value in through.tensors().items():
        assert torch.equal(second.tensors()[name], value), name


def test_a_step_takes_one_pass_or_the_averages_apart_never_both(interpreted: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8, generator=generator)
    batch = Batch(images, torch.zeros(8, dtype=torch.long), [], torch.arange(8))
    apart, together = (make_stepper(trained="final_layer") for _ in range(2))  # few weights: the interpreter is slow
    assert apart.one_pass is None, "on the CPU, training is what it was"
    optimizer_tensors(together.network, together.optimizer)
    trained = [parameter for parameter in together.network.parameters() if parameter.requires_grad]
    together.one_pass = interpreted.OnePass(together.optimizer, trained, together.averages)
    for stepper in (apart, together):
        stepper.max_grad_norm = 0.1
        for average in stepper.averages:
            average.half_life = HALF_LIVES[0]
        for number in range(2):
            stepper.step([batch], images=10_000 * (1 + number))
    for mine, theirs in zip(together.averages, apart.averages, strict=True):
        for (name, value), (_, expected) in zip(mine.items(), theirs.items(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-7, msg=lambda text: f"{name}: {text}")  # noqa: B023
    changed = zip(together.network.parameters(), apart.network.parameters(), strict=True)
    assert max(float((mine - theirs).detach().abs().max()) for mine, theirs in changed) < 1e-7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("odd", [False, True])
def test_on_a_gpu_too(odd: bool) -> None:
    from muralist.train import one_pass

    assert_same(one_pass, odd, "cuda")
