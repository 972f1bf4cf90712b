"""`muralist export --sigma_rel`: a power-function EMA from checkpoints, against the EMA over the weights of every step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from muralist.cli import main
from muralist.models.weights import WEIGHTS_FILE, read_weights
from muralist.tools.post_hoc_ema import StoredWeights, exponent, fit, power_function, profile_of, stored_weights
from muralist.train.checkpoint import list_checkpoints, step_of
from muralist.train.schedule import MAX_EMA_FRACTION, ema_decay
from tests.support.runs import train

STEPS, KEPT = 48, 6


@pytest.fixture(scope="module")
def run(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of every step."""
    results = tmp_path_factory.mktemp("runs")
    train("--data_path", photo_folder, "--results_dir", results, "--run_name", "all", "--max_steps", STEPS,
          "--ckpt_every", 1, "--keep_last", 1000, "--samples_per_gpu", 0, "--val_fraction", 0)  # fmt: skip
    return results / "all"


@pytest.fixture(scope="module")
def few(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with every sixth checkpoint."""
    folder = tmp_path_factory.mktemp("few") / "few"
    shutil.copytree(run, folder)
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        if step_of(checkpoint) % KEPT:
            shutil.rmtree(checkpoint)
    return folder


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def direct(run: Path, sigma_rel: float) -> torch.Tensor:
    """The mean over the steps, weighted by s^gamma: EDM2's decay is that of this weight up to its discretization."""
    decays = (1 - 1 / np.arange(1, STEPS + 1)) ** (exponent(sigma_rel) + 1)
    mean = flat(read_weights(run / "checkpoints" / "step_0000001", "model"))
    for step in range(2, STEPS + 1):
        weights = flat(read_weights(run / "checkpoints" / f"step_{step:07d}", "model"))
        mean = torch.lerp(weights, mean, float(decays[step - 1]))
    return mean


def exported(run: Path, folder: Path, sigma_rel: float) -> torch.Tensor:
    assert main(["export", str(run), str(folder), "--sigma_rel", str(sigma_rel)]) == 0
    return flat(load_file(folder / WEIGHTS_FILE))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm())


@pytest.mark.parametrize("sigma_rel", [0.04, 0.1, 0.15])
def test_ema_of_another_length_is_that_over_all_steps(run: Path, few: Path, tmp_path: Path, sigma_rel: float) -> None:
    wanted = direct(run, sigma_rel)
    torch.testing.assert_close(exported(run, tmp_path / "all", sigma_rel), wanted, rtol=0, atol=1e-6)
    stored = flat(read_weights(few, "ema1"))
    assert distance(exported(few, tmp_path / "few", sigma_rel), wanted) < 0.35 * distance(stored, wanted)


def test_profiles_are_those_of_the_stored_weights(run: Path, few: Path) -> None:
    every = torch.stack([flat(read_weights(path, "model")) for path in list_checkpoints(run / "checkpoints")])
    for one in stored_weights(few):
        found = torch.from_numpy(one.profile) @ every
        torch.testing.assert_close(found, flat(read_weights(one.checkpoint, one.name)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.1, 0.2])
def test_length_is_the_deviation_of_the_profile(sigma_rel: float) -> None:
    steps, shares = np.arange(1, 20_001) / 20_000, power_function(sigma_rel, 20_000)
    assert shares.sum() == pytest.approx(1)
    mean = (shares * steps).sum()
    assert np.sqrt((shares * (steps - mean) ** 2).sum()) == pytest.approx(sigma_rel, rel=1e-3)


def test_emas_of_a_run_begin_as_power_functions() -> None:
    """As long as their half-life is the cap: EDM2's 0.063."""
    half_life = 1e9
    decays = np.array([ema_decay(step * 64, 64, half_life) for step in range(5000)])
    assert exponent(0.0629) + 1 == pytest.approx(np.log(2) / MAX_EMA_FRACTION, rel=2e-3)
    assert np.abs(profile_of(decays) - power_function(0.0629, 5000)).sum() / 2 < 0.002


@pytest.mark.parametrize(("sigma_rel", "percent"), [(0.05, 5), (0.1, 8), (0.15, 14)])
def test_error_with_ten_checkpoints_is_that_of_the_docs(sigma_rel: float, percent: int) -> None:
    steps, stored = 2000, []
    for step in range(steps // 10, steps + 1, steps // 10):
        ema = profile_of(np.array([ema_decay(image, 1, 1e9) for image in range(step)]))
        for profile in (ema, np.eye(step)[-1]):
            stored.append(StoredWeights(Path(), "ema1", np.pad(profile, (0, steps - step))))
    assert round(100 * fit(stored, power_function(sigma_rel, steps))[1]) == percent


def test_long_runs_are_fitted_in_parts(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, wanted = stored_weights(few), power_function(0.1, STEPS)
    whole, error = fit(stored, wanted)
    monkeypatch.setattr("muralist.tools.post_hoc_ema._MAX_COLUMNS", 30)
    parts, error_of_parts = fit(stored, wanted)
    assert error_of_parts == pytest.approx(error, abs=0.03) and parts.sum() == pytest.approx(1)
    assert np.abs(parts - whole).max() < 0.2


def test_what_cannot_be_assembled_is_refused(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = tmp_path / "last"
    shutil.copytree(few, last)
    for checkpoint in list_checkpoints(last / "checkpoints")[:-1]:
        shutil.rmtree(checkpoint)
    for words, said in (
        ([last, "--sigma_rel", "0.2"], "hold no EMA near --sigma_rel 0.2"),
        ([few / "checkpoints" / f"step_{STEPS:07d}", "--sigma_rel", "0.1"], "is not a run with checkpoints"),
        ([few, "--sigma_rel", "0.1", "--weights", "ema2"], "--weights ema2 has no effect with --sigma_rel"),
        ([few, "--sigma_rel", "0.5"], "--sigma_rel"),
    ):
        assert main(["export", str(words[0]), str(tmp_path / "out"), *map(str, words[1:])]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    file = next((few / "checkpoints").glob("*/ema1.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    shutil.copytree(few, tmp_path / "damaged")
    (tmp_path / "damaged" / file.relative_to(few)).write_bytes(content)
    assert main(["export", str(tmp_path / "damaged"), str(tmp_path / "out"), "--sigma_rel", "0.1"]) == 1
    assert "does not match its hash" in capsys.readouterr().err
