"""docs/architecture.md: its chains are the files that a training step, a generated and an evaluated image really cross."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from scripts import draw_docs

from muralist.cli import main
from tests.conftest import REPOSITORY
from tests.support.call_trace import Trace, tracing
from tests.support.evaluating import evaluate, inception_weights, scenes, write_images
from tests.support.generating import generate_arguments, write_table
from tests.support.pipelines import build_pipeline
from tests.support.runs import train

_FILE = re.compile(r"`([\w/]+\.py)`")
_LIMITS = {"One training step": 15, "One generated image": 15, "One evaluated image": 10}


def _section(heading: str) -> str:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    return re.split(r"^##+ ", text.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def _chain(heading: str) -> list[str]:
    """Return the files in the first column of a section's first table."""
    table = _section(heading).partition("|---|---|\n")[2].partition("\n\n")[0]
    return [match[1] for line in table.splitlines() if (match := _FILE.match(line, 2))]


def _services(heading: str) -> set[str]:
    paragraphs = _section(heading).split("\n\n")
    return {file for text in paragraphs if text.startswith("Services") for file in _FILE.findall(text)}


def _assert_chain(heading: str, trace: Trace) -> None:
    chain, services = _chain(heading), _services(heading)
    assert len(chain) <= _LIMITS[heading] and len(set(chain)) == len(chain)
    assert f"These {len(chain)} files" in _section(heading)
    assert trace.between_marks - set(chain) - services == set(), "files of the trace that the page does not name"
    assert set(chain) - trace.called == set(), "files of the page that the trace does not show"
    assert services - trace.between_marks == set()


def test_a_training_step_crosses_the_files_of_its_chain(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", scenes(40, 0))
    options = ("--results_dir", tmp_path / "results", "--max_steps", 12, "--log_every", 3)
    with tracing(tmp_path / "trace") as trace:
        train("--data_path", images, *options)
    _assert_chain("One training step", trace)
    assert set(_chain("One training step")) <= trace.between_marks


def test_a_generated_image_crosses_the_files_of_its_chain(tmp_path: Path) -> None:
    model, table = build_pipeline("sd", tmp_path / "model"), write_table(tmp_path, 24)
    with tracing(tmp_path / "trace") as trace:
        assert main(["generate", *generate_arguments(table, model, tmp_path / "images")]) == 0
    _assert_chain("One generated image", trace)
    assert set(_chain("One generated image")) <= trace.between_marks


def test_an_evaluated_image_crosses_the_files_of_its_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    weights = inception_weights()
    images, reference = (write_images(tmp_path / str(seed), scenes(8, seed)) for seed in range(2))
    with tracing(tmp_path / "trace") as trace:
        evaluate(tmp_path / "out", "--images", images, "--reference", reference, "--inception_weights", weights)
    _assert_chain("One evaluated image", trace)


def _boxes() -> Iterator[tuple[str, draw_docs.Box]]:
    for diagram in draw_docs.DIAGRAMS:
        yield from ((diagram.heading, box) for box in diagram.boxes if diagram.heading in _LIMITS)


@pytest.mark.parametrize(("heading", "box"), _boxes(), ids=lambda value: getattr(value, "title", ""))
def test_diagrams_show_files_of_the_chain(heading: str, box: draw_docs.Box) -> None:
    assert any(fnmatch(file, box.file) for file in _chain(heading)), box.file
