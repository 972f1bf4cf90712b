"""A board over one run, one generation folder and one evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.boards import Board, running_board, write_generation, write_run
from tests.support.evaluations import write_evaluation


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the board shows; tests do not change it."""
    root = tmp_path_factory.mktemp("board") / "results"
    write_run(root / "first")
    write_run(root / "group" / "second", steps=30, checkpoints=1)
    write_evaluation(write_generation(root / "scenes") / "evaluation")
    (root / "scenes" / "evaluation" / "report").mkdir()
    (root / "scenes" / "evaluation" / "report" / "index.html").write_text("<script>1</script>")
    (root.parent / "secret.png").write_bytes((root / "scenes" / "row-0.png").read_bytes())
    (root / "leak.png").symlink_to(root.parent / "secret.png")
    (root / "away").symlink_to(root.parent)
    (root / "best").symlink_to("first")
    (root / "notes.txt").write_text("private")
    write_run(root / ".hidden", checkpoints=0)
    return root


@pytest.fixture(scope="session")
def board(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with running_board(results, tmp_path_factory.mktemp("cache")) as running:
        yield running
