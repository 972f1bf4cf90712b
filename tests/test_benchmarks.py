"""Figures in README and docs: tables are those of the records, and every other figure is in the record it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import benchmark_tables

from tests.conftest import REPOSITORY

FIGURE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(K|M)?(?: (?:tokens/s|images/s|TFLOP/s|TB/s|GB/s|ms|us)\b|x(?![\w/]))"
)
RECORD = re.compile(r"bench/results/([\w.]+\.json)")
SCALES = {None: 1.0, "K": 1e3, "M": 1e6}
PAGES = benchmark_tables.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page: Path) -> None:
    text = page.read_text()
    assert benchmark_tables.render(text) == text, "run `python scripts/benchmark_tables.py`"


def test_every_table_is_on_a_page() -> None:
    pages = {page: page.read_text() for page in PAGES}
    for name in benchmark_tables.BLOCKS:
        places = [page.name for page, text in pages.items() if f"<!-- benchmarks: {name} -->" in text]
        assert places == (["any-pipeline.md"] if name == "finetune" else ["README.md"]), name


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, table rows and list items of a page, without code blocks and generated tables."""
    text = re.sub(r"<!-- benchmarks: .*?<!-- end of benchmarks -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=[|-])", text):
        yield " ".join(block.split())


def numbers(content: Any) -> Iterator[float]:
    """Yield every number of a record, also those in its texts."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from numbers(value)
    elif isinstance(content, bool) or content is None:
        return
    elif isinstance(content, str):
        yield from (float(found) for found in re.findall(r"\d+(?:\.\d+)?", content))
    else:
        yield float(content)


def is_recorded(figure: re.Match[str], values: list[float]) -> bool:
    """Whether a number of the record is this figure, rounded to as many digits; tokens/s may be recorded in thousands."""
    digits = len(figure[1].partition(".")[2])
    shown = float(figure[1].replace(",", ""))
    scale = SCALES[figure[2]]
    return any(round(value / unit, digits) == shown for value in values for unit in {scale, 1.0, 1e-3})


def unrecorded(text: str) -> list[str]:
    """List the figures that no record confirms, with the start of their paragraph."""
    missing = []
    for paragraph in paragraphs(text):
        names = RECORD.findall(paragraph)
        values = [
            value for name in names for value in numbers(json.loads((REPOSITORY / "bench/results" / name).read_text()))
        ]
        missing += [
            f"{found[0]} in {paragraph[:90]!r}"
            for found in FIGURE.finditer(paragraph)
            if not is_recorded(found, values)
        ]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_is_in_the_record_that_its_paragraph_names(page: Path) -> None:
    assert unrecorded(page.read_text()) == []


def test_a_changed_digit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    figures = list(FIGURE.finditer(readme))
    assert len(figures) > 20
    for figure in figures:
        digit = figure.start(1) + len(figure[1]) - 1
        changed = readme[:digit] + str((int(readme[digit]) + 1) % 10) + readme[digit + 1 :]
        assert benchmark_tables.render(changed) != changed or unrecorded(changed), figure[0]


def test_every_record_is_named_somewhere() -> None:
    scripts = [*(REPOSITORY / "bench").glob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    texts = [page.read_text() for page in [*PAGES, REPOSITORY / "bench" / "NOTES.md", *scripts]]
    records = {path.name for path in (REPOSITORY / "bench" / "results").glob("*.json")}
    assert [name for name in sorted(records) if not any(name in text for text in texts)] == []
