"""Attribute the idle time of a GPU to lines of Python on the host."""

from __future__ import annotations

import bisect
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_POLL = 0.001  # seconds between two samples of the host
_SHORTEST = 50e-6  # shorter pauses lie between the kernels of a CUDA graph
_OURS = ("muralist", "diffusers", "transformers")
_MOST = 15


class _Sampler(threading.Thread):
    """Samples the stack of one thread."""

    def __init__(self, watched: int) -> None:
        super().__init__(daemon=True)
        self._watched, self._ended = watched, threading.Event()
        self.times: list[float] = []
        self.places: list[str] = []

    def run(self) -> None:
        while not self._ended.wait(_POLL):
            frame = sys._current_frames().get(self._watched)
            self.times.append(time.time())
            self.places.append(_place(frame))

    def end(self) -> None:
        self._ended.set()
        self.join()


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the stack, and the innermost line of each known library."""
    innermost, known = "", {}
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        innermost = innermost or name
        library = next((word for word in _OURS if word in path.parts), None)
        if library:
            known.setdefault(library, name)
        frame = frame.f_back
    return " < ".join(dict.fromkeys([innermost, *known.values()]))


def idle_places(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the idle milliseconds by line of the host; pauses inside CUDA graphs are listed apart."""
    sampler = _Sampler(threading.get_ident())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        sampler.start()
        work()
        torch.cuda.synchronize()
        sampler.end()
    results: Any = profiler.profiler
    on_gpu = torch.autograd.DeviceType.CUDA
    spans = sorted(
        (event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
        for event in results.kineto_results.events()
        if event.device_type() == on_gpu
    )
    reached, between, idle = spans[0][1], 0.0, defaultdict(float)
    for start, end in spans:
        pause = start - reached
        if pause > _SHORTEST:
            idle[_during(sampler, reached, start)] += pause
        elif pause > 0:
            between += pause
        reached = max(reached, end)
    most = sorted(idle.items(), key=lambda item: -item[1])[:_MOST]
    return {
        "milliseconds, all": round(1e3 * (reached - spans[0][0]), 1),
        "between kernels that follow each other": round(1e3 * between, 1),
        "idle": round(1e3 * sum(idle.values()), 1),
        "idle, by host activity": {place: round(1e3 * seconds, 1) for place, seconds in most},
    }


def _during(sampler: _Sampler, start: float, end: float) -> str:
    """Return the most frequent place in between; for short gaps, the next place."""
    first, last = bisect.bisect(sampler.times, start), bisect.bisect(sampler.times, end)
    seen = sampler.places[first : max(last, first + 1)]
    return max(set(seen), key=seen.count) if seen else "after the last look"
