"""Optimizers: Muon against float64, exact resumption of each one, one curve on any number of processes, refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from muralist.core.errors import UserError
from muralist.models.jit import build
from muralist.settings import TRAIN_FLAT_NAMES, OptimSettings, TrainSettings
from muralist.settings.load import load
from muralist.train.optim import Muon, build_optimizer, orthogonalize
from muralist.train.preflight import check_settings
from tests.support.runs import last_checkpoint, losses, only_run, tensors, train, train_through_and_in_legs
from tests.train.test_strategies import STEPS, assert_same_training, command, finish, start

WITH_PACKAGE = [
    pytest.param(
        name, marks=pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is missing")
    )
    for name, module in (("adamw8bit", "bitsandbytes"), ("prodigy", "prodigyopt"))
]
STATE = {"muon": ".momentum_buffer", "adamw8bit": ".state1", "prodigy": "param_groups.0.d"}
RATES = {"muon": "1e-3", "adamw8bit": "1e-3", "prodigy": "1"}


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """The iteration of Keller Jordan's post, one float64 matrix at a time."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonalized_batch_equals_each_matrix_in_float64(shape: tuple[int, int]) -> None:
    batch = np.random.default_rng(0).normal(size=(3, *shape)) * np.array([1e-6, 1.0, 1e6])[:, None, None]
    found = orthogonalize(torch.from_numpy(batch).float())
    expected = np.stack([newton_schulz(matrix) for matrix in batch])
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)
    values = torch.linalg.svdvals(found)
    assert values.median() > 0.6 and values.max() < 1.3
    assert not orthogonalize(torch.zeros(1, *shape)).any()


def test_muon_steps_equal_float64() -> None:
    torch.manual_seed(0)
    matrices, vector = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)], nn.Parameter(torch.randn(5))
    other = nn.Parameter(vector.detach().clone())
    adamw, expected_adamw = (torch.optim.AdamW([one], betas=(0.9, 0.95)) for one in (vector, other))
    optimizer = Muon(matrices, 0.1, adamw)
    weights = [matrix.detach().double().numpy().copy() for matrix in matrices]
    momenta = [np.zeros((6, 4)) for _ in matrices]
    for rate in (0.01, 0.02, 0.03):
        for group in (*optimizer.param_groups, *expected_adamw.param_groups):
            group["lr"] = rate
        for parameter in (*matrices, vector):
            parameter.grad = torch.randn_like(parameter)
        other.grad = vector.grad
        for index, matrix in enumerate(matrices):
            assert matrix.grad is not None
            gradient = matrix.grad.double().numpy()
            momenta[index] = 0.95 * momenta[index] + 0.05 * gradient
            update = newton_schulz(0.05 * gradient + 0.95 * momenta[index])
            weights[index] = weights[index] * (1 - rate * 0.1) - rate * 0.2 * np.sqrt(6) * update
        optimizer.step()
        expected_adamw.step()
    for matrix, weight in zip(matrices, weights, strict=True):
        np.testing.assert_allclose(matrix.detach().numpy(), weight, atol=1e-6)
    assert torch.equal(vector, other)


def test_muon_is_near_torchs_own() -> None:
    """torch.optim.Muon computes in bf16 everywhere; the update of a step agrees to its rounding."""
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.zeros(16, 48)) for _ in range(2))
    mine.grad = theirs.grad = torch.randn(16, 48)
    library = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon([mine], 0.0, None)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    library.step()
    assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 0.02


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    network = build("JiT-T/8", 16, 3)
    optimizer = build_optimizer(network, OptimSettings(optimizer="muon", weight_decay=0.1))
    assert isinstance(optimizer, Muon) and optimizer.others is not None
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    matrices = {names[id(matrix)].split(".", 2)[2] for matrix in optimizer.matrices}
    linear = ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3", "adaLN_modulation.1")
    assert matrices == {f"{name}.weight" for name in linear}
    in_groups = [id(one) for group in optimizer.param_groups for one in group["params"]]
    assert sorted(in_groups) == sorted(id(one) for one in network.parameters() if one.requires_grad)
    assert type(build_optimizer(network, OptimSettings())) is torch.optim.AdamW


@pytest.mark.parametrize("name", ["muon", *WITH_PACKAGE])
def test_interrupted_run_is_bit_identical(name: str, photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--optimizer", name, "--learning_rate", RATES[name], "--samples_per_gpu", "0",
              "--weight_decay", "0.01", "--enable_condition"]  # fmt: skip
    through, _ = train_through_and_in_legs(tmp_path, common, 3, 7)
    assert json.loads((last_checkpoint(through) / "manifest.json").read_text()).get("optimizer", "adamw") == name
    assert any(key.endswith(STATE[name]) for key in tensors(last_checkpoint(through)))


def test_state_of_another_optimizer_is_refused(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--samples_per_gpu", "0"]
    train(*common, "--max_steps", "1")
    checkpoint = last_checkpoint(only_run(tmp_path))
    train(*common, "--optimizer", "muon", "--resume", checkpoint, "--run_name", "fork", expect=1)
    said = " ".join(capfd.readouterr().err.split())
    assert f"{checkpoint} holds the state of --optimizer adamw, not of muon." in said
    assert f"--init_from {checkpoint}" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--optimizer muon --strategy zero2", "--optimizer muon is not supported with --strategy zero2. DeepSpeed"),
        ("--optimizer prodigy --strategy fsdp2", "--optimizer prodigy is not supported with --strategy fsdp2."),
        ("--use_8bit_adam --strategy fsdp2", "--optimizer adamw8bit is not supported with --strategy fsdp2."),
        (
            "--optimizer adamw8bit",
            "needs bitsandbytes, which is not installed. Install it with `pip install 'muralist[",
        ),
        ("--optimizer prodigy", "needs prodigyopt, which is not installed."),
    ],
)
def test_optimizers_that_cannot_work_are_refused(words: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = load(TrainSettings, ["--data_path", "driving_world", *words.split()], TRAIN_FLAT_NAMES)
    with pytest.raises(UserError) as caught:
        check_settings(settings)
    assert told in str(caught.value)


def test_prodigy_needs_a_learning_rate_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    words = ["--data_path", "driving_world", "--optimizer", "prodigy"]
    with pytest.raises(UserError, match=r"--learning_rate 0.0002 is too low .* Give --learning_rate 1\."):
        check_settings(load(TrainSettings, words, TRAIN_FLAT_NAMES))
    check_settings(load(TrainSettings, [*words, "--lr", "1"], TRAIN_FLAT_NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", *WITH_PACKAGE])
def test_any_number_of_processes_trains_the_same(name: str, photo_folder: Path, tmp_path: Path) -> None:
    more = ["--optimizer", name, "--learning_rate", RATES[name], "--samples_per_gpu", "0"]
    runs = {}
    for strategy, ranks in [("ddp", 1), ("ddp", 2), *([("fsdp2", 2)] if name == "muon" else [])]:
        results = tmp_path / f"{strategy}{ranks}"
        finish(start(*command(strategy, ranks, photo_folder, results, STEPS, *more)))
        runs[strategy, ranks] = only_run(results)
    alone = runs.pop(("ddp", 1))
    for run in runs.values():
        if name == "adamw8bit":  # 8-bit state amplifies the rounding of a sum
            assert losses(run) == pytest.approx(losses(alone), rel=1e-3)
            assert tensors(last_checkpoint(run)).keys() == tensors(last_checkpoint(alone)).keys()
        else:
            assert_same_training(run, alone)
