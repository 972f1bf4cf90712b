"""Ranks from the variables of SLURM, and batch scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from muralist.core.slurm import rendezvous_port, set_rank_environment
from muralist.settings import LaunchSettings
from muralist.tools.launch import job_script
from tests.conftest import REPOSITORY

# From a job of SLURM 22.05: the batch script, and the last task of a step with four and three tasks.
BATCH = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODEID": "0",
         "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # fmt: skip
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NODEID": "1", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}  # fmt: skip


def added(variables: dict[str, str]) -> dict[str, str]:
    after = dict(variables)
    set_rank_environment(after)
    return {name: value for name, value in after.items() if variables.get(name) != value}


def test_srun_task_gets_its_rank() -> None:
    assert added(TASK) == {
        "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": str(rendezvous_port(TASK)),
    }  # fmt: skip


def test_task_with_one_visible_gpu_uses_it() -> None:
    assert added({**TASK, "CUDA_VISIBLE_DEVICES": "2"})["LOCAL_RANK"] == "0"
    assert added({**TASK, "CUDA_VISIBLE_DEVICES": ""})["LOCAL_RANK"] == "2"


def test_given_address_is_kept() -> None:
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
def test_environment_is_unchanged_elsewhere(variables: dict[str, str]) -> None:
    assert added(variables) == {}


def test_jobs_and_steps_have_different_ports() -> None:
    places = [
        {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(70_000, 70_100) for step in range(4)
    ]
    assert len({rendezvous_port(place) for place in places}) == len(places)


def directives(script: str) -> set[str]:
    return {line for line in script.splitlines() if line.startswith("#SBATCH")}


def test_batch_script_and_launch_have_the_same_directives() -> None:
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
