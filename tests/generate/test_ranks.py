"""Ranks of one command: how they share samples through the folder, and a real torchrun."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muralist.cli import main
from muralist.core.slurm import free_port
from muralist.generate import ranks
from muralist.generate.output_dir import Header, OutputDir, Shard, start_ledger
from muralist.generate.plan import Sample
from muralist.generate.ranks import RankCoordinator
from tests.support.generating import SCRIPT, generate_arguments, makers, other_files, read_images, write_table
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.runs import finish, start

ROWS = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputDir:
    monkeypatch.setattr(ranks, "_POLL", 0.0)
    monkeypatch.setattr(ranks, "_OTHERS_END", 0.3)
    folder = OutputDir(tmp_path)
    folder.create()
    start_ledger(folder.ledger, Header({}, 1))
    return folder


def team(folder: OutputDir, size: int, rows: int = ROWS, timeout: float = 60.0) -> list[RankCoordinator]:
    return [RankCoordinator(rank, size, 0, folder, 1, timeout, np.arange(rows)) for rank in range(size)]


def sample(row: int) -> Sample:
    return Sample(row, row, 0, f"{row}", row, "a cube", "", 8, 8, f"{row}.png")


def finish_rows(folder: OutputDir, label: int, rows: list[int], fail: bool = False) -> None:
    shard = Shard(folder.shard(str(label)), "digest")
    for row in rows:
        (folder.root / f"{row}.png").write_bytes(b"image")
        if fail:
            shard.failed(sample(row), "no", str(label), 0.0)
        else:
            shard.done(sample(row), folder.root / f"{row}.png", "sum", str(label), 0.0, None)
    shard.close()


def more(rank: RankCoordinator) -> list[int] | None:
    rank._next_poll = 0.0
    indices = rank.take_lost_samples()
    return None if indices is None else indices.tolist()


def test_samples_are_shared_by_rank(folder: OutputDir) -> None:
    assert [rank.own.tolist() for rank in team(folder, 3)] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_samples_of_a_live_rank_are_not_taken(folder: OutputDir) -> None:
    first, second = team(folder, 2)
    finish_rows(folder, 0, first.own.tolist())
    second.beat()
    assert more(first) == []


def test_samples_of_a_silent_rank_are_taken_once(folder: OutputDir) -> None:
    first, second, _ = team(folder, 3, timeout=0.2)
    for rank in (first, second):
        finish_rows(folder, rank.rank, rank.own.tolist())
        assert more(rank) == []
    finish_rows(folder, 2, [2])
    time.sleep(0.3)
    second._set_state("idle")
    taken = more(first)
    assert taken == [5, 11]
    assert more(second) == [8]
    finish_rows(folder, 0, taken)
    finish_rows(folder, 1, [8])
    assert more(first) is more(second) is None
    assert first.missing() == 0


def test_samples_that_were_taken_and_not_made_are_taken_again(folder: OutputDir) -> None:
    first, second, third = team(folder, 3)
    finish_rows(folder, 0, first.own.tolist())
    finish_rows(folder, 1, second.own.tolist())
    third._set_state("gone")
    assert more(second) == [2, 5, 8, 11]
    assert more(first) == []  # they are being made
    second._set_state("gone")
    assert more(first) == [2, 5, 8, 11]


def test_a_failure_of_an_earlier_command_is_tried_again(folder: OutputDir) -> None:
    finish_rows(folder, 0, [0], fail=True)
    folder.close()
    folder.create()
    (rank,) = team(folder, 1, rows=1)
    rank._follower.skip_ledger()  # as after the ranks have agreed
    assert rank.missing() == 1
    finish_rows(folder, 0, [0], fail=True)
    assert more(rank) is None
    assert rank.missing() == 1
    finish_rows(folder, 0, [0])
    assert rank.missing() == 0


def merging(rank: RankCoordinator) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []

    def close() -> None:
        answers.append(rank.should_merge_ledger())
        if answers[0]:
            rank.output.close()

    thread = threading.Thread(target=close)
    thread.start()
    return thread, answers


def test_the_first_rank_merges_when_the_others_have_ended(folder: OutputDir) -> None:
    first, second = team(folder, 2)
    finish_rows(folder, 0, first.own.tolist())
    finish_rows(folder, 1, second.own.tolist())
    waiting, first_merges = merging(first)
    time.sleep(0.2)
    assert folder.work.is_dir()  # the second may still write
    assert not second.should_merge_ledger()
    waiting.join(5)
    assert first_merges == [True]
    assert second.missing() == 0  # read from the ledger now
    second.beat()
    assert not folder.work.exists()


def test_another_rank_merges_when_the_first_died_at_the_end(folder: OutputDir) -> None:
    first, second, third = team(folder, 3, timeout=0.5)
    first.beat()
    finish_rows(folder, 0, list(range(ROWS)))
    waiting = [merging(rank) for rank in (second, third)]
    for thread, _ in waiting:
        thread.join(5)
    assert [answers for _, answers in waiting] == [[True], [False]]


def test_a_rank_that_is_interrupted_alone_leaves_the_folder_to_the_others(folder: OutputDir) -> None:
    first, second = team(folder, 2)
    second.beat()
    assert not first.should_merge_ledger()
    assert more(second) == [0, 2, 4, 6, 8, 10]
    finish_rows(folder, 1, list(range(ROWS)))
    assert second.should_merge_ledger()


@pytest.mark.parametrize("refused", [0, 2])
def test_the_others_do_not_wait_for_a_rank_that_was_refused(tmp_path: Path, refused: int) -> None:
    """As under plain srun, which ends nobody: three processes, one of which does not see the model."""
    table = write_table(tmp_path, ROWS)
    table.write_text("prompt\n" + "0\n" * ROWS)
    chosen = family("0", "1")
    model = checkpoint(tmp_path / "run", chosen.describe(), network_of(chosen).state_dict())
    environment = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port({"SLURM_JOB_ID": "1"}))}

    def rank(number: int) -> None:
        os.environ.update(environment, RANK=str(number), LOCAL_RANK=str(number))
        own = tmp_path / "elsewhere" if number == refused else model
        with (tmp_path / f"{number}.log").open("w") as sys.stderr:
            paths = f"--prompts_csv {table} --model_path {own} --output_dir {tmp_path / 'out'}"
            status = main(["generate", *paths.split()])
        os._exit(status)

    processes = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in range(3)]
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        process.kill()
    assert [process.exitcode for process in processes] == [1, 1, 1]
    assert time.monotonic() - began < 20
    output = [(tmp_path / f"{number}.log").read_text() for number in range(3)]
    assert "elsewhere" in output.pop(refused) and output == ["", ""]


@pytest.mark.slow
def test_torchrun_makes_the_images_of_one_process(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    table, model = write_table(tmp_path, ROWS), tiny_pipeline("wan21")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *generate_arguments(table, model, alone)))
    launcher = ("torchrun", "--standalone", "--nproc_per_node=3", SCRIPT)
    output = finish(start(*launcher, *generate_arguments(table, model, together)))
    assert read_images(together) == read_images(alone)
    assert len(read_images(alone)) == ROWS
    assert makers(together) == {row: str(row % 3) for row in range(ROWS)}
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(3)}
    assert output.count("Loading the model") == 1
    assert output.count("12 of 12 images are in") == 1
    output = finish(start(*launcher, *generate_arguments(table, model, together)))
    assert output.count("Nothing to do: 12 of 12") == 1
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(3)}
    refused = finish(start(*launcher, *generate_arguments(table, model, together, "--guidance_scale", "3")), expect=1)
    assert refused.count("holds images made with other settings") == 1
