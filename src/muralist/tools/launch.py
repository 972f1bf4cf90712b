"""Start the ranks of a run: on this machine, or as a SLURM job.

`muralist launch` starts the ranks, forwards signals to them, and stops all of them when one fails. `muralist launch
--slurm` writes and submits a job. Inside the job, this module starts the processes on every node, saves ahead of the
time limit, and requeues the job:

  python -m muralist.tools.launch accelerate launch --config_file FILE train.py ...   one launcher per node
  python -m muralist.tools.launch muralist train ...                                  one task per process

SLURM sends SIGUSR1 to the batch script ahead of the time limit (`#SBATCH --signal=B:USR1@180`). The signal is forwarded
to the training processes, which save and exit; then the job is requeued and resumes in its next attempt.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import yaml

from muralist.core.errors import EXIT_CLOSED_OUTPUT, EXIT_LOST_PEERS, UserError, report_errors
from muralist.core.formatting import format_duration
from muralist.core.hardware import requested_processes
from muralist.core.run_dir import atomic_write, sanitize_name
from muralist.core.slurm import first_host, free_port
from muralist.settings import LaunchSettings

_GRACE_SECONDS = 30.0  # that the other ranks have to save and exit once one has failed
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses of ranks that saved and agreed to stop


def launch(command: Sequence[str], processes: int, threads: int = 1) -> int:
    """Run `command` as `processes` ranks; return 0, or the exit status of the first rank that failed.

    Each rank runs in its own session: Ctrl+C reaches this process alone, which forwards it, so that every rank receives
    it exactly once and none is interrupted while saving.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            }
            children.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    status, report, deadline = 0, "", float("inf")
    while True:
        running = [child for child in children if child.poll() is None]
        failed = [(rank, child) for rank, child in enumerate(children) if child.returncode]
        if failed and not status:
            # A rank that exited because it lost a peer is not the cause if any other rank failed.
            rank, child = min(failed, key=lambda pair: pair[1].returncode == EXIT_LOST_PEERS)
            # As a shell reports it: 128 plus the signal's number.
            status = child.returncode if child.returncode > 0 else 128 - child.returncode
            deadline = time.monotonic() + _GRACE_SECONDS
            report = f"Rank {rank} (process {child.pid}) ended with status {status}; its own message is above. "
            report += "The other processes were stopped."
            if child.returncode < 0:
                how = f"was killed by {signal.Signals(-child.returncode).name}; the other processes were stopped"
                report = f"Rank {rank} (process {child.pid}) {how}. Run the same command to resume."
            if child.returncode in _STOPPED:
                report = ""  # not a failure, and its own message says so
            for other in running:
                other.terminate()
        if not running or time.monotonic() > deadline:
            if running and status == EXIT_LOST_PEERS:
                ranks = ", ".join(str(rank) for rank, child in enumerate(children) if child.poll() is None)
                report = f"Rank {ranks} did not respond and was killed. Run the same command to resume."
            break
        time.sleep(0.05)
    if report and status != EXIT_CLOSED_OUTPUT:  # printed last, below the messages of the ranks that lost it
        print(report, file=sys.stderr)
    return status


LOGS = Path("logs")
_CORES_PER_GPU = 8  # SLURM allocates one core by default, too few to feed a GPU
_WARNING = 180  # seconds before the time limit, in which to save; SLURM may be up to a minute early
_SIGNAL_INTERVAL = 5.0  # seconds; a process that is still starting ignores the first signals
_SHORT_ATTEMPT = 60.0  # seconds
# Shells and launchers between the batch script and the training processes must survive SIGUSR1, and so must training
# processes that have no handler yet. torch's agent would answer SIGTERM with a traceback. Only the node knows its rank.
_TASK = 'trap "" USR1; exec "$0" -m "$@"'
_LAUNCHER = (
    'trap "" USR1 TERM; export PET_SIGNALS_TO_HANDLE=SIGINT; '
    'exec "$0" -m accelerate.commands.accelerate_cli launch --machine_rank "$SLURM_NODEID" "$@"'
)


def submit(settings: LaunchSettings, arguments: Sequence[str], name: str) -> str:
    """Write the job of a command to logs/NAME.sbatch, submit it, and return a message with its number and log files."""
    if not shutil.which("sbatch"):
        raise UserError(
            "`sbatch` was not found.",
            "SLURM is not installed on this machine, or not on the PATH.",
            "Run this on a login node of the cluster; without --slurm the processes start on this machine.",
        )
    LOGS.mkdir(exist_ok=True)
    name = sanitize_name(name)
    path = LOGS / f"{name}.sbatch"
    atomic_write(path, job_script(settings, arguments, name, Path.cwd()))
    submitted = _run("sbatch", "--parsable", str(path))
    if submitted.returncode:
        fix = f"The job script is {path}; correct it and submit it with `sbatch {path}`."
        raise UserError(f"SLURM refused the job: {submitted.stderr.strip()}", fix=fix)
    job = submitted.stdout.strip().partition(";")[0]
    return (
        f"Job {job} is submitted: {path}\n"
        f"  tail -f {LOGS}/{arguments[0]}_{job}.out\n"
        f"  tail -f {LOGS}/{arguments[0]}_{job}.err\n"
        f"`scancel {job}` saves and ends it; `sbatch {path}` resumes."
    )


def job_script(settings: LaunchSettings, arguments: Sequence[str], name: str, folder: Path) -> str:
    """Return the text of the batch script."""
    options = [("job-name", name), ("nodes", settings.nodes or 1)]
    if settings.gpus_per_node:
        options += [("gpus-per-node", settings.gpus_per_node), ("cpus-per-gpu", _CORES_PER_GPU)]
    else:
        options += [("ntasks-per-node", settings.nproc or 1)]
    options += [(option, value) for option in ("partition", "time") if (value := getattr(settings, option))]
    options += [("output", f"{LOGS}/{arguments[0]}_%j.out"), ("error", f"{LOGS}/{arguments[0]}_%j.err")]
    options += [("open-mode", "append"), ("requeue", ""), ("signal", f"B:USR1@{_WARNING}"), ("chdir", folder)]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{option}" + (f"={shlex.quote(str(value))}" if value else "") for option, value in options),
        "# Written by `muralist launch --slurm`. Three minutes before the time limit the run saves, and the job is",
        "# requeued and resumes. Submitting this script again also resumes the run.",
        *([f"export NPROC={settings.nproc}"] if settings.nproc else []),
        'trap "" USR1  # until the next command has a handler',
        f"exec {shlex.quote(sys.executable)} -m muralist.tools.launch muralist {shlex.join(arguments)}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the processes of the job until they end or the time limit is near; returns the exit status of the job."""
    attempt = JobAttempt()  # first, to install the signal handlers
    nodes, number = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    port = str(free_port(os.environ))  # a batch script runs on the first node of its job, which hosts rank 0
    if arguments[:2] == ["accelerate", "launch"]:
        launcher_arguments = arguments[2:]
        processes = _processes_per_node(launcher_arguments, nodes)
        place = ["--num_machines", nodes, "--num_processes", nodes * processes,
                 "--main_process_ip", first_host(os.environ["SLURM_JOB_NODELIST"]),
                 "--main_process_port", port]  # fmt: skip
        tasks, command = 1, [_LAUNCHER, sys.executable, *map(str, place), *launcher_arguments]
    elif arguments[:1] == ["muralist"]:
        tasks = processes = _processes_per_node((), nodes)
        command = [_TASK, sys.executable, *arguments]
        os.environ["MASTER_PORT"] = port
    else:
        raise UserError(f"A SLURM job runs `accelerate launch ...` or `muralist ...`, not {arguments[:1]}.")
    print(f"SLURM job {attempt.job}, attempt {number}: nodes x processes = {nodes} x {processes}", flush=True)
    # One thread per process as with every launcher, but all cores of the job for each task and its data loaders.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}",
            "--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=1"]  # fmt: skip
    return attempt.run([*step, "bash", "-c", *command])


class JobAttempt:
    """One start of a job, up to its end or its return to the queue."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.warned: float | None = None
        """Seconds after the start at which SLURM announced the time limit."""
        self.job = os.environ["SLURM_JOB_ID"]
        signal.signal(signal.SIGUSR1, self._handle)
        # `scancel` sends SIGTERM to the training processes too: they save, and this process waits for them.
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and self.warned is None:
            self.warned = time.monotonic() - self.began

    def run(self, step: Sequence[str]) -> int:
        """Run the job step of this attempt; requeue the job if its time is up or it was preempted."""
        status = self._wait(subprocess.Popen(step)) if self.warned is None else 0
        facts = dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "show", "job", self.job).stdout))
        preempted = facts.get("PreemptTime", "None") != "None"  # announced by SIGTERM to the training processes alone
        if not preempted and (status or self.warned is None):
            return status
        limit = facts.get("TimeLimit", "")
        below_ten_minutes = limit.startswith("00:0")
        if self.warned is not None and self.warned < _SHORT_ATTEMPT and below_ten_minutes and not preempted:
            raise UserError(
                f"SLURM announced the end of this job after {self.warned:.0f} s; its time limit is {limit}.",
                "A requeued job would make no progress: the limit is too short for the warning (#SBATCH --signal).",
                "Give a longer --time.",
            )
        used = format_duration(time.monotonic() - self.began)
        print(f"Stopped by SLURM after {used}: job {self.job} is requeued.", flush=True)
        requeued = _run("scontrol", "requeue", self.job)
        if requeued.returncode:
            raise UserError(
                f"SLURM did not requeue job {self.job}: {requeued.stderr.strip()}.",
                fix="The last checkpoint is intact: submit the same script again to resume.",
            )
        return 0

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        next_signal = 0.0
        while True:
            try:
                return process.wait(0.5)
            except subprocess.TimeoutExpired:
                if self.warned is not None and time.monotonic() > next_signal:
                    next_signal = time.monotonic() + _SIGNAL_INTERVAL
                    # Step 0 instead of the job, which may include steps that the site starts itself.
                    _run("scancel", "--quiet", "--signal=USR1", f"{self.job}.0")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _processes_per_node(launcher_arguments: Sequence[str], nodes: int) -> int:
    """NPROC, else the GPUs of this job, else the configuration file of accelerate, else 1."""
    path, config = "", {}
    if launcher_arguments[:1] == ["--config_file"]:
        path = launcher_arguments[1]
        config = yaml.safe_load(Path(path).read_text())
    machines, total = int(config.get("num_machines", 1)), int(config.get("num_processes", 1))
    processes = requested_processes() or int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) or max(1, total // machines)
    if path and (nodes, nodes * processes) != (machines, total):
        own = f"this job has {nodes} and {nodes * processes}, which take precedence"
        print(f"{path} has num_machines {machines}, num_processes {total}; {own}.", flush=True)
    return processes


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
