"""The processes that decode pictures for one GPU, and the threads that ask them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from muralist.data.images import BrokenImage
from muralist.errors import UserError
from muralist.evaluate.decoding import decoded, unchanged
from muralist.evaluate.shared_memory import SharedMemory

_AT_ONCE = 8  # pictures of one request
_FAREWELL = 5.0  # seconds


@dataclass(frozen=True)
class Wanted:
    """A file, the SHA-256 that its content has, and the height and width that its header tells."""

    path: Path
    key: bytes
    shape: tuple[int, int] | None

    @property
    def size(self) -> int:
        """How many bytes its pixels are."""
        return 3 * self.shape[0] * self.shape[1] if self.shape else 0


class Decoders:
    """Some processes; each is asked by one thread of ours, which waits for it without holding the interpreter."""

    def __init__(self, processes: int, ahead: int) -> None:
        self._all_memory = [SharedMemory() for _ in range(ahead)]
        self._unused = list(self._all_memory)
        descriptors = [memory.descriptor for memory in self._all_memory]
        # -P: a file in the current folder must not take the place of a library.
        command = [sys.executable, "-P", "-m", "muralist.evaluate.decoding"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=descriptors)
            for _ in range(processes)
        ]
        self._free = list(self._processes)
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(processes, initializer=self._adopt)

    def _adopt(self) -> None:
        self._own.process = self._free.pop()

    def decode(self, wanted: Sequence[Wanted]) -> Underway:
        """Begin with a batch; as many as `ahead` may be begun and not forgotten."""
        memory = self._unused.pop()
        *starts, size = accumulate((one.size for one in wanted), initial=0)
        pixels = memory.of(size)
        futures = []
        for start in range(0, len(wanted), _AT_ONCE):
            part, places = wanted[start : start + _AT_ONCE], starts[start : start + _AT_ONCE]
            futures.append(self._pool.submit(self._ask, part, places, memory.descriptor, pixels))

        def forget() -> None:
            memory.give_back()
            self._unused.append(memory)

        return Underway(futures, forget, size)

    def _ask(self, wanted: Sequence[Wanted], places: Sequence[int], memory: int, pixels: Tensor) -> list[Tensor | str]:
        process: subprocess.Popen[bytes] = self._own.process
        assert process.stdin and process.stdout
        asked = [
            (os.fspath(one.path), one.key.hex(), start, one.size) for one, start in zip(wanted, places, strict=True)
        ]
        try:
            _write(process.stdin.fileno(), json.dumps((memory, asked)).encode() + b"\n")
            answer = _line(process.stdout.fileno())
        except (OSError, EOFError):
            names = ", ".join(str(one.path) for one in wanted)
            raise UserError(
                "A process that decodes pictures ended.",
                f"It was busy with {names}.",
                "The same command again goes on from what is done.",
            ) from None
        return [_picture(one, said, pixels[start:]) for one, said, start in zip(wanted, answer, places, strict=True)]

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
        for memory in self._all_memory:
            memory.close()


class Underway:
    """A batch that others prepare."""

    def __init__(self, futures: list[Future[list[Tensor | str]]], forget: Callable[[], None], size: int = 0) -> None:
        self._futures = futures
        self.size = size
        """Bytes of memory that is held for it."""
        self.forget = forget
        """To be called when nobody looks at the pixels any more: others come in their place."""

    def rows(self) -> list[Tensor | str]:
        """Wait for each one's row, such as pixels, uint8 [H, W, 3], or the reason why there is none."""
        return [row for future in self._futures for row in future.result()]


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _line(descriptor: int) -> list[Any]:
    data = b""
    while not data.endswith(b"\n"):
        if not (more := os.read(descriptor, 1 << 16)):
            raise EOFError
        data += more
    return json.loads(data)


def _picture(wanted: Wanted, said: Any, pixels: Tensor) -> Tensor | str:
    """Where its pixels are, or why there are none."""
    if isinstance(said, dict):
        raise UserError(**said)
    if isinstance(said, str):
        return said
    if tuple(said) == wanted.shape:
        return pixels[: wanted.size].view(*said, 3)
    try:  # rare: what its header tells is not how large it is, so that there was no place for it
        return torch.from_numpy(decoded(unchanged(wanted.path, wanted.key)))
    except BrokenImage as error:
        return error.reason
