"""Memory that several processes write: a file that has no name, so that nothing of it is left however they end.

Not /dev/shm, of which a container has 64 MB unless it is told otherwise.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

_USUAL = 256 << 20  # bytes: 64 pictures of more than a million pixels


class SharedMemory:
    """Grows with what is asked of it; its descriptor is for other processes to write to."""

    def __init__(self) -> None:
        # Many builds of Python, conda's and uv's, have no such call, and a kernel may refuse it.
        make = getattr(os, "memfd_create", None)
        try:
            self.descriptor = make("muralist") if make else _file()
        except OSError:
            self.descriptor = _file()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """Its first bytes; who holds an earlier, smaller part goes on seeing the same memory."""
        if size > len(self._bytes):
            os.ftruncate(self.descriptor, size)
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        return self._bytes[:size]

    def give_back(self) -> None:
        """Let go of what is more than a usual batch needs; whoever still has a part must not look at it any more."""
        if len(self._bytes) > _USUAL:
            os.ftruncate(self.descriptor, 0)
            self._bytes = self._bytes[:0].clone()

    def close(self) -> None:
        """The memory itself lasts as long as somebody looks at it."""
        self._bytes = self._bytes[:0].clone()
        os.close(self.descriptor)


def _file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
