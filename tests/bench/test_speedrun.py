"""Test bench/speedrun.py in miniature, and the arithmetic of its plan and of its check for memorized images."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.speedrun import NEAR, NearestImages, Speed, as_rows, read_flags, recipe_flags, speed_key, to_words

from bench import speedrun
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import identity, load
from muralist.train.preflight import check_settings, settings_without_effect
from muralist.train.schedule import TrainingClock, learning_rate
from tests.conftest import REPOSITORY
from tests.support.evaluating import inception_weights, scenes
from tests.support.runs import environment


def test_later_flags_replace_earlier_ones_and_recipes_add_up() -> None:
    further = read_flags(["--model", "JiT-B/4", "--sample_interval", "0.1", "1", "--use_amp=false", "--no_compile"])
    assert further == {
        "--model": ["JiT-B/4"], "--sample_interval": ["0.1", "1"], "--use_amp": ["false"], "--no_compile": [],
    }  # fmt: skip
    flags = recipe_flags("p_mean-0.4+s2+cosine", further)
    assert (flags["--model"], flags["--p_mean"], flags["--lr_schedule"]) == (["JiT-S/2"], ["-0.4"], ["cosine"])
    assert to_words(flags)[:5] == ["--model=JiT-S/2", "--sample_interval", "0.1", "1", "--use_amp=false"]
    same = {speed_key(recipe_flags(recipe, further)) for recipe in ("best", "p_mean0.4", "ema100k+cosine+linear")}
    assert len(same) == 1 and speed_key(flags) not in same
    with pytest.raises(SystemExit, match="There is no recipe p_mean7"):
        recipe_flags("best+p_mean7", further)


@pytest.mark.parametrize("recipe", speedrun.RECIPES)
def test_recipes_are_settings_of_train_with_an_effect(recipe: str) -> None:
    words = ["--config", str(REPOSITORY / speedrun.CONFIG), "--max_steps", "7000", "--epochs", "1000000"]
    base = load(TrainSettings, words, TRAIN_FLAT_NAMES)
    settings = load(TrainSettings, [*words, *to_words(recipe_flags(recipe, {}))], TRAIN_FLAT_NAMES)
    check_settings(settings)
    assert (identity(settings) == identity(base)) == (recipe == "best")
    assert settings_without_effect(settings) == []
    rate = learning_rate(settings.optim, TrainingClock(50_000, 512, 1_000_000), settings.max_steps)
    assert recipe in ("official", "constant") or rate.at(6999 * 512) < 0.01 * rate.peak, "it decays to its end"


def test_plan_counts_what_is_outside_of_the_steps() -> None:
    lines = [{"train/samples_per_second": 100.0 if step < 5 else 1000.0} for step in range(20)]
    speed = Speed.of(50.0, 20_000, lines)
    assert speed == Speed(outside=30.0, images_per_second=1000.0)
    assert speed.images(600) == pytest.approx((600 * (1 - speedrun.MARGIN) - 30) * 1000)
    assert speed.images(20) == 0


def test_copies_of_training_images_are_found() -> None:
    generator = np.random.default_rng(0)
    training, tests, new = (generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8) for count in (60, 200, 40))
    mirrored = np.concatenate([training, training[:, :, ::-1]])
    space = NearestImages.build(as_rows(mirrored), as_rows(tests), "cpu")
    found, _, _ = space.compare(as_rows(new))
    assert found[NEAR] <= 0.1 and found["share nearer than any test image"] <= 0.05
    copies = np.concatenate([training[:10, :, ::-1], np.clip(training[10:20] + 1.0, 0, 255), new[:20]])
    found, distances, places = space.compare(as_rows(copies))
    assert found[NEAR] == found["share nearer than any test image"] == 0.5
    assert (places[:10] == 60 + np.arange(10)).all() and (places[10:20] == np.arange(10, 20)).all()
    assert (distances[:10] < 1e-4).all() and (distances[10:20] <= 1).all()
    one_by_one = [np.sqrt(((new[0] - image.astype(float)) ** 2).mean()) for image in mirrored]
    assert float(space.compare(as_rows(new[:1]))[1][0]) == pytest.approx(min(one_by_one))


def command(folder: Path, *words: object, margin: float = speedrun.MARGIN) -> list[str]:
    """A speedrun of a tiny network, which the real Inception scores; other processes may take `margin` of the machine."""
    generator = np.random.default_rng(0)
    if not (folder / "few.npz").is_file():
        labels = {f"{name}_y": generator.integers(0, 10, count) for name, count in (("train", 40), ("test", 12))}
        np.savez(folder / "few.npz", train_x=scenes(40, 0, 32), test_x=scenes(12, 1, 32), **labels)
    paths = ["--data", folder / "few.npz", "--inception_weights", inception_weights(), "--folder", folder / "work"]
    small = "--model JiT-T/16 --batch_size 4 --use_amp=false --num_workers 0 --log_every 1 --warmup_steps 2"
    code = f"import bench.speedrun as s; s.MARGIN, s.OVERTIME = {margin}, 1.0; s.main()"
    chosen = [sys.executable, "-c", code, folder / "record.json", *paths, *words,
              "--images", 12, "--batch", 6, "--steps", 2, *small.split()]  # fmt: skip
    return list(map(str, chosen))


def python_path() -> dict[str, str]:
    return environment(PYTHONPATH=os.pathsep.join([str(REPOSITORY), *sys.path]))


def finish(words: list[str]) -> str:
    done = subprocess.run(words, env=python_path(), cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_when_scored(words: list[str], record: Path) -> dict[str, Any]:
    """Run a command until its record has a first score, kill its processes, and return what the record holds."""
    process = subprocess.Popen(words, env=python_path(), cwd=REPOSITORY, start_new_session=True)

    def is_scored() -> bool:
        runs = json.loads(record.read_text())["runs"] if record.is_file() else []
        return any("fid" in score for run in runs for score in run["scores"])

    deadline = time.monotonic() + 600
    while not is_scored() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found: dict[str, Any] = json.loads(record.read_text())
    (run,) = found["runs"]
    assert len([score for score in run["scores"] if "fid" in score]) == 1
    return found


@pytest.mark.slow
def test_speedrun_within_seconds(tmp_path: Path) -> None:
    limit, margin = 45.0, 0.4
    recipes = ["--recipe", "best", "cosine", "--guidance", 1, "--probe_steps", 30]
    said = finish(command(tmp_path, "--seconds", limit, *recipes, margin=margin))
    record: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    assert len(record["probes"]) == 1, "both recipes are equally fast"
    for run in record["runs"]:
        assert run["ended with its schedule"] and run["within the limit"] and run["seconds"] <= limit
        assert run["seconds"] > 0.5 * (1 - margin) * limit, "the time is used"
        optim = run["settings"]["optim"]  # the rate falls to 0 after the last step; on a busy machine the steps are few
        last = 1.1 / (optim["lr_decay_fraction"] * run["steps"])
        assert run["learning rate of the last step"] < max(0.1, last) * optim["learning_rate"]
        assert run["images"] == 4 * run["steps"] == run["curve"][-1]["images"]
        assert run["settings"]["max_steps"] == run["steps"] == run["steps scored"][-1]
        (score,) = run["scores"]
        assert (score["images"], score["reference images"]) == (12, 40)
        assert np.isfinite([score["fid"], score["kid"], score["kid, test images"]]).all()
        assert set(score["nearest training image, pixels"]["generated, quantiles"]) == {"0", "0.01", "0.05", "0.5"}
    rows = said[said.index("| recipe") :].splitlines()
    assert len(rows) == 4 and {row.split(" | ")[0] for row in rows[2:]} == {"| best", "| cosine"}
    assert not list((tmp_path / "work" / "images").iterdir())


@pytest.mark.slow
def test_killed_speedrun_goes_on(tmp_path: Path) -> None:
    words = command(
        tmp_path, "--train_images", 40, "--recipe", "best", "official", "adamw", "--guidance", 1, 2, "--keep"
    )
    words += ["--learning_rate", "3e-3"]  # which the --blr of `official` contradicts
    record = tmp_path / "record.json"
    before = kill_when_scored(words, record)
    finish(words)
    after = json.loads(record.read_text())
    assert [run["recipe"] for run in after["runs"]] == ["best", "adamw"] and len(after["commands"]) == 2
    assert after["runs"][0]["seconds"] == before["runs"][0]["seconds"], "it was not trained again"
    assert after["runs"][0]["scores"][0]["fid"] == before["runs"][0]["scores"][0]["fid"]
    (failed,) = after["failed"]
    assert failed["recipe"] == "official" and "--blr" in " ".join(failed["error"])
    assert [score["guidance"] for run in after["runs"] for score in run["scores"]] == [1, 2, 1, 2]
    assert all("nearest training image, features" in score for run in after["runs"] for score in run["scores"])
    saved = record.read_bytes()
    finish(words)
    again = json.loads(record.read_text())
    assert again["runs"] == json.loads(saved)["runs"], "nothing is left to do"


@pytest.mark.slow
def test_training_that_is_too_slow_is_stopped_and_marked(tmp_path: Path) -> None:
    words = command(tmp_path, "--seconds", 30, "--recipe", "best", "--guidance", 1, "--probe_steps", 30, margin=-3.0)
    said = finish(words)
    (run,) = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert not run["ended with its schedule"] and not run["within the limit"] and run["seconds"] < 90
    assert run["learning rate of the last step"] == run["settings"]["optim"]["learning_rate"]
    assert " (late) | " in said and run["steps scored"] == [run["steps"]]
