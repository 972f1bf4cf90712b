"""Nothing waits for a GPU where it need not: which copies are made in another way, and where nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from muralist.generate import card
from muralist.generate.card import Ease, Unhurried

GPU = torch.device("cuda")
NUMBERS = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, torch.device]]:
    """What is brought to a GPU without waiting; it stays where it is."""
    made: list[tuple[Tensor, torch.device]] = []

    def to_device(tensor: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
        made.append((tensor, torch.device(device)))
        return tensor.to(dtype or tensor.dtype, copy=True)

    monkeypatch.setattr(card, "to_device", to_device)
    return made


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda: NUMBERS.to("cuda"), NUMBERS),
        (lambda: NUMBERS.to(GPU, torch.float16, False, True), NUMBERS.half()),
        (lambda: NUMBERS.to(device=GPU, dtype=torch.int64, non_blocking=True, copy=True), NUMBERS.long()),
        (lambda: NUMBERS[0, 1].to("cuda:1"), NUMBERS[0, 1]),
        (lambda: NUMBERS[:1].expand(4, 3).to(GPU), NUMBERS[:1].expand(4, 3)),  # as time steps are
        (lambda: torch.tensor([NUMBERS[0, 1]] * 3, device=GPU), torch.ones(3)),  # HunyuanDiT, at every step
        (lambda: torch.tensor([0.1, 2], dtype=torch.bfloat16, device="cuda:0"), torch.tensor([0.1, 2]).bfloat16()),
        (lambda: torch.as_tensor(np.arange(3), device=GPU), torch.arange(3)),
    ],
)
def test_what_is_sent_to_a_gpu_does_not_wait(
    copy: Callable[[], Tensor], expected: Tensor, copies: list[tuple[Tensor, torch.device]]
) -> None:
    with Unhurried():
        found = copy()
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert [(tensor.device.type, device.type) for tensor, device in copies] == [("cpu", "cuda")]


def test_what_is_sent_to_where_another_tensor_is_does_not_wait(
    copies: list[tuple[Tensor, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "_is_gpu", lambda device: device is not None and torch.device(device).type == "meta")
    with Unhurried():
        found = NUMBERS.to(torch.zeros(1, dtype=torch.float64, device="meta"))
    assert found.dtype == torch.float64 and [str(device) for _, device in copies] == ["meta"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize(
    "copy",
    [
        lambda: NUMBERS.to(torch.float64),
        lambda: NUMBERS.to("cpu", copy=True),
        lambda: NUMBERS.to("meta"),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.nn.Parameter(NUMBERS).to(GPU),
        lambda: NUMBERS.clone().requires_grad_().to(GPU),
        lambda: NUMBERS.to_sparse().to(GPU),
        lambda: torch.quantize_per_tensor(NUMBERS, 0.1, 0, torch.quint8).to(GPU),
        lambda: NUMBERS.t().to(GPU),  # whose copy would lie in another order
        lambda: NUMBERS.reshape(1, 1, 2, 3).to(GPU, memory_format=torch.channels_last),
        lambda: torch.tensor([1.0], device=GPU, requires_grad=True),
        lambda: torch.tensor([], device=GPU),
    ],
)
def test_everything_else_is_left_to_torch(
    copy: Callable[[], Tensor], copies: list[tuple[Tensor, torch.device]]
) -> None:
    with Unhurried(), suppress(AssertionError, RuntimeError):  # where there is no GPU, torch says so
        copy()
    assert copies == []


def modes() -> list[Any]:
    return list(_get_current_function_mode_stack())


def test_at_ease_but_in_the_large_parts() -> None:
    ease = Ease(GPU)
    inner = ease.paused(modes)
    outer = ease.paused(lambda: (modes(), inner(), modes()))
    assert outer() == ([], [], [])  # before it is on, too
    with ease.on():
        (mode,) = modes()
        assert isinstance(mode, Unhurried)
        assert outer() == ([], [], []) and modes() == [mode]
    assert modes() == []


def test_an_error_leaves_everything_as_it_was() -> None:
    ease = Ease(GPU)

    @ease.paused
    def fail() -> None:
        assert modes() == []
        raise ValueError

    with pytest.raises(ValueError), ease.on():
        with pytest.raises(ValueError):
            fail()
        assert len(modes()) == 1
        fail()
    assert modes() == []


def test_the_mode_of_somebody_else_is_not_taken_away() -> None:
    class Theirs(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    ease = Ease(GPU)
    with ease.on(), Theirs() as theirs:
        assert ease.paused(modes)()[-1] is theirs


def test_on_a_cpu_and_after_its_end_nothing_is_changed() -> None:
    ended = Ease(GPU)
    ended.end()
    for ease in (Ease(torch.device("cpu")), ended):
        with ease.on():
            assert modes() == [] and ease.paused(modes)() == []
