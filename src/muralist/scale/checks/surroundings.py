"""What surrounds a run: the port where its ranks meet, SLURM's word on its place, Weights & Biases."""

from __future__ import annotations

import errno
import netrc
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from muralist.machine import usable_cores
from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.scale.slurm import hosts, tasks_per_node

_USUAL_PORT = 29500  # torchrun's and accelerate's own
_WANDB = "https://api.wandb.ai"
_NETWORK_PATIENCE = 3.0  # seconds


def look_at_port(around: Circumstances) -> Finding:
    """Try to listen at the port where the ranks will meet."""
    environment = around.environment
    if around.starting and around.ranks == 1:
        return skipped("one process meets nobody")
    named = environment.get("MASTER_PORT")
    if named is None:
        if _in_use(_USUAL_PORT):
            return warning(
                f"Port {_USUAL_PORT}, torchrun's own, is in use on this machine.",
                "A second torchrun here would fail or, worse, meet the first one's ranks.",
                "Give torchrun --master_port (accelerate --main_process_port), or use `muralist launch`, which finds one.",
            )
        return ok(f"{_USUAL_PORT}, torchrun's own, is free")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ok(f"{named}: torchrun listens there")
    if around.rank:
        return skipped("rank 0 listens")
    if not named.isdecimal() or not 0 < int(named) < 65536:
        return failed(f"MASTER_PORT is {named!r}, which is no port.", remedy="Set a number from 1024 to 65535.")
    if _in_use(int(named)):
        return failed(f"MASTER_PORT {named} is in use on this machine.")
    return ok(f"{named} is free")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port may be taken up at once
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def look_at_slurm(around: Circumstances) -> Finding:
    """Compare what SLURM's variables say of this process's place with each other and with the launcher's."""
    environment = around.environment
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return skipped("not inside a job of SLURM")
    if contradiction := _contradiction(environment):
        return failed(contradiction)
    tasks, nodes = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_JOB_NUM_NODES", "1")
    told = f"job {job}, {nodes} nodes, {tasks} tasks in this step"
    gpus, cores = _number(environment, "SLURM_GPUS_ON_NODE"), usable_cores()
    here = _number(environment, "LOCAL_WORLD_SIZE") or int(tasks)
    if gpus and gpus > here > 1:
        return warning(
            f"{told}: {here} processes on a node with {gpus} GPUs.",
            "GPUs without a process do no work.",
            "Give srun --ntasks-per-node as many as GPUs.",
        )
    if gpus and cores < 2 * gpus:
        return warning(
            f"{told}: {cores} cores for {gpus} GPUs.",
            "SLURM gives one core where nothing is said, which cannot feed a GPU.",
            "Add #SBATCH --cpus-per-gpu=8 (or --cpus-per-task).",
        )
    return ok(told)


def _contradiction(environment: Mapping[str, str]) -> str:
    """A sentence where two variables cannot both be right."""
    step, place = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_PROCID")
    if step is not None and place is not None and place >= step:
        return f"SLURM_PROCID is {place}, but the step has {step} tasks (SLURM_STEP_NUM_TASKS)."
    count, names = _number(environment, "SLURM_JOB_NUM_NODES"), environment.get("SLURM_JOB_NODELIST")
    if count is not None and names and len(hosts(names)) != count:
        return f"SLURM_JOB_NUM_NODES is {count}, but SLURM_JOB_NODELIST names {len(hosts(names))}: {names}."
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if per_node and step is not None and sum(tasks_per_node(per_node)) != step:
        return f"SLURM_STEP_TASKS_PER_NODE is {per_node}, which is not {step} (SLURM_STEP_NUM_TASKS)."
    local, node = _number(environment, "SLURM_LOCALID"), _number(environment, "SLURM_NODEID")
    if per_node and local is not None and node is not None:
        tasks = tasks_per_node(per_node)
        if node >= len(tasks) or local >= tasks[node]:
            return f"SLURM_LOCALID {local} on node {node} does not fit SLURM_STEP_TASKS_PER_NODE {per_node}."
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank is not None and size is not None and rank >= size:
        return f"RANK is {rank}, but WORLD_SIZE is {size}."
    own = "TORCHELASTIC_RUN_ID" not in environment and step is not None and step > 1
    if own and size is not None and place is not None and (size, rank) != (step, place):
        return f"RANK {rank} of WORLD_SIZE {size} is not SLURM_PROCID {place} of SLURM_STEP_NUM_TASKS {step}."
    return ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if re.fullmatch(r"\d+", value) else None


def look_at_wandb(around: Circumstances) -> Finding:
    """See whether there is a login, and whether the server can be reached."""
    assert around.train
    environment = around.environment
    if not around.train.log.use_wandb:
        return skipped("--use_wandb is not given")
    if (mode := environment.get("WANDB_MODE", "online")) in ("offline", "disabled", "dryrun"):
        return ok(f"WANDB_MODE is {mode}: files only")
    server = urlsplit(environment.get("WANDB_BASE_URL", _WANDB))
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        with socket.create_connection((server.hostname or "", port), timeout=_NETWORK_PATIENCE):
            pass
    except OSError as error:
        return failed(f"{server.hostname} cannot be reached at port {port}: {error.strerror or error}.")
    if not environment.get("WANDB_API_KEY") and not _remembered_login(server.hostname or ""):
        return failed(f"There is no login for {server.hostname}.", remedy="Run `wandb login`, or set WANDB_API_KEY.")
    return ok(f"{server.hostname} can be reached, and there is a login")


def _remembered_login(host: str) -> bool:
    """Whether `wandb login` left one; its words are not looked at."""
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS = [
    Check(
        name="port",
        what="Whether the port where the ranks will meet (`MASTER_PORT`, else torchrun's 29500) is free.",
        trouble="Guide 2: NCCL timeout (ranks that never meet)",
        why="The ranks could not meet, or would meet those of another run.",
        remedy="Set MASTER_PORT (torchrun --master_port, accelerate --main_process_port) to a free one, or end what listens "
        "there (`ss -ltnp` names it).",
        look=look_at_port,
        quick=True,
    ),
    Check(
        name="SLURM",
        what="Whether SLURM's variables agree with each other, with the launcher's ranks, with the node's GPUs and "
        "cores.",
        trouble="Guide 2: several machines (SLURM); num_processes = nodes x GPUs per node",
        why="Ranks that think differently of how many they are wait for each other for ever.",
        remedy="Start all processes by one launcher: `sbatch scripts/train_slurm_multi_node.sh`, `muralist launch --slurm`, "
        "or one plain srun; unset RANK and WORLD_SIZE left over from another one.",
        look=look_at_slurm,
        on_every_machine=True,
    ),
    Check(
        name="Weights & Biases",
        what="With `--use_wandb`: whether there is a login and the server can be reached, unless `WANDB_MODE=offline`.",
        trouble="Guide 1: `--use_wandb`; W&B prints its URL when training starts",
        why="Training would end at its start, waiting for a login or a server.",
        remedy="Set WANDB_MODE=offline (`wandb sync` uploads later), or leave --use_wandb out: TensorBoard and "
        "metrics.jsonl are written anyway.",
        look=look_at_wandb,
        jobs=frozenset({"train"}),
    ),
]
