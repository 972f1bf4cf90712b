"""The demo's promise: scenes a classifier recognises, by a smaller model; and the beginning of the demo itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from muralist.core import rng
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose
from muralist.demo.command import STEPS
from muralist.diffusion import samplers
from muralist.models.jit import JiT
from muralist.models.jit_spec import infer_jit_config, jit_arguments
from muralist.models.weights import read_weights
from tests.support.runs import finish, metrics, start, train
from tests.support.scene_classifier import scenes, train_classifier


def recognized(run: Path, img_size: int, guidance: float, count: int = 64) -> float:
    """The part of fresh samples that a classifier of real scenes calls by their prompt."""
    classify = train_classifier(img_size, samples=2000, steps=200, seed=0)
    real, kinds = scenes(range(50_000, 50_400), img_size, seed=0)
    assert (classify(real) == kinds).float().mean() >= 0.95
    weights = read_weights(run, "ema1")
    network = JiT(**jit_arguments(infer_jit_config(weights)))
    network.load_state_dict(weights)
    network.eval()
    labels = torch.arange(count) % 8
    noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.arange(1000, 1000 + count), (3, img_size, img_size))
    images = samplers.sample(network, noise, labels, 8, samplers.SamplerSettings(steps=20, guidance=guidance))
    return float((classify(torch.from_numpy(to_uint8_array(images.clamp(-1, 1)))) == labels).float().mean())


@pytest.mark.slow
def test_demo_model_learns_its_prompts(tmp_path: Path) -> None:
    words = (
        "--data_path driving_world --img_size 32 --model JiT-T/8 --enable_condition --init_from none --batch_size 16 "
        "--max_samples 3200 --epochs 4 --learning_rate 4e-3 --beta2 0.99 --lr_schedule cosine --warmup_steps 50 "
        "--run_name small --samples_per_gpu 0 --log_every 200"
    )
    train(*words.split(), "--results_dir", tmp_path)
    assert recognized(tmp_path / "small", 32, guidance=1.5) >= 0.8


@pytest.mark.slow
@pytest.mark.alone
def test_demo_starts(tmp_path: Path) -> None:
    """A quarter of it: two columns of the sheet, a loss that falls, and a speed at which the full demo takes minutes."""
    began = time.monotonic()
    steps = STEPS // 4
    output = finish(start("muralist", "demo", "--results_dir", tmp_path, "--max_steps", steps), timeout=600)
    assert (time.monotonic() - began) * STEPS / steps < 8 * 60  # four on an idle machine; build machines share theirs
    sheet = tmp_path / "demo" / "samples" / "sheet.png"
    assert str(sheet) in output
    with Image.open(sheet) as image:
        assert image.width > 400 and image.height > 800
    held_out = [line["val/loss"] for line in metrics(tmp_path / "demo") if "val/loss" in line]
    assert len(held_out) == 2 and held_out[1] < 0.9 * held_out[0] < 0.2
