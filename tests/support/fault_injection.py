"""Fault injection: a process signals or damages itself at an exact step, or at the n-th file that it touches.

A signal that a process sends to itself acts as one from outside, and comes at the same moment in every repetition. The
product does not know of this: steps are observed where the watchdog is told of them, files through Python's audit
events. Each fault happens once, and a file records that it happened; of a fault that waits, a file records how far its
process came, so that a fault whose moment never came can be told from one that was never planted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAN = "MURALIST_TEST_FAULTS"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1,
           "freeze": signal.SIGSTOP, "pause": signal.SIGSTOP}  # fmt: skip
_PATIENCE = 60.0
_DAY = 86_400.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    what: str
    who: str
    """`rank 1`, `worker 0`, `command`; or `disk`, between two starts."""
    when: str
    """`step`, `save`, `sampling`, `image`, `file`; or `start`: before the start of that number."""
    at: int
    """The step (or the first one after it), the start, or how many files were touched before."""
    after: int = 0
    """During a save or sampling: how many files of it were touched before."""

    @property
    def moment(self) -> int:
        """The step, or the number of the touched file, at which it happens."""
        return {"step": self.at, "save": self.after + 1, "sampling": self.after + 1}.get(self.when, self.at + 1)

    def __str__(self) -> str:
        if self.who == "disk":
            return f"{self.what} before start {self.at}"
        into = f" + {self.after} files" if self.when in ("save", "sampling") else ""
        return f"{self.what} of {self.who} at {self.when} {self.at}{into}"


@dataclass(frozen=True)
class Plan:
    """What a process finds in the file that its environment names."""

    faults: tuple[Fault, ...]
    fired: Path
    """Folder in which every fault that happened has a file."""
    disk: Path
    """The folder of the job: a small disk where it is to be filled or made read-only."""
    work: Path
    """The folder whose files are counted."""
    broken_steps: tuple[int, ...] = ()
    """Training: steps with a non-finite loss, at every attempt."""

    def write(self, path: Path) -> None:
        """Put it where a process finds it."""
        self.fired.mkdir(parents=True, exist_ok=True)
        self.progress.touch()
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, path: Path) -> Plan:
        content = json.loads(path.read_text())
        faults = tuple(Fault(**fault) for fault in content.pop("faults"))
        places = (Path(content[name]) for name in ("fired", "disk", "work"))
        return cls(faults, *places, tuple(content["broken_steps"]))

    def mark(self, fault: Fault) -> Path:
        """The file that says that a fault happened, and in which process."""
        return self.fired / f"{self.faults.index(fault)}"

    def reached(self, fault: Fault) -> Path:
        """The file that says how far the process came in which a fault waits."""
        return self.mark(fault).with_suffix(".reached")

    def why_not(self, fault: Fault) -> str:
        """Why a fault that did not happen could not; raises AssertionError where it should have happened."""
        assert self.reached(fault).exists(), f"{fault} was never planted"
        came = int(self.reached(fault).read_text())
        assert came < fault.moment, f"{fault} did not happen, although its process came to {fault.when} {came}"
        return f"the job was done after {came}"

    @property
    def progress(self) -> Path:
        """A file that is touched whenever the job moves on."""
        return self.fired / "progress"


def arm(who: str) -> None:
    """Lay what the plan has for this process."""
    if PLAN not in os.environ:
        return
    plan = Plan.read(Path(os.environ[PLAN]))
    _FaultInjector(plan, [fault for fault in plan.faults if fault.who == who and not plan.mark(fault).exists()]).watch()


class _FaultInjector:
    def __init__(self, plan: Plan, faults: list[Fault]) -> None:
        self.plan, self.faults = plan, faults
        self.lock = threading.RLock()
        self.counts: dict[Fault, int] = dict.fromkeys(faults, 0)
        """Files touched, of each fault that waits for a file."""
        self.poison: float | None = None
        self.acting = False

    def watch(self) -> None:
        from muralist.train.parallel import LossWrapper
        from muralist.train.watchdog import Watchdog

        report, forward = Watchdog.report, LossWrapper.forward

        def reporting(heartbeat: Any, doing: str, step: int | None = None) -> None:
            report(heartbeat, doing, step)
            if doing == "computing" and step is not None:
                os.utime(self.plan.progress)
                self.poison = float("nan") if step in self.plan.broken_steps and heartbeat.rank == 0 else None
                for fault in self._armed("step"):
                    self._come_to(fault, step)

        def poisoned(module: Any, *rest: Any) -> Any:
            losses = forward(module, *rest)
            if self.poison is not None and losses.requires_grad:
                losses, self.poison = losses * self.poison, None
            return losses

        Watchdog.report = reporting  # type: ignore[method-assign]
        LossWrapper.forward = poisoned  # type: ignore[method-assign]
        for fault in self.faults:
            self.plan.reached(fault).write_text("-1")
        sys.addaudithook(self._hear)

    def _armed(self, *when: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.when in when and fault in self.counts]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") or self.acting:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
        if _is_image(path):
            os.utime(self.plan.progress)
        with self.lock:
            for fault in self._armed("save", "sampling", "image", "file"):
                if self._concerns(fault, path):
                    self.counts[fault] += 1
                    self._come_to(fault, self.counts[fault])

    def _come_to(self, fault: Fault, moment: int) -> None:
        """Note the step or file at which the process is, and act if it is the fault's."""
        with self._unheard():
            self.plan.reached(fault).write_text(str(moment))
        if moment >= fault.moment:
            self._act(fault)

    def _act(self, fault: Fault) -> None:
        del self.counts[fault]
        self.acting = True
        now = time.clock_gettime(time.CLOCK_REALTIME)  # which no fault sets
        self.plan.mark(fault).write_text(json.dumps({"process": os.getpid(), "time": now}))
        self.acting = False
        action: Callable[[Fault], None] = getattr(self, f"_{fault.what}", self._signal)
        action(fault)

    def _signal(self, fault: Fault) -> None:
        os.kill(os.getpid(), SIGNALS[fault.what])

    def _second(self, fault: Fault) -> None:
        """Wait until the player has tried the same command beside this one."""
        done, deadline = self.plan.mark(fault).with_suffix(".done"), time.monotonic() + _PATIENCE
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _nan(self, fault: Fault) -> None:
        self.poison = float("nan")

    def _inf(self, fault: Fault) -> None:
        self.poison = float("inf")

    def _loader(self, fault: Fault) -> None:
        for children in Path("/proc/self/task").glob("*/children"):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)

    def _clock(self, fault: Fault) -> None:
        """The clock is set: a day ahead, or a day back."""
        real, jump = time.time, _DAY if fault.at % 2 else -_DAY
        time.time = lambda: real() + jump

    def _full(self, fault: Fault) -> None:
        from tests.support.disks import PAGE, leave_free

        with self._unheard():
            leave_free(self.plan.disk, fault.after % 3 * PAGE)

    def _read_only(self, fault: Fault) -> None:
        """From now on nothing under the folder can be opened for writing; files that are open stay so."""
        with self._unheard():
            folder = str(self.plan.disk)
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    def _torn(self, fault: Fault) -> None:
        """Half a line is written, then the process is killed."""
        with self._unheard():
            for shard in self.plan.disk.glob("**/.ledger/gpu*.jsonl"):
                if shard.stem == fault.who.replace("worker ", "gpu"):
                    with shard.open("ab") as file:
                        file.write(b'{"status": "done", "index": 1, "co')
        os.kill(os.getpid(), signal.SIGKILL)

    def _deleted(self, fault: Fault) -> None:
        with self._unheard():
            shutil.rmtree(self.plan.disk / "images", ignore_errors=True)

    def _memory(self, fault: Fault) -> None:
        """From now on this process gets no memory for images; the error is that of torch."""
        from muralist.generate.jit_pipeline import JiTPipeline

        def generate_async(*rest: Any) -> Any:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate much.")

        JiTPipeline.generate_async = generate_async  # type: ignore[method-assign]

    def _unheard(self) -> Any:
        injector = self

        class Unheard:
            def __enter__(self) -> None:
                injector.acting = True

            def __exit__(self, *rest: object) -> None:
                injector.acting = False

        return Unheard()

    def _concerns(self, fault: Fault, path: str) -> bool:
        """Whether a file belongs to the work at which a fault is to happen."""
        parts = Path(path).parts
        if fault.when == "save":
            aside = next((part for part in parts if part.startswith(".step_") and part.endswith(".tmp")), "")
            return bool(aside) and int(aside[len(".step_") : -len(".tmp")]) >= fault.at
        if fault.when == "sampling":
            folder = Path(path).parent.name
            return "samples" in parts and folder.startswith("step_") and int(folder[len("step_") :]) >= fault.at
        if fault.when == "image":
            return _is_image(path)
        return path.startswith(f"{self.plan.work}/") and not path.startswith(str(self.plan.fired))


def _is_image(path: str) -> bool:
    """Return whether this is an image being written into a folder."""
    name = Path(path).name
    return name.startswith(".") and ".png." in name
