"""Which files of muralist a training step or an image crosses: every call of every thread, in every process.

Calls count between marks, which are functions that begin a new step, batch or image: what runs before the first mark is
set-up, and what runs after the last one is the end of the job.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import muralist

TRACE = "MURALIST_TEST_TRACE"
_MARKS = {
    "Trainer._next_batches",
    "Scheduler._send", "Worker._run",  # generation: the command, and a worker
    "_Scheduler._hand_out", "_compute_padded", "_decode",  # evaluation: the command, a worker, and a decoder
}  # fmt: skip
_SOURCE = f"{Path(muralist.__file__).parent}{os.sep}"


def arm() -> None:
    """Trace this process, which was forked to work, where a test asks for it."""
    if TRACE in os.environ:
        _start(Path(os.environ[TRACE]))


@dataclass(frozen=True)
class Trace:
    """Files of muralist in which functions were called, at all and between marks."""

    called: set[str] = field(default_factory=set)
    between_marks: set[str] = field(default_factory=set)


@contextmanager
def tracing(folder: Path) -> Iterator[Trace]:
    """Trace this process and those that it starts; the trace is complete when the context ends."""
    folder.mkdir()
    trace = Trace()
    os.environ[TRACE] = str(folder)
    _start(folder)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        del os.environ[TRACE]
    for process in folder.iterdir():
        windows = [set(window.split()) for window in process.read_text().split("mark\n")]
        trace.called.update(*windows)
        trace.between_marks.update(*windows[4:-1])  # the first ones have more: a summary, and what is cached afterwards


def _start(folder: Path) -> None:
    seen: set[str] = set()
    output = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # a worker may be killed

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_SOURCE):
            return
        if code.co_qualname in _MARKS:
            seen.clear()
            os.write(output, b"mark\n")
        if (file := code.co_filename.removeprefix(_SOURCE)) not in seen and code.co_name != "<module>":
            seen.add(file)
            os.write(output, f"{file}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)
