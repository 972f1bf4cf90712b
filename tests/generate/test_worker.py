"""One worker with a real tiny model: memory that runs out, files that cannot be written, full disks."""

from __future__ import annotations

import errno
import functools
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from muralist.core.errors import UserError
from muralist.data import ledger_reader
from muralist.generate import image_files, worker, workers
from muralist.generate.output_dir import merge_shards
from muralist.generate.pipeline import GenerationMode, PipelineError, SampleRequest
from muralist.generate.worker import Worker
from muralist.generate.workers import GenerateBatch, StopWorker
from tests.support import worker_pools as worker_pools
from tests.support.disks import leave_free, small_disk
from tests.support.worker_pools import CPU, Death, ThreadedRun, WatchedPipeline

PROMPTS = ["car", "tree", "house", "car", "tree", "house", "car", "tree"]
Before = Callable[[str, Sequence[SampleRequest]], None]
ROWS, FIRST_SEED = 12, 42


def serve(
    threaded: ThreadedRun,
    before: Before,
    batch_size: int,
    groups: Sequence[Sequence[int]],
    pipeline: WatchedPipeline | None = None,
) -> list[workers.Report]:
    """Return what a worker reports about some batches."""
    inbox: queue.Queue[workers.Request] = queue.Queue()
    for rows in groups:
        inbox.put(GenerateBatch(tuple(threaded.plan.sample(row) for row in rows), batch_size, batch_size))
    reports: list[workers.Report] = []

    def receive(report: workers.Report) -> None:
        reports.append(report)
        if len(finished(reports)) == sum(map(len, groups)):
            inbox.put(StopWorker())

    try:
        Worker(threaded.job, "0", CPU, pipeline or WatchedPipeline("0", before), receive).serve(inbox)
    finally:
        merge_shards(threaded.output.ledger, threaded.output.work)
    return reports


def out_of_memory_above(most: int, sizes: list[int], times: int = 10**9) -> Before:
    """Raise torch's error for batches above some size; real allocations fail in tests/faults."""

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        sizes.append(len(requests))
        if len(requests) > most and sum(size > most for size in sizes) <= times:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    return before


def finished(reports: list[workers.Report]) -> dict[int, str | None]:
    """Why each finished sample failed, if it did."""
    found = [report.failures for report in reports if isinstance(report, workers.SamplesFinished)]
    return {index: failure for failures in found for index, failure in failures.items()}


def done(reports: list[workers.Report]) -> set[int]:
    return {index for index, failure in finished(reports).items() if failure is None}


def test_out_of_memory_is_tried_again_at_the_same_batch_size(tmp_path: Path) -> None:
    sizes: list[int] = []
    threaded = ThreadedRun(tmp_path, PROMPTS)
    reports = serve(threaded, out_of_memory_above(2, sizes, times=1), 4, [range(4)])
    assert (sizes, done(reports)) == ([4, 4], {0, 1, 2, 3})
    assert not any("batch_size" in line for line in threaded.lines().values())


def test_out_of_memory_twice_stops_with_an_error(tmp_path: Path) -> None:
    sizes: list[int] = []
    threaded = ThreadedRun(tmp_path, PROMPTS)
    with pytest.raises(PipelineError, match="GPU 0 ran out of memory at batch size 4.*--allow_batch_change"):
        serve(threaded, out_of_memory_above(2, sizes), 4, [range(4)])
    assert sizes == [4, 4]
    assert threaded.lines() == {}  # no row is to blame


def test_out_of_memory_with_one_image_names_it_and_gives_helpful_advice(tmp_path: Path) -> None:
    for allowed in (False, True):
        threaded = ThreadedRun(tmp_path / str(allowed), PROMPTS, allow_batch_change=allowed)
        with pytest.raises(PipelineError) as refused:
            serve(threaded, out_of_memory_above(0, []), 1, [[0]])
        assert refused.value.what.startswith("GPU 0 ran out of memory with one image, 000001_seed42.png: ")
        assert refused.value.fix.startswith("Make it smaller or remove its row")
        assert "--allow_batch_change" not in str(refused.value)


def test_allow_batch_change_halves_the_batch_and_marks_the_rows(tmp_path: Path) -> None:
    sizes: list[int] = []
    threaded = ThreadedRun(tmp_path, PROMPTS, allow_batch_change=True)
    reports = serve(threaded, out_of_memory_above(2, sizes), 8, [range(8)])
    assert done(reports) == set(range(8))
    assert sizes[:6] == [8, 8, 4, 4, 2, 2] and set(sizes[6:]) == {4, 2}
    assert {line["batch_size"] for line in threaded.lines().values()} == {2}
    assert [report.text for report in reports if isinstance(report, workers.WorkerNote)][:2] == [
        "GPU 0 is out of memory: batch size 4 instead of 8.",
        "GPU 0 is out of memory: batch size 2 instead of 4.",
    ]
    other = ThreadedRun(tmp_path / "other", PROMPTS)
    serve(other, lambda *_: None, 2, [[row] for row in range(8)])
    assert threaded.images() == other.images()


def test_only_rows_of_a_smaller_batch_are_marked(tmp_path: Path) -> None:
    sizes: list[int] = []
    threaded = ThreadedRun(tmp_path, PROMPTS, allow_batch_change=True)
    serve(threaded, out_of_memory_above(3, sizes, times=2), 4, [range(4), range(4, 8)])
    assert [threaded.lines()[row].get("batch_size") for row in range(8)] == [2] * 4 + [None] * 4


def test_a_sample_that_cannot_be_encoded_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from muralist.generate import output_dir

    encode = output_dir.encode_image

    def choke(pixels, sample, facts, video_format):  # type: ignore[no-untyped-def]
        if sample.row == 1:
            raise ValueError("x" * 1_000_000)
        return encode(pixels, sample, facts, video_format)

    monkeypatch.setattr(output_dir, "encode_image", choke)
    threaded = ThreadedRun(tmp_path, PROMPTS)
    reports = serve(threaded, lambda *_: None, 2, [[0, 1], [2, 3]])
    assert done(reports) == {0, 2, 3}
    reason = finished(reports)[1]
    assert reason is not None and reason.startswith("ValueError: xxx") and len(reason) < 400
    assert threaded.lines()[1]["error"] == reason


def test_prompts_of_every_kind_reach_the_file_and_the_ledger_unchanged(tmp_path: Path) -> None:
    prompts = ["\u0000\u0001 \u001b[31mred", "日本語 🎨", "a\nb\tc", "half \ud83d of a pair", "x" * 300_000]
    threaded = ThreadedRun(tmp_path, PROMPTS)
    samples = [threaded.plan.sample(row)._replace(prompt=prompt) for row, prompt in enumerate(prompts)]
    inbox: queue.Queue[workers.Request] = queue.Queue()
    reports: list[workers.Report] = []

    class Anything(WatchedPipeline):
        """Generates a car whatever the prompt."""

        def generate_async(self, requests, size, on_step, mode=GenerationMode.DEFAULT):  # type: ignore[no-untyped-def]
            if inbox.empty():
                inbox.put(StopWorker())
            return super().generate_async([request._replace(prompt="car") for request in requests], size, on_step, mode)

    inbox.put(GenerateBatch(tuple(samples), 5, 5))
    Worker(threaded.job, "0", CPU, Anything("0", lambda *_: None), reports.append).serve(inbox)
    merge_shards(threaded.output.ledger, threaded.output.work)
    lines = threaded.lines()
    assert [lines[row]["prompt"] for row in range(5)] == prompts
    failed = set(finished(reports)) - done(reports)
    assert failed <= {3}, "only a lone surrogate may be more than a PNG can hold"
    for row in set(range(5)) - failed:
        with Image.open(threaded.output.root / samples[row].file) as image:
            image.load()
            assert image.text["prompt"] == prompts[row]
            assert image.text["seed"] == str(42 + row)
            assert image.text["model"] == "tiny" and image.size == (16, 16)
        data, line = (threaded.output.root / samples[row].file).read_bytes(), lines[row]
        assert line["bytes"] == len(data) and line["file"] == samples[row].file and line["gpu"] == "0"
        assert line["seconds"] > 0


def test_images_are_not_flushed_one_by_one_and_truncated_ones_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded, flushed, flush = ThreadedRun(tmp_path, PROMPTS), [], os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    serve(threaded, lambda *_: None, 4, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert threaded.output.finished(threaded.plan).all()
    assert not [name for name in flushed if ".png" in name]
    torn = threaded.output.root / threaded.plan.sample(2).file  # as a power failure may leave it
    torn.write_bytes(torn.read_bytes()[:100])
    assert threaded.output.finished(threaded.plan).tolist() == [row != 2 for row in range(8)]


def test_a_full_disk_stops_with_an_error_and_resumes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        threaded = ThreadedRun(disk, PROMPTS)
        leave_free(disk, 3 * 4096)
        with pytest.raises(UserError, match="No space left on the disk that holds .*run the same command again"):
            serve(threaded, lambda *_: None, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
        (disk / "filler").unlink()
        merge_shards(threaded.output.ledger, threaded.output.work)
        intact = threaded.output.finished(threaded.plan)
        assert 0 < intact.sum() < 8
        assert not list(threaded.output.root.glob(".*.tmp"))
        serve(threaded, lambda *_: None, 2, [[row] for row in range(8) if not intact[row]])
        assert threaded.output.finished(threaded.plan).all()


def test_a_folder_deleted_under_a_worker_is_reported_and_not_recreated(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    batches: list[int] = []

    def delete(label: str, requests: Sequence[SampleRequest]) -> None:
        batches.append(len(requests))
        if len(batches) == 3:
            while threaded.output.shard("0").read_text().count('"done"') < 4:  # nobody writes while it is deleted
                time.sleep(0.01)
            shutil.rmtree(threaded.output.root)

    with pytest.raises(UserError, match="Cannot write .*images: it was deleted while images were being generated"):
        serve(threaded, delete, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert not list(threaded.output.root.glob("**/*"))  # an image without a ledger would stop the next command


def test_a_last_image_that_cannot_be_written_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, flush: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(image_files, "atomic_write", full)
    threaded = ThreadedRun(tmp_path, PROMPTS)
    errors: queue.Queue[Exception] = queue.Queue()

    def run() -> None:
        try:
            serve(threaded, lambda *_: None, 2, [[0, 1]])  # nothing comes after them, not even a message to stop
        except UserError as error:
            errors.put(error)

    threading.Thread(target=run, daemon=True).start()
    assert "No space left on the disk" in str(errors.get(timeout=10))


Start = Callable[[Sequence[int]], Callable[[], None]]
"""Called with the rows of a batch when it starts; the function it returns is called when it is waited for."""


class PendingPipeline(WatchedPipeline):
    """A pipeline whose images are pending until they are waited for, as on a GPU."""

    def __init__(self, start: Start, label: str = "0", before: Before = lambda *_: None, *more: Any) -> None:
        super().__init__(label, before, *more)
        self.start = start

    def generate_async(self, requests, size, on_step, mode=GenerationMode.DEFAULT):  # type: ignore[no-untyped-def]
        waited = self.start([request.seed - FIRST_SEED for request in requests])
        images = super().generate_async(requests, size, on_step, mode).wait()

        def wait() -> list[np.ndarray]:
            waited()
            return images

        return SimpleNamespace(wait=wait, ready=False, gpu_busy=0.75)


def noting(events: list[str], broken: int | None = None) -> PendingPipeline:
    """A pipeline that records when a row is started and waited for."""

    def start(rows: Sequence[int]) -> Callable[[], None]:
        events.append(f"start {rows[0]}")

        def waited() -> None:
            events.append(f"wait {rows[0]}")
            if rows[0] == broken:
                raise UserError("Its values overflowed.")

        return waited

    return PendingPipeline(start)


def test_the_next_batch_is_started_before_the_last_is_waited_for(tmp_path: Path) -> None:
    threaded, events = ThreadedRun(tmp_path, PROMPTS), list[str]()
    reports = serve(threaded, lambda *_: None, 1, [[0], [1], [2]], noting(events))
    assert events == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "wait 2"]
    # If the worker died now, either of two batches could be the cause.
    assert [report.indices for report in reports if isinstance(report, workers.BatchStarted)] == [(0,), (0, 1), (1, 2)]
    assert [line["gpu_busy"] for line in threaded.lines().values()] == [0.75] * 3
    at_once = ThreadedRun(tmp_path / "at once", PROMPTS)
    serve(at_once, lambda *_: None, 1, [[0], [1], [2]])
    assert {row: line["sha256"] for row, line in at_once.lines().items()} == {
        row: line["sha256"] for row, line in threaded.lines().items()
    }
    assert not any("gpu_busy" in line for line in at_once.lines().values())


def test_a_pending_image_that_fails_is_tried_alone_and_recorded(tmp_path: Path) -> None:
    threaded, events = ThreadedRun(tmp_path, PROMPTS), list[str]()
    reports = serve(threaded, lambda *_: None, 1, [[0], [1], [2]], noting(events, broken=1))
    assert finished(reports) == {0: None, 1: "Its values overflowed.", 2: None}
    assert events.count("wait 1") == 2


def test_prompts_are_encoded_ahead_of_their_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    batches = [GenerateBatch(tuple(map(threaded.plan.sample, rows)), 2, 2) for rows in ((0, 1), (2, 3), (4, 5), (6, 7))]
    inbox: queue.Queue[workers.Request] = queue.Queue()
    ahead: list[list[int]] = []  # for every batch: seeds that were prepared when it was started
    prepared: list[int] = []

    def prepare(_: WatchedPipeline, requests: Sequence[SampleRequest]) -> None:
        prepared[:] = sorted(request.seed for request in requests)

    def before(label: str, requests: Sequence[SampleRequest]) -> None:
        ahead.append(list(prepared))
        inbox.put(batches[len(ahead) + 1] if len(ahead) + 1 < len(batches) else StopWorker())  # one is always waiting

    monkeypatch.setattr(WatchedPipeline, "prepare", prepare)
    inbox.put(batches[0])
    inbox.put(batches[1])
    Worker(threaded.job, "0", CPU, WatchedPipeline("0", before), lambda _: None).serve(inbox)
    seeds = [[sample.seed for sample in batch.samples] for batch in batches]
    assert ahead == [seeds[0] + seeds[1], seeds[1] + seeds[2], seeds[2] + seeds[3]]


@pytest.fixture
def pending(monkeypatch: pytest.MonkeyPatch) -> Callable[[Start], None]:
    """Makes the pipelines of all workers pending ones."""

    def use(start: Start) -> None:
        monkeypatch.setattr(worker_pools, "WatchedPipeline", functools.partial(PendingPipeline, start))

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


@pytest.mark.parametrize(
    ("height", "width", "frames", "limit"),
    [(1024, 1024, 1, 4), (480, 832, 1, 10), (512, 512, 1, 16), (64, 64, 1, 64), (4096, 4096, 1, 1), (480, 832, 17, 1)],
)
def test_auto_tries_batches_up_to_a_size_that_depends_on_the_image_alone(
    height: int, width: int, frames: int, limit: int
) -> None:
    assert worker.batch_size_limit(height, width, frames) == limit


def test_auto_doubles_the_batch_until_the_limit_or_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for any number of rows; the memory of a GPU is played by numbers."""
    tried: list[int] = []
    cuda = worker.torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda device: tried[-1])
    monkeypatch.setattr(worker, "_free_memory", lambda: None)

    class Probed(WatchedPipeline):
        def generate(self, requests: Sequence[SampleRequest], *_: Any) -> list[np.ndarray]:
            tried.append(len(requests))
            return []

    def measured(rows: int, side: int) -> int:
        tried.clear()
        threaded = ThreadedRun(tmp_path / f"{rows}-{side}", PROMPTS[:1] * rows)
        own = Worker(threaded.job, "0", CPU, Probed("0", lambda label, requests: None), lambda report: None)
        own.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
        sample = threaded.plan.sample(0)._replace(height=side, width=side)
        return own._largest_batch(workers.MeasureBatchSize(sample))

    assert measured(1, 512) == 16 and tried == [1, 2, 4, 8, 16]
    assert measured(40, 512) == 16
    assert measured(1, 64) == 64 and tried[-1] == 64  # 92 of 100 may be used
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=20))
    assert measured(1, 64) == 16 and tried == [1, 2, 4, 8, 16, 32]
