"""A step that does not fit into memory is split until it does, with the same gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.data.loader import held_out_batches
from muralist.data.sources import open_source
from muralist.errors import UserError
from muralist.models.family import Encoded, build_family
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train.distributed import Engine
from muralist.train.loss_module import LossModule
from muralist.train.schedule import Clock, learning_rate, plan_batch
from muralist.train.stepper import Stepper, build_optimizer
from muralist.train.strategy import Replicated


def make_stepper(trained: str = "") -> Stepper:
    settings = TrainSettings(model=ModelSettings(name="JiT-T/8", img_size=16), optim=OptimSettings(warmup_steps=0))
    family = build_family(settings, [])
    network = family.network()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(trained))
    plan = plan_batch(DataSettings(batch_size=8), settings.optim, ranks=1)
    return Stepper(
        family=family,
        network=network,
        optimizer=build_optimizer(network, settings.optim),
        strategy=Replicated(Engine()),
        plan=plan,
        rate=learning_rate(settings.optim, Clock(100, plan.total, 1)),
        seed=0,
        autocast=None,
        compiled=False,
        max_grad_norm=None,
        half_lives=(1.0, 1.0),
    )


def test_memory_that_is_short_splits_the_batch(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(photo_folder), 16)
    (batch,) = held_out_batches(source, np.arange(8), np.arange(8), 8)
    whole = make_stepper()
    expected = whole.step([batch], images=0)

    forward, tried = LossModule.forward, []

    def small_card(module: LossModule, encoded: Encoded, seed: int, numbers: torch.Tensor) -> torch.Tensor:
        tried.append(len(numbers))
        if len(numbers) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(module, encoded, seed, numbers)

    monkeypatch.setattr(LossModule, "forward", small_card)
    split = make_stepper()
    split.warm_up(batch)
    assert split.micro == 2
    assert tried == [8, 4, 2, 2, 2, 2]
    assert all(parameter.grad is None for parameter in split.network.parameters()), (
        "the trial must leave nothing behind"
    )
    result = split.step([batch], images=0)
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    for mine, theirs in zip(split.network.parameters(), whole.network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-4 * 2e-4 + 1e-6)


def test_a_card_too_small_for_one_image_is_an_error(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_card(*_: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LossModule, "forward", no_card)
    (batch,) = held_out_batches(open_source(str(photo_folder), 16), np.arange(8), np.arange(8), 8)
    with pytest.raises(UserError, match="Not even one image"):
        make_stepper().warm_up(batch)
