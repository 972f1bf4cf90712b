"""The doctor under srun: ranks of two nodes meet, exchange, and find SLURM's variables sane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slow


def test_ranks_of_two_nodes_meet(cluster: Cluster, workplace: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", ".venv/bin/python", "-m", "muralist", "doctor", "--json"]
    told = json.loads(cluster.ask(*words, cwd=workplace, seconds=120))
    found = {one["name"]: one for one in told["checks"]}
    assert told["ok"] and told["ranks"] == 2
    assert found["SLURM"]["status"] in ("ok", "warning") and "2 nodes, 2 tasks in this step" in found["SLURM"]["seen"]
    assert found["collective test"]["seen"].startswith("2 ranks on ")
