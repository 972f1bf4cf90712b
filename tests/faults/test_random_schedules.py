"""Twenty of the random schedules that `make faults` plays by the hundred: nothing lost, nothing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import play as player
from tests.faults.play import play, workshop
from tests.faults.schedule import schedule
from tests.support.disks import can_mount
from tests.support.fault_injection import Fault, Plan
from tests.support.recovery import Workshop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with workshop(tmp_path_factory.mktemp("shop")) as prepared:
        yield prepared


def test_twenty_random_schedules(shop: Workshop, tmp_path: Path) -> None:
    """Every job ends bit-identical, and every planned fault has happened, unless the job never came to its moment."""
    if not can_mount(tmp_path):
        pytest.skip("no disk can be mounted here")
    wrong: list[str] = []
    happened: set[Fault] = set()
    impossible: list[str] = []
    planned, resized = 0, 0
    for number in range(20):
        wanted = schedule(number)
        outcome = play(shop, wanted, tmp_path / "played" / str(number))
        faults = set(wanted.faults)
        planned += len(faults)
        resized += len(set(getattr(wanted.case, "ranks", ())[: outcome.starts])) > 1
        happened |= {fault for fault in faults if str(fault) in outcome.recovered}
        impossible += [f"{number}: {fault}, {why}" for fault, why in outcome.impossible.items()]
        if outcome.error:
            wrong.append(f"{wanted}\n{outcome.error}")
    print(f"{planned} faults planned, of which impossible: {impossible}")
    assert not wrong, "\n\n".join(wrong)
    assert len(impossible) <= planned // 10, impossible
    assert any(fault.what == "clock" and fault.who.startswith("rank") for fault in happened)
    assert resized, "no training was resumed on another number of ranks"


def test_a_schedule_whose_faults_are_not_injected_fails(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "PLAN", "A_VARIABLE_THAT_NOBODY_READS")
    outcome = play(shop, schedule(2), tmp_path / "played")
    assert outcome.error == f"{schedule(2).faults[0]} was never planted" and not outcome.recovered


@pytest.mark.parametrize(("fault", "last"), [(Fault("kill", "rank 0", "step", 5), 4),
                                             (Fault("kill", "rank 0", "save", 3, after=6), 6),
                                             (Fault("kill", "command", "file", 6), 6)])  # fmt: skip
def test_a_fault_is_impossible_only_before_its_moment(fault: Fault, last: int, tmp_path: Path) -> None:
    plan = Plan((fault,), tmp_path, tmp_path, tmp_path)
    plan.reached(fault).write_text(str(last))
    assert plan.why_not(fault) == f"the job was done after {last}"
    plan.reached(fault).write_text(str(last + 1))
    with pytest.raises(AssertionError, match="did not happen, although its process came to"):
        plan.why_not(fault)
