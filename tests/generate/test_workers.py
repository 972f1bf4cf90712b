"""Where workers run: the environment of a process, and a real Ray cluster of which a node is lost."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muralist.core.errors import UserError
from muralist.core.worker_pool import ProcessPool
from muralist.generate import workers
from muralist.generate.model_info import ModelInfo
from muralist.generate.workers import GenerationJob, WorkerFailed, open_pool, ray_devices
from tests.slurm.cluster import wait_until
from tests.support.generating import SCRIPT, generate_arguments, made_by, makers, other_files, read_images, write_table
from tests.support.runs import finish, start
from tests.support.worker_pools import settings


def test_a_process_gets_its_job_and_reports_what_is_wrong(tmp_path: Path) -> None:
    pool = open_pool(GenerationJob(settings(tmp_path), ModelInfo({}, {}), tmp_path, "digest", {}), {"3": "cpu"})
    assert isinstance(pool, ProcessPool)
    pool.start("3")
    ((label, report),) = pool.receive(60)
    pool.close(0.0)
    assert label == "3" and isinstance(report, WorkerFailed)
    assert report.error.what == "There are no weights at none."


def test_a_process_sees_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers._isolate_gpu("cuda:2") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7a")
    assert workers._isolate_gpu("cuda:1") == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7a"
    assert workers._isolate_gpu("cpu") == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7a"


def test_imports_of_a_worker_look_for_no_gpu_and_load_no_pipeline() -> None:
    script = """
import sys, torch
def looked(*_):
    raise AssertionError("looked for GPUs")
for name in ("is_available", "device_count", "_lazy_init", "init", "get_device_properties"):
    setattr(torch.cuda, name, looked)
import muralist.generate.worker
import muralist.generate.jit_pipeline
heavy = {"diffusers", "transformers"} | (set() if torch.backends.cuda.is_built() else {"torch._dynamo"})
print(sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


ROWS, STEPS = 48, 40  # seconds of work for each node, or one is through before it is lost


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head, where Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'muralist[ray]'")
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield running
    running.shutdown()


@pytest.mark.slow
def test_a_lost_nodes_rows_are_redone_with_the_same_images(
    cluster: Any, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    table, model = write_table(tmp_path, ROWS), tiny_pipeline("wan21")
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start("python", SCRIPT, *generate_arguments(table, model, alone, steps=STEPS)))
    second = cluster.add_node(num_cpus=1)
    lost = sorted(node.node_id for node in cluster.list_all_nodes()).index(second.node_id)  # its worker's label
    command = generate_arguments(table, model, together, "--engine", "ray", steps=STEPS)
    process = start("python", SCRIPT, *command, RAY_ADDRESS=cluster.address)
    wait_until(lambda: made_by(together, lost) > 0 or process.poll() is not None, 120)
    cluster.remove_node(second, allow_graceful=False)
    output = finish(process)
    assert f"GPU {lost}: its process cannot be reached any more" in output
    assert read_images(together) == read_images(alone)
    assert len(read_images(alone)) == ROWS
    made = makers(together)
    left = str(1 - lost)
    assert all(made[row] == left for row in range(ROWS) if row % 2 == 1 - lost)
    assert {made[row] for row in range(ROWS) if row % 2 == lost} == {"0", "1"}
    assert other_files(together) == {"failed_prompts_gpu0.txt": "", "failed_prompts_gpu1.txt": ""}


class Holder:
    """Another program of the cluster."""

    def sees(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
def test_one_worker_for_each_gpu_that_is_free(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        assert ray_devices([]) == {"0": "cpu"}
        assert ray_devices([3, 5]) == {"3": "cpu", "5": "cpu"}
        cluster.add_node(num_cpus=1, num_gpus=3)  # pretended
        holder = ray.remote(num_gpus=1)(Holder).remote()
        assert ray.get(holder.sees.remote()) in ("0", "1", "2")
        wait_until(lambda: ray.available_resources().get("GPU") == 2, 20)
        assert ray_devices([]) == {"0": "cuda:0", "1": "cuda:0"}
        assert ray_devices([7]) == {"7": "cuda:0"}
        with pytest.raises(UserError, match="3 GPUs, of which 2 are free; 3 wanted"):
            ray_devices([0, 1, 2])
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_no_cluster_is_told_with_the_way_to_start_one(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    command = generate_arguments(
        write_table(tmp_path, 1), tiny_pipeline("wan21"), tmp_path / "output", "--engine", "ray"
    )
    output = finish(start("python", SCRIPT, *command, RAY_ADDRESS="127.0.0.1:1"), expect=1)
    assert "There is no Ray cluster to run on." in output
    assert "`ray start --head`" in output
    assert not (tmp_path / "output").exists()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"muralist\[ray\]"):
        ray_devices([])
