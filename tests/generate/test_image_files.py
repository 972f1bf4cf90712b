"""Images saved by processes: the same files and lines as by threads, full disks, deleted folders, killed processes."""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from muralist.core.errors import UserError
from muralist.core.worker_pool import ProcessPool, TaskProcessExited
from muralist.data.ledger_reader import read_lines
from muralist.generate import image_files, worker, workers
from muralist.generate.image_files import SaveProcesses
from muralist.generate.output_dir import PSNR, merge_shards
from muralist.generate.pipeline import SampleRequest
from muralist.generate.worker import Worker
from tests.generate.test_worker import finished, serve
from tests.support.disks import PAGE, leave_free, small_disk
from tests.support.generating import read_images
from tests.support.worker_pools import CPU, ThreadedRun, WatchedPipeline

CPUS = 4
BATCH = 64
ROWS = 3 * BATCH
PROMPTS = ["car", "tree", "house"] * BATCH
IN_BATCHES = [range(start, start + BATCH) for start in range(0, ROWS, BATCH)]


def run_of(folder: Path, cpus: int = CPUS, **more: Any) -> ThreadedRun:
    threaded = ThreadedRun(folder, PROMPTS, BATCH, **more)
    threaded.job = threaded.job._replace(cpus=cpus)
    return threaded


def undisturbed(*_: object) -> None:
    """Happens before a batch."""


def ledger(threaded: ThreadedRun) -> dict[int, dict[str, Any]]:
    return {
        line["index"]: {name: value for name, value in line.items() if name not in ("seconds", "changed")}
        for line in read_lines(threaded.output.ledger)
    }


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SaveProcesses]:
    """Those that were used; their images came from processes."""
    used: list[SaveProcesses] = []
    save = SaveProcesses.save

    def noting(self: SaveProcesses, images: Sequence[Any]) -> Any:
        used.append(self)
        return save(self, images)

    monkeypatch.setattr(SaveProcesses, "save", noting)
    return used


@pytest.mark.parametrize("more", [{}, {"image_format": "webp", "preset": "fast"}], ids=["png", "webp, fast"])
def test_processes_save_the_same_files_and_lines_as_threads(
    more: dict[str, Any], tmp_path: Path, pools: list[SaveProcesses]
) -> None:
    one, other = run_of(tmp_path / "threads", cpus=2, **more), run_of(tmp_path / "processes", **more)
    by_threads = serve(one, undisturbed, BATCH, IN_BATCHES)
    assert not pools
    by_processes = serve(other, undisturbed, BATCH, IN_BATCHES)
    assert len(pools) == 3 and len(set(map(id, pools))) == 1
    assert ledger(one) == ledger(other) and len(ledger(one)) == ROWS
    assert any(PSNR in line for line in ledger(one).values()) == bool(more)
    for folder in (one.output.root, one.output.exact):
        there = other.output.root / folder.relative_to(one.output.root)
        names = {path.name for path in folder.glob("*.png")}
        assert names == {path.name for path in there.glob("*.png")}
        assert all((folder / name).read_bytes() == (there / name).read_bytes() for name in names)
    assert finished(by_threads) == finished(by_processes) == dict.fromkeys(range(ROWS))
    messages = [report for report in by_processes if isinstance(report, workers.SamplesFinished)]
    assert len(messages) < ROWS / 8
    assert other.output.finished(other.plan).all()


def test_few_images_are_saved_by_threads(tmp_path: Path, pools: list[SaveProcesses]) -> None:
    serve(run_of(tmp_path), undisturbed, BATCH, [range(BATCH - 1)])
    assert not pools


def test_a_sample_that_cannot_be_encoded_fails_alone(tmp_path: Path, pools: list[SaveProcesses]) -> None:
    threaded = run_of(tmp_path)
    plan = threaded.plan
    sample = type(plan).sample
    broken = {3, 70}

    class Surrogates(type(plan)):  # type: ignore[misc]
        """A PNG cannot hold half of a pair of surrogates."""

        def sample(self, index: int) -> Any:
            found = sample(self, index)
            return found._replace(negative_prompt="half \ud83d of a pair") if index in broken else found

    object.__setattr__(threaded, "plan", Surrogates(**plan.__dict__))
    reports = serve(threaded, undisturbed, BATCH, IN_BATCHES)
    assert pools
    failures = finished(reports)
    assert {row for row, failure in failures.items() if failure} == broken and len(failures) == ROWS
    lines = ledger(threaded)
    for row in broken:
        assert lines[row]["error"] == failures[row] and lines[row]["error"].startswith("UnicodeEncodeError: ")
    assert len(read_images(threaded.output.root)) == ROWS - len(broken)


def test_a_full_disk_stops_with_an_error_and_resumes(tmp_path: Path, pools: list[SaveProcesses]) -> None:
    with small_disk(tmp_path / "disk") as disk:
        threaded = run_of(disk)
        leave_free(disk, 90 * PAGE)
        with pytest.raises(UserError, match="No space left on the disk that holds .*run the same command again"):
            inbox: queue.Queue[workers.Request] = queue.Queue()
            for rows in IN_BATCHES:
                inbox.put(workers.GenerateBatch(tuple(map(threaded.plan.sample, rows)), BATCH, BATCH))
            Worker(threaded.job, "0", CPU, WatchedPipeline("0", undisturbed), lambda _: None).serve(inbox)
        assert pools
        (disk / "filler").unlink()
        merge_shards(threaded.output.ledger, threaded.output.work)
        intact = threaded.output.finished(threaded.plan)
        assert 0 < intact.sum() < ROWS
        serve(threaded, undisturbed, BATCH, [rows for rows in IN_BATCHES if not intact[list(rows)].all()])
        assert threaded.output.finished(threaded.plan).all()


def test_a_folder_deleted_under_processes_is_reported_and_gets_no_images(
    tmp_path: Path, pools: list[SaveProcesses]
) -> None:
    threaded = run_of(tmp_path)
    batches: list[int] = []

    def delete(label: str, requests: Sequence[SampleRequest]) -> None:
        batches.append(len(requests))
        if len(batches) == 3:
            while threaded.output.shard("0").read_text().count('"done"') < 2 * BATCH:
                time.sleep(0.01)
            shutil.rmtree(threaded.output.root)

    with pytest.raises(UserError, match="Cannot write .*images: it was deleted while images were being generated"):
        serve(threaded, delete, BATCH, IN_BATCHES)
    assert pools
    assert not list(threaded.output.root.glob("**/*"))


def test_a_ledger_deleted_while_processes_save_leaves_no_image_of_the_batch(
    tmp_path: Path, pools: list[SaveProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded = run_of(tmp_path)
    save = SaveProcesses.save

    def deleting(self: SaveProcesses, images: Sequence[Any]) -> Any:
        for saved in save(self, images):
            shutil.rmtree(threaded.output.work)
            yield saved

    monkeypatch.setattr(SaveProcesses, "save", deleting)
    with pytest.raises(UserError, match="it was deleted while images were being generated"):
        serve(threaded, undisturbed, BATCH, IN_BATCHES[:1])
    assert not read_images(threaded.output.root)


def test_a_killed_process_is_an_error_and_the_rest_can_be_saved(tmp_path: Path, pools: list[SaveProcesses]) -> None:
    threaded = run_of(tmp_path)
    before = threading.active_count()

    def kill(label: str, requests: Sequence[SampleRequest]) -> None:
        if pools and pools[0]._pool:
            pools[0]._pool._pool.kill("0")

    with pytest.raises(UserError, match="A process that saves images was killed by SIGKILL.*the same command again"):
        serve(threaded, kill, BATCH, IN_BATCHES)
    assert threading.active_count() <= before + 1  # the thread that draws noise
    intact = threaded.output.finished(threaded.plan)
    assert not intact.all()
    serve(threaded, undisturbed, BATCH, [rows for rows in IN_BATCHES if not intact[list(rows)].all()])
    assert threaded.output.finished(threaded.plan).all()


def test_threads_save_where_no_process_can_be_started(
    tmp_path: Path, pools: list[SaveProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process meets the limit; the first one is ended, and later batches do not try again."""
    start, started = ProcessPool.start, []

    def limited(self: ProcessPool, label: str) -> None:
        if self.name == "muralist-save" and label == "1":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(self, label)
        if self.name == "muralist-save":
            started.append(self._workers[label].process)

    monkeypatch.setattr(ProcessPool, "start", limited)
    one, other = run_of(tmp_path / "threads", cpus=2), run_of(tmp_path / "limited")
    serve(one, undisturbed, BATCH, IN_BATCHES)
    warnings: list[str] = []
    monkeypatch.setattr(image_files.log, "warning", lambda text, *values: warnings.append(text % values))
    serve(other, undisturbed, BATCH, IN_BATCHES)
    assert len(pools) == 1 and len(started) == 1 and started[0].exitcode is not None
    assert ledger(one) == ledger(other) and len(ledger(one)) == ROWS
    assert warnings == [
        "Threads save the images, which is slower: no process could be started "
        "([Errno 11] Resource temporarily unavailable)."
    ]


def test_threads_may_end_the_processes_at_the_same_time(tmp_path: Path) -> None:
    """As they do when they find that the folder was deleted."""
    job = run_of(tmp_path / "run").job
    for _ in range(3):
        processes, errors = SaveProcesses(job, "0"), []
        processes._start()

        def close(processes: SaveProcesses = processes, errors: list[Exception] = errors) -> None:
            try:
                processes.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_only_the_worker_of_a_killed_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of the other workers then; any other error of this kind would end all."""
    said: list[Any] = []
    for error in (TaskProcessExited("A process that saves images was killed by SIGKILL."), UserError("wrong")):
        monkeypatch.setattr(worker, "load_pipeline", Mock(side_effect=error))
        worker.work(run_of(tmp_path).job, "0", CPU, queue.Queue(), said.append)
    assert said == [workers.WorkerFailed(said[0].error, all_workers=False), workers.WorkerFailed(said[1].error, True)]
    assert "SIGKILL" in str(said[0].error)
