"""One process of several runs into trouble: what was learned is saved first, and the message is the right one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.data.sampler import ShuffledOrder
from muralist.train import checkpoint
from tests.faults.jobs import train_words
from tests.faults.play import workshop
from tests.faults.schedule import Training
from tests.support.runs import TINY, assert_same_state, finish, last_checkpoint, losses, metrics, start

pytestmark = pytest.mark.slow
TOTAL, IMAGES, STEP = 4, 16, 2
ENDLESS = 1_000_000


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


def test_signal_to_any_rank_saves_and_ends_all(tmp_path: Path) -> None:
    """Real processes, forked from a preloaded one; each signal goes to another rank than the first."""
    case = Training(ranks=(3,), strategy="ddp", steps=ENDLESS, every=ENDLESS, samples=0, loaders=0)
    run = tmp_path / "results" / "run"
    with workshop(tmp_path / "shop") as shop:

        def words(results: Path, steps: int) -> list[object]:
            return [*train_words(shop, case, 3, results, steps, case.every), "--epochs", ENDLESS]

        stops = [0]
        for which, rank, status in ((signal.SIGUSR1, 1, 0), (signal.SIGTERM, 2, 143), (signal.SIGINT, 1, 130)):
            log = tmp_path / f"{which.name}.log"
            with log.open("wb") as output:
                process = shop.fork_server.start(words(run.parent, ENDLESS), output)
            deadline = time.monotonic() + 60
            while not (run / "metrics.jsonl").is_file() or len(losses(run)) < stops[-1] + 5:
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()
                time.sleep(0.01)
            os.kill(json.loads((run / "heartbeats" / f"rank_{rank}.json").read_text())["process"], which)
            assert process.poll(30) == status, log.read_text()
            assert "ended with status" not in log.read_text(), "a stop is not a failure"
            stops.append(len(losses(run)))
            assert f"Stopped by another process at step {stops[-1]}: saved" in log.read_text()  # as rank 0 logs it
            assert last_checkpoint(run).name == f"step_{stops[-1]:07d}"
            assert not (run / "heartbeats").exists(), "a process is left"
        assert stops == sorted(set(stops))
        shop.run(words(tmp_path / "undisturbed", stops[-1]), tmp_path / "undisturbed.log")
    undisturbed = tmp_path / "undisturbed" / "run"
    assert_same_state(last_checkpoint(undisturbed), last_checkpoint(run))
    assert losses(undisturbed) == losses(run) and len(metrics(run)) == stops[-1]
