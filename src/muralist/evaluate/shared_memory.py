"""Memory that several processes write: a file that has no name, so that nothing of it is left however they end.

Not /dev/shm, of which a container has 64 MB unless it is told otherwise.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

import torch
from torch import Tensor


class SharedMemory:
    """Grows with what is asked of it; its descriptor is for other processes to write to."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.descriptor = os.memfd_create("muralist")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """Its first bytes; who holds an earlier, smaller part goes on seeing the same memory."""
        if size > len(self._bytes):
            os.ftruncate(self.descriptor, size)
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        return self._bytes[:size]

    def close(self) -> None:
        """The memory itself lasts as long as somebody looks at it."""
        self._bytes = self._bytes[:0].clone()
        os.close(self.descriptor)
