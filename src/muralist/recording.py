"""Work on a GPU recorded once and replayed (a CUDA graph): the same kernels in the same order with the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

Work = Callable[[], Any]
Record = Callable[[Work], tuple[Any, Callable[[], None]]]
"""Runs work, and returns what it gave and what does the same again."""


class CardRecords:
    """Records on a GPU; all recordings share memory, because only one is replayed at a time and its result is copied."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Work) -> tuple[Any, Callable[[], None]]:
        """Run it once, which compiles and loads what it needs, then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # In the stream's own context: where recording fails, torch may leave it current. Threads that write pictures may
            # talk to the card meanwhile.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                output = work()
        except RuntimeError:
            self._end()
            raise
        return output, graph.replay

    def _end(self) -> None:
        """Take the memory of a recording that failed out of use, which older versions of torch do not."""
        with suppress(RuntimeError):  # it has
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = None
