"""The plan: sample, file name and seed are pure functions of the row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data.prompts import open_prompt_table
from muralist.generate.plan import Plan, batch_slot, round_robin, split_by_slot


def plan_of(path: Path, text: str, copies: int = 1, extension: str = "png") -> Plan:
    path.mkdir(exist_ok=True)
    (path / "prompts.csv").write_text(text)
    return Plan(open_prompt_table(str(path / "prompts.csv")), copies, 42, "blurry", (480, 832), extension)


@given(rows=st.integers(0, 300), workers=st.integers(1, 40))
def test_round_robin_is_complete_and_balanced(rows: int, workers: int) -> None:
    parts = round_robin(np.arange(rows), workers)
    assert [part.tolist() for part in parts] == [list(range(worker, rows, workers)) for worker in range(workers)]


def test_names_and_seeds_of_rows_and_copies(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "prompt,seed,negative_prompt\na,,\nb,7,ugly\nc,,\n", copies=2)
    assert len(plan) == 6
    samples = [plan.sample(index) for index in range(6)]
    assert [sample.file for sample in samples] == [
        "000001_seed42.png", "000001_seed1000042.png", "000002_seed7.png", "000002_seed1000007.png",
        "000003_seed44.png", "000003_seed1000044.png",
    ]  # fmt: skip
    assert [sample.negative_prompt for sample in samples] == ["blurry"] * 2 + ["ugly"] * 2 + ["blurry"] * 2
    assert list(plan.samples(np.array([5, 0, 3]))) == [samples[5], samples[0], samples[3]]
    one = plan_of(tmp_path / "one", "prompt,seed,negative_prompt\na,,\nb,7,ugly\nc,,\n")
    assert [one.sample(row).key for row in range(3)] == [samples[2 * row].key for row in range(3)]


def test_rows_are_grouped_by_size(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "prompt,height,width\na,,\nb,64,32\nc,,\nd,32,64\ne,64,32\n")
    assert [plan.size_of(index) for index in range(5)] == [(480, 832), (64, 32), (480, 832), (32, 64), (64, 32)]
    assert plan.grouped_by_size(np.arange(5)).tolist() == [0, 2, 1, 4, 3]
    assert plan.grouped_by_size(np.array([3, 4])).tolist() == [3, 4]


def test_rows_that_would_be_one_file_are_refused(tmp_path: Path) -> None:
    text = "prompt,image_id,seed\na,cat,5\nb,dog,5\nc,cat,5\n"
    with pytest.raises(UserError, match="would be written to the same file, cat_seed5: line 2 and line 4"):
        plan_of(tmp_path, text).check_file_names()
    distinct = "prompt,image_id,seed\na,cat,5\nb,cat,1000005\n"
    plan_of(tmp_path, distinct).check_file_names()
    with pytest.raises(UserError, match="cat_seed1000005: line 2 and line 3"):
        plan_of(tmp_path, distinct, copies=2).check_file_names()


def test_every_sample_has_one_slot_and_shares_fill_their_batches(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "prompt\n" + "a\n" * 1000, copies=2)
    samples = list(plan.samples(np.arange(2000)))
    assert [plan.slot(index, 8) for index in range(2000)] == [batch_slot(s.row, s.copy, 8) for s in samples]
    assert {plan.slot(index, 1) for index in range(2000)} == {0}
    for workers in range(1, 9):
        for batch_size in (2, 3, 8, 16):
            for part in round_robin(np.arange(2000), workers):
                share = [samples[index] for index in part.tolist()]
                batches = split_by_slot(share, batch_size)
                assert sorted(sample.sample_index for batch in batches for sample in batch) == part.tolist()
                for batch in batches:
                    assert len({batch_slot(sample.row, sample.copy, batch_size) for sample in batch}) == len(batch)
                assert len(batches) <= 1.15 * -(-len(share) // batch_size) + 2
