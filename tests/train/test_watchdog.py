"""Processes that die, freeze, fail, never come or keep others waiting: real ones, told what to do line by line."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from muralist.core.errors import EXIT_LOST_PEERS
from muralist.core.liveness import write_beat
from muralist.train.watchdog import RESUME_HINT, SAVING, WAITING, Heartbeat, Watchdog, WatchdogTiming, read_heartbeat
from tests.support.disks import leave_free, small_disk
from tests.support.runs import environment

LONG = 60.0  # a limit that must not be what ends a process
# A rank whose main thread does what it is told on standard input, and is stuck in a read until the next line comes.
RANK = """
import json, logging, sys, time
from pathlib import Path
from muralist.core import liveness
from muralist.core.errors import UserError
from muralist.train.watchdog import Watchdog, WatchdogTiming
folder, rank, size, timeout, silence, host = json.loads(sys.argv[1])
assert "torch" not in sys.modules
logging.basicConfig(format="%(message)s", stream=sys.stdout)
if host:
    liveness.socket.gethostname = liveness._pid_namespace = lambda: host
timing = WatchdogTiming(beat=0.2, suspicion=0.5, silence=silence, exit_delay=0.5)
with Watchdog(Path(folder), rank, size, timeout, timing) as watchdog:
    for line in sys.stdin:
        command = json.loads(line)
        if command[0] == "report":
            watchdog.report(*command[1:])
        elif command[0] == "raise":
            raise UserError(*command[1:])
        elif command[0] == "diagnosis":
            print(watchdog.diagnosis(), flush=True)
        elif command[0] == "before_exit":
            watchdog.before_exit = lambda: (print("before the exit", flush=True), time.sleep(command[1]), print("done"))
        print("ok", flush=True)
"""


class Rank:
    """One process of a launch."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        timeout: float = LONG,
        silence: float = LONG,
        host: str = "",
        port: int = 1234,
    ) -> None:
        words = [sys.executable, "-c", RANK, json.dumps([str(folder), rank, size, timeout, silence, host])]
        self.path = folder / f"rank_{rank}.json"
        self.process = subprocess.Popen(
            words,
            env=environment(MASTER_PORT=str(port), MASTER_ADDR="n0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self.name = f"Rank {rank} on {host or socket.gethostname()} (process {self.process.pid})"

    def do(self, *order: object) -> list[str]:
        """Give an order and wait until it is done; returns what the process printed meanwhile."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        printed: list[str] = []
        for line in self.process.stdout:
            if line == "ok\n":
                return printed
            printed.append(line.rstrip())
            self.said.append(line.rstrip())
        raise AssertionError(f"ended: {printed}")

    def record(self) -> dict[str, Any]:
        """What its file says."""
        return json.loads(self.path.read_text())

    def has_written(self, doing: str) -> bool:
        """Whether its file says that it is doing this."""
        try:
            return self.record()["doing"] == doing
        except (OSError, ValueError):
            return False

    def end(self, expect: int = EXIT_LOST_PEERS, order: tuple[object, ...] = (), leave: bool = False) -> list[str]:
        """Wait for its end, by itself or because it is asked to leave, and return all it said."""
        words = json.dumps(order) + "\n" if order else None
        if leave or order:
            output, _ = self.process.communicate(words, timeout=20)
        else:
            assert self.process.stdout
            self.process.wait(20)
            output = self.process.stdout.read()
        assert self.process.returncode == expect, output
        return [*self.said, *output.splitlines()]

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launch of so many ranks, all of them or some, and wait until they beat."""
    started: list[Rank] = []

    def begin(
        size: int, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (), step: int | None = 120, **options: Any
    ) -> list[Rank]:
        wanted = ranks or tuple(range(size))
        names = dict(enumerate(hosts))
        fresh = [Rank(tmp_path / "heartbeats", rank, size, host=names.get(rank, ""), **options) for rank in wanted]
        started.extend(fresh)
        for rank in fresh:
            rank.do("report", "computing", step)
        deadline = time.monotonic() + 1  # there are tests in which nothing can be written
        while not all(rank.has_written("computing") for rank in fresh) and time.monotonic() < deadline:
            time.sleep(0.02)
        return fresh

    yield begin
    for rank in started:
        with suppress(ProcessLookupError):
            rank.process.kill()
        rank.process.communicate()


def test_killed_rank_is_named_by_the_others(start: Start) -> None:
    first, second, killed = start(3)
    killed.process.kill()
    began = time.monotonic()
    for survivor in (first, second):
        said = survivor.end()
        assert said[0].startswith("Another process is missing")
        assert said[1].startswith(f"{killed.name} is dead: it crashed or was killed")
        assert said[1].endswith("computing, step 120.")
        assert said[2:] == [RESUME_HINT]
    assert time.monotonic() - began < 10
    assert first.record()["left"] == "lost contact"


@pytest.mark.slow
def test_frozen_rank_is_named_and_ends_itself_when_resumed(start: Start) -> None:
    ranks = start(3, silence=2.0)
    ranks[1].process.send_signal(signal.SIGSTOP)
    for survivor in (ranks[0], ranks[2]):
        said = survivor.end()
        assert f"{ranks[1].name} does not respond" in said[1] and "computing, step 120." in said[1]
        assert said[-1] == RESUME_HINT
    ranks[1].process.send_signal(signal.SIGCONT)
    assert any("stopped earlier" in line or "is dead" in line for line in ranks[1].end())


@pytest.mark.slow
def test_suspended_and_resumed_job_continues(start: Start) -> None:
    ranks = start(2, silence=1.5, timeout=3.0)
    for number, pause in ((signal.SIGSTOP, 3.5), (signal.SIGCONT, 0.5)):
        for rank in ranks:
            rank.process.send_signal(number)
        time.sleep(pause)
    for rank in ranks:
        rank.do("report", "computing", 121)
        rank.end(expect=0, leave=True)


def test_on_another_host_only_beats_count(start: Start) -> None:
    here, there, killed = start(3, hosts=("n0", "n1", "n2"), silence=1.5)
    killed.process.kill()
    killed.process.wait()
    began = time.monotonic()
    said = here.end()
    assert time.monotonic() - began > 1.2  # its number is gone at once, but on another host that says nothing
    said += there.end()
    assert any(f"Rank 2 on n2 (process {killed.process.pid}) does not respond" in line for line in said)
    assert said[-1] == RESUME_HINT


def test_diagnosis_of_one_rank_reaches_other_hosts(start: Start) -> None:
    here, _, killed = start(3, hosts=("n0", "n1", "n1"))
    killed.process.kill()
    said = here.end()  # it cannot see for itself: its patience is a minute
    assert said[1].startswith("Rank 1 on n1 (process") and "stopped earlier: " + killed.name in said[1]


def test_rank_that_was_not_started_is_named_at_the_timeout(start: Start) -> None:
    (earlier,) = start(3, ranks=(2,))
    earlier.process.kill()
    earlier.process.wait()
    began = time.monotonic()
    present = start(3, ranks=(0, 1), step=None, timeout=2.0)
    for rank in present:
        said = rank.end()
        assert said[0].startswith("No progress for 2 s (--dist_timeout)")
        assert said[1].startswith("Rank 2 never reported") and "could not reach n0:1234" in said[1]
        assert "possibly of an earlier start, says: computing, step 120" in said[1]
    assert time.monotonic() - began >= 2.0


def test_message_of_a_failed_rank_reaches_the_others(start: Start) -> None:
    first, second, failing = start(3)
    failing.end(expect=1, order=("raise", "The loss became nan at step 120.", "The learning rate may be too high."))
    for survivor in (first, second):
        said = survivor.end()
        assert said[1] == f"{failing.name} failed: The loss became nan at step 120. The learning rate may be too high."
    assert failing.record()["left"] == "failed"


def test_failed_rank_that_hangs_reports_its_own_error(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom muralist.train.watchdog import Watchdog, WatchdogTiming\n"
        "rank = int(sys.argv[2])\n"
        "with Watchdog(Path(sys.argv[1]), rank, 2, 60, WatchdogTiming(0.1, 0.5, 60, 1)) as beating:\n"
        "    time.sleep(0.5)\n"
        "    if rank: beating.failed('The disk caught fire.')\n"
        "    time.sleep(30)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    ranks = [subprocess.Popen([*words, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    outputs = [rank.communicate(timeout=20)[1] for rank in ranks]
    assert "failed: The disk caught fire." in outputs[0]
    assert outputs[1] == "The disk caught fire.\n"
    assert [rank.returncode for rank in ranks] == [EXIT_LOST_PEERS] * 2


@pytest.mark.slow
def test_slow_rank_is_named_at_the_timeout(start: Start) -> None:
    ranks = start(3, timeout=2.5)
    reported = time.monotonic()
    ranks[1].do("report", "reading data", 121)
    ranks[0].do("report", WAITING, 121)
    ranks[2].do("report", WAITING, 121)
    first = ranks[0].end()
    assert time.monotonic() - reported >= 2.4
    assert first[0].startswith("No progress for") and "--dist_timeout" in first[0]
    assert first[1].startswith(f"{ranks[1].name} keeps the others waiting: reading data, step 121, for ")
    assert first[-1] == RESUME_HINT
    for rank in ranks[1:]:
        assert ranks[1].name in "".join(rank.end())


def test_rank_at_the_lowest_step_is_the_straggler(start: Start) -> None:
    first, late = start(2)
    late.do("report", "computing", 120)
    first.do("report", "computing", 121)
    told = first.do("diagnosis")
    assert len(told) == 1 and told[0].startswith(f"{late.name} keeps the others waiting: computing, step 120")


def test_diagnosis_names_local_and_remote_ranks(start: Start) -> None:
    here, killed, far = start(3, hosts=("n0", "n0", "n9"))
    here.do("report", WAITING, 120)
    killed.process.kill()
    killed.process.wait()
    assert here.do("report", WAITING) == []
    assert here.do("diagnosis")[0].startswith(f"{killed.name} is dead")
    assert far.do("diagnosis")[0].startswith(f"{here.name} stopped earlier: {killed.name} is dead")
    assert here.record()["left"] == "lost contact"


def test_before_exit_has_a_time_limit(start: Start) -> None:
    quick, slow, killed = start(3)
    quick.do("before_exit", 0)
    slow.do("before_exit", 1000)
    killed.process.kill()
    assert quick.end()[:3:2] == ["before the exit", "Another process is missing: rank 0 stops."]
    assert slow.end()[0:2] == ["before the exit", "Another process is missing: rank 1 stops."]


def test_saving_rank_is_left_to_finish(start: Start) -> None:
    saving, killed = start(2)
    saving.do("report", SAVING)
    killed.process.kill()
    time.sleep(1.5)
    assert saving.runs()
    saving.do("report", WAITING)
    assert killed.name in saving.end()[1]


@pytest.mark.slow
def test_long_step_is_fine_while_all_ranks_beat(start: Start) -> None:
    ranks = start(3, silence=1.5)
    time.sleep(2.5)
    assert all(rank.runs() for rank in ranks)
    assert {path.name for path in ranks[0].path.parent.iterdir()} == {f"rank_{rank}.json" for rank in range(3)}
    ranks[1].end(expect=0, leave=True)
    time.sleep(1)  # one that left in good order is not missed
    ranks[0].end(expect=0, leave=True)
    ranks[2].end(expect=0, leave=True)
    assert not ranks[0].path.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("port", [1234, 4321])
def test_files_of_an_earlier_launch_are_ignored(start: Start, port: int) -> None:
    earlier = start(4)
    for rank in earlier:
        rank.process.kill()
        rank.process.wait()
    (first,) = start(2, ranks=(0,), port=port)  # the same port twice: accelerate always takes 29500
    time.sleep(1.5)  # the other takes its time
    assert first.runs()
    (second,) = start(2, ranks=(1,), port=port)
    time.sleep(1)
    assert first.runs() and second.runs()
    second.end(expect=0, leave=True)
    first.end(expect=0, leave=True)
    assert not first.path.parent.exists()  # what is known to be gone was swept up, too


def test_refused_second_launch_does_not_harm_the_first(start: Start) -> None:
    first = start(2)
    intruders = start(2, port=4321) + start(2)
    for intruder in intruders:
        intruder.end(expect=1, order=("raise", "The run is being trained by another process."))
    time.sleep(1)
    for rank in first:
        assert rank.record()["process"] == rank.process.pid
        rank.do("report", "computing", 121)
        rank.end(expect=0, leave=True)


@pytest.mark.slow
def test_failure_in_anothers_file_counts_only_when_it_stays(start: Start) -> None:
    first, second = start(2)
    intruder = Heartbeat(**{**second.record(), "process": 1, "born": "1", "left": "failed", "message": "Refused."})
    for _ in range(6):
        write_beat(second.path, asdict(intruder))
        time.sleep(0.33)  # in which the file's owner writes again
    assert first.runs() and second.runs()


@pytest.mark.slow
def test_single_process_reports_and_leaves_no_file(start: Start) -> None:
    (alone,) = start(1, timeout=0.5)
    alone.do("report", "held-out loss", 200)
    time.sleep(1.2)  # the timeout is not for a process that waits for nobody
    record = alone.record()
    assert (record["rank"], record["host"], record["process"]) == (0, socket.gethostname(), alone.process.pid)
    assert (record["doing"], record["step"]) == ("held-out loss", 200) and record["for_seconds"] in (1, 2)
    assert len(alone.path.read_bytes()) < 4096 and record["beat"] > 5
    alone.end(expect=1, order=("raise", "No."))
    assert not alone.path.parent.exists()


def test_unwritable_folder_is_logged_once(tmp_path: Path, start: Start) -> None:
    (tmp_path / "heartbeats").write_text("a file where the folder should be")
    ranks = start(2, silence=0.5)
    time.sleep(1.5)
    for rank in ranks:
        said = rank.end(expect=0, leave=True)
        assert len(said) <= 2, said
        assert said[0].startswith(f"Cannot write {rank.path}") and "Training goes on." in said[0]


@pytest.mark.slow
def test_full_disk_does_not_stop_training(tmp_path: Path, start: Start) -> None:
    with small_disk(tmp_path / "heartbeats") as disk:
        (early,) = start(2, ranks=(0,), silence=0.5)
        leave_free(disk, 0)
        (late,) = start(2, ranks=(1,), silence=0.5)
        time.sleep(1)
        assert late.end(expect=0, leave=True)[0].startswith(f"Cannot write {late.path}")
        beat = early.record()["beat"]
        time.sleep(0.5)
        assert early.record()["beat"] > beat  # written in place, it needs no new space
        assert early.end(expect=0, leave=True) == []


def test_read_only_disk_is_not_taken_for_a_dead_rank(tmp_path: Path, start: Start) -> None:
    with small_disk(tmp_path / "heartbeats") as disk:
        ranks = start(2, silence=0.5)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        time.sleep(2)
        for rank in ranks:
            said = rank.end(expect=0, leave=True)
            assert len(said) == 1 and said[0].startswith(f"Cannot write {rank.path}"), said


def test_error_while_watching_is_logged_once_and_beats_continue(tmp_path: Path, start: Start) -> None:
    (tmp_path / "heartbeats" / "rank_1.json").mkdir(parents=True)
    (rank,) = start(2, ranks=(0,))
    time.sleep(1.2)
    before = rank.record()["beat"]
    time.sleep(0.5)
    assert rank.record()["beat"] > before
    assert rank.end(expect=0, leave=True) == ["Cannot watch the other processes: Is a directory. Training goes on."]


def test_torn_heartbeat_is_not_taken_for_a_dead_rank(start: Start) -> None:
    first, second = start(2)
    for _ in range(20):
        second.path.write_bytes(first.path.read_bytes()[:100])
        time.sleep(0.05)
    assert first.runs() and second.runs()
    time.sleep(0.3)
    assert second.record()["process"] == second.process.pid


def test_reader_never_mixes_two_heartbeats(tmp_path: Path) -> None:
    beating = Watchdog(tmp_path, 0, 1, LONG)
    path = tmp_path / "rank_0.json"
    records = []
    for message in ("", "x" * 500):
        beating._message = message
        records.append(beating._heartbeat())
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for record in records:
                write_beat(path, asdict(record))

    writer = threading.Thread(target=write)
    writer.start()
    while not path.exists():
        time.sleep(0.001)
    read: set[Heartbeat | None] = set()
    deadline, turns = time.monotonic() + 10, 0
    while turns < 1000 or (not read.issuperset(records) and time.monotonic() < deadline):
        read.add(read_heartbeat(path))
        turns += 1
    done.set()
    writer.join()
    assert read - {None} == set(records)


def test_long_message_in_any_script_is_truncated(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "heartbeats", 1, 2, LONG, WatchdogTiming(beat=0.1)) as beating:
        beating.failed("\udcff\n" + "塗" * 5000)
        text = (tmp_path / "heartbeats" / "rank_1.json").read_bytes()
    assert len(text) < 4096
    assert json.loads(text)["message"] == "? " + "塗" * 598


def test_report_takes_microseconds(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "heartbeats", 0, 1, LONG) as beating:
        costs = []
        for step in range(20_000):
            before = time.perf_counter_ns()
            beating.report("computing", step)
            costs.append(time.perf_counter_ns() - before)
    assert statistics.median(costs) < 5_000
