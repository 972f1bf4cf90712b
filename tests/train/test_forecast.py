"""A run says how long it takes once its speed is known, and at its end how far that was off."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from muralist.train.metrics import Forecast
from tests.support.runs import only_run, train


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    path: Path, step: float, pause: float, later: float | None = None, steps: int = 1000, first: float = 0.0,
    slower: float = 0.0,
) -> Forecast:  # fmt: skip
    """A run of steps in groups of ten, with a checkpoint every hundred; from the middle on a step may take `later`.

    The first pause takes `first` seconds more, and the ten steps after each pause take `slower` more.
    """
    clock = Clock()
    forecast = Forecast(path, 0, steps, 100, clock)
    paused = 0.0
    for group in range(steps // 10):
        own = step if later is None or group < steps // 20 else later
        seconds = 10 * own + (0.5 if group == 0 else 0.0) + (slower if paused else 0.0)
        clock.now += seconds
        forecast.add(10, seconds, paused)
        paused = 0.0
        if (group + 1) % 10 == 0:
            paused = pause + (first if group == 9 else 0.0)
            clock.now += paused
    forecast.conclude()
    return forecast


def test_forecast_of_a_steady_run_includes_checkpoints(tmp_path: Path) -> None:
    forecast = run(tmp_path / "forecast.json", step=0.1, pause=2.0)
    told = json.loads((tmp_path / "forecast.json").read_text())
    assert told["seconds, taken"] == pytest.approx(1000 * 0.1 + 0.5 + 10 * 2.0)
    assert told["seconds, estimated"] == pytest.approx(told["seconds, taken"], rel=1e-3)
    assert abs(told["off"]) < 0.001 and told["steps per second"] == pytest.approx(10.0)
    assert told["estimated at step"] == 210 and forecast.at_step == 210  # the first flush after the second checkpoint


def test_forecast_ignores_the_slow_first_pause(tmp_path: Path) -> None:
    """As on a GPU: memory is laid out at the first checkpoint, and steps are slower while files are written."""
    run(tmp_path / "forecast.json", step=0.03, pause=1.0, first=3.7, slower=1.8)
    assert abs(json.loads((tmp_path / "forecast.json").read_text())["off"]) < 0.01
    run(tmp_path / "forecast.json", step=0.03, pause=1.0, first=3.7, slower=1.8, steps=400)
    assert abs(json.loads((tmp_path / "forecast.json").read_text())["off"]) < 0.01


def test_forecast_error_of_a_run_that_slows_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "forecast.json", step=0.1, pause=0.0, later=0.3)
    assert json.loads((tmp_path / "forecast.json").read_text())["off"] == pytest.approx(-0.5, abs=0.003)


def test_short_runs_have_no_forecast(tmp_path: Path) -> None:
    assert run(tmp_path / "forecast.json", step=0.1, pause=0.0, steps=30).expected is None
    assert run(tmp_path / "forecast.json", step=0.0001, pause=0.0).expected is None  # too fast to be known
    assert not (tmp_path / "forecast.json").exists()


def test_forecast_log_lines_and_file(tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("muralist")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        run(tmp_path / "forecast.json", step=0.1, pause=2.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert said == [
        "At this pace steps 1 to 1000 take 1 min 40 s, checkpoints and samples not counted.",
        "At this pace steps 1 to 1000 take 2 min 00 s, with its checkpoints and samples.",
        "At this pace steps 1 to 1000 take 2 min 00 s, with its checkpoints and samples.",
        "Took 2 min 00 s, estimated 2 min 00 s at step 210: off by +0.0%.",
    ]


def test_real_run_writes_its_forecast(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muralist.train.metrics._MIN_SECONDS", 1e-6)  # however fast this machine is
    train("--data_path", photo_folder, "--max_steps", "48", "--results_dir", tmp_path, "--samples_per_gpu", "0",
          "--epochs", "100", "--val_fraction", "0")  # fmt: skip
    run_folder = only_run(tmp_path)
    told = json.loads((run_folder / "forecast.json").read_text())
    assert told["last step"] == 48 and told["seconds, estimated"] > 0 and told["seconds, taken"] > 0
    log = (run_folder / "logs" / "train.log").read_text()
    assert "At this pace steps 1 to 48 take" in log and "off by" in log
