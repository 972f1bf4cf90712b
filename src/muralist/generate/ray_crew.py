"""The workers as actors of a Ray cluster: one per GPU, wherever in the cluster it is.

An actor does nothing but answer: each call brings an order or none, and takes home what the worker said meanwhile. No queue
lives on any node, so none can be lost with it; a call that fails says that the actor, or its node, is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muralist.errors import UserError
from muralist.generate.messages import Gone, Hopeless, Job, Order, Report

_LONGEST_CALL = 1.0  # seconds for which a call without an order waits for something to report
_LISTENS = 5.0


def ray_labels(gpu_ids: Sequence[int]) -> dict[str, str]:
    """Label and device of each worker: one for each free GPU of the cluster; without GPUs, one CPU process per node.

    Which GPU an actor gets is Ray's choice: `--gpu_ids` says how many, and what they are called.
    """
    ray = _connected()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus:
        labels = list(gpu_ids) or list(range(len(_nodes(ray))))
        return {str(label): "cpu" for label in labels}
    free = int(ray.available_resources().get("GPU", 0))
    if free < max(len(gpu_ids), 1):
        raise UserError(
            f"The Ray cluster has {gpus} GPUs, of which {free} are free; {len(gpu_ids) or 'at least one'} wanted.",
            "Other programs of the cluster hold the rest.",
            "Wait for them, or name fewer with --gpu_ids.",
        )
    return {str(label): "cuda:0" for label in gpu_ids or range(free)}  # an actor sees its own GPU only


class RayCrew:
    """Actors of the cluster; `devices` says what each label's actor works on."""

    def __init__(self, job: Job, devices: dict[str, str]) -> None:
        self.job, self.devices = job, devices
        self._ray = _connected()
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, str] = {}  # under way, and to whom

    def start(self, label: str) -> None:
        """Ask for an actor; it comes up when the cluster has room for it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place: dict[str, Any] = {"num_gpus": 1}
        if self.devices[label] == "cpu":
            nodes = _nodes(self._ray)
            node = nodes[list(self.devices).index(label) % len(nodes)]
            place = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        self._forget_calls(label)  # of an actor that was given up: its end is not that of the new one
        actor = self._ray.remote(Answering).options(**place, max_restarts=0)
        self._actors[label] = actor.remote(self.job, label, self.devices[label], str(Path.cwd()))
        self._call(label, None)

    def send(self, label: str, order: Order) -> None:
        """An order travels with a call of its own; calls are answered one after the other."""
        if label in self._actors:
            self._call(label, order)

    def receive(self, seconds: float) -> list[tuple[str, Report]]:
        """What calls brought home; every worker that is there always has one under way."""
        if not self._calls:
            time.sleep(seconds)
            return []
        answered, _ = self._ray.wait(list(self._calls), timeout=seconds)
        more, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        reports: list[tuple[str, Report]] = []
        for call in dict.fromkeys([*answered, *more]):
            label = self._calls.pop(call, None)
            if label is None:
                continue  # of a worker that another answer of this round told to be gone
            try:
                said = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                said = _last_words(label, error)
            reports += [(label, report) for report in said]
            if any(isinstance(report, Gone) for report in said):
                self._forget(label)
            elif label not in self._calls.values():
                self._call(label, None)
        return reports

    def kill(self, label: str) -> None:
        """End an actor's process; the call that is under way tells that it is gone."""
        if label in self._actors:
            self._ray.kill(self._actors[label])

    def close(self, patience: float) -> None:
        """Wait a little for those that were told to stop, then end whatever is left."""
        deadline = time.monotonic() + patience
        while self._actors and time.monotonic() < deadline:
            self.receive(0.1)
        for label in list(self._actors):
            self._forget(label)

    def _call(self, label: str, order: Order | None) -> None:
        self._calls[self._actors[label].answer.remote(order)] = label

    def _forget(self, label: str) -> None:
        """Free what an actor holds; answers that still come are of no interest."""
        self._ray.kill(self._actors.pop(label))
        self._forget_calls(label)

    def _forget_calls(self, label: str) -> None:
        self._calls = {call: whose for call, whose in self._calls.items() if whose != label}


class Answering:
    """The actor: a worker in a thread, and an answer to every call."""

    def __init__(self, job: Job, label: str, device: str, folder: str) -> None:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        with suppress(OSError):  # relative paths mean what they mean where the command was given
            os.chdir(folder)
        self._inbox: queue.Queue[Order] = queue.Queue()
        self._outbox: queue.Queue[Report] = queue.Queue()
        threading.Thread(target=self._work, args=(job, label, device), daemon=True).start()

    def answer(self, order: Order | None) -> list[Report]:
        """Take an order, if there is one, and hand over what was said since the last call."""
        reports: list[Report] = []
        if order is not None:
            self._inbox.put(order)
        else:
            with suppress(queue.Empty):
                reports.append(self._outbox.get(timeout=_LONGEST_CALL))
        while not self._outbox.empty():
            reports.append(self._outbox.get())
        return reports

    def _work(self, job: Job, label: str, device: str) -> None:
        try:
            import torch

            from muralist.generate.worker import work

            work(job, label, torch.device(device), self._inbox, self._outbox.put)
            self._outbox.put(Gone("has ended"))
        except BaseException as error:
            self._outbox.put(Gone(f"ended with {type(error).__name__}: {_first_line(error)}"))


def _connected() -> Any:
    """Ray, connected to the cluster that is there."""
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "1"
    )  # else a cluster that is no more is looked for for 14 minutes
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--engine ray needs Ray.", fix="pip install 'muralist[ray]', on every node.") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            if given := re.fullmatch(r"\[?([^/\]]+?)\]?:(\d+)", address):  # what does not listen is known at once
                socket.create_connection((given[1], int(given[2])), _LISTENS).close()
            ends = signal.getsignal(signal.SIGTERM)
            # What workers have to say comes as reports; their output stays in Ray's own logs.
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, ends)  # Ray takes it for itself, and would end us with a stack trace
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                "There is no Ray cluster to run on.",
                f"Looking for {address}: {_first_line(error)}",
                "Start one: `ray start --head` on the first node, then `ray start --address=FIRST:6379` on the others. "
                "RAY_ADDRESS says where it is when this is not one of its nodes.",
            ) from None
    return ray


def _nodes(ray: Any) -> list[str]:
    """Ids of the nodes that are alive."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _last_words(label: str, error: Exception) -> list[Report]:
    gone = Gone("cannot be reached any more: it died, or its node is lost")
    if "creation task" not in str(error):
        return [gone]
    reason = [line for line in str(error).splitlines() if line.strip()][-1]
    told = UserError(
        f"GPU {label} could not be started on the cluster: {reason.strip():.200}.",
        fix="Install the same muralist, with the same Python, on every node.",
    )
    return [Hopeless(told, everyone=False), gone]


def _first_line(error: BaseException) -> str:
    return f"{(str(error).strip().splitlines() or [''])[0]:.200}"
