"""Whose rank a process takes from SLURM's variables, and when it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from muralist.scale.slurm import adopt_ranks, port
from muralist.scale.slurm_submit import job_script
from muralist.settings import LaunchSettings
from tests.conftest import REPOSITORY

# As seen in a job of SLURM 22.05: in the batch script, and what srun adds in the last task of a step of four and three.
BATCH = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODEID": "0",
         "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # fmt: skip
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODEID": "1", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}  # fmt: skip


def added(variables: dict[str, str]) -> dict[str, str]:
    after = dict(variables)
    adopt_ranks(after)
    return {name: value for name, value in after.items() if variables.get(name) != value}


def test_a_task_of_srun_has_its_place() -> None:
    assert added(TASK) == {
        "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": str(port(TASK)),
    }  # fmt: skip


def test_a_task_that_sees_one_gpu_uses_it() -> None:
    assert added({**TASK, "CUDA_VISIBLE_DEVICES": "2"})["LOCAL_RANK"] == "0"
    assert added({**TASK, "CUDA_VISIBLE_DEVICES": ""})["LOCAL_RANK"] == "2"


def test_an_address_that_was_given_stays() -> None:
    given = added({**TASK, "MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "29500"})
    assert "MASTER_ADDR" not in given and "MASTER_PORT" not in given


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,  # python in a batch script, or in the shell of salloc
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {**TASK, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"},  # a launcher started by srun
    ],
)
def test_elsewhere_nothing_changes(variables: dict[str, str]) -> None:
    assert added(variables) == {}


def test_jobs_and_steps_meet_at_different_ports() -> None:
    places = [
        {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(70_000, 70_100) for step in range(4)
    ]
    assert len({port(place) for place in places}) == len(places)


def directives(script: str) -> set[str]:
    return {line for line in script.splitlines() if line.startswith("#SBATCH")}


def test_the_guides_script_asks_for_what_launch_asks_for() -> None:
    written = (REPOSITORY / "scripts" / "train_slurm_multi_node.sh").read_text()
    settings = LaunchSettings(slurm=True, nodes=2, gpus_per_node=4, partition="gpu", time="24:00:00")
    launched = job_script(settings, ["train"], "train", Path("/home/a b"))
    assert directives(launched) - directives(written) == {"#SBATCH --chdir='/home/a b'"}
    assert directives(written) < directives(launched)
    assert written.count('trap "" USR1') == launched.count('trap "" USR1') == 1


def test_nodes_without_gpus() -> None:
    script = job_script(LaunchSettings(slurm=True, nproc=3), ["train", "--run_name", "a b"], "x", Path("/"))
    assert "gpu" not in script
    assert "#SBATCH --ntasks-per-node=3\n" in script
    assert "export NPROC=3\n" in script
    assert script.endswith("muralist train --run_name 'a b'\n")
