"""Processes as a crew sees them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from muralist.generate.crew import LocalCrew
from muralist.generate.messages import Gone, Job, Task
from muralist.generate.plan import Sample
from tests.support.crews import settings


def test_a_worker_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    crew = LocalCrew(Job(settings(tmp_path), tmp_path, "digest", {}), {"0": "cpu"})
    crew.start("0")
    pid = crew._workers["0"].process.pid
    os.kill(pid, signal.SIGSTOP)
    large = Sample(0, 0, 0, "000001", 42, "x" * 5_000_000, "", 16, 16, "000001_seed42.png")
    started = time.monotonic()
    for _ in range(3):
        crew.send("0", Task((large,), 1, 1))
    assert crew.receive(0.1) == []
    assert time.monotonic() - started < 2
    crew.kill("0")
    assert crew.receive(10) == [("0", Gone("was killed by SIGKILL"))]
    crew.send("0", Task((large,), 1, 1))  # one that is gone does not hear it
    assert crew.receive(0.01) == []
    crew.close(0)


def test_a_worker_does_not_listen_to_ctrl_c_from_its_first_moment(tmp_path: Path) -> None:
    crew = LocalCrew(Job(settings(tmp_path), tmp_path, "digest", {}), {"0": "cpu"})
    crew.start("0")
    pid = crew._workers["0"].process.pid
    os.kill(pid, signal.SIGINT)
    assert crew.receive(0.5) == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])  # the command itself does
    crew.close(0)
    assert crew._workers["0"].process.exitcode == -signal.SIGKILL
