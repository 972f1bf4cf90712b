"""Tell whether other processes are alive: by beat files that each process rewrites, and by their process ids.

Clocks of different hosts are never compared. A beat is new when its content changed, and its age is the time that this
process has watched it without a change. A process id means something only within one kernel and PID namespace.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 512  # bytes; beats are padded to full blocks, so that a shorter beat leaves no rest of a longer one behind


@dataclass(frozen=True)
class ProcessIdentity:
    """Host and id of a process, with what distinguishes it from a later process with the same id."""

    host: str
    process: int
    born: str
    """Start time in kernel ticks; empty where the system has no /proc."""
    space: str
    """Kernel boot id and PID namespace: processes with the same value see each other's ids, whatever the host name."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Identify the calling process."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid()), _pid_namespace())

    def is_dead(self) -> bool:
        """Whether the process is known to have ended; False where this process cannot tell, as on another host."""
        return bool(self.space) and self.space == _pid_namespace() and _start_time(self.process) != self.born


def _pid_namespace() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _start_time(process: int) -> str:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # other errors, such as too many open files, do not mean it ended
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has only its exit status left


def write_beat(path: Path, content: Mapping[str, object]) -> None:
    """Rewrite a beat file in place: it works on a full disk, and on NFS a renamed file may appear a minute later."""
    text = json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "replace")
    data = text.ljust(math.ceil((len(text) + 1) / _BLOCK) * _BLOCK - 1) + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.pwrite(descriptor, data, 0)
        if os.fstat(descriptor).st_size > len(data):
            os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def read_beat(path: Path) -> dict[str, Any] | None:
    """Read a beat file; None where it is torn or not a JSON object, even at the third attempt."""
    for _ in range(3):
        with suppress(ValueError, RecursionError):
            if isinstance(content := json.loads(path.read_bytes()), dict):
                return content
        time.sleep(0.02)
    return None


class BeatAge:
    """Seconds for which an observed value has not changed, without the time in which this process was suspended."""

    def __init__(self, longest_gap: float = math.inf) -> None:
        """Count at most `longest_gap` seconds between two observations."""
        self.seconds = 0.0
        self._longest_gap = longest_gap
        self._value: object = None
        self._observed = time.monotonic()

    def observe(self, value: object) -> float:
        """Take note of the value as it is now; returns for how long it has been the same."""
        now = time.monotonic()
        gap, self._observed = min(now - self._observed, self._longest_gap), now
        self.seconds = self.seconds + gap if value == self._value else 0.0
        self._value = value
        return self.seconds
