"""The generator of schedules: repeatable, readable, and with every fault there is."""

from __future__ import annotations

from tests.faults.schedule import DAMAGE, FEATURE_DAMAGE, IMAGE_DAMAGE, schedule

MANY = 200


def test_schedule_is_a_function_of_its_number() -> None:
    assert [schedule(number) for number in range(20)] == [schedule(number) for number in range(20)]
    assert str(schedule(3)) == str(schedule(3)) and "\n" not in str(schedule(3))
    assert schedule(3) != schedule(3, seed=11)


def test_every_fault_of_every_job_occurs() -> None:
    seen = {
        (played.job, fault.what, fault.when if played.job == "train" else "")
        for played in map(schedule, range(MANY))
        for fault in played.faults
    }
    steps = ("kill", "term", "usr1", "pause", "freeze", "clock", "second", "loader", "nan", "inf")
    expected = {("train", what, "step") for what in steps}
    expected |= {("train", what, "save") for what in ("kill", "term", "pause", "full", "read_only")}
    expected |= {("train", what, "sampling") for what in ("kill", "term")}
    expected |= {("train", what, "file") for what in ("kill", "term")}
    expected |= {("train", what, "start") for what in DAMAGE}
    working = ("kill", "freeze", "torn", "memory", "full", "deleted", "second", "clock", "int", "term")
    expected |= {("generate", what, "") for what in (*working, *IMAGE_DAMAGE)}
    expected |= {("evaluate", what, "") for what in ("kill", "int", "term", "pause", *FEATURE_DAMAGE)}
    assert not expected - seen
    ranks = {count for played in map(schedule, range(MANY)) for count in getattr(played.case, "ranks", ())}
    assert ranks == {1, 2, 3}


def test_no_fault_waits_for_a_process_that_never_exists() -> None:
    for played in map(schedule, range(MANY)):
        least = min(getattr(played.case, "ranks", None) or getattr(played.case, "workers", ()))
        for fault in played.faults:
            kind, _, number = fault.who.partition(" ")
            assert kind in ("rank", "worker", "command", "disk")
            assert not number or int(number) < least, str(played)
