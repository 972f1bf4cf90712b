"""docs/equality.md: every line of its table is measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.equality import CASES, PAGE, equality_page, measure, read_rows
from tests.support.pipelines import BUILDERS

Build = Callable[[str], Path]


@pytest.mark.parametrize("name", BUILDERS)
def test_images_are_those_of_diffusers_as_the_page_says(name: str, tiny_pipeline: Build) -> None:
    row = measure(CASES[name], tiny_pipeline(name))
    assert row.alone == 0 and (row.batched or 0) <= 1
    assert str(row) in read_rows((REPOSITORY / "docs" / PAGE).read_text(encoding="utf-8")), (
        "run scripts/write_equality.py"
    )


def test_the_page_has_a_line_for_every_pipeline_and_at_least_sixteen_classes(tiny_pipeline: Build) -> None:
    page = (REPOSITORY / "docs" / PAGE).read_text(encoding="utf-8")
    rows = read_rows(page)
    assert len(rows) == len(set(rows)) == len(CASES) and set(CASES) == set(BUILDERS)
    classes = {json.loads((tiny_pipeline(name) / "model_index.json").read_text())["_class_name"] for name in BUILDERS}
    assert {row.split()[1] for row in rows} == classes and len(classes) >= 16
    assert f"{len(classes)} pipeline classes" in page
    around = [line for line in page.splitlines() if line not in rows]
    drawn = equality_page([])
    assert [line for line in drawn.splitlines() if "pipeline classes" not in line] == [
        line for line in around if "pipeline classes" not in line
    ], "run scripts/write_equality.py"
