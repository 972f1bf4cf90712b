"""`--profile N`: a trace that can be opened, a summary that adds up, and the same run as without."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from muralist.train.loggers import start_log
from muralist.train.metrics import StepProfiler, kind_of
from tests.support.runs import assert_same_state, last_checkpoint, losses, only_run, train

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
