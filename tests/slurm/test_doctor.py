"""The doctor under srun: the collective self-test on two nodes, and the variables of SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slow


def test_collective_test_on_two_nodes(cluster: Cluster, workplace: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", ".venv/bin/python", "-m", "muralist", "doctor", "--json"]
    report = json.loads(cluster.ask(*words, cwd=workplace, seconds=120))
    found = {result["name"]: result for result in report["checks"]}
    assert report["ok"] and report["ranks"] == 2
    assert found["SLURM"]["status"] in ("ok", "warning") and "2 nodes, 2 tasks in this step" in found["SLURM"]["seen"]
    assert found["collective test"]["seen"].startswith("2 ranks on ")
