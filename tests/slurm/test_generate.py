"""Generation with plain `srun` on two nodes, and ranks that are killed in the middle of it."""

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
from tests.support.generating import SCRIPT, generate_arguments, made_by, makers, other_files, read_images, write_table
from tests.support.runs import finish, start

pytestmark = pytest.mark.slow

ROWS, RANKS, STEPS = 24, 4, 20
SRUN = ["srun", "--nodes=2", f"--ntasks={RANKS}", "--ntasks-per-node=2", "--export=ALL"]


def test_two_of_four_ranks_are_killed_and_every_image_is_generated(
    cluster: Cluster, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    table, model = write_table(tmp_path, ROWS), tiny_pipeline("wan21")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *generate_arguments(table, model, alone, steps=STEPS)))
    arguments = generate_arguments(table, model, together, "--worker_timeout", "10", steps=STEPS)
    # Each task writes its pid and its exit status: srun reports only the highest status.
    task = (
        f"{shlex.join([sys.executable, SCRIPT, *arguments])} & echo $! > {tmp_path}/pid.$SLURM_PROCID; "
        f"wait $!; echo $? > {tmp_path}/status.$SLURM_PROCID"
    )
    process = start(*SRUN, "bash", "-c", task, **cluster.environment)
    for lost in (0, 3):
        wait_until(partial(made_by, together, lost), 120)
        os.kill(int((tmp_path / f"pid.{lost}").read_text()), signal.SIGKILL)
    output = finish(process)
    statuses = [int((tmp_path / f"status.{rank}").read_text()) for rank in range(RANKS)]
    assert statuses == [137, 0, 0, 137], output
    assert read_images(together) == read_images(alone)
    assert len(read_images(alone)) == ROWS
    made = makers(together)
    assert set(made) == set(range(ROWS))
    assert all(made[row] == str(row % RANKS) for row in range(ROWS) if row % RANKS in (1, 2))
    assert {made[row] for row in range(ROWS) if row % RANKS in (0, 3)} & {"1", "2"}, "the rows of the lost were redone"
    assert other_files(together) == {f"failed_prompts_gpu{rank}.txt": "" for rank in range(RANKS)}
    assert output.count(f"{ROWS} of {ROWS} images are in") == 1
