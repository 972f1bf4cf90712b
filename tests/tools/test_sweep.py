"""`muralist sweep`: its combinations, sweep.json and table, and a sweep from a run to a winner."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import save_file

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.generate import command as generating
from muralist.models.weights import WeightSet
from muralist.settings import SweepSettings
from muralist.tools.sweep import (
    Combination,
    Sweep,
    SweepResults,
    SweepScore,
    conclusions,
    list_combinations,
    results_table,
)
from tests.support.evaluating import inception_weights, scenes, write_images
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.pipelines import build_pipeline
from tests.support.runs import finish, only_run, start, train
from tests.support.worker_pools import ModelThreadPool

SETTINGS = {"model": "JiT-T/8 at 16 px", "num_inference_steps": 50, "num_samples": 8192, "reference": "ab"}


def score(scale: float, fid: float, around: float = 0.1, weights: WeightSet = "ema1") -> SweepScore:
    interval = None if scale == 1 else (0.1, 1.0)
    tried = {"weights": weights, "guidance_scale": scale, "guidance_interval": interval}
    return SweepScore(**tried, fid=fid, low=fid - around, high=fid + around, images=8192, gpu_seconds=75.0)  # type: ignore[arg-type]


def found(folder: Path, *scores: SweepScore, **changes: Any) -> SweepResults:
    opened = SweepResults.open(folder / "sweep.json", "results/run", SETTINGS | changes)
    opened.scores |= {score.name: score for score in scores}
    return opened


def test_results_are_read_back(tmp_path: Path) -> None:
    first = found(tmp_path, score(2, 4.0), score(1, 9.0))
    first.full = score(2, 3.5)
    first.write(finished=True)
    again = found(tmp_path)
    assert (again.scores, again.full) == (first.scores, first.full)
    assert [one.fid for one in again.ranked()] == [4.0, 9.0]
    changes = r"Changed: num_inference_steps 50 -> 20; reference ab -> cd\. Its model was resu"
    with pytest.raises(UserError, match=changes):
        found(tmp_path, num_inference_steps=20, reference="cd")
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="damaged. Delete it and run the same command: images and features are kept"):
        found(tmp_path)


def test_the_table() -> None:
    ranked = [score(2.5, 4.0), score(2, 4.15, weights="ema2"), score(3, 4.3), score(1, 9.0)]
    console = Console(width=118, color_system=None)
    with console.capture() as capture:
        console.print(results_table(ranked, score(2.5, 3.52)))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert lines == [
        "weights guidance interval FID 95% images GPU time",
        "ema1 2.5 0.1 to 1 4.00 3.90 to 4.10 8,192 1 min 15 s best",
        "ema2 2 0.1 to 1 4.15 4.05 to 4.25 8,192 1 min 15 s within noise",
        "ema1 3 0.1 to 1 4.30 4.20 to 4.40 8,192 1 min 15 s",
        "ema1 1 - 9.00 8.90 to 9.10 8,192 1 min 15 s",
        "ema1 2.5 0.1 to 1 3.52 3.42 to 3.62 8,192 1 min 15 s full count",
    ]
    with console.capture() as capture:
        console.print(results_table(ranked, limit=1))
    assert len(capture.get().splitlines()) == 2


def test_conclusions() -> None:
    middle = conclusions([score(2, 4.0), score(3, 4.5), score(1, 9.0)])
    assert middle == ["Best of 3: ema1_cfg2_0.1-1, FID 4.00 with 8,192 images."]
    edge = conclusions([score(3, 4.0), score(2, 4.1), score(1, 9.0)])
    assert "within noise of 1 other:" in edge[1]
    assert edge[2] == "Its guidance scale is the highest one tried: try higher ones too, in the same folder."
    assert "the lowest one tried" in conclusions([score(2, 4.0), score(3, 4.5)])[1]
    assert len(conclusions([score(1, 4.0), score(2, 5.0)])) == 1  # no scale is below no guidance


def given(**changes: Any) -> SweepSettings:
    return SweepSettings(model_path="", reference="", output_dir="", **changes)


def names(settings: SweepSettings) -> list[str]:
    return [combination.name for combination in list_combinations(settings, guided=True, single_set=False)[0]]


def test_every_combination_once() -> None:
    settings = given(guidance_scale=[1, 2, 2.9, 2.0], guidance_interval=["0,1", "0.1,1"])
    found, notes = list_combinations(settings, guided=True, single_set=False)
    each = ["cfg1", "cfg2_0-1", "cfg2_0.1-1", "cfg2.9_0-1", "cfg2.9_0.1-1"]
    expected = [f"{which}_{rest}" for which in ("ema1", "ema2") for rest in each]
    assert [combination.name for combination in found] == expected
    assert notes == []  # a scale of 1 has no interval; 2 is 2.0
    assert len(names(given())) == 14


def test_close_scales_have_different_folders() -> None:
    expected = ["model_cfg2.9_0.1-1", "model_cfg2.9000001_0.1-1"]
    assert names(given(weights=["model"], guidance_scale=[2.9, 2.9000001])) == expected


def test_missing_choices_are_logged() -> None:
    found, notes = list_combinations(given(weights=["ema1", "ema2", "ema1"]), guided=False, single_set=False)
    assert [combination.generate_settings for combination in found] == [{"weights": "ema1"}, {"weights": "ema2"}]
    assert notes == ["The model is unconditional and cannot be guided: only its weights are compared."]
    found, notes = list_combinations(given(guidance_scale=[1, 3]), guided=True, single_set=True)
    assert [combination.name for combination in found] == ["weights_cfg1", "weights_cfg3_0.1-1"]
    assert notes == ["The model has a single set of weights: there are no EMA weights to choose from."]
    assert found[1].flags == "--guidance_scale 3 --guidance_interval 0.1 1"
    assert Combination(weights="ema1", guidance_scale=1.0).flags == "--weights ema1 --guidance_scale 1"


@pytest.mark.parametrize("written", ["0.1", "0.1:1", "0,0.5,1", "1,0", "0,1.5"])
def test_invalid_intervals_are_refused(written: str) -> None:
    with pytest.raises(UserError, match=rf"'{written}' is not an interval.*two numbers from 0 to 1.*Write LOW,HIGH"):
        names(given(guidance_interval=[written]))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MURALIST_INCEPTION", "NPROC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))
    monkeypatch.setattr(generating, "open_pool", ModelThreadPool)  # threads; the slow test starts processes
    for name in ("", "muralist"):  # as in a process of its own: another command may have set up its log here
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two EMAs of its weights."""
    chosen = family("cat", "dog", "bird")
    weights = network_of(chosen).state_dict()
    run = checkpoint(tmp_path_factory.mktemp("runs") / "pets", chosen.describe(), weights)
    other = {name: value * 1.5 for name, value in weights.items()}
    save_file(other, run / "checkpoints" / "step_0000001" / "ema2.safetensors")
    return run


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics as other tools write them."""
    path = tmp_path_factory.mktemp("reference") / "stats.npz"
    np.savez(path, mu=np.zeros(2048), sigma=np.eye(2048))
    return path


def words(model: Path, reference: Path, output: Path, *more: object) -> list[str]:
    paths = ("--model_path", model, "--reference", reference, "--output_dir", output, "--num_inference_steps", 2)
    return ["sweep", *map(str, (*paths, *more))]


def results(output: Path) -> dict[str, Any]:
    """sweep.json, without what a clock put there."""
    found = json.loads((output / "sweep.json").read_text())
    for entry in (*found["combinations"], found["winner"], found["full"]):
        if entry:
            assert entry.pop("gpu_seconds") > 0
    return found


def test_wrong_settings_are_refused_before_anything_is_generated(
    pets: Path, statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"

    def refused(*arguments: object, model: Path = pets, reference: Path = statistics) -> str:
        assert main(words(model, reference, output, *arguments)) == 1
        assert not output.exists()
        return capsys.readouterr().err

    weights = ("--inception_weights", inception_weights())
    assert "need the Inception weights of 2015-12-05, which were not found" in refused()
    assert "cannot be read" in refused("--inception_weights", pets / "checkpoints" / "latest")
    assert "'0.1' is not an interval" in refused("--guidance_interval", 0.1, 1)
    assert "expected one or more of model, ema1, ema2" in refused("--weights", "ema3")
    assert "There are no model weights" in refused("--weights", "model")
    assert "does not exist" in refused(*weights, reference=tmp_path / "nowhere")
    assert "stats.npz holds no" in refused(*weights, reference=_npz(tmp_path / "stats.npz"))
    write_images(tmp_path / "real", scenes(2, 0))
    output = tmp_path / "real" / "out"
    assert "would become part of the reference" in refused(*weights, reference=tmp_path / "real")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "every rank would run the complete sweep" in refused(*weights)


def _npz(path: Path) -> Path:
    np.savez(path, mean=np.zeros(2048))
    return path


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_pipeline("sd", tmp_path).rename(tmp_path / "model")
    assert main(words(tmp_path / "model", tmp_path, tmp_path / "out")) == 1
    assert "is not a JiT model" in capsys.readouterr().err


def prepare(model: Path, reference: Path, output: Path, **settings: Any) -> Sweep:
    given = {
        "model_path": model,
        "reference": reference,
        "output_dir": output,
        "inception_weights": inception_weights(),
    }
    return Sweep(SweepSettings(**{name: str(path) for name, path in given.items()}, **settings))


def scored(tried: Combination, fid: float, low: float, high: float, images: int) -> SweepScore:
    return SweepScore(**tried.model_dump(), fid=fid, low=low, high=high, images=images, gpu_seconds=60.0)


def score_all(model: Path, reference: Path, output: Path, **settings: Any) -> Sweep:
    """Write a model without classes, and a sweep.json that holds its only score."""
    save_file(network_of(family()).state_dict(), model)
    output.mkdir()
    prepared = prepare(model, reference, output, num_inference_steps=2, **settings)
    (only,) = prepared.combinations
    prepared.results.scores[only.name] = scored(only, 12.0, 11.5, 12.5, 8192)
    prepared.results.full = scored(only, 11.0, 10.8, 11.2, 50_000)
    prepared.results.write()
    return prepared


def test_scored_combinations_are_not_generated_again(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model.safetensors", tmp_path / "out"
    command = words(model, statistics, output, "--inception_weights", inception_weights())
    prepared = score_all(model, statistics, output)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "there are no EMA weights to choose from" in captured.err
    assert "cannot be guided: only its weights are compared" in captured.err
    assert "1 combination for JiT at 16 px, 8,192 images each, 2 steps, then 50,000 of the best." in captured.err
    assert "Scored already: 1." in captured.err
    assert "With 50,000 other images its FID is 11.00 (10.80 to 11.20)." in captured.out
    assert f"  muralist generate --model_path {model} --num_inference_steps 2 --prompts_csv" in captured.out
    assert {path.name for path in output.iterdir()} == {"prompts.jsonl", "sweep.json"}
    assert results(output)["winner"]["name"] == "weights"
    assert main([*command, "--official_last_step"]) == 1
    assert "Changed: official_last_step None -> True." in " ".join(capsys.readouterr().err.split())
    prepared.results.full = scored(Combination(weights="ema2"), 11.0, 10.8, 11.2, 50_000)
    prepared.results.write()
    assert main([*command, "--full_samples", "none"]) == 0
    assert results(output)["full"] is None  # another combination was the best then
    assert main([*command, "--num_inference_steps", "3"]) == 1
    assert "Changed: num_inference_steps 2 -> 3." in capsys.readouterr().err


def test_the_official_last_step_is_passed_to_generate(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "model.safetensors", tmp_path / "out"
    prepared = score_all(model, statistics, output, official_last_step=True)
    assert prepared.model.identity["official_last_step"] is True  # so that its images are generated that way
    more = ("--full_samples", "none", "--inception_weights", inception_weights())
    assert main(words(model, statistics, output, "--official_last_step", *more)) == 0
    told = f"  muralist generate --model_path {model} --official_last_step --num_inference_steps 2 --prompts_csv"
    assert told in capsys.readouterr().out
    assert main(words(model, statistics, output, *more)) == 1
    assert "Changed: official_last_step True -> None." in capsys.readouterr().err


def test_the_solver_is_passed_to_generate(statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "model.safetensors", tmp_path / "out"
    prepared = score_all(model, statistics, output, scheduler="abm2")
    assert prepared.model.resolved["scheduler"] == "abm2"
    more = ("--full_samples", "none", "--inception_weights", inception_weights())
    assert main(words(model, statistics, output, "--scheduler", "abm2", *more)) == 0
    told = f"  muralist generate --model_path {model} --scheduler abm2 --num_inference_steps 2 --prompts_csv"
    assert told in capsys.readouterr().out
    assert main(words(model, statistics, output, "--scheduler", "heun", *more)) == 1
    assert "Changed: scheduler abm2 -> None." in capsys.readouterr().err
    assert main(words(model, statistics, output, "--scheduler", "ddim", *more)) == 1
    assert "The scheduler ddim does not fit a JiT model." in capsys.readouterr().err


def test_equal_ema_weights_are_tried_once(pets: Path, statistics: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pets, run)
    step = run / "checkpoints" / "step_0000001"
    shutil.copy(step / "ema1.safetensors", step / "model.safetensors")

    def tried(*weights: str) -> list[str | None]:
        prepared = prepare(run, statistics, tmp_path / "out", weights=list(weights), guidance_scale=[2])
        return [combination.weights for combination in prepared.combinations]

    assert tried("ema1", "ema2", "model") == ["ema1", "ema2"]
    assert tried("model", "ema1") == ["model"]


def made(folder: Path) -> int:
    return len(list(folder.glob("*.png")))


@pytest.mark.slow
def test_an_interrupted_sweep_resumes_with_the_same_results(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--data_path", photo_folder, "--enable_condition", "--results_dir", tmp_path / "results", "--max_steps", 8,
          "--samples_per_gpu", 0, "--ema2_half_life", 0.01)  # fmt: skip
    run = only_run(tmp_path / "results")
    reference = write_images(tmp_path / "reference", scenes(6, 1, 16))

    def command(output: str) -> list[str]:
        more = ("--guidance_scale", 4, "--num_samples", 4, "--full_samples", 6, "--num_inference_steps", 8)
        return words(run, reference, tmp_path / output, *more, "--inception_weights", inception_weights())

    killed = start("python", "-m", "muralist", *command("killed"))
    folder = tmp_path / "killed" / "small-4"
    try:
        _wait(lambda: made(folder / "ema2_cfg4_0.1-1") > 0, killed)
    finally:
        killed.send_signal(signal.SIGINT)
    assert "nterrupted" in finish(killed, expect=130)
    (before,) = results(tmp_path / "killed")["combinations"]
    assert before["name"] == "ema1_cfg4_0.1-1" and results(tmp_path / "killed")["winner"] is None
    there = {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    assert 4 < len(there) <= 8
    capsys.readouterr()

    for output in ("killed", "whole"):
        assert main(command(output)) == 0
    assert {path: path.stat().st_mtime_ns for path in there} == there
    found = results(tmp_path / "whole")
    assert results(tmp_path / "killed") == found
    assert [entry["name"] for entry in found["combinations"]] == ["ema1_cfg4_0.1-1", "ema2_cfg4_0.1-1"]
    first, second = (entry["fid"] for entry in found["combinations"])
    assert first != second and found["winner"]["fid"] == min(first, second)
    assert (found["full"]["name"], found["full"]["images"]) == (found["winner"]["name"], 6)
    # The reference is computed once, classes are balanced, all combinations share seeds and the full count has others.
    whole = tmp_path / "whole"
    assert len(list(whole.glob("reference-*.npz"))) == 2 and not list(whole.glob("*.features"))
    names = {tuple(sorted(path.name for path in each.glob("*.png"))) for each in (whole / "small-4").iterdir()}
    assert names == {tuple(f"{row + 1:06d}_seed{42 + row}.png" for row in range(4))}
    assert (whole / "full-6" / found["winner"]["name"] / "000006_seed1000047.png").is_file()
    assert sum("sunrise" in line for line in (whole / "prompts.jsonl").read_text().splitlines()) == 3
    captured = capsys.readouterr().out
    assert "full count" in captured and f"{found['winner']['flags']} --num_inference_steps 8" in captured


def _wait(happened: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, finish(process, expect=None)
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
