"""Metrics are written late but once, the forecast is right, a profile adds up and changes nothing."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muralist.core.errors import UserError
from muralist.settings import CheckpointSettings
from muralist.train import metrics
from muralist.train.loggers import ProgressLogger, start_log
from muralist.train.metrics import DeviceEvent, Forecast, MetricsRecorder, StepProfiler, kind_of
from muralist.train.schedule import TrainingClock, checkpoint_steps
from muralist.train.step import StepResult
from tests.support.runs import assert_same_state, last_checkpoint, losses, only_run, train


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
    progress, forecast = ProgressLogger(0, 1000, 10, quiet=True), Forecast(None, range(1000), set())
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


def test_short_steps_are_written_while_the_gpu_has_others_in_its_queue(now: list[float]) -> None:
    recorder, memory = build(4, every=1000)
    found = []
    for step in range(1, 101):
        now[0] += 0.03
        take(recorder, step)
        found.append(len(memory.lines))
    assert found == [0] * 37 + [34] * 34 + [68] * 29  # a second after the last, and four steps
    for step in range(101, 104):
        now[0] += 2
        take(recorder, step)
    assert memory.steps == list(range(1, 104))


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


def run(
    path: Path, step: float, pause: float, later: float | None = None, steps: int = 1000, first: float = 0.0,
    slower: float = 0.0, every: int = 100, epoch: int | None = None,
) -> Forecast:  # fmt: skip
    """A run of steps in groups of ten, with a checkpoint every hundred, or also at the end of every epoch.

    From the middle on a step may take `later`.

    The first pause takes `first` seconds more, and the ten steps after each pause take `slower` more.
    """
    now = [100.0]  # stands still until it is told to go on
    clock = TrainingClock(8 * (epoch or steps), 8, steps // (epoch or steps))
    checkpoints = checkpoint_steps(CheckpointSettings(every=every, at_epoch_end=epoch is not None), clock, steps)
    forecast = Forecast(path, range(steps), checkpoints, lambda: now[0])
    paused = 0.0
    for group in range(steps // 10):
        own = step if later is None or group < steps // 20 else later
        seconds = 10 * own + (0.5 if group == 0 else 0.0) + (slower if paused else 0.0)
        now[0] += seconds
        forecast.add(10, seconds, paused)
        paused = 0.0
        if 10 * (group + 1) in checkpoints:
            paused = pause + (first if 10 * (group + 1) == min(checkpoints) else 0.0)
            now[0] += paused
    forecast.conclude()
    return forecast


def test_forecast_of_a_steady_run_includes_checkpoints(tmp_path: Path) -> None:
    forecast = run(tmp_path / "forecast.json", step=0.1, pause=2.0)
    told = json.loads((tmp_path / "forecast.json").read_text())
    assert told["seconds, taken"] == pytest.approx(1000 * 0.1 + 0.5 + 10 * 2.0)
    assert told["seconds, estimated"] == pytest.approx(told["seconds, taken"], rel=1e-3)
    assert abs(told["off"]) < 0.001 and told["steps per second"] == pytest.approx(10.0)
    assert told["estimated at step"] == 210 and forecast.at_step == 210  # the first flush after the second checkpoint


@pytest.mark.parametrize(("every", "epoch"), [(5000, 100), (350, 100), (100, 250)])
def test_forecast_counts_checkpoints_at_epoch_ends(tmp_path: Path, every: int, epoch: int) -> None:
    run(tmp_path / "forecast.json", step=0.1, pause=5.0, first=3.0, every=every, epoch=epoch)
    assert abs(json.loads((tmp_path / "forecast.json").read_text())["off"]) < 0.001


def test_forecast_ignores_the_slow_first_pause(tmp_path: Path) -> None:
    """As on a GPU: memory is laid out at the first checkpoint, and steps are slower while files are written."""
    run(tmp_path / "forecast.json", step=0.03, pause=1.0, first=3.7, slower=1.8)
    assert abs(json.loads((tmp_path / "forecast.json").read_text())["off"]) < 0.01
    run(tmp_path / "forecast.json", step=0.03, pause=1.0, first=3.7, slower=1.8, steps=400)
    assert abs(json.loads((tmp_path / "forecast.json").read_text())["off"]) < 0.01


def test_forecast_error_of_a_run_that_slows_down(tmp_path: Path) -> None:
    run(tmp_path / "forecast.json", step=0.1, pause=0.0, later=0.3)
    assert json.loads((tmp_path / "forecast.json").read_text())["off"] == pytest.approx(-0.5, abs=0.003)


def test_short_runs_have_no_forecast(tmp_path: Path) -> None:
    assert run(tmp_path / "forecast.json", step=0.1, pause=0.0, steps=30).expected is None
    assert run(tmp_path / "forecast.json", step=0.0001, pause=0.0).expected is None  # too fast to be known
    assert not (tmp_path / "forecast.json").exists()


def test_forecast_log_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.log, "info", lambda text, *values: said.append(text % values))
    run(tmp_path / "forecast.json", step=0.1, pause=2.0)
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


CPU = torch.device("cpu")


def steps_of(trace: Path) -> list[str]:
    """The names of the steps in a trace."""
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    assert "aten::addmm" in {event.get("name") for event in events}
    marks = [event for event in events if str(event.get("name")).startswith("training step")]
    return [event["name"] for event in sorted(marks, key=lambda event: event["ts"])]


def test_trace_has_the_steps_and_the_run_is_the_same(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--max_steps", "6", "--samples_per_gpu", "0"]
    train(*common, "--results_dir", tmp_path / "with", "--profile", "2")
    train(*common, "--results_dir", tmp_path / "without")
    run, without = only_run(tmp_path / "with"), only_run(tmp_path / "without")
    assert run.name == without.name and not (without / "profile").exists()
    assert losses(run) == losses(without)
    assert_same_state(last_checkpoint(run), last_checkpoint(without))
    assert steps_of(run / "profile" / "trace_rank0.json.gz") == ["training step 3", "training step 4"]
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["summary_rank0.txt", "trace_rank0.json.gz"]
    summary = (run / "profile" / "summary_rank0.txt").read_text()
    header = re.match(r"profile    2 steps from step 4, ([0-9.,]+) ms each", summary)
    parts = re.findall(r"^ +(\D+?) +([0-9.,]+) ms", summary, re.MULTILINE)
    assert header and {"GEMMs", "attention", "optimizer and EMA", "other"} < {name for name, _ in parts}
    total = sum(float(time.replace(",", "")) for _, time in parts)
    assert total == pytest.approx(float(header[1].replace(",", "")), rel=0.01)
    said = (run / "logs" / "train.log").read_text()
    assert f"the trace is {run / 'profile' / 'trace_rank0.json.gz'}" in said and "GEMMs" in said


def record(profile: StepProfiler, steps: range) -> None:
    """Steps of a small product each."""
    weight = torch.ones(8, 8)
    for step in steps:
        profile.begin(step)
        weight = torch.addmm(weight, weight, weight)
        profile.end(step, nullcontext)


@pytest.mark.parametrize(
    ("asked", "steps", "recorded"),
    [
        (2, range(9), [3, 4]),
        (10, range(5), [3, 4]),
        (10, range(1), [0]),
        (1, range(40, 50), [43]),  # of a run that goes on
        (3, range(40, 42), [41]),
    ],
)
def test_short_run_profiles_the_steps_it_has(tmp_path: Path, asked: int, steps: range, recorded: list[int]) -> None:
    profile = StepProfiler(asked, steps, tmp_path, 3, CPU)
    record(profile, steps)
    profile.close()
    assert steps_of(tmp_path / "trace_rank3.json.gz") == [f"training step {step}" for step in recorded]
    told = (tmp_path / "summary_rank3.txt").read_text()
    assert told.startswith(f"profile    {len(recorded)} steps from step {recorded[0] + 1}")
    assert (f"(of {asked} requested: the run has no more)" in told) == (len(recorded) < asked)


def test_stopped_run_writes_the_steps_it_profiled(tmp_path: Path) -> None:
    profile = StepProfiler(5, range(20), tmp_path, 0, CPU)
    record(profile, range(5))
    profile.begin(5)  # and then a signal comes
    profile.close()
    assert steps_of(tmp_path / "trace_rank0.json.gz")[:2] == ["training step 3", "training step 4"]
    assert (tmp_path / "summary_rank0.txt").read_text().startswith("profile    2 steps from step 4 (of 5 requested")


def test_run_that_ends_too_early_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_log(None, 0)
    profile = StepProfiler(5, range(20), tmp_path / "none", 0, CPU)
    record(profile, range(2))
    profile.close()
    assert "the run ended before step 4, the first to be profiled" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_unwritable_profile_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_log(None, 0)
    (tmp_path / "profile").write_text("in the way")
    record(StepProfiler(1, range(5), tmp_path / "profile", 0, CPU), range(5))
    assert "The profile could not be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMMs"),
        ("aten::addmm", "GEMMs"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_attention_backward", "attention"),
        ("_adaln_rmsnorm_backward", "adaLN and norms"),
        ("_quantize_rowwise", "FP8 quantization"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer and EMA"),
        ("triton_poi_fused_add_0", "compiled"),
        ("aten::sum", "other"),
    ],
)
def test_kernel_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
