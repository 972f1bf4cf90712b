"""What played schedules share: the preloaded process, images to train on, a model, a table, what is to be evaluated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.evaluating import scenes, small_clip, write_images
from tests.support.fork_server import SMALLEST, ForkServer

MINUTE = 60.0


class Workshop:
    """A folder with everything that schedules need, made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.fork_server = ForkServer(root)
        self.data, self.model = root / "data", root / "model"
        self.images, self.real, self.clip = root / "images", root / "real", root / "clip"
        self.references = root / "references"
        self._once(self.data, self._write_data)
        self._once(self.model, self._train_model)
        self._once(self.images, self._write_images)
        self._once(self.real, lambda folder: write_images(folder, scenes(14, seed=2)))
        self._once(self.clip, small_clip)

    def close(self) -> None:
        """End the preloaded process."""
        self.fork_server.close()

    def run(self, words: Sequence[object], log: Path, **environment: str) -> str:
        """Run a command that nothing disturbs; returns what it printed."""
        with log.open("wb") as output:
            process = self.fork_server.start(words, output, **environment)
        status = process.poll(3 * MINUTE)
        if status is None:
            self.fork_server.kill_all()
        assert status == 0, f"exit status {status} undisturbed:\n{log.read_text()}"
        return log.read_text()

    def table(self, rows: int) -> Path:
        """Prompts for the model: names of its classes."""
        path = self.root / f"prompts_{rows}.csv"
        if not path.exists():
            path.write_text("prompt\n" + "".join(f"{('dawn', 'dusk')[row % 2]}\n" for row in range(rows)))
        return path

    @staticmethod
    def _once(folder: Path, make: Callable[[Path], object]) -> None:
        if not folder.exists():
            aside = folder.with_name(f".{folder.name}.new")
            shutil.rmtree(aside, ignore_errors=True)
            make(aside)
            aside.rename(folder)

    @staticmethod
    def _write_data(folder: Path) -> None:
        random = np.random.default_rng(0)
        for label in ("dawn", "dusk"):
            (folder / label).mkdir(parents=True)
            for number in range(20):
                pixels = random.integers(0, 256, (18, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / label / f"{number:02d}.png")

    def _train_model(self, folder: Path) -> None:
        folder.mkdir()
        words = ["train", "--data_path", self.data, "--enable_condition", "--model", f"JiT-{SMALLEST}/8", "--img_size", 16,
                 "--batch_size", 8, "--max_steps", 4, "--samples_per_gpu", 0, "--no_use_tensorboard", "--num_workers", 0,
                 "--warmup_steps", 0, "--results_dir", folder, "--run_name", "run"]  # fmt: skip
        self.run(words, self.root / "model.log")

    @staticmethod
    def _write_images(folder: Path) -> None:
        write_images(folder, scenes(16, seed=1))
        (folder.parent / "told.csv").write_text(
            "image_id,prompt\n" + "".join(f"{row:06d},a red cube on table {row}\n" for row in range(16))
        )

    @property
    def told(self) -> Path:
        """The prompts of the images to evaluate."""
        return self.root / "told.csv"
