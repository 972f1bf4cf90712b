"""Processes as a crew sees them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muralist.generate import worker_process
from muralist.generate.crew import LocalCrew
from muralist.generate.messages import Gone, Hopeless, Job, Task
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


def test_a_worker_that_is_on_its_way_is_given_its_work_later(tmp_path: Path) -> None:
    with LocalCrew.early() as waiting:
        (early,) = waiting
        crew = LocalCrew(Job(settings(tmp_path), tmp_path, "digest", {}), {"0": "cpu", "1": "cpu"}, waiting)
        crew.start("0")
    assert early.process.is_alive()  # it is the crew's now
    ((label, report),) = crew.receive(60)
    assert label == "0" and isinstance(report, Hopeless)
    assert report.error.what == "There is no model at none."  # so it was told its job
    crew.start("1")
    assert [crew._workers[label] is early for label in "01"] == [True, False]
    crew.close(0)
    assert not early.process.is_alive()


def test_a_worker_that_nobody_takes_over_is_ended() -> None:
    with pytest.raises(KeyboardInterrupt), LocalCrew.early() as (early,):
        raise KeyboardInterrupt
    assert early.process.exitcode == -signal.SIGKILL
    assert early.pipe.closed


def test_a_process_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert worker_process._alone("cuda:2") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7a")
    assert worker_process._alone("cuda:1") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7a"
    assert worker_process._alone("cpu") == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7a"


def test_what_a_worker_imports_before_it_knows_its_gpu_looks_for_none() -> None:
    script = """
import sys, torch
def looked(*_):
    raise AssertionError("looked for GPUs")
for name in ("is_available", "device_count", "_lazy_init", "init", "get_device_properties"):
    setattr(torch.cuda, name, looked)
import muralist.generate.worker
print([name for name in ("diffusers", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("status", "asked"), [(0, ["cuInit", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])])
def test_a_gpu_wakes_while_libraries_are_imported(
    monkeypatch: pytest.MonkeyPatch, status: int, asked: list[str]
) -> None:
    heard: list[str] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            heard.append("cuInit")
            return status

        def cuDevicePrimaryCtxRetain(self, context: object, number: int) -> int:
            assert number == 0  # the only one that is seen
            heard.append("cuDevicePrimaryCtxRetain")
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    worker_process._wake_gpu()
    assert heard == asked


def test_a_machine_without_a_driver_is_not_the_thread_s_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    worker_process._wake_gpu()  # torch tells
