"""An encoder without a network, so that processes that use it start quickly."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muralist.data.decode import decode_image
from muralist.evaluate.encoders import Encoder, LoadedEncoder


@dataclass(frozen=True)
class MeanColor(Encoder):
    """The mean color of an image; the process named `fails_as` runs out of memory."""

    source: Path = Path()
    sha256: str = "color"
    width: int = 3
    name: str = "color"
    fails_as: str = ""
    takes_pixels: bool = False

    def load(self, device: torch.device) -> LoadedEncoder:
        return LoadedEncoder(self.prepare, self.compute)

    def takes_pixels_on(self, device: torch.device) -> bool:
        return self.takes_pixels

    def prepare(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.array(decode_image(data)))

    def compute(self, batch: Tensor) -> Tensor:
        if multiprocessing.current_process().name == self.fails_as:
            raise RuntimeError("out of memory.\nmore")
        time.sleep(0.05)  # long enough to signal the process meanwhile
        return batch.float().mean((1, 2))
