"""One worker with a real tiny model: memory that runs out, files that cannot be, disks that are full."""

from __future__ import annotations

import errno
import io
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from muralist.errors import UserError
from muralist.generate import ledger, messages, worker
from muralist.generate.messages import Stop, Task
from muralist.generate.painter import CannotPaint, Order, Way
from muralist.generate.worker import Worker
from tests.support.crews import CPU, Atelier, Watched
from tests.support.disks import leave_free, small_disk

PROMPTS = ["car", "tree", "house", "car", "tree", "house", "car", "tree"]
Before = Callable[[str, Sequence[Order]], None]


def serve(
    atelier: Atelier, before: Before, shape: int, groups: Sequence[Sequence[int]], painter: Watched | None = None
) -> list[messages.Report]:
    """What a worker says of some tasks."""
    inbox: queue.Queue[messages.Order] = queue.Queue()
    for rows in groups:
        inbox.put(Task(tuple(atelier.plan.sample(row) for row in rows), shape, shape))
    said: list[messages.Report] = []

    def hear(report: messages.Report) -> None:
        said.append(report)
        if sum(isinstance(report, messages.Done | messages.Failed) for report in said) == sum(map(len, groups)):
            inbox.put(Stop())

    try:
        Worker(atelier.job, "0", CPU, painter or Watched("0", before), hear).serve(inbox)
    finally:
        ledger.merge(atelier.folder.ledger, atelier.folder.work)
    return said


def short_of_memory_above(most: int, sizes: list[int], times: int = 10**9) -> Before:
    """The words of torch's own error, for batches above some size; real allocations fail in tests/faults."""

    def before(label: str, orders: Sequence[Order]) -> None:
        sizes.append(len(orders))
        if len(orders) > most and sum(size > most for size in sizes) <= times:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    return before


def done(said: list[messages.Report]) -> set[int]:
    return {report.number for report in said if isinstance(report, messages.Done)}


def test_memory_that_runs_out_once_is_tried_again_in_the_same_shape(tmp_path: Path) -> None:
    sizes: list[int] = []
    atelier = Atelier(tmp_path, PROMPTS)
    said = serve(atelier, short_of_memory_above(2, sizes, times=1), 4, [range(4)])
    assert (sizes, done(said)) == ([4, 4], {0, 1, 2, 3})
    assert not any("batch_size" in line for line in atelier.lines().values())


def test_memory_that_runs_out_twice_stops_with_a_sentence(tmp_path: Path) -> None:
    sizes: list[int] = []
    atelier = Atelier(tmp_path, PROMPTS)
    with pytest.raises(CannotPaint, match="GPU 0 ran out of memory with 4 pictures at once.*--allow_batch_change"):
        serve(atelier, short_of_memory_above(2, sizes), 4, [range(4)])
    assert sizes == [4, 4]
    assert atelier.lines() == {}  # no row is to blame


def test_memory_that_does_not_hold_one_picture_names_it_and_gives_advice_that_can_help(tmp_path: Path) -> None:
    for allowed in (False, True):
        atelier = Atelier(tmp_path / str(allowed), PROMPTS, allow_batch_change=allowed)
        with pytest.raises(CannotPaint) as refused:
            serve(atelier, short_of_memory_above(0, []), 1, [[0]])
        assert refused.value.what.startswith("GPU 0 ran out of memory with one picture, 000001_seed42.png: ")
        assert refused.value.fix.startswith("Make it smaller or leave its row out")
        assert "--allow_batch_change" not in str(refused.value)  # fewer than one cannot be made


def test_with_allow_batch_change_rows_are_made_in_halves_and_marked(tmp_path: Path) -> None:
    sizes: list[int] = []
    atelier = Atelier(tmp_path, PROMPTS, allow_batch_change=True)
    said = serve(atelier, short_of_memory_above(2, sizes), 8, [range(8)])
    assert done(said) == set(range(8))
    assert sizes[:6] == [8, 8, 4, 4, 2, 2] and set(sizes[6:]) == {4, 2}
    assert {line["batch_size"] for line in atelier.lines().values()} == {2}
    assert [report.text for report in said if isinstance(report, messages.Remark)][:2] == [
        "GPU 0 is out of memory: 4 at once instead of 8.",
        "GPU 0 is out of memory: 2 at once instead of 4.",
    ]
    other = Atelier(tmp_path / "other", PROMPTS)
    serve(other, lambda *_: None, 2, [[row] for row in range(8)])
    assert atelier.bytes() == other.bytes()  # right pictures under the right names


def test_only_the_rows_made_when_memory_was_short_are_marked(tmp_path: Path) -> None:
    sizes: list[int] = []
    atelier = Atelier(tmp_path, PROMPTS, allow_batch_change=True)
    serve(atelier, short_of_memory_above(3, sizes, times=2), 4, [range(4), range(4, 8)])
    assert [atelier.lines()[row].get("batch_size") for row in range(8)] == [2] * 4 + [None] * 4


def test_a_text_that_no_file_can_carry_fails_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from muralist.generate import store

    encode = store.encode

    def choke(pixels, sample, facts, video_format):  # type: ignore[no-untyped-def]
        if sample.row == 1:
            raise ValueError("x" * 1_000_000)
        return encode(pixels, sample, facts, video_format)

    monkeypatch.setattr(store, "encode", choke)
    atelier = Atelier(tmp_path, PROMPTS)
    said = serve(atelier, lambda *_: None, 2, [[0, 1], [2, 3]])
    assert done(said) == {0, 2, 3}
    (failed,) = [report for report in said if isinstance(report, messages.Failed)]
    assert failed.number == 1 and failed.reason.startswith("ValueError: xxx") and len(failed.reason) < 400
    assert atelier.lines()[1]["error"] == failed.reason


def test_prompts_of_every_kind_reach_the_file_and_the_ledger_unchanged(tmp_path: Path) -> None:
    prompts = ["\u0000\u0001 \u001b[31mred", "日本語 🎨", "a\nb\tc", "half \ud83d of a pair", "x" * 300_000]
    atelier = Atelier(tmp_path, PROMPTS)
    samples = [atelier.plan.sample(row)._replace(prompt=prompt) for row, prompt in enumerate(prompts)]
    inbox: queue.Queue[messages.Order] = queue.Queue()
    said: list[messages.Report] = []

    class Anything(Watched):
        """Paints a car whatever is asked for."""

        def begin(self, orders, size, beat, way=Way.USUAL):  # type: ignore[no-untyped-def]
            if inbox.empty():
                inbox.put(Stop())
            return super().begin([order._replace(prompt="car") for order in orders], size, beat, way)

    inbox.put(Task(tuple(samples), 5, 5))
    Worker(atelier.job, "0", CPU, Anything("0", lambda *_: None), said.append).serve(inbox)
    ledger.merge(atelier.folder.ledger, atelier.folder.work)
    lines = atelier.lines()
    assert [lines[row]["prompt"] for row in range(5)] == prompts
    failed = {report.number for report in said if isinstance(report, messages.Failed)}
    assert failed <= {3}, "only half a character may be more than a PNG can say"
    for row in set(range(5)) - failed:
        with Image.open(atelier.folder.root / samples[row].file) as picture:
            picture.load()
            assert picture.text["prompt"] == prompts[row]
            assert picture.text["seed"] == str(42 + row)
            assert picture.text["model"] == "tiny"


def test_a_full_disk_stops_with_a_sentence_and_resumes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        atelier = Atelier(disk, PROMPTS)
        leave_free(disk, 3 * 4096)
        with pytest.raises(UserError, match="No space left on the disk that holds .*run the same command again"):
            serve(atelier, lambda *_: None, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
        (disk / "filler").unlink()
        ledger.merge(atelier.folder.ledger, atelier.folder.work)
        whole = atelier.folder.finished(atelier.plan)
        assert 0 < whole.sum() < 8
        assert not list(atelier.folder.root.glob(".*.tmp"))
        serve(atelier, lambda *_: None, 2, [[row] for row in range(8) if not whole[row]])
        assert atelier.folder.finished(atelier.plan).all()


def test_a_folder_deleted_under_a_worker_is_told_and_nothing_is_left_in_its_place(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    batches: list[int] = []

    def delete(label: str, orders: Sequence[Order]) -> None:
        batches.append(len(orders))
        if len(batches) == 3:
            while atelier.folder.shard("0").read_text().count('"done"') < 4:  # nobody writes while it is deleted
                time.sleep(0.01)
            shutil.rmtree(atelier.folder.root)

    with pytest.raises(UserError, match="Cannot write .*images: it was deleted while pictures were being made"):
        serve(atelier, delete, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert not list(atelier.folder.root.glob("**/*"))  # a picture without a ledger would stop the next command


def test_a_last_picture_that_cannot_be_written_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(worker, "write_atomically", full)
    atelier = Atelier(tmp_path, PROMPTS)
    told: queue.Queue[Exception] = queue.Queue()

    def run() -> None:
        try:
            serve(atelier, lambda *_: None, 2, [[0, 1]])  # nothing comes after them, not even a word to stop
        except UserError as error:
            told.put(error)

    threading.Thread(target=run, daemon=True).start()
    assert "No space left on the disk" in str(told.get(timeout=10))


def test_a_picture_carries_how_it_was_made(tmp_path: Path) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    serve(atelier, lambda *_: None, 2, [[0, 1]])
    data = (atelier.folder.root / "000002_seed43.png").read_bytes()
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (16, 16)
        assert {key: picture.text[key] for key in ("prompt", "seed", "model")} == {
            "prompt": "tree",
            "seed": "43",
            "model": "tiny",
        }
    line = atelier.lines()[1]
    assert line["bytes"] == len(data) and line["file"] == "000002_seed43.png" and line["gpu"] == "0"
    assert line["seconds"] > 0 and json.loads(json.dumps(line)) == line


class Slow(Watched):
    """A painter whose pictures are on their way until they are waited for; tells the order of events."""

    def __init__(self, events: list[str], broken: set[str] | None = None) -> None:
        super().__init__("0", lambda *_: None)
        self.events, self.broken = events, broken or set()

    def begin(self, orders, size, beat, way=Way.USUAL):  # type: ignore[no-untyped-def]
        name = ",".join(str(order.seed) for order in orders)
        self.events.append(f"begin {name}")
        pictures = super().begin(orders, size, beat, way).wait()

        def wait() -> list[np.ndarray]:
            self.events.append(f"wait {name}")
            if self.broken & {str(order.seed) for order in orders}:
                raise UserError("Its numbers overflowed.")
            return pictures

        return SimpleNamespace(wait=wait, there=False, gpu_busy=0.75)


def test_the_next_batch_is_begun_before_the_last_is_waited_for(tmp_path: Path) -> None:
    atelier, events = Atelier(tmp_path, PROMPTS), list[str]()
    said = serve(atelier, lambda *_: None, 1, [[0], [1], [2]], Slow(events))
    assert events == ["begin 42", "begin 43", "wait 42", "begin 44", "wait 43", "wait 44"]
    # Were the worker to die now, either of two might be why.
    assert [report.numbers for report in said if isinstance(report, messages.Began)] == [(0,), (0, 1), (1, 2)]
    assert [line["gpu_busy"] for line in atelier.lines().values()] == [0.75] * 3
    at_once = Atelier(tmp_path / "at once", PROMPTS)
    serve(at_once, lambda *_: None, 1, [[0], [1], [2]])
    assert {row: line["sha256"] for row, line in at_once.lines().items()} == {
        row: line["sha256"] for row, line in atelier.lines().items()
    }
    assert not any("gpu_busy" in line for line in at_once.lines().values())


def test_a_picture_found_broken_on_its_way_is_tried_alone_and_recorded(tmp_path: Path) -> None:
    atelier, events = Atelier(tmp_path, PROMPTS), list[str]()
    said = serve(atelier, lambda *_: None, 1, [[0], [1], [2]], Slow(events, {"43"}))
    assert done(said) == {0, 2}
    assert [(report.number, report.reason) for report in said if isinstance(report, messages.Failed)] == [
        (1, "Its numbers overflowed.")
    ]
    assert events.count("wait 43") == 2


def test_what_follows_is_prepared_before_a_task_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atelier = Atelier(tmp_path, PROMPTS)
    tasks = [Task(tuple(map(atelier.plan.sample, rows)), 2, 2) for rows in ((0, 1), (2, 3), (4, 5), (6, 7))]
    inbox: queue.Queue[messages.Order] = queue.Queue()
    ahead: list[list[int]] = []  # for every task: seeds that were prepared when it was begun
    prepared: list[int] = []

    def prepare(_: Watched, orders: Sequence[Order]) -> None:
        prepared[:] = sorted(order.seed for order in orders)

    def before(label: str, orders: Sequence[Order]) -> None:
        ahead.append(list(prepared))
        inbox.put(tasks[len(ahead) + 1] if len(ahead) + 1 < len(tasks) else Stop())  # one is always waiting

    monkeypatch.setattr(Watched, "prepare", prepare)
    inbox.put(tasks[0])
    inbox.put(tasks[1])
    Worker(atelier.job, "0", CPU, Watched("0", before), lambda _: None).serve(inbox)
    seeds = [[sample.seed for sample in task.samples] for task in tasks]
    assert ahead == [seeds[0] + seeds[1], seeds[1] + seeds[2], seeds[2] + seeds[3]]
