"""Where a GPU has nothing to do, and what its host does then: pauses between kernels by line of Python."""

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

_LOOK = 0.001  # seconds between two looks at what the host does
_SHORTEST = 50e-6  # seconds of a pause that is the host's; shorter ones lie between the kernels of a recording
_OURS = ("muralist", "diffusers", "transformers")
_MOST = 15


class _Sampler(threading.Thread):
    """Looks at what one thread does, again and again."""

    def __init__(self, watched: int) -> None:
        super().__init__(daemon=True)
        self._watched, self._ended = watched, threading.Event()
        self.times: list[float] = []
        self.places: list[str] = []

    def run(self) -> None:
        while not self._ended.wait(_LOOK):
            frame = sys._current_frames().get(self._watched)
            self.times.append(time.time())
            self.places.append(_place(frame))

    def end(self) -> None:
        self._ended.set()
        self.join()


def _place(frame: FrameType | None) -> str:
    """The innermost line, and the innermost one of each of the libraries that are on the way to it."""
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
    """Milliseconds in which no kernel ran, by what the host did; pauses between the kernels of a recording apart."""
    sampler = _Sampler(threading.get_ident())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        sampler.start()
        work()
        torch.cuda.synchronize()
        sampler.end()
    results: Any = profiler.profiler
    on_card = torch.autograd.DeviceType.CUDA
    spans = sorted(
        (event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
        for event in results.kineto_results.events()
        if event.device_type() == on_card
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
        "idle, by what the host did": {place: round(1e3 * seconds, 1) for place, seconds in most},
    }


def _during(sampler: _Sampler, start: float, end: float) -> str:
    """What was seen most often in between; of short pauses, what was seen next."""
    first, last = bisect.bisect(sampler.times, start), bisect.bisect(sampler.times, end)
    seen = sampler.places[first : max(last, first + 1)]
    return max(set(seen), key=seen.count) if seen else "after the last look"
