"""Stands in for a card's recorder on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers.utils import import_utils

from muralist.generate.recorded import Recorders, Work


class Tape:
    """Records as a card does: run once, then the same memory in and out at every replay, nothing of Python."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Work) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        work()
        output = _captured(work)
        places = tree_flatten(output)[0]

        def replay() -> None:
            self.replayed += 1
            for place, value in zip(places, tree_flatten(_captured(work))[0], strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)

        return output, replay


def _captured(work: Work) -> Any:
    """What work does when transformers sees that a card records."""
    with patch.object(import_utils, "is_cuda_stream_capturing", lambda: True):
        return work()


class Taped(Recorders):
    """A pipeline's recorders, for a device that has no queue to be ahead of."""

    def step(self) -> None:
        pass
