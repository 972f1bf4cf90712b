"""Metrics are written out a few steps later where a GPU computes on meanwhile: the same numbers, none lost, none twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muralist.errors import UserError
from muralist.train import recorder as recording
from muralist.train.forecast import Forecast
from muralist.train.monitors import ProgressLine
from muralist.train.recorder import Moment, Recorder
from muralist.train.schedule import Clock
from muralist.train.stepper import StepResult


class Memory:
    """A monitor that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.lines]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(recording.time, "perf_counter", lambda: moment[0])
    monkeypatch.setattr(recording.time, "time", lambda: moment[0])
    return moment


def build(later: int, monkeypatch: pytest.MonkeyPatch, every: int = 10) -> tuple[Recorder, Memory]:
    monkeypatch.setattr(Recorder, "_steps_later", lambda _: later)
    engine: Any = SimpleNamespace(device=torch.device("cpu"), size=1, mean=lambda values: values, is_main=True)
    memory = Memory()
    line = ProgressLine(0, 1000, 10, quiet=True)
    monitors: Any = [memory]
    return Recorder(
        engine, Clock(10_000, 8, 1), monitors, line, every, 16, 100, 1e9, False, Forecast(None, 0, 1000, 100)
    ), memory


def take(recorder: Recorder, step: int, loss: float | None = None) -> None:
    recorder.add(step, StepResult(torch.tensor(step / 10 if loss is None else loss), torch.tensor(1.0), 1e-4), 0.01)
    recorder.flush_if_due(step)


def test_results_are_written_out_later_and_once(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, memory = build(4, monkeypatch)
    found = []
    for step in range(1, 26):
        now[0] += 0.1
        take(recorder, step)
        found.append(len(memory.lines))
    assert found == [0] * 13 + [10] * 10 + [20] * 2  # after step 14, and 24
    recorder.flush({"val/loss": 0.5})
    assert memory.steps == list(range(1, 26))
    assert [line["train/loss"] for _, line in memory.lines] == pytest.approx([step / 10 for step in range(1, 26)])
    assert [step for step, line in memory.lines if "val/loss" in line] == [25]
    # The speed is that of the steps themselves, whenever it is written out.
    assert all(line["train/samples_per_second"] == pytest.approx(80) for _, line in memory.lines)
    assert all(line["train/data_wait_fraction"] == pytest.approx(0.1) for _, line in memory.lines)


def test_pauses_are_left_out_of_the_speed_on_either_side_of_a_reading(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, memory = build(4, monkeypatch)
    for step in range(1, 31):
        now[0] += 0.1
        take(recorder, step)
        if step in (5, 12):  # while nothing is read, and while ten steps are on their way
            with recorder.paused():
                now[0] += 7
    recorder.flush()
    assert all(line["train/samples_per_second"] == pytest.approx(80) for _, line in memory.lines)
    groups = [list(group) for _, group in groupby(memory.lines, lambda line: line[1]["time"])]
    assert [len(group) for group in groups] == [10, 10, 10]  # a pause is no silence


@pytest.mark.parametrize("every", [1, 2, 10])
def test_where_nothing_computes_on_nothing_waits(every: int, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, memory = build(0, monkeypatch, every)
    for step in range(1, 21):
        take(recorder, step)
        assert len(memory.lines) == step // every * every


def test_groups_never_overtake_each_other(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, memory = build(4, monkeypatch, every=3)
    for step in range(1, 20):
        now[0] += 2 if step == 8 else 0.1
        take(recorder, step)
        assert step != 8 or memory.steps[-1] == 8  # a person would wonder: at once
    recorder.flush()
    recorder.flush()
    assert memory.steps == list(range(1, 20))


def test_a_loss_that_is_no_number_ends_the_run_before_anything_is_saved(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, memory = build(4, monkeypatch)
    with pytest.raises(UserError, match="The loss became nan at step 9"):
        for step in range(1, 15):
            take(recorder, step, math.nan if step >= 9 else None)
    assert memory.steps == list(range(1, 9)) and step == 14
    recorder, memory = build(4, monkeypatch)
    with pytest.raises(UserError, match="at step 9"):
        for step in range(1, 12):
            take(recorder, step, math.nan if step >= 9 else None)
        recorder.flush()  # what a checkpoint begins with
    assert memory.steps == list(range(1, 9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_moment_of_a_gpu_comes_when_its_work_is_done() -> None:
    device = torch.device("cuda:0")
    first = Moment(device)
    torch.cuda._sleep(200_000_000)
    second = Moment(device)
    second.wait()
    assert 0.03 < second.since(first) < 1
