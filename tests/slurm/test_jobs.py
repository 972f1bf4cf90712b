"""SLURM jobs: training on two nodes that is stopped, requeued and resumed ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muralist.core.slurm import first_host, rendezvous_port
from tests.slurm.cluster import Cluster, Job, wait_until
from tests.support.runs import TINY, assert_same_state, finish, last_checkpoint, losses, only_run, start

pytestmark = pytest.mark.slow

STEPS = 40
SCRIPT = "scripts/train_slurm_multi_node.sh"
SMALL = [*TINY, "--data_path", "driving_world", "--max_samples", "512", "--no_use_amp", "--ckpt_every", "5000",
         "--samples_per_gpu", "0", "--log_every", "1", "--val_fraction", "0"]  # fmt: skip
BASE = ["--config", "configs/base_config.yaml"]
Submit = Callable[..., Job]
Disturb = Callable[[Cluster, Job], None]


def by_script(cluster: Cluster, workplace: Path, *options: str, steps: int = STEPS) -> Job:
    return cluster.submit("--gpus-per-node=1", *options, SCRIPT, *SMALL, "--max_steps", steps, cwd=workplace)


def by_launch(cluster: Cluster, workplace: Path, steps: int = STEPS) -> Job:
    words = ["launch", "--slurm", "--nodes", "2", "--gpus-per-node", "1", "--partition", "gpu", "train", *BASE, *SMALL]
    output = finish(start("muralist", *words, "--max_steps", steps, cwd=workplace, **cluster.environment))
    submitted = re.search(r"Job (\d+) is submitted", output)
    assert submitted
    assert f"tail -f logs/train_{submitted[1]}.out" in output
    return Job(cluster, int(submitted[1]))


def send_time_limit_signal(cluster: Cluster, job: Job) -> None:
    cluster.ask("scancel", "--signal=USR1", "--batch", str(job.number))  # what SLURM does ahead of the time limit
    time.sleep(1)


def preempt(cluster: Cluster, job: Job) -> None:
    cluster.submit(
        "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1", cwd=Path("/")
    )
    wait_until(lambda: job.facts()["PreemptTime"] != "None", 30)


def log(workplace: Path, job: Job, kind: str = "out") -> str:
    path = workplace / "logs" / f"train_{job.number}.{kind}"
    return path.read_text() if path.exists() else ""


def wait_for(text: str, workplace: Path, job: Job) -> None:
    wait_until(lambda: text in log(workplace, job) or job.ended(), 90)
    assert text in log(workplace, job), log(workplace, job) + log(workplace, job, "err")


def ranks(job: Job) -> dict[int, tuple[int, int]]:
    """Node and pid of every rank of a running job."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            content = (process / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # the process has ended
        variables = dict(line.split("=", 1) for line in content.split("\0") if "=" in line)
        rank = variables.get("RANK", variables.get("SLURM_PROCID") if "-m\0muralist\0" in words else None)
        if variables.get("SLURM_JOB_ID") == str(job.number) and rank is not None:
            found[int(rank)] = (int(variables["SLURM_NODEID"]), int(process.name))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("undisturbed")
    words = ["launch", "--nproc", "2", "train", *BASE, *SMALL, "--max_steps", STEPS, "--results_dir", results]
    finish(start("muralist", *words))
    return only_run(results)


@pytest.mark.parametrize(
    ("submit", "disturb"),
    [
        (by_script, send_time_limit_signal),
        (by_script, preempt),
        (by_launch, send_time_limit_signal),
    ],
)
def test_requeued_job_ends_with_the_same_bits(
    cluster: Cluster, workplace: Path, undisturbed: Path, submit: Submit, disturb: Disturb
) -> None:
    job = submit(cluster, workplace)
    wait_for("step 3/", workplace, job)
    process = ranks(job)[1][1]
    os.kill(process, signal.SIGSTOP)  # so that a fast machine does not finish before the disturbance
    disturb(cluster, job)
    os.kill(process, signal.SIGCONT)
    facts = job.wait()
    output = log(workplace, job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), output
    stopped = re.search(r"Stopped by SIG\w+ at step (\d+): saved", output)
    resumed = re.search(r"resuming from .* at step (\d+)", output)
    assert stopped and resumed and 3 <= int(stopped[1]) == int(resumed[1]) < STEPS
    assert output.count("Number of processes: 2") == 2, "the second leg's lines come after the first's"
    # torch's agents may log that their peers left, but no traceback is ours.
    assert not re.search(r"muralist/\w+/\w+\.py", log(workplace, job, "err"))
    run = only_run(workplace / "results")
    assert losses(run) == losses(undisturbed)
    assert_same_state(last_checkpoint(undisturbed), last_checkpoint(run))


def test_allocation_takes_precedence_and_ranks_are_in_order(cluster: Cluster, workplace: Path) -> None:
    job = by_script(cluster, workplace, "--gpus-per-node=2", steps=100_000)
    wait_for("step 1/", workplace, job)
    assert {rank: node for rank, (node, _) in ranks(job).items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert "has num_machines 2, num_processes 8; this job has 2 and 4" in log(workplace, job)
    # A cancelled job saves before SLURM kills it.
    cluster.ask("scancel", str(job.number))
    assert job.wait(60)["JobState"] == "CANCELLED"
    stopped = re.search(r"Stopped by SIGTERM at step (\d+): saved", log(workplace, job))
    assert stopped
    assert last_checkpoint(only_run(workplace / "results")).name == f"step_{int(stopped[1]):07d}"


def test_signal_before_training_has_started(cluster: Cluster, workplace: Path) -> None:
    job = by_script(cluster, workplace, steps=2)
    wait_for("attempt 1", workplace, job)
    send_time_limit_signal(cluster, job)
    assert job.wait()["JobState"] == "COMPLETED"
    output = log(workplace, job)
    assert "attempt 2" in output
    assert output.count("Finished at step 2.") == 1


def test_time_limit_shorter_than_its_warning_is_not_requeued(cluster: Cluster, workplace: Path) -> None:
    job = by_script(cluster, workplace, "--time=5")
    wait_for("attempt 1", workplace, job)
    send_time_limit_signal(cluster, job)
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0")
    assert "its time limit is 00:05:00" in log(workplace, job, "err")


def test_user_error_ends_the_job(cluster: Cluster, workplace: Path) -> None:
    job = cluster.submit("--gpus-per-node=1", SCRIPT, "--data_path", "nowhere", cwd=workplace)
    facts = job.wait()
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "1:0")
    assert "nowhere" in log(workplace, job, "err")


@pytest.mark.parametrize("submit", [by_script, by_launch])
def test_killed_process_ends_the_job(cluster: Cluster, workplace: Path, submit: Submit) -> None:
    job = submit(cluster, workplace, steps=100_000)
    wait_for("step 1/", workplace, job)
    killed = time.monotonic()
    os.kill(ranks(job)[1][1], signal.SIGKILL)
    facts = job.wait(60)
    assert time.monotonic() - killed < 60
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0")


@pytest.mark.parametrize("submit", [by_script, by_launch])
def test_port_in_use_is_avoided(cluster: Cluster, workplace: Path, submit: Submit) -> None:
    before = cluster.submit("--output=/dev/null", "--wrap=true", cwd=Path("/"))
    with socket.socket() as taken:
        taken.bind(("", rendezvous_port({"SLURM_JOB_ID": str(before.number + 1)})))
        taken.listen()
        job = submit(cluster, workplace, steps=2)
        assert job.number == before.number + 1
        assert job.wait()["JobState"] == "COMPLETED", log(workplace, job, "err")
    assert "Finished at step 2." in log(workplace, job)


def test_plain_srun_is_a_launcher(cluster: Cluster, workplace: Path) -> None:
    python = workplace / ".venv" / "bin" / "python"
    output = cluster.ask("srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", str(python), "train.py",
                         *map(str, SMALL), "--max_steps", "2", cwd=workplace, seconds=90)  # fmt: skip
    assert "Number of processes: 4" in output
    assert output.count("Finished at step 2.") == 1


@pytest.mark.parametrize("nodes", ["n1", "n[07-09,12]", "a,b[1-2]", "gpu-[2,4]", "127.0.0.[1-2]"])
def test_first_host_agrees_with_scontrol(cluster: Cluster, nodes: str) -> None:
    assert first_host(nodes) == cluster.ask("scontrol", "show", "hostnames", nodes).split()[0]
