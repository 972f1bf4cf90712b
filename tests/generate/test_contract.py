"""The contract of the complete command, kept by every pipeline: the same bytes for any workers and interruptions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muralist.cli import main
from muralist.generate import command
from tests.support.equality import CASES
from tests.support.fork_server import PLAIN, ForkServer
from tests.support.generating import generate_arguments, read_images
from tests.support.pipelines import BUILDERS, REPRESENTATIVE
from tests.support.worker_pools import ModelThreadPool

Build = Callable[[str], Path]
ROWS = 7
KILLED = [name for name in BUILDERS if name not in ("hunyuan11", "schnell", "wan22")]  # one of each class
KILLED_ROWS = 9  # enough that some are left when the first image exists


def write_prompts(folder: Path, rows: int) -> Path:
    """Texts of several lengths: none, a few words, more than a text encoder reads; one in Chinese."""
    texts = ["a red car", "", "many " * 120, "一只红色的猫", "two dogs on the street in the rain at night", "snow"]
    lines = [f"{texts[row % len(texts)]},{row},{'dark' * (row % 2)}" for row in range(rows)]
    path = folder / "prompts.csv"
    path.write_text("prompt,seed,negative_prompt\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def words(name: str, table: Path, model: Path, output: Path, *more: object) -> list[str]:
    return ["generate", *generate_arguments(
        table, model, output, "--guidance_scale", CASES[name].guidance_scale, *more, steps=2
    )]  # fmt: skip


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of commands in this process are threads."""
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)
    for logger in ("", "muralist"):
        monkeypatch.setattr(logging.getLogger(logger), "handlers", [])


@pytest.mark.parametrize("name", REPRESENTATIVE)  # the slow test below has one of each class
def test_one_worker_and_three_that_resume_make_the_same_bytes(
    name: str, tiny_pipeline: Build, tmp_path: Path, in_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    table, model = write_prompts(tmp_path, ROWS), tiny_pipeline(name)
    assert main(words(name, table, model, tmp_path / "one", "--gpu_ids", 0)) == 0
    assert main(words(name, table, model, tmp_path / "three", "--gpu_ids", 1, "--num_samples", 2)) == 0
    assert main(words(name, table, model, tmp_path / "three", "--gpu_ids", 0, 1, 2)) == 0
    images = read_images(tmp_path / "one")
    assert len(images) == len(set(images.values())) == ROWS
    assert read_images(tmp_path / "three") == images
    ignored = name in ("flux", "schnell", "hunyuanvideo", "lcm", "klein", "sana_sprint")
    assert capsys.readouterr().err.count("Negative prompts have no effect: ") == (3 if ignored else 0)


@pytest.mark.slow
def test_every_pipeline_resumes_after_kill_9_with_the_same_bytes(
    tiny_pipeline: Build, tmp_path: Path, in_threads: None
) -> None:
    """A command and its worker, real processes, are killed at the first image, and the same command resumes."""
    table = write_prompts(tmp_path, KILLED_ROWS)
    server = ForkServer(tmp_path / "server", PLAIN)
    interrupted = []
    try:
        for name in KILLED:
            model, killed, log = tiny_pipeline(name), tmp_path / name, tmp_path / f"{name}.log"
            one = words(name, table, model, killed, "--gpu_ids", 0)
            with log.open("wb") as output:
                process = server.start(one, output)
                while process.poll() is None and not read_images(killed):
                    time.sleep(0.002)
                server.kill_all()
                process.poll(30)
                if len(read_images(killed)) < KILLED_ROWS:
                    interrupted.append(name)
                assert server.start(one, output).poll(120) == 0, log.read_text()
            assert main(words(name, table, model, tmp_path / f"{name}-3", "--gpu_ids", 0, 1, 2)) == 0
            images = read_images(tmp_path / f"{name}-3")
            assert len(images) == len(set(images.values())) == KILLED_ROWS
            assert read_images(killed) == images, name
    finally:
        server.close()
    assert len(interrupted) >= len(KILLED) - 3, f"only these were killed in the middle: {interrupted}"
