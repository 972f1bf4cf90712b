"""A fork server: a process that has imported everything heavy and forks muralist's commands, so that a rank starts fast.

What it forks are processes like any other: with a number, a session and an environment of their own, ended by signals and
by their own exit. `muralist launch`, `generate` and `evaluate` start their further processes through it too, instead of
starting Python anew; everything else in them is the product's own.

Commands that a test calls in its own process get their workers from such a server too (`fork_workers`), and
`tests.support.runs.fork` starts commands through it: importing diffusers takes six seconds, most of what a process with a
tiny model costs.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import current_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from tests.conftest import REPOSITORY

IMPATIENT, PLAIN = "impatient", "plain"
"""Kinds of servers: one whose processes give up on others sooner, and one that only saves the imports."""
SMALLEST = "X"
"""A variant of JiT that only processes of the fork server have."""
_ADDRESS = "MURALIST_TEST_FORK_SERVER"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TERM": "dumb",
    "CUDA_VISIBLE_DEVICES": "",
}
_KILL_ALL = "kill all"
_LENGTH = 8
_IMPORTED = (
    "transformers.models.clip.image_processing_pil_clip", "transformers.models.clip.modeling_clip", "muralist.cli",
    "muralist.evaluate.command", "muralist.generate.command", "muralist.generate.jit_pipeline",
    "muralist.generate.pipeline", "muralist.generate.worker", "muralist.models.jit_spec", "muralist.tools.launch",
    "muralist.train.trainer",
)  # fmt: skip
_PIPELINES = ("StableDiffusionPipeline", "WanPipeline", "HunyuanDiTPipeline")  # with them come the text encoders
_STARTING = 120.0


class Started:
    """A process that the fork_server forked; looks like a `subprocess.Popen`, and like a `multiprocessing.Process`."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self._text = b""
        self.pid = int(self._line(None) or 0)
        self.returncode: int | None = None

    def _line(self, seconds: float | None) -> bytes | None:
        while b"\n" not in self._text:
            if not select.select([self._answers], [], [], seconds)[0]:
                return None
            if not (more := self._answers.recv(64)):
                raise RuntimeError("the fork server has ended")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line

    def poll(self, seconds: float | None = 0.0) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""
        if self.returncode is None and (line := self._line(seconds)) is not None:
            self.returncode = os.waitstatus_to_exitcode(int(line))
            self._answers.close()
        return self.returncode

    def join(self, timeout: float | None = None) -> None:
        self.poll(timeout)

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The tests' side: starts the preloaded process and asks it for more."""

    def __init__(self, folder: Path | None = None, mode: str = IMPATIENT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork_server")  # a socket's path must be short
        self.address = str(Path(self._folder.name, "socket"))
        folder = folder or Path(self._folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "fork_server.log"
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'src'}"}
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", self.address, mode],
                cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=errors, stderr=errors,
            )  # fmt: skip
        deadline = time.monotonic() + _STARTING
        while not Path(self.address).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.02)

    def start(self, words: Sequence[object], output: BinaryIO, **environment: str) -> Started:
        """Start `muralist WORDS`; what it prints goes into a file."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        variables = {**inherited, **_ENVIRONMENT, **environment}
        return _ask(self.address, {"words": [str(word) for word in words]}, variables, [output.fileno()] * 2)

    def kill_all(self) -> None:
        """End every process that it forked."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.address)
            _send(line, pickle.dumps(_KILL_ALL), [])
            line.recv(1)

    def close(self) -> None:
        """End it and all that it forked."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)
        self._folder.cleanup()


def _ask(address: str, wanted: Mapping[str, Any], environment: Mapping[str, str], files: Sequence[int]) -> Started:
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    place = {"environment": {**environment, _ADDRESS: address}, "folder": str(Path.cwd())}
    _send(line, pickle.dumps({**place, **wanted}), files)
    return Started(line)


def _send(line: socket.socket, data: bytes, files: Sequence[int]) -> None:
    socket.send_fds(line, [len(data).to_bytes(_LENGTH, "big")], files)
    line.sendall(data)


def _receive(line: socket.socket) -> tuple[Any, list[int]]:
    length, files, _, _ = socket.recv_fds(line, _LENGTH, 16)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += line.recv(1 << 20)
    return pickle.loads(data), files


class Command(Started):
    """A forked process that prints into a file; looks like a `subprocess.Popen` with a pipe."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - it is read after the end of the process
        files = [self._printed.fileno()] * 2
        started = _ask(shared_server().address, {"words": list(words), "folder": str(folder)}, environment, files)
        self.__dict__ |= started.__dict__

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, as `subprocess.Popen` does."""
        if (status := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired("muralist", timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end and return what it printed."""
        self.wait(timeout)
        self._printed.seek(0)
        return self._printed.read().decode(), None


@cache
def shared_server() -> ForkServer:
    """Start the plain server of this process of tests, where it is first needed."""
    return ForkServer(mode=PLAIN)


class _Popen(Started):
    """In place of `subprocess.Popen` in the launcher: a rank."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool) -> None:
        assert list(command[1:3]) == ["-m", "muralist"] and start_new_session
        self.__dict__ = _ask(os.environ[_ADDRESS], {"words": list(command[3:])}, env, [1, 2]).__dict__


class _Context:
    """In place of multiprocessing's "spawn": worker processes with nothing of their parent but a pipe."""

    def __init__(self, address: Callable[[], str] = lambda: os.environ[_ADDRESS]) -> None:
        self._address = address

    def Pipe(self, duplex: bool = True) -> tuple[Connection, Connection]:
        import multiprocessing

        return multiprocessing.Pipe(duplex)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool) -> Any:
        return _Process(self._address(), target, args, name)


class _Process:
    def __init__(self, address: str, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self._address, self._call, self._name, self._started = address, (target, args), name, None

    def start(self) -> None:
        pipes: list[int] = []

        class Pickler(pickle.Pickler):
            def persistent_id(self, thing: Any) -> tuple[int, bool, bool] | None:
                if not isinstance(thing, Connection):
                    return None
                pipes.append(thing.fileno())
                return len(pipes) - 1, thing.readable, thing.writable

        data = io.BytesIO()
        Pickler(data).dump(self._call)
        key = bytes(current_process().authkey)  # with which it fetches descriptors that the arguments hold
        wanted = {"call": data.getvalue(), "name": self._name, "key": key}
        self._started = _ask(self._address, wanted, os.environ, [1, 2, *pipes])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._started, name)


def fork_workers(address: Callable[[], str]) -> Any:
    """Return what stands for the module `multiprocessing` in `muralist.core.worker_pool`: it forks instead of spawning."""
    context = _Context(address)
    return SimpleNamespace(get_context=lambda method: context)


def _call(data: bytes, pipes: Sequence[int]) -> int:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, wanted: tuple[int, bool, bool]) -> Connection:
            place, readable, writable = wanted
            return Connection(pipes[place], readable=readable, writable=writable)

    target, arguments = Unpickler(io.BytesIO(data)).load()
    target(*arguments)
    return 0


def _import_everything(mode: str) -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    from muralist.core import worker_pool

    worker_pool.multiprocessing = fork_workers(lambda: os.environ[_ADDRESS])
    if mode == IMPATIENT:
        _shorten_waits()
    else:
        import diffusers

        for name in _PIPELINES:
            getattr(diffusers, name)
    gc.freeze()  # what is here already is nothing for a child's garbage collector
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"


def _shorten_waits() -> None:
    import muralist.tools.launch
    import muralist.train.trainer
    from muralist.models import configs
    from muralist.train import watchdog

    configs.JIT_CONFIGS[SMALLEST] = configs.JiTConfig(32, 2, 1, 16, 4, 1)  # saves and steps of milliseconds
    muralist.train.trainer.matmul_rate = lambda device, dtype: 1e10  # half a second, for a figure nobody looks at here

    # A tenth of the product's patience with processes that give no sign of life: it is the same code that loses it.
    pace = watchdog.WatchdogTiming(beat=0.2, suspicion=1.5, silence=4.0, exit_delay=5.0)
    watchdog.WatchdogTiming = lambda: pace  # type: ignore[assignment,misc]
    muralist.tools.launch._GRACE_SECONDS = 5.0
    muralist.tools.launch.subprocess = SimpleNamespace(Popen=_Popen)  # type: ignore[assignment]


def _serve(address: str) -> Callable[[], int]:
    """Fork what is asked for until stdin ends; returns, in each forked process, what it is to run."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    bell, rung = os.pipe()
    os.set_blocking(rung, False)
    os.set_blocking(bell, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(rung)
    Path(f"{address}.new").rename(address)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listening, bell], [], [])
        if bell in ready:
            with suppress(BlockingIOError):
                os.read(bell, 4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with suppress(OSError), running.pop(ended[0]) as line:  # whoever asked may be gone
                    line.sendall(b"%d\n" % ended[1])
        if 0 in ready:
            _kill(running)
            sys.exit(0)
        if listening not in ready:
            continue
        line = listening.accept()[0]
        wanted, files = _receive(line)
        if wanted == _KILL_ALL:
            _kill(running)
            line.sendall(b"\n")
            line.close()
            continue
        if child := os.fork():
            for file in files:
                os.close(file)
            running[child] = line
            with suppress(OSError):
                line.sendall(b"%d\n" % child)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (line, listening, *running.values()):
            other.close()
        for file in (bell, rung):
            os.close(file)
        return lambda: _run(wanted, files)


def _kill(running: Mapping[int, socket.socket]) -> None:
    for child in running:
        os.kill(child, signal.SIGKILL)


def _run(wanted: dict[str, Any], files: Sequence[int]) -> int:
    os.setsid()
    for target, file in enumerate(files[:2], start=1):
        os.dup2(file, target)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    from tests.support import call_trace
    from tests.support.fault_injection import arm

    call_trace.arm()
    if "call" in wanted:
        kind, _, label = wanted["name"].rpartition("-")
        if kind not in ("muralist-decode", "muralist-save"):  # those have no faults of their own
            arm(f"worker {label}")
        current_process().authkey = wanted["key"]
        return _call(wanted["call"], files[2:])
    from muralist.cli import main

    command = wanted["words"][0]
    if command.endswith(".py"):
        sys.argv[:] = wanted["words"]
        runpy.run_path(command, run_name="__main__")
        return 0
    if command != "launch":
        arm(f"rank {os.environ.get('RANK', '0')}" if command == "train" else "command")
    return main(wanted["words"])


if __name__ == "__main__":
    from tests.support import fork_server  # so that what is pickled has one name

    fork_server._import_everything(sys.argv[2])
    job = fork_server._serve(sys.argv[1])
    sys.exit(job())
