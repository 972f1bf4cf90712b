"""Twenty of the random schedules that `make faults` plays by the hundred: nothing lost, nothing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.play import play, workshop
from tests.faults.schedule import schedule
from tests.support.disks import can_mount


@pytest.mark.slow
def test_twenty_random_schedules(tmp_path: Path) -> None:
    mounts = can_mount(tmp_path)
    wrong, played = [], 0
    with workshop(tmp_path) as shop:
        for number in range(20):
            wanted = schedule(number)
            if wanted.needs_mounts and not mounts:
                continue
            outcome = play(shop, wanted, tmp_path / "played" / str(number))
            played += 1
            if outcome.error:
                wrong.append(f"{wanted}\n{outcome.error}")
    assert not wrong, "\n\n".join(wrong)
    assert played >= 12
