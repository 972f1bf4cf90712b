"""Test bench/cifar_fid.py in miniature: a training that its time limit stops, and the scores of its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench.test_speedrun import python_path
from tests.conftest import REPOSITORY
from tests.support.evaluating import inception_weights, scenes


@pytest.mark.slow
def test_checkpoints_of_a_stopped_training_are_scored(tmp_path: Path) -> None:
    labels = {f"{name}_y": np.arange(count) % 10 for name, count in (("train", 40), ("test", 12))}
    np.savez(tmp_path / "few.npz", train_x=scenes(40, 0, 32), test_x=scenes(12, 1, 32), **labels)
    code = (
        f"import bench.cifar_fid as b, pathlib; b.CONCURRENT = 2; b.RESULTS = pathlib.Path({str(tmp_path)!r}); b.main()"
    )
    words = [sys.executable, "-c", code, "record", "--data", tmp_path / "few.npz", "--folder", tmp_path / "work",
             "--inception_weights", inception_weights(), "--seconds", 40, "--every", 5, "--checkpoints", 2, "--images", 12,
             "--steps", 2, "--model", "JiT-T/16", "--batch_size", 4, "--use_amp=false", "--num_workers", 0,
             "--warmup_steps", 2, "--keep_last", 3]  # fmt: skip
    done = subprocess.run(
        list(map(str, words)), env=python_path(), cwd=REPOSITORY, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert 40 <= record["seconds of training, start to end"] < 160
    first, last = record["checkpoints"]
    assert 5 < first["step"] < last["step"] and last["step"] % 5 == 0, "only the last three were kept"
    for found in (first, last):
        assert np.isfinite([found["fid"], found["val/loss"]]).all() and found["generated images"] == 12
    assert first["fid"] != last["fid"]
