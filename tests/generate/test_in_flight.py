"""Deaths while one batch is on its way and the next is begun: who is suspected, who is given up, what is made once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from muralist.data import ledger_lines
from muralist.errors import UserError
from muralist.generate.painter import Order, Way
from tests.support import crews
from tests.support.crews import Atelier, Death, Watched

ROWS = 12
FIRST_SEED = 42

Begin = Callable[[Sequence[int]], Callable[[], None]]
"""Called with the rows of a batch when it is begun; what it returns is called when it is waited for."""


@pytest.fixture
def on_its_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[Begin], None]:
    """Makes pictures stay on their way until they are waited for, as on a GPU."""

    def use(begin: Begin) -> None:
        class Slow(Watched):
            def begin(self, orders: Sequence[Order], size: tuple[int, int], beat: Any, way: Way = Way.USUAL) -> Any:
                waited = begin([order.seed - FIRST_SEED for order in orders])
                pictures = super().begin(orders, size, beat, way).wait()

                def wait() -> list[np.ndarray]:
                    waited()
                    return pictures

                return SimpleNamespace(wait=wait, there=False, gpu_busy=None)

        monkeypatch.setattr(crews, "Watched", Slow)

    return use


@pytest.mark.parametrize("labels", [["0"], ["0", "1"]])
def test_only_the_row_that_kills_is_given_up(
    labels: list[str], tmp_path: Path, on_its_way: Callable[[Begin], None]
) -> None:
    def begin(rows: Sequence[int]) -> Callable[[], None]:
        if 3 in rows:
            raise Death
        return lambda: None

    on_its_way(begin)
    atelier = Atelier(tmp_path, ["car", "tree", "house"] * (ROWS // 3), shape=2)
    outcome = atelier.run(labels)
    assert (outcome.done, outcome.failed) == (ROWS - 1, 1)
    assert [index for index, line in atelier.lines().items() if line["status"] != "done"] == [3]


def test_a_death_while_a_failed_batch_is_tried_again_counts_once(
    tmp_path: Path, on_its_way: Callable[[Begin], None]
) -> None:
    tries = 0

    def begin(rows: Sequence[int]) -> Callable[[], None]:
        nonlocal tries
        tries += 0 in rows
        if 0 in rows and tries == 2:
            raise Death
        broken = 0 in rows and tries == 1

        def waited() -> None:
            if broken:
                raise UserError("Its numbers overflowed.")

        return waited

    on_its_way(begin)
    atelier = Atelier(tmp_path, ["car", "tree", "house"] * (ROWS // 3), shape=1)
    outcome = atelier.run(["0", "1"])
    assert (outcome.done, outcome.failed) == (ROWS, 0)
    assert sorted(line["index"] for line in ledger_lines.read_lines(atelier.folder.ledger)) == list(range(ROWS))


class Device:
    """Works through a queue as a GPU does; whoever hands a batch to it is through shortly before it is done."""

    SECONDS, SHORTLY = 0.3, 0.1

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.pauses: list[float] = []

    def begin(self, rows: Sequence[int]) -> Callable[[], None]:
        """Hand it a batch; what is returned waits for it."""
        now = time.monotonic()
        if self.ends:
            self.pauses.append(max(0.0, now - self.ends[-1]))
        self.ends.append(max(now, self.ends[-1] if self.ends else now) + self.SECONDS)
        end = self.ends[-1]
        threading.Event().wait(max(0.0, end - self.SHORTLY - now))
        return lambda: time.sleep(max(0.0, end - time.monotonic()))


def test_a_device_has_its_next_batch_before_the_last_is_done(
    tmp_path: Path, on_its_way: Callable[[Begin], None]
) -> None:
    """A batch that is being saved must not count as work that is still there."""
    device = Device()
    on_its_way(device.begin)
    outcome = Atelier(tmp_path, ["car", "tree"] * 40, shape=8).run(["0"])
    assert outcome.done == 80 and len(device.pauses) >= 9
    assert sum(pause > 0 for pause in device.pauses) <= 2  # a busy machine may be late; it was every second time
