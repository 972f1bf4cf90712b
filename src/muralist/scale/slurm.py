"""What SLURM tells a process about its place: the ranks of a plain `srun`, the first node, a port for the run."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping

_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports the kernel hands out by itself


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Make the tasks of a plain `srun` the ranks of one run; elsewhere, and under another launcher, nothing changes.

    A batch script and the shell of `salloc` have variables of SLURM too, but only `srun` counts the tasks of a step.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "RANK" in environment or "SLURM_PROCID" not in environment:
        return
    local = int(environment["SLURM_LOCALID"])
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    # Where SLURM shows each task its own GPU only (--gpus-per-task, --gpu-bind), that one has number 0 in every task.
    environment["LOCAL_RANK"] = str(local % len(visible) if visible else local)
    environment["LOCAL_WORLD_SIZE"] = str(
        tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    )
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(port(environment)))


def first_host(node_list: str) -> str:
    """The first name of a node list as SLURM writes it: `gpu[07-09,12]` begins with gpu07."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None  # it also matches nothing
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def port(environment: Mapping[str, str]) -> int:
    """Where the ranks of this step meet: other jobs, and other steps of this one, meet elsewhere."""
    job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    return _FIRST_PORT + (31 * job + step) % _PORTS


def free_port(environment: Mapping[str, str]) -> int:
    """For the first node's eyes: the port above, or the next one that nothing on this machine listens at."""
    wanted = port(environment) - _FIRST_PORT
    for distance in range(_PORTS):
        candidate = _FIRST_PORT + (wanted + distance) % _PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run's port may be taken up at once
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            return candidate
    raise OSError(f"No port between {_FIRST_PORT} and {_FIRST_PORT + _PORTS} is free.")


def tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` are two nodes with four tasks and one with three."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return counts


def hosts(node_list: str) -> list[str]:
    """Every name of a node list as SLURM writes it: `gpu[07-09,12],head` are five."""
    names: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", node_list):
        spread = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            spread = [name + piece for name in spread for piece in ([text] if text else _numbers(ranges))]
        names += spread
    return names


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
