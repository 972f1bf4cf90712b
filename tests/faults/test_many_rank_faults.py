"""One process of several runs into trouble: what was learned is saved first, and the message is the right one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.data.sampler import ShuffledOrder
from muralist.train import checkpoint
from tests.support.runs import TINY, finish, last_checkpoint, losses, start

pytestmark = pytest.mark.slow
TOTAL, IMAGES, STEP = 4, 16, 2


@pytest.fixture
def images_with_a_broken_one(tmp_path: Path) -> tuple[Path, str]:
    """Return a folder of images; the one that rank 1 of two reads at step 2 is truncated."""
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(IMAGES):
        pixels = generator.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
    number = STEP * TOTAL + TOTAL - 1
    broken = folder / f"{int(ShuffledOrder(0, IMAGES).positions(np.array([number]))[0]):02d}.png"
    broken.write_bytes(broken.read_bytes()[:200])
    return folder, broken.name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_no_rank_leaves_before_a_slow_save_is_done(
    images_with_a_broken_one: tuple[Path, str], tmp_path: Path, strategy: str
) -> None:
    folder, name = images_with_a_broken_one
    words = ["train", *TINY, "--data_path", folder, "--global_batch_size", TOTAL, "--val_fraction", "0", "--epochs", "9",
             "--samples_per_gpu", "0", "--results_dir", tmp_path / "results", "--run_name", "run",
             "--strategy", strategy]  # fmt: skip
    slow_save = (
        "import sys, time\n"
        "from muralist.train import checkpoint\n"
        "complete = checkpoint._complete\n"
        "checkpoint._complete = lambda *rest: (time.sleep(5), complete(*rest))[1]\n"
        "from muralist.cli import main\n"
        f"sys.exit(main({[str(word) for word in words]!r}))\n"
    )
    impatient = (
        "import sys\nfrom muralist.tools import launch\nlaunch._GRACE_SECONDS = 2.0\n"
        f"sys.exit(launch.launch([{sys.executable!r}, '-c', {slow_save!r}], 2))\n"
    )
    output = finish(start("python", "-c", impatient), expect=1, timeout=120)
    assert name in output and "Traceback" not in output
    run = tmp_path / "results" / "run"
    assert last_checkpoint(run).name == f"step_{STEP:07d}"
    checkpoint.read_manifest(last_checkpoint(run))
    assert len(losses(run)) == STEP


def test_processes_that_see_different_checkpoints_do_not_train(photo_folder: Path, tmp_path: Path) -> None:
    common = ["python", "train.py", *TINY, "--data_path", photo_folder, "--run_name", "run", "--samples_per_gpu", "0",
              "--global_batch_size", "4", "--epochs", "9"]  # fmt: skip
    finish(start(*common, "--results_dir", tmp_path / "shared", "--max_steps", "3"))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    ranks = [
        start(*common, "--results_dir", tmp_path / place, RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank, place in enumerate(("shared", "elsewhere"))
    ]
    for step, rank in zip((3, 0), ranks, strict=True):
        output = finish(rank, expect=1, timeout=120)
        assert "do not see the same checkpoint and data" in output and f"at step {step} " in output
    assert len(losses(tmp_path / "shared" / "run")) == 3
