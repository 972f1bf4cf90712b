"""Writes checkpoints while training goes on: it waits only for the copy to host memory, never for the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muralist.settings import CheckpointSettings
from muralist.train import checkpoint
from muralist.words import duration

log = logging.getLogger("muralist")
_PIECE = 1 << 28  # bytes
_ALIGNED = 64


class CheckpointWriter:
    """One checkpoint at a time, in a thread; what went wrong there is raised where training asks next."""

    def __init__(self, folder: Path, keep: CheckpointSettings, writers: DeviceMesh | None = None) -> None:
        self.folder, self.keep, self.writers = folder, keep, writers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def submit(
        self, step: int, weights: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Copy everything, then write it in the background; waits for the checkpoint before, if that is still written."""
        self.finish()
        copies = {name: self._on_host(name, tensors) for name, tensors in weights.items()}
        states = self._on_host("state", state)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are under way
        self._thread = threading.Thread(target=self._write, args=(step, copies, states, facts))
        self._thread.start()

    def _write(self, step: int, weights: dict[str, Any], state: dict[str, Any], facts: dict[str, Any]) -> None:
        started = time.perf_counter()
        try:
            group = self.writers.get_group() if self.writers else None
            path = checkpoint.write(self.folder, step, weights, state, facts, group)
            if self.writers is None or self.writers.get_rank() == 0:
                checkpoint.prune(self.folder, self.keep.keep_last, self.keep.keep_every)
                log.info("Saved checkpoint to %s (%s)", path, duration(time.perf_counter() - started))
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait until the checkpoint under way is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _on_host(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._copy((part, name), value.detach()) for name, value in tensors.items()}

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return self._into_buffer(key, tensor)
        assert self.writers is not None, "tensors in parts need all processes to be written"
        part = self._into_buffer(key, tensor.to_local())
        return DTensor.from_local(
            part, self.writers, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _into_buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Copy into memory that stays for the next checkpoint: fresh memory, and memory that is not page-locked, is slow."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._pinned_like(tensor) if tensor.is_cuda else torch.empty_like(tensor, device="cpu")
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _pinned_like(self, tensor: Tensor) -> Tensor:
        """Page-locked memory, cut from large pieces: torch would round each tensor up to a power of two."""
        size = tensor.numel() * tensor.element_size()
        if size > len(self._pinned):
            self._pinned = torch.empty(max(size, _PIECE), dtype=torch.uint8, pin_memory=True)
        cut, self._pinned = self._pinned[:size], self._pinned[-(-size // _ALIGNED) * _ALIGNED :]
        return cut.view(tensor.dtype).view(tensor.shape)
