"""A step that does not fit into memory is split until it does, with the same gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.core.errors import UserError
from muralist.data.loader import held_out_batches
from muralist.data.sources import open_source
from muralist.models.spec import Encoded, build_spec
from muralist.settings import DataSettings, ModelSettings, OptimSettings, TrainSettings
from muralist.train.distributed import World
from muralist.train.parallel import DataParallel, LossWrapper
from muralist.train.schedule import TrainingClock, learning_rate, plan_batch
from muralist.train.step import TrainState


def make_state(trained: str = "") -> TrainState:
    settings = TrainSettings(
        model=ModelSettings(name="JiT-T/8", img_size=16),
        data=DataSettings(batch_size=8),
        optim=OptimSettings(warmup_steps=0, ema1_half_life=1.0, ema2_half_life=1.0),
    )
    spec = build_spec(settings, [])
    network = spec.network()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(trained))
    plan = plan_batch(settings.data, settings.optim, ranks=1)
    rate = learning_rate(settings.optim, TrainingClock(100, plan.total, 1))
    return TrainState(settings, spec, network, DataParallel(World()), plan, rate, autocast=None, compiled=False)


def test_out_of_memory_splits_the_batch(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(photo_folder), 16)
    (batch,) = held_out_batches(source, np.arange(8), np.arange(8), 8)
    unsplit = make_state()
    expected = unsplit.step([batch])

    forward, tried = LossWrapper.forward, []

    def small_gpu(module: LossWrapper, encoded: Encoded, seed: int, sample_indices: torch.Tensor) -> torch.Tensor:
        tried.append(len(sample_indices))
        if len(sample_indices) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(module, encoded, seed, sample_indices)

    monkeypatch.setattr(LossWrapper, "forward", small_gpu)
    split = make_state()
    split.warm_up(batch)
    assert split.micro_batch == 2
    assert tried == [8, 4, 2, 2, 2, 2]
    assert all(parameter.grad is None for parameter in split.network.parameters())  # the trial leaves nothing behind
    result = split.step([batch])
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    for mine, theirs in zip(split.network.parameters(), unsplit.network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-4 * 2e-4 + 1e-6)


def test_gpu_too_small_for_one_image_is_an_error(photo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LossWrapper, "forward", no_memory)
    (batch,) = held_out_batches(open_source(str(photo_folder), 16), np.arange(8), np.arange(8), 8)
    with pytest.raises(UserError, match="micro-batches of a single image"):
        make_state().warm_up(batch)


@pytest.mark.parametrize("held_out", [True, False])
def test_forward_pass_without_gradients_is_compiled_only_for_held_out_images(
    photo_folder: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    (batch,) = held_out_batches(open_source(str(photo_folder), 16), np.arange(8), np.arange(8), 8)
    forward, with_gradients = LossWrapper.forward, list[bool]()

    def recorded(*inputs: object) -> torch.Tensor:
        with_gradients.append(torch.is_grad_enabled())
        return forward(*inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(LossWrapper, "forward", recorded)
    state = make_state()
    state.cuda_graphs = True
    state.warm_up(batch, held_out=held_out)
    assert with_gradients == [True, False][: 1 + held_out]
