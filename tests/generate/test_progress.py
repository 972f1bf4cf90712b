"""How far workers are, told in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muralist.generate import progress
from muralist.generate.folder import OutputFolder
from muralist.generate.screen import Count, Lines


def test_counts_are_written_down_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OutputFolder(tmp_path / "images")
    folder.create()
    screen = progress.ToldScreen(Lines(), folder)
    screen.show({"0": Count(1, 0, 8), "1": Count(0, 1, 8)}, 2)
    told = {"workers": {"0": [1, 0, 8], "1": [0, 1, 8]}, "unassigned": 2}
    assert json.loads(folder.progress.read_text()) == told
    screen.show({"0": Count(2, 0, 8), "1": Count(0, 1, 8)}, 1)
    assert json.loads(folder.progress.read_text()) == told, "not again within a second"
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN", 0.0)
    screen.show({"0": Count(2, 0, 8), "1": Count(0, 1, 8)}, 1)
    assert json.loads(folder.progress.read_text())["workers"]["0"] == [2, 0, 8]

    folder.sweep()
    assert not folder.progress.exists(), "the next command does not find what a killed one said"
    folder.end()
    screen.show({"0": Count(8, 0, 8)}, 0)
    assert not folder.work.exists(), "a folder that is done stays so"
