"""The local launcher: environment of ranks, signals, failures and exit status."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from muralist.core.hardware import default_processes
from muralist.tools.launch import launch
from tests.support.runs import TINY, finish, losses, only_run, start


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_ranks_get_their_environment(tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    assert launch(python(code), 3) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_failed_rank_stops_all_and_sets_the_exit_status(tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    began = time.monotonic()
    assert launch(python(code), 3) == 7
    assert time.monotonic() - began < 20


def test_signal_reaches_every_rank_once(tmp_path: Path) -> None:
    rank = (
        "import os, signal, time, sys\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        f"open({str(tmp_path)!r} + '/ready' + os.environ['RANK'], 'w').close()\n"
        "while not heard: time.sleep(0.02)\n"
        "time.sleep(0.3)\n"
        "sys.exit(0 if len(heard) == 1 else 9)\n"
    )
    code = (
        f"import sys; from muralist.tools.launch import launch; sys.exit(launch([sys.executable, '-c', {rank!r}], 2))"
    )
    process = start("python", "-c", code)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    finish(process, expect=0, timeout=20)


def test_default_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert default_processes() == 3
    monkeypatch.setenv("NPROC", "7")
    assert default_processes() == 7


def test_command_is_required(capfd: pytest.CaptureFixture[str]) -> None:
    from muralist.cli import main

    assert main(["launch", "--nproc", "2"]) == 1
    assert "needs a command to start" in capfd.readouterr().err
    assert main(["launch", "--nproc", "2", "trian", "--data_path", "x"]) == 1
    assert "Did you mean train?" in capfd.readouterr().err


def test_invalid_slurm_options_are_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muralist.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    train = ["train", "--data_path", "driving_world"]
    for words, message in (
        (["--nodes", "2", *train], "--nodes applies to SLURM jobs only"),
        (["--nproc", "2", "--gpus-per-node", "4", *train], "--gpus-per-node applies to SLURM jobs only"),
        (["--slurm", *train], "The number of processes per node is not defined."),
        (["--slurm", "--gpus-per-node", "4", "--nproc", "4", *train], "exactly one of --gpus-per-node and --nproc"),
        (["--slurm", "--gpus-per-node", "4", *train, "--modle", "JiT-B/4"], "Unknown setting --modle"),
        (["--slurm", "--gpus-per-node", "4", "--partition", "demo", *train, "--debug"], "`sbatch` was not found"),
    ):
        assert main(["launch", *words]) == 1
        assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_rank_is_named_and_the_next_start_resumes(photo_folder: Path, tmp_path: Path) -> None:
    words = ["muralist", "launch", "--nproc", "4", "train", *TINY, "--data_path", photo_folder, "--results_dir", tmp_path,
             "--global_batch_size", "8", "--epochs", "100000", "--ckpt_every", "5", "--samples_per_gpu", "0",
             "--log_every", "1"]  # fmt: skip
    process = start(*words, "--max_steps", "100000")
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("*/checkpoints/step_0000010")) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    killed = time.monotonic()
    os.kill(int(ranks[2]), signal.SIGKILL)
    output = finish(process, expect=137, timeout=60)
    assert time.monotonic() - killed < 60
    assert f"Rank 2 (process {ranks[2]}) was killed by SIGKILL" in output.splitlines()[-1]
    assert "Traceback" not in output
    output = finish(start(*words, "--max_steps", "100"))
    resumed = re.search(r"resuming from .* at step (\d+)", output)
    assert resumed and 10 <= int(resumed[1]) < 100
    assert len(losses(only_run(tmp_path))) == 100
