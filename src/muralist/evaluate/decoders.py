"""The processes that decode pictures for one GPU, and the threads that ask them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from muralist.errors import UserError
from muralist.machine import usable_cores

_AT_ONCE = 8  # pictures of one request
_FAREWELL = 5.0  # seconds
# Bytes: after each pipe full a thread needs Python's lock again. One has at most a megabyte, and all of a user 64.
_PIPE, _ALL_PIPES = 1 << 20, 16 << 20

Wanted = tuple[Path, bytes]
"""A file and the SHA-256 that its content has."""


class Decoders:
    """Some processes; each is asked by one thread of ours, which waits for it without holding the interpreter."""

    def __init__(self, processes: int) -> None:
        # -P: a file in the current folder must not take the place of a library.
        command = [sys.executable, "-P", "-m", "muralist.evaluate.decoding"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            for _ in range(processes)
        ]
        size = min(_PIPE, _ALL_PIPES // usable_cores())  # of every GPU's decoders together, there are as many as cores
        for process in self._processes:
            assert process.stdout
            with suppress(OSError, AttributeError):  # there is less to be had, or no such call: as it is, then
                fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, size)
        self._free = list(self._processes)
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(processes, initializer=self._adopt)

    def _adopt(self) -> None:
        self._own.process = self._free.pop()

    def decode(self, wanted: Sequence[Wanted]) -> list[Future[list[Tensor | str]]]:
        """Pixels, uint8 [H, W, 3], of each file or the reason why there are none, some at a time."""
        parts = [wanted[start : start + _AT_ONCE] for start in range(0, len(wanted), _AT_ONCE)]
        return [self._pool.submit(self._ask, part) for part in parts]

    def _ask(self, wanted: Sequence[Wanted]) -> list[Tensor | str]:
        process: subprocess.Popen[bytes] = self._own.process
        assert process.stdin and process.stdout
        request = json.dumps([(os.fspath(path), key.hex()) for path, key in wanted]).encode()
        try:
            _write(process.stdin.fileno(), request + b"\n")
            told, begun = _line(process.stdout.fileno())
            return _pictures(told, begun, process.stdout.fileno())
        except (OSError, EOFError):
            names = ", ".join(str(path) for path, _ in wanted)
            raise UserError(
                "A process that decodes pictures ended.",
                f"It was busy with {names}.",
                "The same command again goes on from what is done.",
            ) from None

    def __enter__(self) -> Decoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self._processes:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdin and process.stdout
            process.stdin.close()  # which it takes for the end
            process.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL)
            process.kill()
            process.wait()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _line(descriptor: int) -> tuple[list[Any], bytes]:
    """The answer's first line, and what came with it of the pixels."""
    data = b""
    while b"\n" not in data:
        if not (more := os.read(descriptor, 1 << 16)):
            raise EOFError
        data += more
    line, _, begun = data.partition(b"\n")
    return json.loads(line), begun


def _pictures(told: list[Any], begun: bytes, descriptor: int) -> list[Tensor | str]:
    """Pixels, read into the memory where they stay; the whole answer is read before a fault in it is told."""
    shapes = [tuple(said) for said in told if isinstance(said, list)]
    sizes = [height * width * 3 for height, width in shapes]
    pixels = torch.empty(sum(sizes), dtype=torch.uint8)
    view = pixels.numpy().data
    view[: len(begun)] = begun
    view = view[len(begun) :]
    while view:
        if not (count := os.readv(descriptor, [view])):
            raise EOFError
        view = view[count:]
    if fault := next((said for said in told if isinstance(said, dict)), None):
        raise UserError(**fault)
    parts = iter([part.view(*shape, 3) for part, shape in zip(pixels.split(sizes), shapes, strict=True)])
    return [said if isinstance(said, str) else next(parts) for said in told]
