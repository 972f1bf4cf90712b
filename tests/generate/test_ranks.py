"""Ranks of one command: what they tell each other through the folder, and a real torchrun."""

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
from muralist.generate import ledger, ranks
from muralist.generate.folder import OutputFolder
from muralist.generate.ledger import Header, Shard
from muralist.generate.plan import Sample
from muralist.generate.ranks import Ranks
from muralist.scale.slurm import free_port
from tests.support.generating import SCRIPT, makers, other_files, pictures, words, write_table
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.runs import finish, start

ROWS = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputFolder:
    monkeypatch.setattr(ranks, "_LOOK", 0.0)
    monkeypatch.setattr(ranks, "_OTHERS_END", 0.3)
    folder = OutputFolder(tmp_path)
    folder.create()
    ledger.start(folder.ledger, Header({}, 1))
    return folder


def team(folder: OutputFolder, size: int, rows: int = ROWS, timeout: float = 60.0) -> list[Ranks]:
    return [Ranks(rank, size, 0, folder, 1, timeout, np.arange(rows)) for rank in range(size)]


def sample(row: int) -> Sample:
    return Sample(row, row, 0, f"{row}", row, "a cube", "", 8, 8, f"{row}.png")


def settle(folder: OutputFolder, label: int, rows: list[int], fail: bool = False) -> None:
    shard = Shard(folder.shard(str(label)), "digest")
    for row in rows:
        (folder.root / f"{row}.png").write_bytes(b"picture")
        if fail:
            shard.failed(sample(row), "no", str(label), 0.0)
        else:
            shard.done(sample(row), folder.root / f"{row}.png", "sum", str(label), 0.0, None)
    shard.close()


def more(rank: Ranks) -> list[int] | None:
    rank._next_look = 0.0
    numbers = rank.more()
    return None if numbers is None else numbers.tolist()


def test_rows_are_shared_by_rank(folder: OutputFolder) -> None:
    assert [rank.own.tolist() for rank in team(folder, 3)] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_rows_of_a_rank_that_is_there_are_its_own(folder: OutputFolder) -> None:
    first, second = team(folder, 2)
    settle(folder, 0, first.own.tolist())
    second.beat()
    assert more(first) == []


def test_rows_of_a_silent_rank_are_taken_once(folder: OutputFolder) -> None:
    first, second, _ = team(folder, 3, timeout=0.2)
    for rank in (first, second):
        settle(folder, rank.rank, rank.own.tolist())
        assert more(rank) == []
    settle(folder, 2, [2])
    time.sleep(0.3)
    second._say("idle")
    taken = more(first)
    assert taken == [5, 11]
    assert more(second) == [8]
    settle(folder, 0, taken)
    settle(folder, 1, [8])
    assert more(first) is more(second) is None
    assert first.missing() == 0


def test_rows_that_a_rank_took_and_did_not_make_are_taken_again(folder: OutputFolder) -> None:
    first, second, third = team(folder, 3)
    settle(folder, 0, first.own.tolist())
    settle(folder, 1, second.own.tolist())
    third._say("gone")
    assert more(second) == [2, 5, 8, 11]
    assert more(first) == []  # they are being made
    second._say("gone")
    assert more(first) == [2, 5, 8, 11]


def test_a_failure_of_an_earlier_command_settles_nothing(folder: OutputFolder) -> None:
    settle(folder, 0, [0], fail=True)
    folder.end()
    folder.create()
    (rank,) = team(folder, 1, rows=1)
    rank._read[folder.ledger] = folder.ledger.stat().st_size  # as after the stock was taken
    assert rank.missing() == 1
    settle(folder, 0, [0], fail=True)
    assert more(rank) is None
    assert rank.missing() == 1
    settle(folder, 0, [0])
    assert rank.missing() == 0


def closing(rank: Ranks) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []

    def close() -> None:
        answers.append(rank.closes_the_folder())
        if answers[0]:
            rank.folder.end()

    thread = threading.Thread(target=close)
    thread.start()
    return thread, answers


def test_the_first_rank_merges_when_the_others_have_ended(folder: OutputFolder) -> None:
    first, second = team(folder, 2)
    settle(folder, 0, first.own.tolist())
    settle(folder, 1, second.own.tolist())
    waiting, first_closes = closing(first)
    time.sleep(0.2)
    assert folder.work.is_dir()  # the second may still write
    assert not second.closes_the_folder()
    waiting.join(5)
    assert first_closes == [True]
    assert second.missing() == 0  # told from the ledger now
    second.beat()
    assert not folder.work.exists()


def test_another_rank_merges_when_the_first_died_at_the_very_end(folder: OutputFolder) -> None:
    first, second, third = team(folder, 3, timeout=0.5)
    first.beat()
    settle(folder, 0, list(range(ROWS)))
    waiting = [closing(rank) for rank in (second, third)]
    for thread, _ in waiting:
        thread.join(5)
    assert [answers for _, answers in waiting] == [[True], [False]]


def test_a_rank_that_is_interrupted_alone_leaves_the_folder_to_the_others(folder: OutputFolder) -> None:
    first, second = team(folder, 2)
    second.beat()
    assert not first.closes_the_folder()
    assert more(second) == [0, 2, 4, 6, 8, 10]
    settle(folder, 1, list(range(ROWS)))
    assert second.closes_the_folder()


@pytest.mark.parametrize("refused", [0, 2])
def test_the_others_do_not_wait_for_a_rank_that_was_refused(tmp_path: Path, refused: int) -> None:
    """As under plain srun, which ends nobody: three processes, one of which does not see the model."""
    table = write_table(tmp_path, ROWS)
    table.write_text("prompt\n" + "0\n" * ROWS)
    chosen = family()
    model = checkpoint(tmp_path / "run", chosen.describe(), network_of(chosen).state_dict())
    surroundings = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port({"SLURM_JOB_ID": "1"}))}

    def rank(number: int) -> None:
        os.environ.update(surroundings, RANK=str(number), LOCAL_RANK=str(number))
        own = tmp_path / "elsewhere" if number == refused else model
        with (tmp_path / f"{number}.log").open("w") as sys.stderr:
            status = main(
                [
                    "generate",
                    "--prompts_csv",
                    str(table),
                    "--model_path",
                    str(own),
                    "--output_dir",
                    str(tmp_path / "out"),
                ]
            )
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
    said = [(tmp_path / f"{number}.log").read_text() for number in range(3)]
    assert "elsewhere" in said.pop(refused) and said == ["", ""]


@pytest.mark.slow
def test_torchrun_makes_the_pictures_of_one_process(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    table, model = write_table(tmp_path, ROWS), tiny_pipeline("wan21")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *words(table, model, alone)))
    launcher = ("torchrun", "--standalone", "--nproc_per_node=3", SCRIPT)
    said = finish(start(*launcher, *words(table, model, together)))
    assert pictures(together) == pictures(alone)
    assert len(pictures(alone)) == ROWS
    assert makers(together) == {row: str(row % 3) for row in range(ROWS)}
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(3)}
    assert said.count("Loading the model") == 1
    assert said.count("12 of 12 pictures are in") == 1
    said = finish(start(*launcher, *words(table, model, together)))
    assert said.count("Nothing to do: 12 of 12") == 1
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(3)}
    refused = finish(start(*launcher, *words(table, model, together, "--guidance_scale", "3")), expect=1)
    assert refused.count("holds pictures made with other settings") == 1
