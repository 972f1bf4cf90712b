"""CUDA graph capture, imitated on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers.utils import import_utils

from muralist.kernels.cuda_graphs import CudaGraphs

Work = Callable[[], Any]


class FakeCudaGraphs(CudaGraphs):
    """Captures as a GPU does: one warm-up run, then the same memory in and out at every replay."""

    def __init__(self, wanted: bool = True) -> None:
        super().__init__(wanted)
        self.captures = self.replays = 0

    def _capture(self, work: Work) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        work()
        output = _while_capturing(work)
        static = tree_flatten(output)[0]

        def replay() -> None:
            self.replays += 1
            for target, value in zip(static, tree_flatten(_while_capturing(work))[0], strict=True):
                if isinstance(target, Tensor):
                    target.copy_(value)

        return output, replay

    def step(self) -> None:
        """Do nothing: a CPU has no queue that the host could run ahead of."""


def _while_capturing(work: Work) -> Any:
    """Run work while transformers believes that a CUDA stream is being captured."""
    with patch.object(import_utils, "is_cuda_stream_capturing", lambda: True):
        return work()
