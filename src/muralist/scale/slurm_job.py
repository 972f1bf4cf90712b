"""The batch script's part of a SLURM job: start the processes on every node, save before time is up, requeue, go on.

Run as `python -m muralist.scale.slurm_job` followed by what is to be started, one of

  accelerate launch --config_file FILE train.py ...   one launcher per node, told its rank on that node
  muralist train ...                                  one task per process, with SLURM's own ranks

SLURM sends SIGUSR1 to the batch script ahead of the time limit (`#SBATCH --signal=B:USR1@180`). It is handed on to the
training processes, which save and leave; then the job goes back into the queue, and its next leg goes on from there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import yaml

from muralist.cli import guarded
from muralist.errors import UserError
from muralist.launch import chosen_processes
from muralist.scale.slurm import first_host, free_port
from muralist.words import duration

_ASK_EVERY = 5.0  # seconds between requests to stop: a process that is still starting does not hear the first one
_SHORT_LEG = 60.0  # seconds
# What stands between a signal and the training processes must not end by it, and before they listen neither must they:
# SIGUSR1, and for torch's agent SIGTERM too, which it would answer with a traceback. A node's rank is known on it only.
_TASK = 'trap "" USR1; exec "$0" -m "$@"'
_LAUNCHER = (
    'trap "" USR1 TERM; export PET_SIGNALS_TO_HANDLE=SIGINT; '
    'exec "$0" -m accelerate.commands.accelerate_cli launch --machine_rank "$SLURM_NODEID" "$@"'
)


def main(arguments: Sequence[str]) -> int:
    """Run the job's processes to their end, or until time is up; returns the exit status of the job."""
    leg = Leg()  # first of all: from here on a signal is noted
    job, nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
    number = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    meeting = str(free_port(os.environ))  # a batch script runs on its job's first node, where the ranks meet
    if arguments[:2] == ["accelerate", "launch"]:
        rest = arguments[2:]
        processes = _processes_per_node(rest, nodes)
        place = ["--num_machines", nodes, "--num_processes", nodes * processes,
                 "--main_process_ip", first_host(os.environ["SLURM_JOB_NODELIST"]),
                 "--main_process_port", meeting]  # fmt: skip
        tasks, command = 1, [_LAUNCHER, sys.executable, *map(str, place), *rest]
    elif arguments[:1] == ["muralist"]:
        tasks = processes = _processes_per_node((), nodes)
        command = [_TASK, sys.executable, *arguments]
        os.environ["MASTER_PORT"] = meeting
    else:
        raise UserError("A SLURM job runs `accelerate launch ...` or `muralist ...`.", f"It was given {arguments[:1]}.")
    print(f"SLURM job {job}, leg {number}: nodes x processes = {nodes} x {processes}", flush=True)
    # One thread per process as with every launcher; all cores of the job for each task, which has loaders to feed it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}",
            "--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=1"]  # fmt: skip
    return leg.run([*step, "bash", "-c", *command])


class Leg:
    """One start of a job, up to its end or its return to the queue."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.time_is_up = False
        self.job = os.environ["SLURM_JOB_ID"]
        signal.signal(signal.SIGUSR1, self._note)
        # Sent with `scancel`, to the training processes too: they save, and this process stays until they are done.
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.time_is_up |= number == signal.SIGUSR1

    def run(self, step: Sequence[str]) -> int:
        """Run the one step of this leg; what has to be done when it ends depends on why it did."""
        status = 0 if self.time_is_up else self._wait(subprocess.Popen(step))
        facts = _facts(self.job)
        preempted = facts.get("PreemptTime", "None") != "None"  # announced by SIGTERM to the training processes alone
        if not preempted and (status or not self.time_is_up):
            return status
        used, limit = time.monotonic() - self.began, facts.get("TimeLimit", "")
        if not preempted and used < _SHORT_LEG and limit.startswith("00:0"):  # less than ten minutes
            raise UserError(
                f"SLURM announced the end of this job after {duration(used)}; its time limit is {limit}.",
                "Requeued, it would get no further: the warning (#SBATCH --signal) comes too early for so short a limit.",
                "Give a longer --time.",
            )
        print(f"Asked to leave after {duration(used)}: job {self.job} goes back into the queue.", flush=True)
        requeued = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True, check=False)
        if requeued.returncode:
            raise UserError(
                f"SLURM did not take job {self.job} back into the queue: {requeued.stderr.strip()}.",
                fix="Nothing is lost: submitting the same script again goes on.",
            )
        return 0

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        next_request = 0.0
        while True:
            try:
                return process.wait(0.5)
            except subprocess.TimeoutExpired:
                if self.time_is_up and time.monotonic() > next_request:
                    next_request = time.monotonic() + _ASK_EVERY
                    # Step 0 and not the job: that would reach what the site itself runs beside it.
                    asking = ["scancel", "--quiet", "--signal=USR1", f"{self.job}.0"]
                    subprocess.run(asking, stderr=subprocess.DEVNULL, check=False)


def _processes_per_node(launcher_arguments: Sequence[str], nodes: int) -> int:
    """NPROC, else the GPUs of this job, else what accelerate's configuration says, else 1."""
    path, machines, total = _configured(launcher_arguments)
    processes = chosen_processes() or int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) or max(1, total // machines)
    if path and (nodes, nodes * processes) != (machines, total):
        print(f"{path} says num_machines {machines}, num_processes {total}; this job has {nodes} and {nodes * processes}, "
              "which is what counts.", flush=True)  # fmt: skip
    return processes


def _configured(launcher_arguments: Sequence[str]) -> tuple[str, int, int]:
    """The configuration file of accelerate, its number of machines and its number of processes."""
    if launcher_arguments[:1] != ["--config_file"]:
        return "", 1, 1
    path = launcher_arguments[1]
    content = yaml.safe_load(Path(path).read_text())
    return path, int(content.get("num_machines", 1)), int(content.get("num_processes", 1))


def _facts(job: str) -> dict[str, str]:
    """What SLURM knows about a job; nothing when it does not answer."""
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
    return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
