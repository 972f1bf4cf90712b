"""The scheduler on workers in threads: every row is made or recorded as failed, whichever worker dies or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.scheduler_simulation import Case, simulate

from muralist.core.errors import UserError
from muralist.data.ledger_reader import read_lines
from muralist.generate.output_dir import write_failures
from muralist.generate.pipeline import SampleRequest
from muralist.generate.plan import batch_slot
from muralist.generate.scheduler import BatchSize, Undecided
from muralist.generate.workers import (
    GenerateBatch,
    GroupByText,
    Heartbeat,
    MeasureBatchSize,
    WorkerExited,
    WorkerReady,
)
from tests.support.worker_pools import Death, ThreadedRun, ThreadPool, WatchedPipeline

PROMPTS = ["car", "tree", "house"] * 5  # 15 rows: 7 batches of two and a padded one


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The images of one undisturbed worker."""
    threaded = ThreadedRun(tmp_path_factory.mktemp("reference"), PROMPTS)
    assert threaded.run(["0"]) == (15, 0)
    images = threaded.images()
    assert len(set(images.values())) == 15
    return images


def sent_batches(threaded: ThreadedRun) -> list[tuple[str, list[int]]]:
    return [
        (label, [sample.row for sample in message.samples])
        for label, message in threaded.pool.sent
        if isinstance(message, GenerateBatch)
    ]


@pytest.mark.parametrize("labels", [["0", "1"], ["2", "3", "7"], [str(gpu) for gpu in range(20)]])
def test_round_robin_by_position_and_the_same_bytes(
    tmp_path: Path, reference: dict[str, bytes], labels: list[str]
) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(labels) == (15, 0)
    assert threaded.images() == reference
    lines = threaded.lines()
    assert [lines[row]["gpu"] for row in range(15)] == [labels[row % len(labels)] for row in range(15)]
    assert all(line["status"] == "done" and line["settings"] == threaded.header.digest for line in lines.values())
    assert {label: count.done for label, count in threaded.display.workers.items()} == {
        label: len(range(place, 15, len(labels))) for place, label in enumerate(labels)
    }


def test_a_row_has_one_slot_in_every_batch_of_any_worker(tmp_path: Path) -> None:
    seen: dict[int, set[tuple[int, int]]] = {}

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        seeds = [request.seed for request in requests]
        for seed in seeds:
            if seeds.count(seed) == 1:  # the first one of a batch is also what it is padded with
                seen.setdefault(seed, set()).add((len(seeds), seeds.index(seed)))

    threaded = ThreadedRun(tmp_path, PROMPTS * 2, batch_size=4)
    for labels in (["0"], ["0", "1"], ["0", "1", "2"]):
        assert threaded.run(labels, before) == (30, 0)
    assert len(seen) == 30
    assert all(slots == {(4, batch_slot(seed - 42, 0, 4))} for seed, slots in seen.items())


def test_the_rows_of_a_dead_worker_go_to_the_others(tmp_path: Path, reference: dict[str, bytes]) -> None:
    batches: dict[str, int] = {}

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        batches[label] = batches.get(label, 0) + 1
        if label == "1" and batches["1"] == 2:
            raise Death

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0", "1", "2"], before) == (15, 0)
    assert threaded.images() == reference
    assert threaded.pool.started == ["0", "1", "2"]
    assert any("its process was killed by SIGKILL. The others take its " in text for text in threaded.display.printed)
    # The batch it died with was generated again row by row.
    fatal = [rows for label, rows in sent_batches(threaded) if label == "1"][1]
    assert len(fatal) == 2
    assert sorted(rows for label, rows in sent_batches(threaded) if label != "1" and set(rows) & set(fatal)) == [
        [row] for row in sorted(fatal)
    ]
    assert set(threaded.display.totals) == {15}
    assert sum(count.total for count in threaded.display.workers.values()) == 15


def test_a_worker_that_hangs_is_killed(tmp_path: Path, reference: dict[str, bytes]) -> None:
    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        if label == "1":
            assert threaded.pool.pipelines[label].ended.wait(20)

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0", "1"], before, timeout=0.5) == (15, 0)
    assert threaded.images() == reference
    assert "GPU 1 sent no heartbeat for 0 s and was killed. The others take its 7 rows." in threaded.display.printed[0]
    assert {line["gpu"] for line in threaded.lines().values()} == {"0"}


def test_an_idle_worker_is_not_taken_for_a_hung_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 finishes its one row and waits for longer than the limit; then GPU 0 dies, and GPU 1 takes over, slowly."""

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        if label == "0":
            for _ in range(8):
                time.sleep(0.1)
                threaded.pool.outbox.put(("0", threaded.pool.pipelines["0"], Heartbeat()))
            raise Death

    monkeypatch.setattr(WatchedPipeline, "prepare", lambda *_: time.sleep(0.3))
    threaded = ThreadedRun(tmp_path, ["car", "tree", "house"], batch_size=1)
    assert threaded.run(["0", "1"], before, timeout=0.6) == (3, 0)
    assert threaded.pool.started == ["0", "1"]
    assert not any("sent no heartbeat" in text for text in threaded.display.printed)


def test_a_prompt_that_fails_is_tried_alone_and_recorded(tmp_path: Path, reference: dict[str, bytes]) -> None:
    tried: list[list[str]] = []
    threaded = ThreadedRun(tmp_path, [*PROMPTS[:4], "no such class", *PROMPTS[5:]])
    outcome = threaded.run(["0", "1"], lambda label, requests: tried.append([request.prompt for request in requests]))
    assert outcome == (14, 1)
    assert {**threaded.images(), "000005_seed46.png": reference["000005_seed46.png"]} == reference
    line = threaded.lines()[4]
    assert (line["status"], line["gpu"], line["id"], line["seed"]) == ("failed", "0", "000005", 46)
    assert "no such class" in line["error"]
    # At the same batch size, padded with itself, so that its neighbor is the same to the bit.
    assert ["no such class", "no such class"] in tried
    assert {len(prompts) for prompts in tried} == {2}
    assert write_failures(threaded.output, ["0", "1"]) == 1
    text = (threaded.output.root / "failed_prompts_gpu0.txt").read_text()
    assert text.startswith("000005\t46\tno such class\tThe prompt ") and text.count("\n") == 1
    assert (threaded.output.root / "failed_prompts_gpu1.txt").read_text() == ""


def test_a_failure_that_does_not_happen_again_is_not_recorded(tmp_path: Path, reference: dict[str, bytes]) -> None:
    failures: list[int] = []

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        if requests[0].seed == 42 and not failures:
            failures.append(1)
            raise RuntimeError("a cosmic ray")

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0"], before, indices=[0]) == (1, 0)
    assert threaded.images() == {"000001_seed42.png": reference["000001_seed42.png"]}


@pytest.mark.parametrize("workers", [1, 3])
def test_prompts_that_kill_workers_are_skipped_after_two_deaths(
    tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    poison = {42 + row for row in (4, 5, 6)}  # neighbors, so that nothing is made in between

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        if any(request.seed in poison for request in requests):
            raise Death

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run([str(label) for label in range(workers)], before) == (12, 3)
    made = threaded.images()
    assert made == {name: data for name, data in reference.items() if name in made} and len(made) == 12
    failed = [row for row, line in threaded.lines().items() if line["status"] == "failed"]
    assert sorted(failed) == [4, 5, 6]
    assert threaded.lines()[4]["error"] == "the worker died 2 times while generating it"
    assert "Row 5 is skipped: the worker died 2 times while generating it." in threaded.display.printed
    assert set(threaded.display.totals) == {15}


def test_workers_that_always_die_end_the_command(tmp_path: Path) -> None:
    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        raise Death

    threaded = ThreadedRun(tmp_path, PROMPTS)
    with pytest.raises(UserError, match="All workers died, and so did 6 that were started in their place"):
        threaded.run(["0", "1"], before)
    assert sorted(threaded.pool.started) == ["0"] * 4 + ["1"] * 4  # in turn: one of the two may be broken
    assert threaded.images() == {}


def test_the_first_worker_measures_once_before_any_image(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def decide(ready: WorkerReady, measured: int | None) -> BatchSize | Undecided:
        asked.append(measured)
        assert not list(threaded.output.root.glob("*.png"))
        return Undecided.MEASURE if measured is None else BatchSize(measured, measured)

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0", "1", "2"], decide=decide) == (15, 0)
    assert asked == [None, 1]  # on a CPU, one at a time
    assert [type(message) for _, message in threaded.pool.sent].count(MeasureBatchSize) == 1
    assert {len(rows) for _, rows in sent_batches(threaded)} == {1}


def test_another_worker_measures_when_the_first_dies(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def decide(ready: WorkerReady, measured: int | None) -> BatchSize | Undecided:
        asked.append(measured)
        if measured is not None:
            return BatchSize(measured, measured)
        if len(asked) == 1:
            for label in ("0", "1"):  # whichever of them it is
                threaded.pool.outbox.put((label, threaded.pool.pipelines[label], WorkerExited("was killed by SIGKILL")))
                threaded.pool.kill(label)
        return Undecided.MEASURE

    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0", "1"], decide=decide) == (15, 0)
    assert asked[:2] == [None, None] and asked.index(1) == len(asked) - 1
    assert len(threaded.pool.started) == 3


@pytest.mark.parametrize(
    ("slow", "costs"), [(4.0, np.ones_like), (1.0, lambda row: 1 + row % 4), (1.0, lambda row: np.where(row < 200, 1, 5))],
    ids=["a slow GPU", "expensive rows in one share", "expensive rows last"],
)  # fmt: skip
def test_all_workers_are_busy_to_the_end(tmp_path: Path, slow: float, costs: object) -> None:
    case = Case(rows=240, batch=2, seconds_per_image=60.0, workers=4, costs=costs, slow=slow)  # type: ignore[arg-type]
    outcome = simulate(case, tmp_path)
    assert (outcome.generated, outcome.duplicates) == (240, 0)
    ideal = 240 * 60.0 / (3 + 1 / slow)
    most_expensive = costs(np.arange(240)).max() / costs(np.arange(240)).mean() * 2 * 60.0 * slow  # type: ignore[operator]
    assert ideal < outcome.generating < ideal + most_expensive  # at most one batch beyond what the GPUs can do
    assert outcome.batches <= 123  # 120 full ones: what was left of the round_robin filled batches together


def test_every_worker_begins_with_its_own_share(tmp_path: Path) -> None:
    simulate(Case(rows=160, batch=4, seconds_per_image=60.0, workers=4, slow=2.0), tmp_path)
    makers = {line["index"]: int(line["gpu"]) for line in read_lines(tmp_path / "images" / "ledger.jsonl")}
    assert all(makers[row] == row % 4 for row in range(48))
    own = sum(maker == row % 4 for row, maker in makers.items())
    assert own < 160  # the slow one's last rows were made by others


class TextLengths(ThreadPool):
    """Workers whose model can batch only prompts of one length; the first worker dies when asked for lengths."""

    dies_at = ""

    def open_pipeline(self) -> Any:
        pipeline = super().open_pipeline()
        pipeline.groups_by_text = lambda: True  # type: ignore[method-assign]

        def text_groups(requests: Sequence[SampleRequest]) -> list[str]:
            if self.dies_at and threading.current_thread().name == f"worker {self.dies_at}":
                raise Death
            return [str(len(request.prompt)) for request in requests]

        pipeline.text_groups = text_groups  # type: ignore[method-assign]
        return pipeline


@pytest.mark.parametrize("labels", [["0"], ["0", "1", "2"]])
def test_only_prompts_of_one_text_group_share_a_batch(
    tmp_path: Path, labels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.worker_pools.ThreadPool", TextLengths)
    lengths: list[set[int]] = []
    threaded = ThreadedRun(tmp_path, PROMPTS * 3, batch_size=4)  # of 3, 4 and 5 letters
    assert threaded.run(labels, lambda label, requests: lengths.append({len(r.prompt) for r in requests})) == (45, 0)
    assert all(len(each) == 1 for each in lengths)
    sizes = [len(rows) for _, rows in sent_batches(threaded)]
    assert sum(sizes) == 45 and len(sizes) <= 45 / 4 + 3 * 2 * len(labels)  # full but for each group's last ones
    grouped = [
        index for _, message in threaded.pool.sent if isinstance(message, GroupByText) for index in message.samples
    ]
    assert len(grouped) == len({sample.sample_index for sample in grouped}) == 45  # each is asked for once
    assert set(threaded.display.totals) == {45}

    reference = ThreadedRun(tmp_path / "reference", PROMPTS * 3, batch_size=4)
    monkeypatch.setattr("tests.support.worker_pools.ThreadPool", ThreadPool)
    assert reference.run(["0"]) == (45, 0) and reference.images() == threaded.images()


def test_samples_whose_text_groups_a_dead_worker_was_asked_for_go_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.worker_pools.ThreadPool", TextLengths)
    monkeypatch.setattr(TextLengths, "dies_at", "1")
    threaded = ThreadedRun(tmp_path, PROMPTS, batch_size=2)
    assert threaded.run(["0", "1"]) == (15, 0)
    assert {line["gpu"] for line in threaded.lines().values()} == {"0"}
    assert "GPU 1: its process was killed by SIGKILL. The others take its 7 rows." in threaded.display.printed
