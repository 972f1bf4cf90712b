"""Runs that train a diffusers pipeline: exact resume, every strategy, samples of every rank, other commands on a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from muralist.cli import main
from muralist.core.images import to_uint8_array
from tests.support.hunyuan import write_scenes
from tests.support.runs import assert_same_state, finish, last_checkpoint, losses, metrics, start, tensors

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SHORT = ["--img_size", "64", "--batch_size", "4", "--global_batch_size", "4", "--num_workers", "0", "--warmup_steps", "3",
         "--learning_rate", "1e-3", "--sample_steps", "2", "--no_use_tensorboard", "--val_fraction", "0.2",
         "--ckpt_every", "2", "--log_every", "1"]  # fmt: skip
LORA = ("--training_parts", "lora", "--lora_rank", "4")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes with captions of all lengths; one has none."""
    return write_scenes(tmp_path_factory.mktemp("scenes") / "data", 64, 20)


def words(pipeline: Path, data: Path, run: Path, steps: int, *more: object) -> list[str]:
    own = ["--model.path", pipeline, "--data_path", data, "--results_dir", run.parent, "--run_name", run.name]
    return [str(word) for word in (*SHORT, *own, "--max_steps", steps, *more)]


def train(pipeline: Path, data: Path, run: Path, steps: int, *more: object) -> Path:
    """Train in this process."""
    assert main(["train", *words(pipeline, data, run, steps, *more)]) == 0
    return run


OTHERS = ("sd", "sd3", "wan22", "qwenimage", "zimage", "pixart", "sana", "chroma", "lumina2", "auraflow", "cogview4",
          "klein", "hunyuanvideo")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [("flux", ()), ("flux", LORA), ("sdxl", ()), *(pytest.param(name, (), marks=pytest.mark.slow) for name in OTHERS)],
    ids=["flux", "lora", "sdxl", *OTHERS],
)
def test_resumed_run_is_bit_identical(
    name: str, more: tuple[object, ...], tiny_pipeline: Callable[[str], Path], scenes: Path, tmp_path: Path
) -> None:
    folder = tiny_pipeline(name)
    through = train(folder, scenes, tmp_path / "through", 4, *more)
    train(folder, scenes, tmp_path / "halves", 2, "--samples_per_gpu", 0, *more)
    halves = train(folder, scenes, tmp_path / "halves", 4, "--samples_per_gpu", 0, *more)
    assert_same_state(last_checkpoint(through), last_checkpoint(halves))
    assert metrics(through) == metrics(halves), "losses, gradient norms and the held-out loss, whose noise is fixed"
    assert [line["val/loss"] for line in metrics(through) if "val/loss" in line]
    for step in (2, 4):
        assert (through / "samples" / f"step_{step:07d}" / "gpu_0_sample.png").is_file()


@pytest.fixture(scope="module")
def trained(tiny_pipeline: Callable[[str], Path], scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_pipeline("sd"), scenes, tmp_path_factory.mktemp("results") / "sd", 2)


def test_export_and_generate_make_the_image_of_the_training_sample(trained: Path, tmp_path: Path) -> None:
    step = trained / "samples" / "step_0000002"
    prompt = (step / "gpu_0_prompt.txt").read_text().strip()
    with Image.open(step / "gpu_0_sample.png") as image:
        sampled = np.asarray(image).astype(int)
    assert main(["export", str(trained), str(tmp_path / "exported")]) == 0
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "exported")
    pipe.set_progress_bar_config(disable=True)
    own = pipe(
        prompt, height=64, width=64, num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(0)
    ).images
    assert np.abs(to_uint8_array(own * 2 - 1)[0].astype(int) - sampled).max() <= 1
    (tmp_path / "prompts.csv").write_text(f'prompt,seed\n"{prompt}",0\n')
    command = ["generate", "--model_path", trained, "--prompts_csv", tmp_path / "prompts.csv", "--output_dir",
               tmp_path / "images", "--height", 64, "--width", 64, "--num_inference_steps", 2, "--dtype", "fp32",
               "--batch_size", 1]  # fmt: skip
    assert main([str(word) for word in command]) == 0
    (generated,) = (tmp_path / "images").rglob("*.png")
    with Image.open(generated) as image:
        assert np.abs(np.asarray(image).astype(int) - sampled).max() <= 1


# With real processes


def processes(strategy: str, ranks: int, *arguments: object) -> str:
    launcher = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    return finish(start(*launcher, "train.py", *arguments, "--strategy", strategy))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "more", "strategies"),
    [("qwenimage", (), (("fsdp2", 2), ("zero3", 2), ("ddp", 4))), ("flux", LORA, (("ddp", 2), ("zero2", 2)))],
    ids=["ragged", "lora"],
)
def test_every_strategy_trains_the_same(
    name: str,
    more: tuple[object, ...],
    strategies: tuple[tuple[str, int], ...],
    tiny_pipeline: Callable[[str], Path],
    scenes: Path,
    tmp_path: Path,
) -> None:
    """Qwen-Image's texts vary in length: its network is called once per image, and its last block has unused weights."""
    folder = tiny_pipeline(name)
    alone = train(folder, scenes, tmp_path / "alone", 4, *more)
    expected = tensors(last_checkpoint(alone))
    for strategy, ranks in strategies:
        run = tmp_path / f"{strategy}-{ranks}"
        arguments = words(folder, scenes, run, 4, "--batch_size", 4 // ranks, *more)
        processes(strategy, ranks, *arguments)
        assert losses(run) == pytest.approx(losses(alone), rel=1e-5), strategy
        for mine, theirs in zip(metrics(run), metrics(alone), strict=True):
            assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        assert metrics(run)[-1]["val/loss"] == pytest.approx(metrics(alone)[-1]["val/loss"], rel=1e-5)
        found = tensors(last_checkpoint(run))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key.endswith(".step") and not value:
                continue  # weights without gradients: ZeRO has one counter for all weights
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
        for step in (2, 4):
            images = {path.name for path in (run / "samples" / f"step_{step:07d}").glob("gpu_*_sample.png")}
            assert images == {f"gpu_{rank}_sample.png" for rank in range(ranks)}
        mine, theirs = (each / "samples" / "step_0000004" / "gpu_0_sample.png" for each in (run, alone))
        with Image.open(mine) as sampled, Image.open(theirs) as expected_image:
            assert np.abs(np.asarray(sampled).astype(int) - np.asarray(expected_image).astype(int)).max() <= 2


@pytest.mark.slow
@needs_deepspeed
def test_run_resumes_under_any_strategy(tiny_pipeline: Callable[[str], Path], scenes: Path, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd3")  # whose last block has weights without gradients
    alone = train(folder, scenes, tmp_path / "alone", 6, "--samples_per_gpu", 0)
    run = tmp_path / "legs"
    for steps, strategy in enumerate(("fsdp2", "zero3", "ddp"), start=1):
        arguments = words(folder, scenes, run, 2 * steps, "--batch_size", 2, "--samples_per_gpu", 0)
        processes(strategy, 2, *arguments)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert json.loads((last_checkpoint(run) / "manifest.json").read_text())["model"]["family"] == "diffusers"
