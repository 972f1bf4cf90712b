"""Where workers run, processes of this machine or actors of a Ray cluster, and the messages they exchange.

A Ray actor only answers calls: each call brings a message or none, and returns what the worker reported meanwhile. No
queue lives on any node, so none can be lost with it; a call that fails means that the actor, or its node, is gone.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from muralist.core.errors import UserError, first_line
from muralist.core.hardware import available_cpus
from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited, WorkerPool
from muralist.generate.model_info import ModelInfo
from muralist.generate.plan import Sample
from muralist.settings import GenerateSettings

if TYPE_CHECKING:
    import torch

_LONGEST_CALL = 1.0  # seconds for which a call without a message waits for a report
_CONNECT_TIMEOUT = 5.0


class GenerationJob(NamedTuple):
    """Everything a worker needs at its start."""

    settings: GenerateSettings
    model: ModelInfo
    output_dir: Path
    digest: str  # of the ledger's settings
    metadata: dict[str, Any]  # written into every image beside its own prompt and seed
    cpus: int = 1  # of this machine, for each worker


class MeasureBatchSize(NamedTuple):
    """Find the largest batch of this sample that fits into memory."""

    sample: Sample


class GroupByText(NamedTuple):
    """Find out which of these samples can share a batch."""

    samples: tuple[Sample, ...]


class GenerateBatch(NamedTuple):
    """Generate samples of one size in one call of `batch_size` images; missing ones are padded."""

    samples: tuple[Sample, ...]
    batch_size: int
    recorded_batch_size: int  # the ledger's: images of another batch size are marked
    exclusive: bool = False  # nothing else is on the device meanwhile: a worker died with one of these samples before

    @property
    def indices(self) -> tuple[int, ...]:
        """The sample indices."""
        return tuple(sample.sample_index for sample in self.samples)


class StopWorker:
    """No more batches come."""


class WorkerReady(NamedTuple):
    """The model is loaded."""

    supports_batching: bool
    environment: dict[str, str]  # versions and device, on which the last bits of an image depend
    groups_by_text: bool = False  # only samples of one text group can share a batch


class BatchSizeMeasured(NamedTuple):
    """The largest batch that fits."""

    batch_size: int


class TextGroups(NamedTuple):
    """The text group of each sample that was asked for, by sample index."""

    groups: dict[int, str]


class Heartbeat:
    """The worker took a denoising step."""


class BatchStarted(NamedTuple):
    """Samples that are on the device: if the worker dies now, one of them may be the cause."""

    indices: tuple[int, ...]


class SamplesFinished(NamedTuple):
    """The lines of samples in the ledger are on disk, each with its file or with the reason why it failed by itself."""

    failures: dict[int, str | None]
    """By sample index: the reason, or None for an image."""


class WorkerNote(NamedTuple):
    """A sentence for the user."""

    text: str


class WorkerFailed(NamedTuple):
    """This worker cannot generate any more; `all_workers`: nor can any other."""

    error: UserError
    all_workers: bool


Request = MeasureBatchSize | GroupByText | GenerateBatch | StopWorker
_Progress = Heartbeat | BatchStarted | SamplesFinished
Report = WorkerReady | BatchSizeMeasured | TextGroups | _Progress | WorkerNote | WorkerFailed | WorkerExited


def open_pool(job: GenerationJob, devices: dict[str, str]) -> WorkerPool:
    """Return the pool of a command; `devices` are those of each worker, by label."""
    if job.settings.engine == "ray":
        return RayPool(job, devices)
    processes = len(devices) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    job = job._replace(cpus=max(1, available_cpus() // processes))
    arguments = {label: (job, label, device) for label, device in devices.items()}
    return ProcessPool("muralist-gpu", _run_process, arguments)


def _run_process(inbox: Inbox, send: Send, job: GenerationJob, label: str, device: str) -> None:
    """Run a worker in this process."""
    own_device = prepare_process(device)
    from muralist.generate import worker

    worker.work(job, label, own_device, inbox, send)


def prepare_process(device: str) -> torch.device:
    """Complete the environment of a worker's process before torch and the driver read it, and return its device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = _isolate_gpu(device)
    import torch
    from tqdm import tqdm

    # The default lock is shared by processes, and a killed worker would never release it.
    tqdm.set_lock(threading.RLock())
    return torch.device(device)


def _isolate_gpu(device: str) -> str:
    """Make a GPU the only one that this process sees, and return its new name."""
    if not device.startswith("cuda:"):
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = int(device.removeprefix("cuda:"))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return "cuda:0"


def ray_devices(gpu_ids: Sequence[int]) -> dict[str, str]:
    """Return label and device of each worker: one per free GPU of the cluster; without GPUs, one CPU process per node.

    Ray chooses the GPU of an actor: `--gpu_ids` says how many, and their labels.
    """
    ray = _connect()
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
    return {str(label): "cuda:0" for label in gpu_ids or range(free)}  # an actor sees only its own GPU


class RayPool(WorkerPool):
    """Actors of a Ray cluster, one for each worker."""

    def __init__(self, job: GenerationJob, devices: dict[str, str]) -> None:
        super().__init__()
        self.job, self.devices = job, devices
        self._ray = _connect()
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, str] = {}  # label of each call in progress

    def start(self, label: str) -> None:
        """Request an actor; it starts when the cluster has the resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_gpus": 1}
        if self.devices[label] == "cpu":
            nodes = _nodes(self._ray)
            node = nodes[list(self.devices).index(label) % len(nodes)]
            options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        self._drop_calls(label)  # of an actor that was killed: its exit is not that of the new one
        actor = self._ray.remote(RayActor).options(**options, max_restarts=0)
        self._actors[label] = actor.remote(self.job, label, self.devices[label], str(Path.cwd()))
        self._call(label, None)
        self.reset_silence(label)

    def send(self, label: str, message: Request) -> None:
        """Send a message with a call of its own; calls are answered one after the other."""
        if label in self._actors:
            self._call(label, message)

    def _receive(self, seconds: float) -> list[tuple[str, Report]]:
        """Return the reports of finished calls; every live worker always has a call in progress."""
        if not self._calls:
            time.sleep(seconds)
            return []
        answered, _ = self._ray.wait(list(self._calls), timeout=seconds)
        more, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        reports: list[tuple[str, Report]] = []
        for call in dict.fromkeys([*answered, *more]):
            label = self._calls.pop(call, None)
            if label is None:
                continue  # of a worker that exited, according to another call of this round
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                answer = _exit_reports(label, error)
            reports += [(label, report) for report in answer]
            if any(isinstance(report, WorkerExited) for report in answer):
                self._drop(label)
            elif label not in self._calls.values():
                self._call(label, None)
        return reports

    def kill(self, label: str) -> None:
        """End an actor's process; the call in progress reports its exit."""
        if label in self._actors:
            self._ray.kill(self._actors[label])

    def close(self, grace: float) -> None:
        """Wait for workers that were told to stop, then end the rest."""
        deadline = time.monotonic() + grace
        while self._actors and time.monotonic() < deadline:
            self._receive(0.1)
        for label in list(self._actors):
            self._drop(label)

    def _call(self, label: str, message: Request | None) -> None:
        self._calls[self._actors[label].exchange.remote(message)] = label

    def _drop(self, label: str) -> None:
        """Free the resources of an actor."""
        self._ray.kill(self._actors.pop(label))
        self._drop_calls(label)

    def _drop_calls(self, label: str) -> None:
        self._calls = {call: other for call, other in self._calls.items() if other != label}


class RayActor:
    """A worker in a thread of an actor, and an answer to every call."""

    def __init__(self, job: GenerationJob, label: str, device: str, folder: str) -> None:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        with suppress(OSError):  # so that relative paths mean the same as where the command runs
            os.chdir(folder)
        self._inbox: queue.Queue[Request] = queue.Queue()
        self._outbox: queue.Queue[Report] = queue.Queue()
        threading.Thread(target=self._work, args=(job, label, device), daemon=True).start()

    def exchange(self, message: Request | None) -> list[Report]:
        """Take a message, if there is one, and return the reports since the last call."""
        reports: list[Report] = []
        if message is not None:
            self._inbox.put(message)
        else:
            with suppress(queue.Empty):
                reports.append(self._outbox.get(timeout=_LONGEST_CALL))
        while not self._outbox.empty():
            reports.append(self._outbox.get())
        return reports

    def _work(self, job: GenerationJob, label: str, device: str) -> None:
        try:
            import torch

            from muralist.generate.worker import work

            work(job, label, torch.device(device), self._inbox, self._outbox.put)
            self._outbox.put(WorkerExited("has ended"))
        except BaseException as error:
            self._outbox.put(WorkerExited(f"ended with {type(error).__name__}: {first_line(error)}"))


def _connect() -> Any:
    """Return the module ray, connected to the running cluster."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else a cluster that is gone is searched for 14 minutes
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--engine ray needs Ray.", fix="pip install 'muralist[ray]', on every node.") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            # An address where nothing listens fails at once.
            if given := re.fullmatch(r"\[?([^/\]]+?)\]?:(\d+)", address):
                socket.create_connection((given[1], int(given[2])), _CONNECT_TIMEOUT).close()
            handler = signal.getsignal(signal.SIGTERM)
            # Workers report by messages; their output stays in Ray's own logs.
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's own handler would end us with a stack trace
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                "There is no Ray cluster to run on.",
                f"Looking for {address}: {first_line(error)}",
                "Start one: `ray start --head` on the first node, then `ray start --address=FIRST:6379` on the others. "
                "Set RAY_ADDRESS when this machine is not one of its nodes.",
            ) from None
    return ray


def _nodes(ray: Any) -> list[str]:
    """Return the ids of the nodes that are alive."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _exit_reports(label: str, error: Exception) -> list[Report]:
    exited = WorkerExited("cannot be reached any more: it died, or its node is lost")
    if "creation task" not in str(error):
        return [exited]
    reason = [line for line in str(error).splitlines() if line.strip()][-1]
    failure = UserError(
        f"GPU {label} could not be started on the cluster: {reason.strip():.200}.",
        fix="Install the same muralist, with the same Python, on every node.",
    )
    return [WorkerFailed(failure, all_workers=False), exited]
