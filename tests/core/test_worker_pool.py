"""The worker pool, with real processes that are stopped, killed or interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muralist.core.worker_pool import Inbox, ProcessPool, Send, WorkerExited

pytestmark = pytest.mark.usefixtures("spawned_workers")


def echo(inbox: Inbox, send: Send, greeting: str) -> None:
    send((greeting, os.getpid()))
    while (message := inbox.get()) is not None:
        send(len(message))


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool("muralist-test", echo, {"0": ("hello",), "1": ("hi",)})
    yield pool
    pool.close(0.0)


def start(pool: ProcessPool, label: str) -> int:
    pool.start(label)
    (answer,) = pool.receive(30)
    assert answer[0] == label
    return int(answer[1][1])


def test_messages_restarts_and_exit_reports(pool: ProcessPool) -> None:
    first, second = start(pool, "0"), start(pool, "1")
    assert pool.silence("0") < 30
    pool.send("1", "four")
    assert pool.receive(30) == [("1", 4)]
    os.kill(first, signal.SIGKILL)
    assert pool.receive(30) == [("0", WorkerExited("was killed by SIGKILL"))]
    pool.send("0", "lost")  # a worker that has exited does not get it
    assert start(pool, "0") not in (first, second)
    pool.send("1", None)
    assert pool.receive(30) == [("1", WorkerExited("exited with status 0"))]


def test_a_worker_that_reads_nothing_blocks_nobody(pool: ProcessPool) -> None:
    os.kill(start(pool, "0"), signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(3):
        pool.send("0", "x" * 5_000_000)
    assert pool.receive(0.1) == []
    assert time.monotonic() - started < 2
    assert pool.silence("0") >= 0.1
    pool.reset_silence("0")
    assert pool.silence("0") < 0.1
    pool.kill("0")
    assert pool.receive(10) == [("0", WorkerExited("was killed by SIGKILL"))]


def test_a_worker_ignores_ctrl_c_from_its_start(pool: ProcessPool) -> None:
    pool.start("0")
    process = pool._workers["0"].process
    os.kill(process.pid, signal.SIGINT)
    assert pool.receive(30)[0][0] == "0"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])  # the parent does not
    pool.close(0.0)
    assert process.exitcode == -signal.SIGKILL


PARENT = """
import os, signal, time
from muralist.core.worker_pool import ProcessPool
from tests.core.test_worker_pool import echo

if __name__ == "__main__":
    pool = ProcessPool("muralist-test", echo, {"0": ("hello",)})
    pool.start("0")
    print(pool.receive(30)[0][1][1], flush=True)
    {ENDING}
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit"])
def test_workers_do_not_outlive_their_parent(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.replace("{ENDING}", ending))
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', 'src')}"}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=60)
    worker = Path(f"/proc/{int(ended.stdout)}/stat")
    deadline = time.monotonic() + 20
    while worker.exists() and worker.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
