"""Plays a schedule with real processes: starts the job, starts it again whenever it ended, and looks at what came out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults.jobs import Job, job_of
from tests.faults.schedule import LIVING_ON, Schedule
from tests.support.disks import small_disk
from tests.support.fault_injection import PLAN, Fault, Plan
from tests.support.recovery import Workshop

MOST_STARTS = 12
LONGEST_START = 120.0
"""Seconds after which a start that has not ended hangs, on a machine with other things to do too."""
_PAUSE = 0.3
_AT_ONCE = 1.0  # seconds between processes that reach the same step
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


@dataclass
class Outcome:
    """How a schedule went; an error where it went wrong."""

    starts: int = 0
    seconds: float = 0.0
    recovered: dict[str, float] = field(default_factory=dict)
    """Of each fault that happened, by its words, the seconds until the job moved on."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Of each fault whose moment never came, by its words, why."""
    error: str = ""


def play(shop: Workshop, schedule: Schedule, folder: Path) -> Outcome:
    """Play a schedule in a folder, which is removed if all went well."""
    while (folder / "place").is_mount():  # of a player that was killed
        subprocess.run(["umount", "--lazy", str(folder / "place")], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome, begun = Outcome(), time.monotonic()
    try:
        with small_disk(folder / "place", "8m") if schedule.needs_mounts else nullcontext(folder / "place") as place:
            place.mkdir(exist_ok=True)
            _Play(shop, schedule, folder, place, outcome).run()
    except AssertionError as error:
        outcome.error = str(error) or traceback.format_exc()
    except Exception:
        outcome.error = traceback.format_exc()
    finally:
        shop.fork_server.kill_all()
    outcome.seconds = time.monotonic() - begun
    if not outcome.error:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


class _Play:
    def __init__(self, shop: Workshop, schedule: Schedule, folder: Path, place: Path, outcome: Outcome) -> None:
        self.shop, self.schedule, self.folder, self.place, self.outcome = shop, schedule, folder, place, outcome
        self.job: Job = job_of(shop, place, Random(schedule.number), schedule.case)
        work = shop.root if schedule.job == "evaluate" else place
        self.plan = Plan(schedule.faults, folder / "fired", place, work, getattr(schedule.case, "skipped", ()))
        self.plan.write(folder / "plan.json")
        self.attended: dict[Fault, int] = {}
        """Faults that happened, and in which start or before which."""
        self.waiting: dict[Fault, float] = {}
        """Faults after which the job has not moved on yet, and when they happened."""

    def run(self) -> None:
        for start in range(1, MOST_STARTS + 1):
            self.outcome.starts = start
            expected = self._prepare(start)
            status, told = self._start(start)
            self._check(start, status, told, expected)
            if status == 0 and self.job.is_finished():
                break
        else:
            raise AssertionError(f"not finished after {MOST_STARTS} starts")
        self.job.compare()
        self._account_for_every_fault()

    def _account_for_every_fault(self) -> None:
        """Every planned fault has happened, or is known to have been impossible."""
        for fault in dict.fromkeys(self.schedule.faults):
            if fault in self.attended:
                assert str(fault) in self.outcome.recovered, f"{fault} happened, and the job never moved on"
            elif fault.who == "disk":
                self.outcome.impossible[str(fault)] = "no start found anything to damage"
            else:
                self.outcome.impossible[str(fault)] = self.plan.why_not(fault)

    def _prepare(self, start: int) -> list[str]:
        """Mend the disk as a user would, or damage what lies on it; returns what the next start must say."""
        for fault in self.schedule.faults:
            if fault.what == "read_only" and fault in self.attended and _is_read_only(self.place):
                subprocess.run(["umount", "--lazy", str(self.place)], check=True)
        (self.place / "filler").unlink(missing_ok=True)
        deleted = any(fault.what == "deleted" and fault in self.attended for fault in self.schedule.faults)
        if deleted and not (self.place / "images" / "ledger.jsonl").exists():
            shutil.rmtree(self.place / "images", ignore_errors=True)  # as one does who finds that it was not empty
        expected = []
        for fault in self.schedule.faults:
            if fault.who == "disk" and fault not in self.attended and start >= fault.at:
                said = self.job.damage(fault.what)
                if said is not None:
                    expected += said
                    self.attended[fault] = start
                    self.waiting[fault] = time.time()
        return expected

    def _start(self, start: int) -> tuple[int, str]:
        log = self.folder / f"start_{start}.log"
        environment = {PLAN: str(self.folder / "plan.json"), **self.job.environment(start)}
        begun, deadline = time.time(), time.monotonic() + LONGEST_START
        with log.open("wb") as output:
            process = self.shop.fork_server.start(self.job.arguments(start), output, **environment)
        while (status := process.poll(0.01)) is None:
            assert time.monotonic() < deadline, f"start {start} hangs:\n{_end_of(log)}"
            self._attend(start)
            self._look_for_progress(begun)
        self._attend(start)
        if status == 0 and self.job.is_finished():
            for fault, happened in self.waiting.items():  # it went on at once, between two looks
                self.outcome.recovered[str(fault)] = max(0.0, time.time() - happened)
            self.waiting.clear()
        return status, log.read_text(errors="replace")

    def _attend(self, start: int) -> None:
        """Do what a fault that just happened needs of somebody outside."""
        for fault in self.schedule.faults:
            mark = self.plan.mark(fault)
            if fault in self.attended or not mark.exists() or not (text := mark.read_text()):
                continue
            self.attended[fault] = start
            said = json.loads(text)
            self.waiting[fault] = said["time"]
            if fault.what == "pause":
                _wait_until_stopped(said["process"])
                time.sleep(_PAUSE)
                os.kill(said["process"], signal.SIGCONT)
            elif fault.what == "second":
                self._try_beside(start, said["time"])
                mark.with_suffix(".done").touch()

    def _try_beside(self, start: int, asked: float) -> None:
        log = self.folder / "second.log"
        with log.open("wb") as output:
            second = self.shop.fork_server.start(self.job.arguments(start), output, **self.job.environment(start))
        status = second.poll(LONGEST_START)
        told = log.read_text(errors="replace")
        if any(fault.what == "deleted" and self.plan.mark(fault).exists() for fault in self.schedule.faults):
            return  # the folder of the first is gone: the second has one of its own
        marks = [self.plan.mark(fault) for fault in self.schedule.faults if fault.what == "kill"]
        # A kill of an earlier start excuses nothing: only one at this very step, with which the first's lock went.
        killed = any(mark.exists() and mark.stat().st_mtime >= asked - _AT_ONCE for mark in marks)
        if status == 0 and killed:
            return  # the second went on in its place, and is compared as any other start
        assert status and self.job.refusal in told, f"a second command was not refused, status {status}:\n{told}"

    def _look_for_progress(self, begun: float) -> None:
        moved = self.plan.progress.stat().st_mtime
        for fault, happened in list(self.waiting.items()):
            if moved > max(happened, begun) + 0.001 and (happened < begun or not _ends_a_start(fault)):
                self.outcome.recovered[str(fault)] = moved - happened
                del self.waiting[fault]

    def _check(self, start: int, status: int, told: str, expected: list[str]) -> None:
        self.job.heard(start, told)
        assert "Traceback" not in told, f"start {start} shows a traceback:\n{told}"
        for fault, happened in self.attended.items():
            deadly = fault.what in ("kill", "freeze") and not fault.who.startswith("worker")
            assert status or happened != start or not deadly, f"start {start} succeeded in spite of {fault}"
        for sentence in expected:
            assert sentence in told, f"start {start} does not say {sentence!r}:\n{told}"
        if status and status not in _KILLED:
            assert any(word in told for word in ("muralist:", "Rank ", "GPU ", "nterrupted", "Stopped by")), (
                f"start {start} ended with {status} and does not say why:\n{told}"
            )


def _ends_a_start(fault: Fault) -> bool:
    """Whether what the job still does in this start is no recovery: of generation, a single worker may be lost."""
    if fault.who.startswith("worker"):
        return fault.what in ("full", "deleted", "memory")
    return fault.what not in LIVING_ON


def _wait_until_stopped(process: int) -> None:
    """A signal to go on that comes before the one to stop would be lost."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return
        time.sleep(0.005)


def _is_read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


@contextmanager
def workshop(root: Path) -> Iterator[Workshop]:
    """A workshop that is closed in the end."""
    shop = Workshop(root)
    try:
        yield shop
    finally:
        shop.close()
