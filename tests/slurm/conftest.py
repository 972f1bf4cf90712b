"""Fixtures: the cluster, and a folder to submit from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.slurm.cluster import Cluster, missing, two_nodes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster of two nodes, where SLURM is installed; .ci/run installs it."""
    if reason := missing():
        pytest.skip(reason)
    with two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Link the files that jobs need, so that their output stays out of the repository."""
    for name in ("train.py", "configs", "scripts", "accelerate_config_multi_node.yaml"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path
