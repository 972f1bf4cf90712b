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

from muralist.scale.kernels import kind_of
from muralist.train.monitors import start_log
from muralist.train.profile import StepProfile
from tests.support.runs import assert_same_state, last_checkpoint, losses, only_run, train

CPU = torch.device("cpu")


def steps_of(trace: Path) -> list[str]:
    """The names of the steps in a trace."""
    with gzip.open(trace) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    assert "aten::addmm" in {event.get("name") for event in events}
    marks = [event for event in events if str(event.get("name")).startswith("training step")]
    return [event["name"] for event in sorted(marks, key=lambda event: event["ts"])]


def test_the_trace_has_the_steps_and_the_run_is_the_same(photo_folder: Path, tmp_path: Path) -> None:
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
    whole = re.match(r"profile    2 steps from step 4, ([0-9.,]+) ms each", summary)
    parts = re.findall(r"^ +(\D+?) +([0-9.,]+) ms", summary, re.MULTILINE)
    assert whole and {"matrix products", "attention", "optimizer and averages", "other"} < {name for name, _ in parts}
    total = sum(float(time.replace(",", "")) for _, time in parts)
    assert total == pytest.approx(float(whole[1].replace(",", "")), rel=0.01)
    said = (run / "logs" / "train.log").read_text()
    assert f"the trace is {run / 'profile' / 'trace_rank0.json.gz'}" in said and "matrix products" in said


def record(profile: StepProfile, steps: range) -> None:
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
def test_a_short_run_records_what_it_has(tmp_path: Path, asked: int, steps: range, recorded: list[int]) -> None:
    profile = StepProfile(asked, steps, tmp_path, 3, CPU)
    record(profile, steps)
    profile.close()
    assert steps_of(tmp_path / "trace_rank3.json.gz") == [f"training step {step}" for step in recorded]
    told = (tmp_path / "summary_rank3.txt").read_text()
    assert told.startswith(f"profile    {len(recorded)} steps from step {recorded[0] + 1}")
    assert (f"(of {asked} asked for: the run has no more)" in told) == (len(recorded) < asked)


def test_a_run_that_is_stopped_leaves_what_was_recorded(tmp_path: Path) -> None:
    profile = StepProfile(5, range(20), tmp_path, 0, CPU)
    record(profile, range(5))
    profile.begin(5)  # and then a signal comes
    profile.close()
    assert steps_of(tmp_path / "trace_rank0.json.gz")[:2] == ["training step 3", "training step 4"]
    assert (tmp_path / "summary_rank0.txt").read_text().startswith("profile    2 steps from step 4 (of 5 asked for")


def test_a_run_that_never_came_so_far_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_log(None, 0)
    profile = StepProfile(5, range(20), tmp_path / "none", 0, CPU)
    record(profile, range(2))
    profile.close()
    assert "the run ended before step 4, the first to be recorded" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_written_costs_the_trace_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_log(None, 0)
    (tmp_path / "profile").write_text("in the way")
    record(StepProfile(1, range(5), tmp_path / "profile", 0, CPU), range(5))
    assert "The profile could not be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_attention_backward", "attention"),
        ("_norm_backward", "norm, gate, modulation"),
        ("_round_rows", "rounding to 8 bits"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "exchange between GPUs"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer and averages"),
        ("triton_poi_fused_add_0", "compiled"),
        ("aten::sum", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
