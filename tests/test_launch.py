"""The local launcher: ranks in, one exit status out, whatever happens to them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from muralist.launch import default_processes, launch
from tests.support.runs import TINY, finish, losses, only_run, start


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    assert launch(python(code), 3) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_one_failure_ends_all_and_gives_its_status(tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    began = time.monotonic()
    assert launch(python(code), 3) == 7
    assert time.monotonic() - began < 20


def test_a_signal_reaches_every_rank_once(tmp_path: Path) -> None:
    rank = (
        "import os, signal, time, sys\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        f"open({str(tmp_path)!r} + '/ready' + os.environ['RANK'], 'w').close()\n"
        "while not heard: time.sleep(0.02)\n"
        "time.sleep(0.3)\n"
        "sys.exit(0 if len(heard) == 1 else 9)\n"
    )
    code = f"import sys; from muralist.launch import launch; sys.exit(launch([sys.executable, '-c', {rank!r}], 2))"
    process = start("python", "-c", code)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    finish(process, expect=0, timeout=20)


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert default_processes() == 3
    monkeypatch.setenv("NPROC", "7")
    assert default_processes() == 7


def test_a_command_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    from muralist.cli import main

    assert main(["launch", "--nproc", "2"]) == 1
    assert "needs a command to start" in capfd.readouterr().err


def test_jobs_of_slurm_are_asked_for_in_full(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muralist.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    train = ["train", "--data_path", "driving_world"]
    for words, told in (
        (["--nodes", "2", *train], "--nodes is for a job of SLURM"),
        (["--nproc", "2", "--gpus-per-node", "4", *train], "--gpus-per-node is for a job of SLURM"),
        (["--slurm", *train], "How many processes is a node to run?"),
        (["--slurm", "--gpus-per-node", "4", "--nproc", "4", *train], "but not both"),
        (["--slurm", "--gpus-per-node", "4", *train, "--modle", "JiT-B/4"], "Unknown setting --modle"),
        (["--slurm", "--gpus-per-node", "4", "--partition", "demo", *train, "--debug"], "There is no `sbatch` here"),
    ):
        assert main(["launch", *words]) == 1
        assert told in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_of_four_ranks_is_killed_and_the_next_start_goes_on(photo_folder: Path, tmp_path: Path) -> None:
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
