"""A real SLURM cluster of two nodes on this machine: munged, slurmctld and two slurmd, with fake GPU devices."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

GPUS_PER_NODE = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
CONFIGURATION = """\
ClusterName=muralist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
MinJobAge=3600
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=64 RealMemory=4000 Gres=gpu:{gpus}
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=64 RealMemory=4000 Gres=gpu:{gpus}
PartitionName=gpu Nodes=127.0.0.[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=127.0.0.[1-2] PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return why SLURM cannot run on this machine; empty if it can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=_path())]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)} not found): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "SLURM's daemons and fake GPUs need root"


@dataclass
class Job:
    """A submitted job."""

    cluster: Cluster
    number: int

    def facts(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.ask("scontrol", "show", "job", str(self.number))))

    def ended(self) -> bool:
        """Whether the job has ended and is not requeued."""
        return self.facts()["JobState"] in ENDED

    def wait(self, seconds: float = 120) -> dict[str, str]:
        """Wait until the job has ended, and return its facts."""
        wait_until(self.ended, seconds)
        return self.facts()


@dataclass
class Cluster:
    """Environment in which the commands of SLURM use this cluster."""

    environment: Mapping[str, str]

    def ask(self, *command: str, cwd: Path | None = None, seconds: float = 60, **extra: str) -> str:
        """Run a command of SLURM and return its output."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.environment, **extra}, timeout=seconds, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: object, cwd: Path, **extra: str) -> Job:
        """Submit a batch script: options of sbatch, the script, its arguments."""
        return Job(self, int(self.ask("sbatch", "--parsable", *map(str, words), cwd=cwd, **extra)))


@contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start the daemons in a folder, wait until both nodes accept jobs, and end these daemons afterwards.

    The nodes are named by two addresses of the loopback device, which resolve without an entry in /etc/hosts.
    """
    with ExitStack() as stack:
        folder.chmod(0o755)
        controller_port, first_port, second_port = _free_ports(3)
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=folder,
                controller_port=controller_port,
                first_port=first_port,
                second_port=second_port,
                gpus=GPUS_PER_NODE,
                first_job=_first_job(),
            )
        )
        for number in range(GPUS_PER_NODE):  # clones of /dev/null: SLURM counts device files
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"NodeName=127.0.0.[1-2] Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-{GPUS_PER_NODE - 1}]\n"
        )
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        # Tests that run inside a job must not pass its variables to the jobs of this cluster.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        cluster = Cluster({**inherited, "SLURM_CONF": str(configuration), "PATH": _path()})

        def daemon(*command: str) -> None:
            stack.enter_context(_running(command, cluster.environment, folder / f"{command[0]}.{command[-1]}.log"))

        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files[:3], "--num-threads=2")
        wait_until((folder / "munge.socket").exists, 20)
        daemon("slurmctld", "-D", "-c")
        for node in ("127.0.0.1", "127.0.0.2"):
            (folder / f"spool.{node}").mkdir()
            daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: _idle_nodes(cluster) == 2, 60)
        stack.callback(_cancel_all, cluster)
        yield cluster


def wait_until(happened: Callable[[], object], seconds: float) -> None:
    """Poll until a condition holds; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.1)


def _first_job() -> int:
    """Number jobs differently in each pytest worker: each has its own cluster, and ports follow job numbers."""
    return 1 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"  # daemons on Debian


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextmanager
def _running(command: tuple[str, ...], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    bound = ("setpriv", "--pdeathsig", "TERM", *command)  # ends with the tests even if they are killed
    with log.open("w") as output:
        process = subprocess.Popen(bound, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
        assert process.poll() is None, f"{command[0]} ended by itself:\n{log.read_text()}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(cluster: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--states=idle", "--Node", "--partition=gpu"],
        env=cluster.environment, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    return len(done.stdout.splitlines())


def _cancel_all(cluster: Cluster) -> None:
    """Cancel all jobs, which outlive the daemons that started them."""
    cluster.ask("scancel", "--user=root")
    wait_until(lambda: not cluster.ask("squeue", "--noheader"), 60)
