"""Writes checkpoints while training goes on: it waits only for the copy to host memory, never for the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from muralist.settings import CheckpointSettings
from muralist.train import checkpoint
from muralist.words import duration

log = logging.getLogger("muralist")


class CheckpointWriter:
    """One checkpoint at a time, in a thread; what went wrong there is raised where training asks next."""

    def __init__(self, folder: Path, keep: CheckpointSettings) -> None:
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(
        self, step: int, weights: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Copy everything, then write it in the background; waits for the checkpoint before, if that is still written."""
        self.finish()
        copies = {name: _on_host(tensors) for name, tensors in weights.items()}
        self._thread = threading.Thread(target=self._write, args=(step, copies, _on_host(state), facts))
        self._thread.start()

    def _write(self, step: int, weights: dict[str, Any], state: dict[str, Any], facts: dict[str, Any]) -> None:
        started = time.perf_counter()
        try:
            path = checkpoint.write(self.folder, step, weights, state, facts)
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


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
