"""Memory: the formula against what autograd really keeps, and against a measured peak."""

from __future__ import annotations

import json

import pytest
import torch

from muralist.core.rng import SampleKeys
from muralist.models import configs
from muralist.models.jit_spec import JiTInputs, JiTSpec
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import load
from muralist.train.preflight import CONTEXT, MemoryEstimate, estimate_memory, state_bytes
from tests.conftest import REPOSITORY


def kept_by_autograd(name: str, side: int, bf16: bool, images: int, *more: str) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights not counted."""
    settings = load(TrainSettings, ["--model", name, "--img_size", str(side), *more], TRAIN_FLAT_NAMES)
    family = JiTSpec.from_settings(settings, [])
    network = family.network()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    inputs = JiTInputs(torch.zeros(images, side, side, 3, dtype=torch.uint8), torch.zeros(images, dtype=torch.int64))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss = family.loss(network, inputs, SampleKeys(0, torch.arange(images)))
    assert loss.requires_grad
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


@pytest.mark.parametrize("bf16", [False, True])
def test_formula_counts_what_autograd_saves(bf16: bool) -> None:
    more, fewer = (kept_by_autograd("JiT-T/4", 32, bf16, images) for images in (3, 2))
    assert configs.activation_bytes("JiT-T/4", 32, bf16, compiled=False) == pytest.approx(more - fewer, rel=0.06)


@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_checkpointing_saves_less(bf16: bool) -> None:
    more, fewer = (kept_by_autograd("JiT-T/4", 64, bf16, images, "--activation_checkpointing") for images in (3, 2))
    full = configs.activation_bytes("JiT-T/4", 64, bf16, compiled=False)
    blocks = 6 * 256 + 4 * 4  # positions, with context tokens in the last four
    one_block = full * (256 + 4) / blocks
    told = configs.activation_bytes("JiT-T/4", 64, bf16, compiled=False, gradient_checkpointing=True)
    assert told == pytest.approx(more - fewer + one_block, rel=0.1)
    assert more - fewer < 0.15 * full


def test_checkpointing_lets_larger_batches_fit() -> None:
    most = [
        estimate_memory(load(TrainSettings, ["--model", "JiT-B/4", *more], TRAIN_FLAT_NAMES), 1, True).largest_batch(
            80e9
        )
        for more in ([], ["--gradient_checkpointing"], ["--activation_checkpointing"])
    ]
    assert most[0] and most[1] and most[1] > 4 * most[0] and most[1] == most[2]


def test_formula_is_near_a_measured_peak() -> None:
    measured = json.loads((REPOSITORY / "bench" / "results" / "cifar10_jit_s2_h200.json").read_text())[
        "peak memory, GB"
    ]
    parameters = configs.parameter_count("S", 2, 10)
    need = MemoryEstimate(
        parameters, state_bytes("ddp", parameters, 0, 1), configs.activation_bytes("JiT-S/2", 32, True, True)
    )
    assert (need.total(256) - CONTEXT) / 1e9 == pytest.approx(measured, rel=0.05)


def test_largest_batch() -> None:
    settings = load(TrainSettings, ["--model", "JiT-B/4", "--use_amp"], TRAIN_FLAT_NAMES)
    need = estimate_memory(settings, ranks=1, compiled=True)
    most = need.largest_batch(141e9)
    assert most and need.total(most) <= 141e9 < need.total(most + 1)
    assert need.largest_batch(1e9) == 0
    assert [state_bytes(strategy, 100, 0, 4) for strategy in ("ddp", "fsdp2", "zero2", "zero3")] == [
        2400,
        600,
        1600,
        700,
    ]
