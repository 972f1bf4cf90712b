"""Weights on their way to a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muralist.generate import carried
from muralist.generate.carried import carry

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a test are large, and are carried in many pieces."""
    monkeypatch.setattr(carried, "_PIECE", 1000)
    monkeypatch.setattr(carried, "_LARGE", 1000)
    monkeypatch.setattr(carried, "usable_cores", lambda: 3)


def several() -> list[nn.Module]:
    """Networks with weights of several types and shapes, some of them in use twice."""
    torch.manual_seed(0)
    first, second = nn.Linear(70, 50, dtype=torch.bfloat16), nn.Linear(70, 50, bias=False)
    turned = nn.Linear(40, 30)
    turned.weight = nn.Parameter(turned.weight.data.t().contiguous().t())  # another order in memory
    twice = nn.ModuleList([second, nn.Linear(70, 50)])
    twice[1].weight = second.weight
    return [nn.Sequential(first, nn.BatchNorm1d(50), turned), twice]


def test_the_same_bytes_come_elsewhere() -> None:
    modules, as_they_were = several(), several()
    before = {id(weight): weight.data_ptr() for module in modules for weight in module.parameters()}
    carry(modules, CPU)
    for module, original in zip(modules, as_they_were, strict=True):
        for (name, weight), other in zip(module.named_parameters(), original.parameters(), strict=True):
            assert torch.equal(weight, other) and weight.dtype == other.dtype and weight.stride() == other.stride()
            large = weight.nbytes >= 1000 and name != "2.weight"
            assert (weight.data_ptr() != before[id(weight)]) == large, name
    assert modules[1][0].weight is modules[1][1].weight


def test_nothing_to_carry() -> None:
    carry([nn.Linear(2, 2), nn.ReLU()], CPU)


def test_what_goes_wrong_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(carried, "_carry", broken)
    with pytest.raises(torch.OutOfMemoryError):
        carry(several(), CPU)


def test_without_page_locked_memory_weights_stay_for_torchs_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(device: torch.device) -> None:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(carried, "_lane", none)
    modules = several()
    before = [weight.data_ptr() for module in modules for weight in module.parameters()]
    carry(modules, CPU)
    assert before == [weight.data_ptr() for module in modules for weight in module.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_same_bytes_come_to_a_gpu() -> None:
    gpu, modules, plain = torch.device("cuda:0"), several(), several()
    carry(modules, gpu)
    for module, original in zip(modules, plain, strict=True):
        module.to(gpu)
        for weight, other in zip(module.parameters(), original.to(gpu).parameters(), strict=True):
            assert weight.device == other.device and torch.equal(weight, other) and weight.stride() == other.stride()
