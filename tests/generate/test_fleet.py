"""The fleet on workers in threads: every row ends up made or recorded, whoever dies, hangs or chokes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from muralist.errors import UserError
from muralist.generate.fleet import Not, Shape
from muralist.generate.folder import write_failures
from muralist.generate.messages import Beat, Gone, Measure, Ready, Task
from muralist.generate.painter import Order
from muralist.generate.plan import place_of
from tests.support.crews import Atelier, Death, Watched

PROMPTS = ["car", "tree", "house"] * 5  # 15 rows: 7 batches of two and a padded one


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The pictures of one undisturbed worker."""
    atelier = Atelier(tmp_path_factory.mktemp("reference"), PROMPTS)
    assert atelier.run(["0"]) == (15, 0)
    pictures = atelier.bytes()
    assert len(set(pictures.values())) == 15
    return pictures


def tasks(atelier: Atelier) -> list[tuple[str, list[int]]]:
    return [(label, [s.row for s in order.samples]) for label, order in atelier.crew.sent if isinstance(order, Task)]


@pytest.mark.parametrize("labels", [["0", "1"], ["2", "3", "7"], [str(gpu) for gpu in range(20)]])
def test_round_robin_by_position_and_the_same_bytes(
    tmp_path: Path, reference: dict[str, bytes], labels: list[str]
) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(labels) == (15, 0)
    assert atelier.bytes() == reference
    lines = atelier.lines()
    assert [lines[row]["gpu"] for row in range(15)] == [labels[row % len(labels)] for row in range(15)]
    assert all(line["status"] == "done" and line["settings"] == atelier.header.digest for line in lines.values())
    assert {label: count.done for label, count in atelier.screen.counts.items()} == {
        label: len(range(place, 15, len(labels))) for place, label in enumerate(labels)
    }


def test_a_row_has_one_place_in_every_batch_whoever_paints_it(tmp_path: Path) -> None:
    seen: dict[int, set[tuple[int, int]]] = {}

    def before(label: str, orders: Sequence[Order]) -> None:
        seeds = [order.seed for order in orders]
        for seed in seeds:
            if seeds.count(seed) == 1:  # the first one of a batch is also what it is padded with
                seen.setdefault(seed, set()).add((len(seeds), seeds.index(seed)))

    atelier = Atelier(tmp_path, PROMPTS * 2, shape=4)
    for labels in (["0"], ["0", "1"], ["0", "1", "2"]):
        assert atelier.run(labels, before) == (30, 0)
    assert len(seen) == 30
    assert all(places == {(4, place_of(seed - 42, 0, 4))} for seed, places in seen.items())


def test_the_rows_of_a_dead_worker_go_to_the_others(tmp_path: Path, reference: dict[str, bytes]) -> None:
    painted: dict[str, int] = {}

    def before(label: str, orders: Sequence[Order]) -> None:
        painted[label] = painted.get(label, 0) + 1
        if label == "1" and painted["1"] == 2:
            raise Death

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0", "1", "2"], before) == (15, 0)
    assert atelier.bytes() == reference
    assert atelier.crew.started == ["0", "1", "2"]
    assert any("its process was killed by SIGKILL. The others take its " in said for said in atelier.screen.said)
    # What it was painting when it died was painted again row by row.
    fatal = [rows for label, rows in tasks(atelier) if label == "1"][1]
    assert len(fatal) == 2
    assert sorted(rows for label, rows in tasks(atelier) if label != "1" and set(rows) & set(fatal)) == [
        [row] for row in sorted(fatal)
    ]
    assert set(atelier.screen.totals) == {15}
    assert sum(count.total for count in atelier.screen.counts.values()) == 15


def test_a_worker_that_hangs_is_given_up_and_killed(tmp_path: Path, reference: dict[str, bytes]) -> None:
    def before(label: str, orders: Sequence[Order]) -> None:
        if label == "1":
            assert atelier.crew.painters[label].ended.wait(20)

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0", "1"], before, timeout=0.5) == (15, 0)
    assert atelier.bytes() == reference
    assert "GPU 1 gave no sign of life for 0 s and was given up. The others take its 7 rows." in atelier.screen.said[0]
    assert {line["gpu"] for line in atelier.lines().values()} == {"0"}


def test_a_worker_that_had_nothing_to_do_is_not_taken_for_a_hung_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU 1 finishes its one row and waits for longer than the limit; then GPU 0 dies, and GPU 1 takes over, slowly."""

    def before(label: str, orders: Sequence[Order]) -> None:
        if label == "0":
            for _ in range(8):
                time.sleep(0.1)
                atelier.crew.outbox.put(("0", atelier.crew.painters["0"], Beat()))
            raise Death

    monkeypatch.setattr(Watched, "prepare", lambda *_: time.sleep(0.3))
    atelier = Atelier(tmp_path, ["car", "tree", "house"], shape=1)
    assert atelier.run(["0", "1"], before, timeout=0.6) == (3, 0)
    assert atelier.crew.started == ["0", "1"]
    assert not any("gave no sign" in said for said in atelier.screen.said)


def test_a_prompt_that_fails_is_tried_alone_and_recorded(tmp_path: Path, reference: dict[str, bytes]) -> None:
    tried: list[list[str]] = []
    atelier = Atelier(tmp_path, [*PROMPTS[:4], "no such class", *PROMPTS[5:]])
    outcome = atelier.run(["0", "1"], lambda label, orders: tried.append([order.prompt for order in orders]))
    assert outcome == (14, 1)
    assert {**atelier.bytes(), "000005_seed46.png": reference["000005_seed46.png"]} == reference
    line = atelier.lines()[4]
    assert (line["status"], line["gpu"], line["id"], line["seed"]) == ("failed", "0", "000005", 46)
    assert "no such class" in line["error"]
    # In the same shape as ever: padded with itself, so that its neighbour is the same to the bit.
    assert ["no such class", "no such class"] in tried
    assert {len(prompts) for prompts in tried} == {2}
    assert write_failures(atelier.folder, ["0", "1"]) == 1
    told = atelier.folder.failures("0").read_text()
    assert told.startswith("000005\t46\tno such class\tThe prompt ") and told.count("\n") == 1
    assert atelier.folder.failures("1").read_text() == ""


def test_a_failure_that_does_not_come_again_is_no_failure(tmp_path: Path, reference: dict[str, bytes]) -> None:
    failures: list[int] = []

    def before(label: str, orders: Sequence[Order]) -> None:
        if orders[0].seed == 42 and not failures:
            failures.append(1)
            raise RuntimeError("a cosmic ray")

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0"], before, numbers=[0]) == (1, 0)
    assert atelier.bytes() == {"000001_seed42.png": reference["000001_seed42.png"]}


@pytest.mark.parametrize("workers", [1, 3])
def test_prompts_that_kill_every_worker_are_given_up_after_two(
    tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    poison = {42 + row for row in (4, 5, 6)}  # neighbours, so that nothing is made in between

    def before(label: str, orders: Sequence[Order]) -> None:
        if any(order.seed in poison for order in orders):
            raise Death

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run([str(label) for label in range(workers)], before) == (12, 3)
    made = atelier.bytes()
    assert made == {name: data for name, data in reference.items() if name in made} and len(made) == 12
    failed = [row for row, line in atelier.lines().items() if line["status"] == "failed"]
    assert sorted(failed) == [4, 5, 6]
    assert atelier.lines()[4]["error"] == "the worker died 2 times while painting it"
    assert "Row 5 is given up: the worker died 2 times while painting it." in atelier.screen.said
    assert set(atelier.screen.totals) == {15}


def test_workers_that_always_die_end_the_command(tmp_path: Path) -> None:
    def before(label: str, orders: Sequence[Order]) -> None:
        raise Death

    atelier = Atelier(tmp_path, PROMPTS)
    with pytest.raises(UserError, match="All workers are gone, and so were those started in their place"):
        atelier.run(["0", "1"], before)
    assert sorted(atelier.crew.started) == ["0"] * 4 + ["1"] * 4  # in turn: one of the two may be broken
    assert atelier.bytes() == {}


def test_a_model_that_cannot_paint_anything_stops_early(tmp_path: Path) -> None:
    def before(label: str, orders: Sequence[Order]) -> None:
        raise RuntimeError("this network is broken")

    atelier = Atelier(tmp_path, ["car"] * 40)
    with pytest.raises(
        UserError, match="The first 16 pictures all failed alike. The reason: RuntimeError: this network"
    ):
        atelier.run(["0", "1"], before)


def test_the_first_worker_measures_once_before_any_picture(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def settle(ready: Ready, measured: int | None) -> Shape | Not:
        asked.append(measured)
        assert not list(atelier.folder.root.glob("*.png"))
        return Not.MEASURED if measured is None else Shape(measured, measured)

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0", "1", "2"], settle=settle) == (15, 0)
    assert asked == [None, 1]  # on a CPU, one at a time
    assert [type(order) for _, order in atelier.crew.sent].count(Measure) == 1
    assert {len(rows) for _, rows in tasks(atelier)} == {1}


def test_another_worker_measures_when_the_first_dies_at_it(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def settle(ready: Ready, measured: int | None) -> Shape | Not:
        asked.append(measured)
        if measured is not None:
            return Shape(measured, measured)
        if len(asked) == 1:
            for label in ("0", "1"):  # whichever of them it is
                atelier.crew.outbox.put((label, atelier.crew.painters[label], Gone("was killed by SIGKILL")))
                atelier.crew.kill(label)
        return Not.MEASURED

    atelier = Atelier(tmp_path, PROMPTS)
    assert atelier.run(["0", "1"], settle=settle) == (15, 0)
    assert asked[:2] == [None, None] and asked.index(1) == len(asked) - 1
    assert len(atelier.crew.started) == 3
