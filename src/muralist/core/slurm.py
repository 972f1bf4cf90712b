"""Ranks, first node and rendezvous port of a process, from the environment variables of SLURM."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping

_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ephemeral ports of the kernel


def set_rank_environment(environment: MutableMapping[str, str]) -> None:
    """Turn the tasks of a plain `srun` into ranks; under another launcher and outside of SLURM, do nothing.

    Batch scripts and the shell of `salloc` have variables of SLURM too, but only `srun` sets the tasks of a step.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "RANK" in environment or "SLURM_PROCID" not in environment:
        return
    local_tasks = expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    local, visible = int(environment["SLURM_LOCALID"]), environment.get("CUDA_VISIBLE_DEVICES", "")
    # With --gpus-per-task or --gpu-bind each task sees only its own GPU, which is then device 0.
    gpus = len([device for device in visible.split(",") if device]) or tasks
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = str(local % gpus)
    environment["LOCAL_WORLD_SIZE"] = str(local_tasks)
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(rendezvous_port(environment)))


def rendezvous_port(environment: Mapping[str, str]) -> int:
    """Port of this job step, different from those of other jobs and other steps."""
    job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    return _FIRST_PORT + (31 * job + step) % _PORTS


def free_port(environment: Mapping[str, str]) -> int:
    """Return the rendezvous port, or the next one that is free on this machine, which must be the first node."""
    wanted = rendezvous_port(environment) - _FIRST_PORT
    for distance in range(_PORTS):
        port = _FIRST_PORT + (wanted + distance) % _PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a run that ended is free at once
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"No port between {_FIRST_PORT} and {_FIRST_PORT + _PORTS} is free.")


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand `4(x2),3` to [4, 4, 3]."""
    counts: list[int] = []
    for count, _, repeat in (part.rstrip(")").partition("(x") for part in text.split(",")):
        counts += [int(count)] * int(repeat or 1)
    return counts


def first_host(node_list: str) -> str:
    """Return the first name of a node list of SLURM: gpu07 for `gpu[07-09,12]`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None  # the pattern also matches nothing
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def expand_hosts(node_list: str) -> list[str]:
    """Return all names of a node list of SLURM: five for `gpu[07-09,12],head`."""
    names: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", node_list):
        prefixes = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            suffixes = [text] if text else []
            for first, _, last in (span.partition("-") for span in ranges.split(",") if span):
                suffixes += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
            prefixes = [prefix + suffix for prefix in prefixes for suffix in suffixes]
        names += prefixes
    return names
