"""Workers in threads: the real worker with a real tiny model, which can be made to die or hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from muralist.core.errors import UserError
from muralist.core.worker_pool import WorkerExited, WorkerPool
from muralist.data import ledger_reader
from muralist.data.prompts import open_prompt_table
from muralist.generate.console import WorkerProgress
from muralist.generate.model_info import ModelInfo
from muralist.generate.output_dir import Header, OutputDir, merge_shards, start_ledger
from muralist.generate.pipeline import GenerationMode, PendingBatch, Pipeline, SampleRequest
from muralist.generate.plan import Plan
from muralist.generate.scheduler import BatchSize, DecideBatchSize, Scheduler
from muralist.generate.worker import Worker
from muralist.generate.workers import GenerationJob, Report, Request, StopWorker, WorkerFailed, WorkerReady
from muralist.models.jit import JiT
from muralist.models.jit_spec import JiTSpec, Objective
from muralist.settings import GenerateSettings, ObjectiveSettings

SIDE = 16
CLASSES = ["car", "tree", "house"]
CPU = torch.device("cpu")
_one_at_a_time = threading.RLock()  # a pipeline may count on being alone in its process

Before = Callable[[str, Sequence[SampleRequest]], None]
"""Called with a worker's label and the requests of a batch."""


class Death(BaseException):
    """Ends a thread as a kill ends a process: nothing catches it."""


def settings(folder: Path, **more: Any) -> GenerateSettings:
    """Settings of a command that generates tiny images of classes."""
    return GenerateSettings(
        prompts_csv=str(folder / "prompts.csv"), output_dir=str(folder), model_path="none", num_inference_steps=2,
        guidance_scale=1.0, height=SIDE, width=SIDE, dtype="fp32", **more,
    )  # fmt: skip


def tiny_jit_pipeline() -> Pipeline:
    """A JiT with random weights, the same every time."""
    from muralist.generate.jit_pipeline import JiTPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"patch_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "in_context_len": 0}
        network = JiT(SIDE, num_classes=len(CLASSES), **sizes)
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    spec = JiTSpec("JiT", SIDE, CLASSES, Objective.from_settings(ObjectiveSettings(), SIDE))
    return JiTPipeline(spec, network.eval().requires_grad_(False), settings(Path()))


class WatchedPipeline:
    """A pipeline that calls `before` with the requests of every batch, which may raise or wait."""

    def __init__(self, label: str, before: Before, pipeline: Pipeline | None = None) -> None:
        self.pipeline, self.label, self.before = pipeline or tiny_jit_pipeline(), label, before
        self.ended = threading.Event()
        self.truncation, self.execution_info = self.pipeline.truncation, self.pipeline.execution_info
        self.ignores_negative_prompts = self.pipeline.ignores_negative_prompts
        self.groups_by_text = self.pipeline.groups_by_text

    def supports_batching(self) -> bool:
        with _one_at_a_time:
            return self.pipeline.supports_batching()

    def text_groups(self, requests: Sequence[SampleRequest]) -> list[str]:
        with _one_at_a_time:
            return self.pipeline.text_groups(requests)

    def prepare(self, requests: Sequence[SampleRequest]) -> None:
        with _one_at_a_time:
            self.pipeline.prepare(requests)

    def generate(self, *arguments: Any) -> list[np.ndarray]:
        return self.generate_async(*arguments).wait()

    def generate_async(
        self,
        requests: Sequence[SampleRequest],
        size: tuple[int, int],
        on_step: Callable[[], None],
        mode: GenerationMode = GenerationMode.DEFAULT,
    ) -> PendingBatch:
        self.before(self.label, requests)
        if self.ended.is_set():
            raise Death
        with _one_at_a_time:
            return self.pipeline.generate_async(requests, size, on_step, mode)


class ThreadPool(WorkerPool):
    """A worker pool of threads."""

    def __init__(self, job: GenerationJob, before: Before = lambda *_: None) -> None:
        super().__init__()
        self.job, self.before = job, before
        self.inboxes: dict[str, queue.Queue[Request]] = {}
        self.outbox: queue.Queue[tuple[str, WatchedPipeline, Report]] = queue.Queue()
        self.pipelines: dict[str, WatchedPipeline] = {}
        self.threads: list[threading.Thread] = []
        self.started: list[str] = []
        self.sent: list[tuple[str, Request]] = []

    def start(self, label: str) -> None:
        pipeline = self.pipelines[label] = WatchedPipeline(label, self.before, self.open_pipeline())
        inbox = self.inboxes[label] = queue.Queue()
        self.started.append(label)
        self.reset_silence(label)

        def run() -> None:
            def send(report: Report) -> None:
                if not pipeline.ended.is_set():
                    self.outbox.put((label, pipeline, report))

            reason = "exited with status 0"
            try:
                send(WorkerReady(pipeline.supports_batching(), {"device": "CPU"}, pipeline.groups_by_text()))
                Worker(self.job, label, CPU, pipeline, send).serve(inbox)
            except Death:
                reason = "was killed by SIGKILL"
            except UserError as error:
                send(WorkerFailed(error, all_workers=True))
            self.outbox.put((label, pipeline, WorkerExited(reason)))

        self.threads.append(threading.Thread(target=run, daemon=True, name=f"worker {label}"))
        self.threads[-1].start()

    def open_pipeline(self) -> Pipeline:
        return tiny_jit_pipeline()

    def send(self, label: str, message: Request) -> None:
        self.sent.append((label, message))
        self.inboxes[label].put(message)

    def _receive(self, seconds: float) -> list[tuple[str, Report]]:
        try:
            label, pipeline, report = self.outbox.get(timeout=min(seconds, 0.02))
        except queue.Empty:
            return []
        return [(label, report)] if self.pipelines[label] is pipeline else []

    def kill(self, label: str) -> None:
        self.pipelines[label].ended.set()
        self.inboxes[label].put(StopWorker())

    def close(self, grace: float) -> None:
        for label in self.pipelines:
            self.kill(label)


class ModelThreadPool(ThreadPool):
    """Takes the place of a command's processes: the same workers, with the command's own model, in threads."""

    last: ModelThreadPool

    def __init__(self, job: GenerationJob, devices: dict[str, str]) -> None:
        super().__init__(job)
        self.devices = devices
        ModelThreadPool.last = self

    def open_pipeline(self) -> Pipeline:
        from muralist.generate.pipeline import load_pipeline

        return load_pipeline(self.job.settings, CPU, self.job.model)

    def close(self, grace: float) -> None:
        super().close(grace)
        for thread in self.threads:
            thread.join(5)  # else what a worker raises at its end would be counted for the next test


class RecordingDisplay:
    """A progress display that remembers."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.workers: dict[str, WorkerProgress] = {}
        self.totals: list[int] = []

    def update(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        self.workers = dict(workers)
        self.totals.append(sum(worker.total for worker in workers.values()) + unassigned)

    def print(self, text: str) -> None:
        self.printed.append(text)

    def close(self) -> None: ...


class Result(NamedTuple):
    """The number of samples that were generated, and that failed."""

    done: int
    failed: int


class ThreadedRun:
    """A folder, a table and everything else that a scheduler with threads needs."""

    def __init__(self, folder: Path, prompts: Sequence[str], batch_size: int = 2, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = OutputDir(folder / "images")
        self.output.create()
        table = folder / "prompts.csv"
        table.write_text("prompt\n" + "".join(f"{prompt}\n" for prompt in prompts))
        self.settings = settings(folder, **more)
        self.plan = Plan(open_prompt_table(str(table)), self.settings.images_per_prompt, 42, "", (SIDE, SIDE), "png")
        self.header = Header({"model": "tiny"}, batch_size)
        start_ledger(self.output.ledger, self.header)
        model = ModelInfo({}, {"model": "tiny"})
        self.job = GenerationJob(self.settings, model, self.output.root, self.header.digest, model.identity)
        self.display = RecordingDisplay()
        self.pool = ThreadPool(self.job)

    def run(
        self,
        labels: Sequence[str],
        before: Before = lambda *_: None,
        timeout: float = 60.0,
        decide: DecideBatchSize | None = None,
        indices: Sequence[int] | None = None,
    ) -> Result:
        """Run a scheduler to its end and merge the ledger."""
        self.pool = ThreadPool(self.job, before)
        size = BatchSize(self.header.batch_size, self.header.batch_size)
        decide = decide or (lambda *_: size)
        scheduler = Scheduler(self.plan, self.output, self.header.digest, self.pool, self.display, decide, timeout)
        try:
            scheduler.run(labels, np.arange(len(self.plan)) if indices is None else np.array(indices))
            workers = scheduler.workers.values()
            return Result(sum(worker.done for worker in workers), sum(worker.failed for worker in workers))
        except BaseException:
            self.pool.close(0)
            raise
        finally:
            for thread in self.pool.threads:
                thread.join(5)
            merge_shards(self.output.ledger, self.output.work)

    def lines(self) -> dict[int, dict[str, Any]]:
        """The last line about each row."""
        last = {line["index"]: line for line in ledger_reader.read_lines(self.output.ledger)}
        return dict(sorted(last.items()))

    def images(self) -> dict[str, bytes]:
        """Every image's bytes."""
        return {path.name: path.read_bytes() for path in sorted(self.output.root.glob("*.png"))}
