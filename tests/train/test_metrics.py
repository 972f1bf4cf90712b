"""Metrics of a GPU are written a few steps later, while it computes: the same values, none lost, none twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muralist.core.errors import UserError
from muralist.train import metrics
from muralist.train.loggers import ProgressLogger
from muralist.train.metrics import DeviceEvent, Forecast, MetricsRecorder
from muralist.train.schedule import TrainingClock
from muralist.train.step import StepResult


class Memory:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.lines]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(metrics.time, "time", lambda: clock[0])
    return clock


def build(delay: int, every: int = 10) -> tuple[MetricsRecorder, Memory]:
    world = SimpleNamespace(device=torch.device("cpu"), size=1, all_reduce_mean=lambda values: values, is_main=True)
    spec = SimpleNamespace(tokens_per_image=lambda: 16, flops_per_image=lambda: 100)
    memory = Memory()
    loggers: Any = [memory]
    progress, forecast = ProgressLogger(0, 1000, 10, quiet=True), Forecast(None, 0, 1000, 100)
    scaler = SimpleNamespace(is_enabled=lambda: False)
    state: Any = SimpleNamespace(world=world, spec=spec, scaler=scaler, skip_non_finite=False)
    recorder = MetricsRecorder(state, TrainingClock(10_000, 8, 1), loggers, progress, forecast, every, 1e9)
    recorder._write_delay = delay
    return recorder, memory


def take(recorder: MetricsRecorder, step: int, loss: float | None = None) -> None:
    recorder.add(step, StepResult(torch.tensor(step / 10 if loss is None else loss), torch.tensor(1.0), 1e-4), 0.01)
    recorder.flush_if_due(step)


def test_results_are_written_later_and_once(now: list[float]) -> None:
    recorder, memory = build(4)
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
    # The speed is that of the steps themselves, whenever they are written.
    assert all(line["train/samples_per_second"] == pytest.approx(80) for _, line in memory.lines)
    assert all(line["train/data_wait_fraction"] == pytest.approx(0.1) for _, line in memory.lines)


def test_pauses_are_left_out_of_the_speed(now: list[float]) -> None:
    recorder, memory = build(4)
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
def test_without_a_gpu_nothing_is_delayed(every: int, now: list[float]) -> None:
    recorder, memory = build(0, every)
    for step in range(1, 21):
        take(recorder, step)
        assert len(memory.lines) == step // every * every


def test_groups_are_written_in_order(now: list[float]) -> None:
    recorder, memory = build(4, every=3)
    for step in range(1, 20):
        now[0] += 2 if step == 8 else 0.1
        take(recorder, step)
        assert step != 8 or memory.steps[-1] == 8  # a person would wonder: at once
    recorder.flush()
    recorder.flush()
    assert memory.steps == list(range(1, 20))


def test_non_finite_loss_ends_the_run_before_anything_is_saved(now: list[float]) -> None:
    recorder, memory = build(4)
    with pytest.raises(UserError, match="The loss became nan at step 9"):
        for step in range(1, 15):
            take(recorder, step, math.nan if step >= 9 else None)
    assert memory.steps == list(range(1, 9)) and step == 14
    recorder, memory = build(4)
    with pytest.raises(UserError, match="at step 9"):
        for step in range(1, 12):
            take(recorder, step, math.nan if step >= 9 else None)
        recorder.flush()  # what a checkpoint begins with
    assert memory.steps == list(range(1, 9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_event_waits_for_the_work_before_it() -> None:
    device = torch.device("cuda:0")
    first = DeviceEvent(device)
    torch.cuda._sleep(200_000_000)
    second = DeviceEvent(device)
    second.wait()
    assert 0.03 < second.since(first) < 1
