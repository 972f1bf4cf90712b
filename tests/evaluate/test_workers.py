"""Processes that compute features together: real ones, which fail, are killed, or hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from muralist.core.errors import UserError
from muralist.evaluate import features
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.features import compute_features, hash_files
from tests.support.colors import MeanColor
from tests.support.evaluating import scenes, write_images

pytestmark = pytest.mark.slow
ALONE = {"0": "cpu"}


def items_of(folder: Path, count: int) -> list[FeatureItem]:
    return hash_files(sorted(write_images(folder / "images", scenes(count, 0)).iterdir()))


def processes() -> dict[str, int]:
    return {one.name.rpartition("-")[2]: one.pid or 0 for one in multiprocessing.active_children()}


def test_the_others_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes one fails, one is killed and one hangs; the features are equal."""
    captured: list[str] = []
    monkeypatch.setattr(features.log, "warning", lambda text, *values: captured.append(text % values))
    items = items_of(tmp_path, 40)
    hung = 0

    def disturb(done: int, total: int) -> None:
        nonlocal hung
        if not hung and {"1", "2", "3"} <= processes().keys():
            hung = processes()["2"]
            os.kill(hung, signal.SIGSTOP)
            os.kill(processes()["1"], signal.SIGKILL)
        if done == 16:  # more than those two can have done: the last one is at work
            monkeypatch.setattr(features, "TIMEOUT", 3.0)

    found = compute_features(
        MeanColor(fails_as="muralist-evaluate-0"), items, {str(n): "cpu" for n in range(4)}, tmp_path, progress=disturb
    )
    taken = "The others take over its share."
    assert sorted(captured) == [
        f"Process 0, which computes features, failed: RuntimeError: out of memory. {taken}",
        f"Process 1, which computes features, was killed by SIGKILL. {taken}",
        f"Process 2, which computes features, finished nothing for 3 s and was killed. {taken}",
    ]
    assert found.computed == 40 and len(np.unique(found.rows, axis=0)) == 40
    assert np.array_equal(found.rows, compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


def test_the_same_command_resumes_when_all_processes_died(tmp_path: Path) -> None:
    items = items_of(tmp_path, 12)

    def kill_all(done: int, total: int) -> None:
        for pid in processes().values():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError) as told:
        compute_features(MeanColor(), items, {"0": "cpu", "1": "cpu"}, tmp_path / "cache", progress=kill_all)
    assert "was killed by SIGKILL. No other process is left. It was busy with " in str(told.value)
    assert str(told.value).endswith(".png. Run the same command again to resume.")
    assert processes() == {}
    resumed = compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    assert 0 < resumed.cached < 12 and resumed.computed + resumed.cached == 12
    assert np.array_equal(resumed.rows, compute_features(MeanColor(), items, ALONE, tmp_path / "alone").rows)
