"""Several real CUDA ranks on one GPU, connected through gloo: the same curve, checkpoints, samples and faults as on CPUs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muralist.core.errors import EXIT_LOST_PEERS
from tests.support.evaluating import inception_weights, scenes, write_images
from tests.support.generating import SCRIPT, generate_arguments, makers, read_images, write_table
from tests.support.runs import assert_same_state, finish, last_checkpoint, losses, metrics, only_run, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

STEPS = 24
BF16_TOLERANCE = 5e-3  # relative, of a loss: gradients are summed in another order and all-reduced in bf16
FP32_TOLERANCE = 1e-4  # relative, of a loss; matmuls are in float32, not TF32
Record = Callable[[str, object], None]


def command(ranks: int, data: Path, results: Path, *more: object) -> list[object]:
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "train.py", "--model", "JiT-S/4", "--img_size", "32", "--data_path", data, "--enable_condition",
            "--results_dir", results, "--batch_size", "12", "--global_batch_size", "12", "--max_steps", STEPS, "--epochs",
            "100", "--learning_rate", "1e-3", "--warmup_steps", "3", "--num_workers", "0", "--sample_steps", "2",
            "--no_use_tensorboard", "--compile", "false", *more]  # fmt: skip


def train(ranks: int, data: Path, results: Path, *more: object) -> tuple[Path, str]:
    output = finish(start(*command(ranks, data, results, *more)))
    return only_run(results), output


def largest_difference(run: Path, other: Path) -> float:
    """Return the largest relative difference of a loss."""
    pairs = list(zip(losses(run), losses(other), strict=True))
    assert len(pairs) == STEPS
    return max(abs(mine - theirs) / theirs for mine, theirs in pairs)


@pytest.fixture(scope="module")
def alone(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs of one rank, each trained once."""
    runs: dict[tuple[object, ...], Path] = {}

    def run(*more: object) -> Path:
        if more not in runs:
            runs[more] = train(1, photo_folder, tmp_path_factory.mktemp("alone"), *more)[0]
        return runs[more]

    return run


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_curve_is_that_of_one_rank(
    alone: Callable[..., Path], photo_folder: Path, tmp_path: Path, record_property: Record, strategy: str, ranks: int
) -> None:
    run, output = train(ranks, photo_folder, tmp_path, "--use_amp", "--strategy", strategy)
    assert f"{ranks} processes share 1 GPU: collectives use gloo" in output
    assert f"Number of processes: {ranks}" in output and "Number of GPUs: 1" in output
    difference = largest_difference(run, alone("--use_amp"))
    record_property("largest relative difference of a loss, bf16", difference)
    assert difference < BF16_TOLERANCE
    samples = run / "samples" / f"step_{STEPS:07d}"
    assert sorted(path.name for path in samples.glob("gpu_*_sample.png")) == [
        f"gpu_{rank}_sample.png" for rank in range(ranks)
    ]


def test_float32_ranks_agree_more_closely(
    alone: Callable[..., Path], photo_folder: Path, tmp_path: Path, record_property: Record
) -> None:
    run, _ = train(2, photo_folder, tmp_path, "--samples_per_gpu", "0")
    difference = largest_difference(run, alone("--samples_per_gpu", "0"))
    record_property("largest relative difference of a loss, float32", difference)
    assert difference < FP32_TOLERANCE


def test_compiled_ranks_train_the_same(
    alone: Callable[..., Path], photo_folder: Path, tmp_path: Path, record_property: Record
) -> None:
    run, _ = train(2, photo_folder, tmp_path, "--use_amp", "--samples_per_gpu", "0", "--compile", "true")
    difference = largest_difference(run, alone("--use_amp"))
    record_property("largest relative difference of a loss, bf16", difference)
    assert difference < BF16_TOLERANCE


def test_a_run_resumes_under_another_strategy_on_fewer_ranks(
    alone: Callable[..., Path], photo_folder: Path, tmp_path: Path, record_property: Record
) -> None:
    for ranks, strategy, steps in ((4, "fsdp2", 8), (2, "ddp", 16), (1, "ddp", STEPS)):
        more = ("--use_amp", "--samples_per_gpu", "0", "--strategy", strategy, "--max_steps", steps)
        run, output = train(ranks, photo_folder, tmp_path, *more)
        assert steps == 8 or f"at step {steps - 8}" in output
    difference = largest_difference(run, alone("--use_amp"))
    record_property("largest relative difference of a loss, bf16", difference)
    assert difference < BF16_TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_killed_rank_is_named_and_the_run_resumes_with_the_same_bits(
    photo_folder: Path, tmp_path: Path, strategy: str
) -> None:
    quiet = ("--use_amp", "--samples_per_gpu", "0", "--ckpt_every", "6", "--strategy", strategy)
    undisturbed, _ = train(2, photo_folder, tmp_path / "undisturbed", *quiet)
    words = command(2, photo_folder, tmp_path / "killed", *quiet, "--max_steps", 100_000)
    launcher = ["muralist", "launch", "--nproc", "2", "train"]
    process = start(*launcher, *words[words.index("train.py") + 1 :])
    run = wait_for_checkpoint(tmp_path / "killed")
    victim = json.loads((run / "heartbeats" / "rank_1.json").read_text())["process"]
    os.kill(victim, signal.SIGKILL)
    output = finish(process, expect=None)
    assert process.returncode != 0 and "Rank 1" in output and "Traceback" not in output, output
    for later in sorted((run / "checkpoints").glob("step_*"))[1:]:  # the kill may have come late: resume from the first
        for file in sorted(later.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        later.rmdir()
    finish(start(*command(2, photo_folder, tmp_path / "killed", *quiet)))
    assert metrics(run) == metrics(undisturbed)
    assert_same_state(last_checkpoint(run), last_checkpoint(undisturbed))


def wait_for_checkpoint(results: Path) -> Path:
    """Return the run as soon as it has a checkpoint."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if found := list(results.glob("*/checkpoints/latest")):
            return found[0].parents[1]
        time.sleep(0.05)
    raise AssertionError("no checkpoint after 240 s")


def test_nccl_is_refused(photo_folder: Path, tmp_path: Path) -> None:
    output = finish(start(*command(2, photo_folder, tmp_path, "--dist_backend", "nccl")), expect=None)
    assert "--dist_backend nccl needs a GPU for each process: 2 processes have 1 GPU." in output
    assert not list(tmp_path.glob("*/checkpoints/step_*"))


def test_a_rank_that_stops_answering_is_named(photo_folder: Path, tmp_path: Path) -> None:
    words = command(2, photo_folder, tmp_path, "--samples_per_gpu", "0", "--ckpt_every", "6", "--max_steps", 100_000)
    launcher = ["muralist", "launch", "--nproc", "2", "train"]
    process = start(*launcher, *words[words.index("train.py") + 1 :], "--dist_timeout", "15")
    run = wait_for_checkpoint(tmp_path)
    frozen = json.loads((run / "heartbeats" / "rank_1.json").read_text())["process"]
    os.kill(frozen, signal.SIGSTOP)
    output = finish(process, expect=EXIT_LOST_PEERS, timeout=150)
    assert f"(process {frozen}) does not respond" in output and "Traceback" not in output


def test_ranks_of_torchrun_generate_the_images_of_one_process(
    tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    table, model = write_table(tmp_path, 12), tiny_pipeline("sd3")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *generate_arguments(table, model, alone)))
    launcher = ("torchrun", "--standalone", "--nproc_per_node=3", SCRIPT)
    finish(start(*launcher, *generate_arguments(table, model, together)))
    assert read_images(together) == read_images(alone) and len(read_images(alone)) == 12
    assert makers(together) == {row: str(row % 3) for row in range(12)}


def test_processes_that_share_a_gpu_evaluate_like_one(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", scenes(96, 0, side=48))
    reference = write_images(tmp_path / "reference", scenes(80, 1, side=48))
    reports = []
    for processes in ("1", "3"):
        output = tmp_path / processes
        words = ["muralist", "evaluate", "--images", images, "--reference", reference, "--output_dir", output,
                 "--inception_weights", inception_weights()]  # fmt: skip
        finish(start(*words, NPROC=processes))
        reports.append(_scores(output / "report.json"))
    assert reports[0] == reports[1] and reports[0]["fid"]["value"] > 1


def _scores(report: Path) -> dict[str, Any]:
    return dict(json.loads(report.read_text())["scores"])
