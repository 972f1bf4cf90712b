"""Workers that die while one batch is on the device and the next is started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from muralist.core.errors import UserError
from muralist.data import ledger_reader
from muralist.generate.pipeline import GenerationMode, SampleRequest
from tests.support import worker_pools as worker_pools
from tests.support.worker_pools import Death, ThreadedRun, WatchedPipeline

ROWS = 12
FIRST_SEED = 42

Start = Callable[[Sequence[int]], Callable[[], None]]
"""Called with the rows of a batch when it starts; the function it returns is called when it is waited for."""


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Start], None]:
    """Makes images pending until they are waited for, as on a GPU."""

    def use(start: Start) -> None:
        class Slow(WatchedPipeline):
            def generate_async(
                self,
                requests: Sequence[SampleRequest],
                size: tuple[int, int],
                on_step: Any,
                mode: GenerationMode = GenerationMode.DEFAULT,
            ) -> Any:
                waited = start([request.seed - FIRST_SEED for request in requests])
                images = super().generate_async(requests, size, on_step, mode).wait()

                def wait() -> list[np.ndarray]:
                    waited()
                    return images

                return SimpleNamespace(wait=wait, ready=False, gpu_busy=None)

        monkeypatch.setattr(worker_pools, "WatchedPipeline", Slow)

    return use


@pytest.mark.parametrize("labels", [["0"], ["0", "1"]])
def test_only_the_row_that_kills_is_skipped(
    labels: list[str], tmp_path: Path, pending: Callable[[Start], None]
) -> None:
    def start(rows: Sequence[int]) -> Callable[[], None]:
        if 3 in rows:
            raise Death
        return lambda: None

    pending(start)
    threaded = ThreadedRun(tmp_path, ["car", "tree", "house"] * (ROWS // 3), batch_size=2)
    outcome = threaded.run(labels)
    assert (outcome.done, outcome.failed) == (ROWS - 1, 1)
    assert [index for index, line in threaded.lines().items() if line["status"] != "done"] == [3]


def test_a_death_while_a_failed_batch_is_tried_again_counts_once(
    tmp_path: Path, pending: Callable[[Start], None]
) -> None:
    tries = 0

    def start(rows: Sequence[int]) -> Callable[[], None]:
        nonlocal tries
        tries += 0 in rows
        if 0 in rows and tries == 2:
            raise Death
        broken = 0 in rows and tries == 1

        def waited() -> None:
            if broken:
                raise UserError("Its values overflowed.")

        return waited

    pending(start)
    threaded = ThreadedRun(tmp_path, ["car", "tree", "house"] * (ROWS // 3), batch_size=1)
    outcome = threaded.run(["0", "1"])
    assert (outcome.done, outcome.failed) == (ROWS, 0)
    assert sorted(line["index"] for line in ledger_reader.read_lines(threaded.output.ledger)) == list(range(ROWS))


class Device:
    """Works through a queue like a GPU; starting a batch takes nearly as long as the batch before it."""

    SECONDS, SHORTLY = 0.3, 0.1

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.pauses: list[float] = []

    def start(self, rows: Sequence[int]) -> Callable[[], None]:
        """Queue a batch; returns the function that waits for it."""
        now = time.monotonic()
        if self.ends:
            self.pauses.append(max(0.0, now - self.ends[-1]))
        self.ends.append(max(now, self.ends[-1] if self.ends else now) + self.SECONDS)
        end = self.ends[-1]
        threading.Event().wait(max(0.0, end - self.SHORTLY - now))
        return lambda: time.sleep(max(0.0, end - time.monotonic()))


def test_a_device_has_its_next_batch_before_the_last_is_done(tmp_path: Path, pending: Callable[[Start], None]) -> None:
    """A batch that is being saved must not count as work that is still there."""
    device = Device()
    pending(device.start)
    outcome = ThreadedRun(tmp_path, ["car", "tree"] * 40, batch_size=8).run(["0"])
    assert outcome.done == 80 and len(device.pauses) >= 9
    assert sum(pause > 0 for pause in device.pauses) <= 2  # a busy machine may be late; it was every second time
