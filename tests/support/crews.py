"""Workers in threads: the real worker with a real tiny model, which can be made to die or hang at a word."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist.data import ledger_lines
from muralist.data.prompts import open_table
from muralist.generate import ledger
from muralist.generate.fleet import Fleet, Not, Outcome, Shape
from muralist.generate.folder import OutputFolder
from muralist.generate.ledger import Header
from muralist.generate.messages import Gone, Job, Order, Ready, Report, Stop
from muralist.generate.painter import Order as PaintOrder
from muralist.generate.painter import Painter, Pending, Way
from muralist.generate.plan import Plan
from muralist.generate.screen import Count
from muralist.generate.worker import Worker
from muralist.models.jit import JiT
from muralist.models.jit_family import JiTFamily, Objective
from muralist.settings import GenerateSettings, ObjectiveSettings

SIDE = 16
CLASSES = ["car", "tree", "house"]
CPU = torch.device("cpu")
_one_at_a_time = threading.RLock()  # a painter may count on being alone in its process


Before = Callable[[str, Sequence[PaintOrder]], None]
"""Called with a worker's label and the orders of a batch."""


class Death(BaseException):
    """Ends a thread as a kill ends a process: nothing catches it."""


def settings(folder: Path, **more: Any) -> GenerateSettings:
    """Settings of a command that makes tiny pictures of classes."""
    return GenerateSettings(
        prompts_csv=str(folder / "prompts.csv"), output_dir=str(folder), model_path="none", num_inference_steps=2,
        guidance_scale=1.0, height=SIDE, width=SIDE, dtype="fp32", **more,
    )  # fmt: skip


def tiny_painter() -> Painter:
    """A JiT with random weights, the same every time."""
    from muralist.generate.jit_painter import JiTPainter

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"patch_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "in_context_len": 0}
        network = JiT(SIDE, num_classes=len(CLASSES), **sizes)
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    family = JiTFamily("JiT", SIDE, CLASSES, Objective.from_settings(ObjectiveSettings(), SIDE))
    return JiTPainter(family, network.eval().requires_grad_(False), settings(Path()))


class Watched:
    """A painter that tells what it paints, and does as it is told before it does."""

    def __init__(self, label: str, before: Before, painter: Painter | None = None) -> None:
        self.painter, self.label, self.before = painter or tiny_painter(), label, before
        self.ended = threading.Event()

    def batches(self) -> bool:
        with _one_at_a_time:
            return self.painter.batches()

    def prepare(self, orders: Sequence[PaintOrder]) -> None:
        with _one_at_a_time:
            self.painter.prepare(orders)

    def made_with(self) -> dict[str, str]:
        return self.painter.made_with()

    def cut_short(self, prompt: str) -> bool:
        return self.painter.cut_short(prompt)

    def paint(
        self, orders: Sequence[PaintOrder], size: tuple[int, int], beat: Callable[[], None], way: Way = Way.USUAL
    ) -> list[np.ndarray]:
        return self.begin(orders, size, beat, way).wait()

    def begin(
        self, orders: Sequence[PaintOrder], size: tuple[int, int], beat: Callable[[], None], way: Way = Way.USUAL
    ) -> Pending:
        self.before(self.label, orders)
        if self.ended.is_set():
            raise Death
        with _one_at_a_time:
            return self.painter.begin(orders, size, beat, way)


class ThreadCrew:
    """A crew of threads; `before` is called with label and orders before every batch, and may raise or wait."""

    def __init__(self, job: Job, before: Before = lambda *_: None) -> None:
        self.job, self.before = job, before
        self.inboxes: dict[str, queue.Queue[Order]] = {}
        self.outbox: queue.Queue[tuple[str, Watched, Report]] = queue.Queue()
        self.painters: dict[str, Watched] = {}
        self.threads: list[threading.Thread] = []
        self.started: list[str] = []
        self.sent: list[tuple[str, Order]] = []

    def start(self, label: str) -> None:
        painter = self.painters[label] = Watched(label, self.before, self.open_painter())
        inbox = self.inboxes[label] = queue.Queue()
        self.started.append(label)

        def run() -> None:
            def send(report: Report) -> None:
                if not painter.ended.is_set():
                    self.outbox.put((label, painter, report))

            how = "ended with status 0"
            try:
                send(Ready(painter.batches(), {"device": "CPU"}))
                Worker(self.job, label, CPU, painter, send).serve(inbox)
            except Death:
                how = "was killed by SIGKILL"
            self.outbox.put((label, painter, Gone(how)))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def open_painter(self) -> Painter:
        return tiny_painter()

    def send(self, label: str, order: Order) -> None:
        self.sent.append((label, order))
        self.inboxes[label].put(order)

    def receive(self, seconds: float) -> list[tuple[str, Report]]:
        try:
            label, painter, report = self.outbox.get(timeout=min(seconds, 0.02))
        except queue.Empty:
            return []
        return [(label, report)] if self.painters[label] is painter else []

    def kill(self, label: str) -> None:
        self.painters[label].ended.set()
        self.inboxes[label].put(Stop())

    def close(self, patience: float) -> None:
        for label in self.painters:
            self.kill(label)


class ModelCrew(ThreadCrew):
    """Takes the place of the processes of a command: the same workers, with the command's own model, in threads."""

    last: ModelCrew

    def __init__(self, job: Job, devices: dict[str, str], early: list[Any]) -> None:
        super().__init__(job)
        self.devices = devices
        ModelCrew.last = self

    @staticmethod
    def early() -> AbstractContextManager[list[Any]]:
        return nullcontext([])

    def open_painter(self) -> Painter:
        from muralist.generate.pipelines import open_painter

        return open_painter(self.job.settings, CPU)


class Heard:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.counts: dict[str, Count] = {}
        self.totals: list[int] = []

    def show(self, counts: dict[str, Count], unassigned: int) -> None:
        self.counts = dict(counts)
        self.totals.append(sum(count.total for count in counts.values()) + unassigned)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def close(self) -> None: ...


class Atelier:
    """A folder, a table and what it takes to run a fleet of threads on them."""

    def __init__(self, folder: Path, prompts: Sequence[str], shape: int = 2, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = OutputFolder(folder / "images")
        self.folder.create()
        table = folder / "prompts.csv"
        table.write_text("prompt\n" + "".join(f"{prompt}\n" for prompt in prompts))
        self.settings = settings(folder, **more)
        self.plan = Plan(open_table(str(table)), self.settings.images_per_prompt, 42, "", (SIDE, SIDE), "png")
        self.header = Header({"model": "tiny"}, shape)
        ledger.start(self.folder.ledger, self.header)
        self.job = Job(self.settings, self.folder.root, self.header.digest, {"model": "tiny"})
        self.screen = Heard()
        self.crew = ThreadCrew(self.job)

    def run(
        self,
        labels: Sequence[str],
        before: Before = lambda *_: None,
        timeout: float = 60.0,
        settle: Callable[[Ready, int | None], Shape | Not] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Outcome:
        """Run a fleet to its end and merge what it wrote."""
        self.crew = ThreadCrew(self.job, before)
        shape = Shape(self.header.batch_size, self.header.batch_size)
        fleet = Fleet(
            self.plan, self.folder, self.header.digest, self.crew, self.screen, settle or (lambda *_: shape),
            lambda: None, lambda: None, timeout,
        )  # fmt: skip
        todo = np.arange(len(self.plan)) if numbers is None else np.array(numbers)
        try:
            return fleet.run(labels, todo)
        except BaseException:
            self.crew.close(0)
            raise
        finally:
            for thread in self.crew.threads:
                thread.join(5)
            ledger.merge(self.folder.ledger, self.folder.work)

    def lines(self) -> dict[int, dict[str, Any]]:
        """The last line about each row."""
        last = {line["index"]: line for line in ledger_lines.read_lines(self.folder.ledger)}
        return dict(sorted(last.items()))

    def bytes(self) -> dict[str, bytes]:
        """Every picture."""
        return {path.name: path.read_bytes() for path in sorted(self.folder.root.glob("*.png"))}
