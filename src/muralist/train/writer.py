"""Writes checkpoints while training goes on: it waits only for the copy to host memory, never for the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muralist.settings import CheckpointSettings
from muralist.train import checkpoint
from muralist.words import duration

log = logging.getLogger("muralist")


class CheckpointWriter:
    """One checkpoint at a time, in a thread; what went wrong there is raised where training asks next."""

    def __init__(self, folder: Path, keep: CheckpointSettings, writers: DeviceMesh | None = None) -> None:
        self.folder, self.keep, self.writers = folder, keep, writers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(
        self, step: int, weights: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Copy everything, then write it in the background; waits for the checkpoint before, if that is still written."""
        self.finish()
        copies = {name: self._on_host(tensors) for name, tensors in weights.items()}
        self._thread = threading.Thread(target=self._write, args=(step, copies, self._on_host(state), facts))
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

    def _on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._copy(value.detach()) for name, value in tensors.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.to("cpu", copy=True)
        assert self.writers is not None, "tensors in parts need all processes to be written"
        part = tensor.to_local().to("cpu", copy=True)
        return DTensor.from_local(
            part, self.writers, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
