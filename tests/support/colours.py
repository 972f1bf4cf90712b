"""A feature extractor that needs no network: a process that computes with it starts in a moment."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muralist.data.images import decode
from muralist.evaluate.extractors import Loaded


@dataclass(frozen=True)
class Colours:
    """The mean colour of a picture; the process of the given name runs out of memory."""

    name: str = "colours"
    digest: str = "colours"
    width: int = 3
    fails_as: str = ""
    source: Path = Path()
    takes_pixels: bool = False
    tf32: bool = False

    def load(self, device: torch.device) -> Loaded:
        return Loaded(self.prepare, self.compute, takes_pixels=self.takes_pixels)

    def prepare(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.array(decode(data)))

    def compute(self, batch: Tensor) -> Tensor:
        if multiprocessing.current_process().name == self.fails_as:
            raise RuntimeError("out of memory.\nmore")
        time.sleep(0.05)  # as long as it takes to do something to a process
        return batch.float().mean((1, 2))
