"""Test bench/distill_fid.py in miniature: teacher, students and their scores, also where a call was killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from bench.distill_fid import RECIPES, STUDENT, passes
from bench.speedrun import read_flags, recipe_flags, to_words
from PIL import Image

from muralist.settings import DISTILL_FLAT_NAMES, DistillSettings
from muralist.settings.load import identity, load
from tests.bench.test_speedrun import command, finish, kill_when_scored


def test_passes_are_those_of_the_docs() -> None:
    """50 Heun steps with guidance take 187 passes: no guidance at the times up to 0.1, and one velocity in the last step."""
    assert passes("heun", 50, 2.9) == 187 and passes("heun", 50, 1.0) == 99
    assert passes("abm2", 10, 1.0) == 10 and 10 < passes("abm2", 10, 1.5) < 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_settings_of_distill_with_an_effect(recipe: str) -> None:
    flags = recipe_flags(recipe, read_flags(STUDENT.split()), RECIPES)
    plain = recipe_flags("two", read_flags(STUDENT.split()), RECIPES)
    settings, base = (
        load(DistillSettings, ["TEACHER", *to_words(one)], DISTILL_FLAT_NAMES, positional=("distill.teacher",))
        for one in (flags, plain)
    )
    assert (identity(settings) == identity(base)) == (recipe == "two")


@pytest.mark.slow
def test_students_are_scored_beside_their_teacher(tmp_path: Path) -> None:
    """On driving scenes, whose size and number of classes are not those of CIFAR-10."""
    data = tmp_path / "scenes.npz"
    finish([sys.executable, "bench/scenes_data.py", str(data), "--side", "48", "--images", "60"])
    finish(command(tmp_path, "--train_images", 40, "--guidance", 1.5, "--data", data))
    words = command(tmp_path, "--data", data, "--train_images", 40, "--recipe", "two", "one", "--teacher_guidance", 1.5,
                    "--solvers", "heun:3", "abm2:2", "--teacher_images", 12)  # fmt: skip
    drop = {"--model", "--steps"}  # of the teacher, and of its sampler
    kept = [word for at, word in enumerate(words) if word not in drop and words[at - 1] not in drop]
    words = [sys.executable, "bench/distill_fid.py", str(tmp_path / "students.json"), *kept[4:]]
    record = tmp_path / "students.json"
    before = kill_when_scored(words, record)["runs"][0]
    assert before["settings"]["model"]["img_size"] == 48
    assert before["recipe"] == "two" and before["settings"]["distill"]["steps"] == 2
    said = finish(words)
    found = json.loads(record.read_text())
    assert [run["recipe"] for run in found["runs"]] == ["two", "one"]
    assert found["runs"][0]["seconds"] == before["seconds"], "it was not trained again"
    assert found["runs"][0]["scores"][0]["fid"] == before["scores"][0]["fid"], "it was not scored again"
    scores = [score for run in (*found["runs"], found["teacher"]) for score in run["scores"]]
    assert [(score.get("solver"), score.get("passes")) for score in scores] == [
        (None, None), (None, None), ("heun", passes("heun", 3, 1.5)), ("abm2", passes("abm2", 2, 1.5)),
    ]  # fmt: skip
    for score in scores:
        assert np.isfinite([score["fid"], score["kid, test images"], score["recall, test images"]]).all()
        assert score["images"] == 12 and score["images per second"] > 0
    assert len({score["fid"] for score in scores}) == 4, "all are other images"
    rows = said[said.index("| model") :].splitlines()[2:]
    assert {row.split(" | ")[0] for row in rows} == {"| two", "| one", "| teacher"}
    with Image.open(tmp_path / "work" / "sheet.png") as sheet:
        assert sheet.height > 4 * 48
    assert len(list((tmp_path / "work" / "examples").iterdir())) == 4
