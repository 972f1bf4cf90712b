"""The environment of a worker's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muralist.core.worker_pool import ProcessPool
from muralist.generate import workers
from muralist.generate.messages import GenerationJob, WorkerFailed
from muralist.generate.workers import open_pool
from tests.support.worker_pools import settings


def test_a_process_gets_its_job_and_reports_what_is_wrong(tmp_path: Path) -> None:
    pool = open_pool(GenerationJob(settings(tmp_path), tmp_path, "digest", {}), {"3": "cpu"})
    assert isinstance(pool, ProcessPool)
    pool.start("3")
    ((label, report),) = pool.receive(60)
    pool.close(0.0)
    assert label == "3" and isinstance(report, WorkerFailed)
    assert report.error.what == "There is no model at none."


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
print([name for name in ("diffusers", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
