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
DECIMAL = re.compile(r"(?<![\w.,/])(?P<number>\d[\d,]*\.\d+|\d+(?=%))(?![\d.]*\.\d|[\w+])%?")
"""Numbers with a decimal point and percentages, but no versions such as 2.11.0."""
RECORD = re.compile(r"((?:bench/results|tests/evaluate|src/muralist/demo/assets)/\w+\.json)")
SCALES = {None: 1.0, "K": 1e3, "M": 1e6}
PAGES = benchmark_tables.PAGES
WRITTEN_BY_SCRIPTS = ("## JiT in fewer passes", "## FID during training", "## Loss in FP8", "### Results")
"""Sections that other tests compare with their records, word by word."""
LONGEST_LIST = 40
"""Longer lists of a record are curves, in which any number can be found."""
NOT_IN_RECORDS = {  # settings, versions, published values and sizes; where a comment says so, also measurements
    "README.md": "2.0 3.11 7% 95%",
    "any-pipeline.md": "0.1 1.1 1.2 1.5 12.5% 2.1 2.11 2.2 2.5 3.2 3.5",
    "board.md": "0.01 3.11",
    # measured once: start-up, checkpoints and copies of weights in variants that are not in the code
    "decisions.md": "0.05 0.12 0.95 0.98 0.99 1% 10% 11% 12% 2% 2.6 20% 25% 3.11 3.5 3.9 4.2 4.5 4.8 4.9 40% 5% 5.9 "
    "6% 60% 8.8 9%",
    "distilling.md": "0.1 1.5 2.9 2311.18828 2405.14867",
    "equality.md": "2.1 2.2",
    "estimating.md": "1% 1.2 10% 6.5 80%",
    # measured once: 0.15 s of one core to decode an image
    "evaluating.md": "0.001 0.01 0.15 1.5 1.8 16.6 17.5 17.7 2.0 2512.16853 3.9 4.0 95%",
    "generating.md": "0.1 0.125 0.3 2.9 3.5 4.0 4.5 5.0 60% 7.85",
    "hunyuandit.md": "1.0 1.1 1.2 1.5 4.1",
    # measured once: 0.1 to 0.2 s for the features of an image
    "index.md": "0.1 0.2 3.11",
    "lora.md": "1.0 2.2 3.5",
    "many-gpus.md": "2.11",
    "quickstart.ko.md": "3.11",
    "quickstart.zh.md": "3.11",
    # published: FID of JiT-B/16 on ImageNet
    "recipes.md": "4.37",
    "small-gpus.md": "0.56",
    "training-jit.md": "0.05 0.063 0.1 0.15 0.2 0.95 1% 14% 20% 5% 8% 8.9",
}
"""Decimals and percentages by page that no record has."""


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


def numbers(content: Any, texts: bool = True) -> Iterator[float]:
    """Yield every number of a record, also those in its texts."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for value in content if len(content) <= LONGEST_LIST else ():
            yield from numbers(value, texts)
    elif isinstance(content, bool) or content is None:
        return
    elif isinstance(content, str):
        yield from (float(found) for found in re.findall(r"\d+(?:\.\d+)?", content) if texts)
    else:
        yield float(content)


def is_recorded(figure: re.Match[str], values: list[float]) -> bool:
    """Whether a number of the record is this figure, rounded to as many digits; tokens/s may be recorded in thousands."""
    digits = len(figure[1].partition(".")[2])
    shown = float(figure[1].replace(",", ""))
    scale = SCALES[figure[2]]
    return any(round(value / unit, digits) == shown for value in values for unit in {scale, 1.0, 1e-3})


def recorded(names: list[str], texts: bool = True) -> list[float]:
    """Return the numbers of some records."""
    return [value for name in names for value in numbers(json.loads((REPOSITORY / name).read_text()), texts)]


def unrecorded(text: str) -> list[str]:
    """List the figures that no record confirms, with the start of their paragraph."""
    missing = []
    for paragraph in paragraphs(text):
        values = recorded(RECORD.findall(paragraph))
        missing += [
            f"{found[0]} in {paragraph[:90]!r}"
            for found in FIGURE.finditer(paragraph)
            if not is_recorded(found, values)
        ]
    return missing


def decimals_without_record(text: str) -> Iterator[str]:
    """Yield decimals and percentages that are in no record: of their paragraph, and for a table of its section."""
    for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        if section.startswith(WRITTEN_BY_SCRIPTS):
            continue
        of_section = [name for paragraph in paragraphs(section) for name in RECORD.findall(paragraph)]
        for paragraph in paragraphs(section):
            names = RECORD.findall(paragraph) or (of_section if paragraph.startswith("|") else [])
            values = recorded(names, texts=False)
            for found in DECIMAL.finditer(re.sub(r"`[^`]*`", "", paragraph)):
                if not is_rounded(found, values):
                    yield found[0]


def is_rounded(figure: re.Match[str], values: list[float]) -> bool:
    """Whether one of the values is this decimal or percentage, rounded up or down."""
    shown = float(figure["number"].replace(",", ""))
    error = 0.5001 * 10.0 ** -len(figure["number"].partition(".")[2])
    units = (1.0, 0.01) if figure[0].endswith("%") else (1.0,)
    return any(abs(abs(value) / unit - shown) <= error for value in values for unit in units)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_decimal_is_recorded_or_listed(page: Path) -> None:
    assert sorted(set(decimals_without_record(page.read_text()))) == NOT_IN_RECORDS.get(page.name, "").split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_is_in_the_record_that_its_paragraph_names(page: Path) -> None:
    assert unrecorded(page.read_text()) == []


def is_accepted(page: Path, text: str) -> bool:
    """Whether the tests above accept this text of a page."""
    decimals = sorted(set(decimals_without_record(text)))
    return (
        benchmark_tables.render(text) == text
        and not unrecorded(text)
        and decimals == NOT_IN_RECORDS.get(page.name, "").split()
    )


def changed(text: str, digit: int) -> str:
    """Return the text with another digit at a position."""
    return text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]


def test_a_changed_digit_is_found() -> None:
    page = REPOSITORY / "README.md"
    text = page.read_text()
    figures = list(FIGURE.finditer(text))
    assert len(figures) > 20 and is_accepted(page, text)
    for figure in figures:
        assert not is_accepted(page, changed(text, figure.end(1) - 1)), figure[0]


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        (
            "README.md",
            "one H200 | muralist | baseline | ratio |\n|---|---|---|---|\n| JiT-B/4 training, batch 256 | 705",
        ),
        ("distilling.md", "| student, critic 8 times as fast | 0.4203"),
        ("distilling.md", "| student, regression to the teacher's path | 2 | 19.59"),
        ("training-jit.md", "| 102.3"),
        ("training-jit.md", "held-out loss 0.1705"),
        ("evaluating.md", "pytorch-fid's are 262.40"),
        ("estimating.md", "every 200 steps | | -21%"),
        ("any-pipeline.md", "recognizes 93.8%"),
        ("hunyuandit.md", "0.83"),
        ("decisions.md", "with three times the rate with 0.5386"),
    ],
)
def test_a_changed_digit_of_a_table_or_sentence_is_found(page: str, figure: str) -> None:
    path = REPOSITORY / ("docs" if page != "README.md" else "") / page
    text = path.read_text()
    assert text.count(figure) == 1 and is_accepted(path, text)
    digit = text.index(figure) + max(place for place, character in enumerate(figure) if character.isdigit())
    assert not is_accepted(path, changed(text, digit))


def test_every_record_is_named_somewhere() -> None:
    scripts = [*(REPOSITORY / "bench").glob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    texts = [page.read_text() for page in [*PAGES, REPOSITORY / "bench" / "NOTES.md", *scripts]]
    records = {path.name for path in (REPOSITORY / "bench" / "results").glob("*.json")}
    assert [name for name in sorted(records) if not any(name in text for text in texts)] == []
