"""Checks of the environment of a run: rendezvous port, SLURM variables, Weights & Biases, collectives, clocks."""

from __future__ import annotations

import errno
import netrc
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from muralist.core.formatting import format_list
from muralist.core.hardware import available_cpus
from muralist.core.slurm import expand_hosts, expand_tasks_per_node
from muralist.tools.doctor.check import TRAIN, Check, CheckContext, Finding, failed, ok, skipped, warning

_DEFAULT_PORT = 29500  # of torchrun and accelerate
_WANDB = "https://api.wandb.ai"
_CONNECT_TIMEOUT = 3.0  # seconds
_SKEW_WARNING, _SKEW_FAILURE = 1.0, 60.0  # seconds
_ONE_PROCESS = "one process; `muralist launch --nproc N doctor ...` (or torchrun, srun) tests several ranks"


@Check(
    "port",
    symptom="NCCL timeout (ranks that never connect)",
    why="The ranks could not connect, or would connect to those of another run.",
    fix="Set MASTER_PORT (torchrun --master_port, accelerate --main_process_port) to a free port, or end the program "
    "that listens there (`ss -ltnp` names it).",
    at_start=True,
)
def check_port(context: CheckContext) -> Finding:
    """Check that the port where the ranks connect (`MASTER_PORT`, else torchrun's 29500) is free."""
    if context.starting and context.ranks == 1:
        return skipped("one process needs no port")
    port = context.environment.get("MASTER_PORT")
    if port is None:
        if _in_use(_DEFAULT_PORT):
            return warning(
                f"Port {_DEFAULT_PORT}, the default of torchrun, is in use on this machine.",
                "A second torchrun here would fail or connect to the ranks of the first one.",
                "Give torchrun --master_port (accelerate --main_process_port), or use `muralist launch`.",
            )
        return ok(f"{_DEFAULT_PORT}, the default of torchrun, is free")
    if context.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ok(f"{port}: torchrun listens there")
    if context.rank:
        return skipped("rank 0 listens")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return failed(f"MASTER_PORT is {port!r}, which is not a port.", fix="Set a number from 1024 to 65535.")
    if _in_use(int(port)):
        return failed(f"MASTER_PORT {port} is in use on this machine.")
    return ok(f"{port} is free")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a run that ended is free at once
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


@Check(
    "SLURM",
    symptom="several machines (SLURM); num_processes = nodes x GPUs per node",
    why="Ranks that disagree about their number wait for each other forever.",
    fix="Start all processes with one launcher: `sbatch scripts/train_slurm_multi_node.sh`, `muralist launch --slurm`, "
    "or one plain srun; unset RANK and WORLD_SIZE of an earlier launcher.",
    per_machine=True,
)
def check_slurm(context: CheckContext) -> Finding:
    """Compare the variables of SLURM with each other, with the launcher's ranks, and with the node's GPUs and cores."""
    environment = context.environment
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return skipped("not inside a SLURM job")
    if contradiction := _contradiction(environment):
        return failed(contradiction)
    tasks, nodes = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_JOB_NUM_NODES", "1")
    message = f"job {job}, {nodes} nodes, {tasks} tasks in this step"
    gpus, cores = _number(environment, "SLURM_GPUS_ON_NODE"), available_cpus()
    local_tasks = _number(environment, "LOCAL_WORLD_SIZE") or int(tasks)
    if gpus and gpus > local_tasks > 1:
        return warning(
            f"{message}: {local_tasks} processes on a node with {gpus} GPUs.",
            "GPUs without a process are idle.",
            f"Give srun --ntasks-per-node={gpus}.",
        )
    if gpus and cores < 2 * gpus:
        return warning(
            f"{message}: {cores} cores for {gpus} GPUs.",
            "SLURM allocates one core by default, too few to feed a GPU.",
            "Add #SBATCH --cpus-per-gpu=8 (or --cpus-per-task).",
        )
    return ok(message)


def _contradiction(environment: Mapping[str, str]) -> str:
    """Describe two variables that cannot both be right; empty if there are none."""
    tasks, task = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_PROCID")
    if tasks is not None and task is not None and task >= tasks:
        return f"SLURM_PROCID is {task}, but the step has {tasks} tasks (SLURM_STEP_NUM_TASKS)."
    nodes, names = _number(environment, "SLURM_JOB_NUM_NODES"), environment.get("SLURM_JOB_NODELIST")
    if nodes is not None and names and len(expand_hosts(names)) != nodes:
        return f"SLURM_JOB_NUM_NODES is {nodes}, but SLURM_JOB_NODELIST names {len(expand_hosts(names))}: {names}."
    if layout := environment.get("SLURM_STEP_TASKS_PER_NODE"):
        per_node = expand_tasks_per_node(layout)
        if tasks is not None and sum(per_node) != tasks:
            return f"SLURM_STEP_TASKS_PER_NODE is {layout}, which is not {tasks} (SLURM_STEP_NUM_TASKS)."
        local, node = _number(environment, "SLURM_LOCALID"), _number(environment, "SLURM_NODEID")
        if local is not None and node is not None and (node >= len(per_node) or local >= per_node[node]):
            return f"SLURM_LOCALID {local} on node {node} does not fit SLURM_STEP_TASKS_PER_NODE {layout}."
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank is None or world is None:
        return ""
    if rank >= world:
        return f"RANK is {rank}, but WORLD_SIZE is {world}."
    plain_srun = "TORCHELASTIC_RUN_ID" not in environment and tasks is not None and tasks > 1
    if plain_srun and task is not None and (world, rank) != (tasks, task):
        return f"RANK {rank} of WORLD_SIZE {world} is not SLURM_PROCID {task} of SLURM_STEP_NUM_TASKS {tasks}."
    return ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if re.fullmatch(r"\d+", value) else None


@Check(
    "Weights & Biases",
    symptom="`--use_wandb`; W&B prints its URL when training starts",
    why="Training would end at its start, waiting for a login or a server.",
    fix="Set WANDB_MODE=offline (`wandb sync` uploads later), or leave --use_wandb out: TensorBoard and metrics.jsonl "
    "are written anyway.",
    jobs=TRAIN,
)
def check_wandb(context: CheckContext) -> Finding:
    """With `--use_wandb`: connect to the server and look for a login, unless `WANDB_MODE=offline`."""
    assert context.train
    if not context.train.log.use_wandb:
        return skipped("--use_wandb is not given")
    if (mode := context.environment.get("WANDB_MODE", "online")) in ("offline", "disabled", "dryrun"):
        return ok(f"WANDB_MODE is {mode}: files only")
    server = urlsplit(context.environment.get("WANDB_BASE_URL", _WANDB))
    host, port = server.hostname or "", server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        return failed(f"{host} cannot be reached at port {port}: {error.strerror or error}.")
    if not context.environment.get("WANDB_API_KEY") and not _has_login(host):
        return failed(f"No login for {host}.", fix="Run `wandb login`, or set WANDB_API_KEY.")
    return ok(f"{host} can be reached, and there is a login")


def _has_login(host: str) -> bool:
    """Whether `wandb login` stored a login; its content is not read."""
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@Check(
    "collective test",
    symptom="NCCL timeout (`timedelta(seconds=36000)`, order of barriers, all GPUs at the same step)",
    why="Every training step waits for the slowest rank, and forever for a missing one.",
    fix="Check the machine that is named: is it up, can it reach MASTER_ADDR at MASTER_PORT (firewall, "
    "NCCL_SOCKET_IFNAME), does another program use its GPU or its network? In training --dist_timeout sets how long "
    "ranks wait.",
)
def check_collectives(context: CheckContext) -> Finding:
    """Under a launcher: wait for all ranks, measure the bandwidth of all-reduce, and name ranks that compute or send
    more slowly than the others."""
    report = context.exchange
    if report is None:
        return skipped(_ONE_PROCESS)
    if isinstance(report, Exception):
        return failed(f"{report}.")
    rates = ", ".join(f"{rate / 1e9:.2f} GB/s for {size / 2**20:g} MiB" for size, rate in report.bandwidths.items())
    machines = len(set(report.hosts))
    message = f"{len(report.hosts)} ranks on {machines} machine{'s' if machines > 1 else ''} exchange {rates}"
    facts = {
        "bytes per second": report.bandwidths[max(report.bandwidths)],
        "compute, seconds by rank": report.compute,
        "sending, seconds by rank": report.broadcast,
    }
    if slow := report.slow_ranks():
        return warning(f"{message}; but {format_list(slow)}.", facts=facts)
    return ok(message, facts=facts)


@Check(
    "clocks",
    symptom="several machines (SLURM)",
    why="Logs of several machines cannot be ordered, and the newest file on a shared disk is misjudged.",
    fix="Synchronize the machines with one time server (chrony, ntpd); `timedatectl` shows whether they are.",
)
def check_clocks(context: CheckContext) -> Finding:
    """Under a launcher on several machines: measure the offsets of their clocks."""
    report = context.exchange
    if report is None:
        return skipped(_ONE_PROCESS)
    if isinstance(report, Exception):
        return skipped("the ranks did not connect")
    if len(set(report.hosts)) < 2:
        return skipped("all ranks are on one machine")
    host, (offset, error) = max(report.clocks.items(), key=lambda item: abs(item[1][0]))
    side = "ahead of" if offset > 0 else "behind"
    message = f"clock of {host} is {abs(offset):.3f} s {side} the clock of {report.hosts[0]} (± {error:.3f} s)"
    facts = {f"{name}, seconds ahead": seconds for name, (seconds, _) in report.clocks.items()}
    if abs(offset) - error > _SKEW_FAILURE:
        return failed(f"The {message}.", facts=facts)
    if abs(offset) - error > _SKEW_WARNING:
        return warning(f"The {message}.", facts=facts)
    return ok(f"largest offset: the {message}", facts=facts)
