"""Generation on a real SLURM of two nodes: plain `srun`, and ranks that are killed in the middle of it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until
from tests.support.generating import SCRIPT, made_by, makers, other_files, pictures, words, write_table
from tests.support.runs import finish, start

pytestmark = pytest.mark.slow

ROWS, RANKS, STEPS = 24, 4, 20
SRUN = ["srun", "--nodes=2", f"--ntasks={RANKS}", "--ntasks-per-node=2", "--export=ALL"]


def test_ranks_on_two_nodes_lose_two_and_make_every_picture(
    cluster: Cluster, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    table, model = write_table(tmp_path, ROWS), tiny_pipeline("wan21")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *words(table, model, alone, steps=STEPS)))
    told = words(table, model, together, "--worker_timeout", "10", steps=STEPS)
    # Each task leaves its process number and its exit status: srun itself tells only the worst one.
    task = (
        f"{shlex.join([sys.executable, SCRIPT, *told])} & echo $! > {tmp_path}/pid.$SLURM_PROCID; "
        f"wait $!; echo $? > {tmp_path}/status.$SLURM_PROCID"
    )
    process = start(*SRUN, "bash", "-c", task, **cluster.environment)
    for lost in (0, 3):
        wait_until(partial(made_by, together, lost), 120)
        os.kill(int((tmp_path / f"pid.{lost}").read_text()), signal.SIGKILL)
    said = finish(process)
    statuses = [int((tmp_path / f"status.{rank}").read_text()) for rank in range(RANKS)]
    assert statuses == [137, 0, 0, 137], said
    assert pictures(together) == pictures(alone)
    assert len(pictures(alone)) == ROWS
    made = makers(together)
    assert set(made) == set(range(ROWS))
    assert all(made[row] == str(row % RANKS) for row in range(ROWS) if row % RANKS in (1, 2))
    assert {made[row] for row in range(ROWS) if row % RANKS in (0, 3)} & {"1", "2"}, "the rows of the lost were redone"
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(RANKS)}
    assert said.count(f"{ROWS} of {ROWS} pictures are in") == 1
