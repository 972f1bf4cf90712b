"""Training from an encoded folder: the losses of training from the pixels, and no text encoder on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muralist.cli import main
from muralist.core.rng import SampleKeys
from muralist.data.loader import held_out_batches
from muralist.data.packed import LatentSource
from muralist.data.sources import open_source
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.hunyuan_dit import FrozenEncoders, HunyuanDiTSpec
from muralist.settings import PackSettings, SampleSettings
from muralist.tools.encode import encode
from tests.support.hunyuan import SMALL, write_scenes
from tests.support.runs import assert_same_state, last_checkpoint, metrics

SIZE = 64
# Of the batch's size in encoding, for which last bits are equal.
WORDS = [*SMALL, "--img_size", SIZE, "--batch_size", 4, "--val_fraction", 0.1, "--ckpt_every", 3]
FORGETFUL = ["--uncond_p", 0.3, "--uncond_p_t5", 0.4]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set as pixels in train and val, and encoded with and without mirror images."""
    place = tmp_path_factory.mktemp("data")
    write_scenes(place / "train", SIZE, 16)
    write_scenes(place / "val", SIZE, 4, first=100)
    for name, mirrored in (("encoded", True), ("plain", False)):
        encode(
            PackSettings(
                source=str(place / "train"),
                destination=str(place / name),
                img_size=SIZE,
                num_workers=1,
                encode="small",
                random_flip=mirrored,
            )
        )
    return place


def small_folder(run: Path) -> Path:
    return run.parent / "models" / "small-hunyuandit"


def train(place: Path, data: str, run: str, *arguments: object, expect: int = 0) -> Path:
    words = [*WORDS, *FORGETFUL, "--data_path", place / data, "--results_dir", place / "results", "--run_name", run]
    assert main(["train", *map(str, [*words, *arguments])]) == expect
    return place / "results" / run


@pytest.fixture(scope="module")
def through(place: Path) -> Path:
    return train(place, "encoded", "through", "--max_steps", 3)


def test_doctor_reads_latents(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "train", *WORDS, "--data_path", place / "encoded", "--results_dir", place / "results", "--json"]
    assert main(list(map(str, words))) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["data set"]["seen"].startswith("16 images, 16 decoded at ")


def test_losses_on_latents_equal_losses_on_pixels(place: Path, through: Path) -> None:
    pixels = train(place, "train", "pixels", "--max_steps", 3)
    assert metrics(pixels) == metrics(through)
    assert sum("val/loss" in line for line in metrics(through)) == 1
    assert_same_state(last_checkpoint(pixels), last_checkpoint(through))
    sample = Path("samples", "step_0000003", "gpu_0_sample.png")
    assert (pixels / sample).read_bytes() == (through / sample).read_bytes()


def test_flips_are_seeded_per_sample_and_optional(place: Path, through: Path) -> None:
    numbers = np.arange(8)
    for data, random_flip in (("encoded", True), ("encoded", False), ("plain", False)):
        ahead = LatentSource(place / data, SIZE)
        family = HunyuanDiTSpec.load(small_folder(through), (SIZE, SIZE), random_flip=random_flip, latents=ahead)
        latents = []
        for source in (open_source(str(place / "train"), SIZE), ahead):
            batch = next(held_out_batches(source, numbers, numbers, 8))
            latents.append(family.encode(batch, SampleKeys(0, batch.sample_indices)).latents)
        torch.testing.assert_close(latents[0], latents[1], rtol=1e-4, atol=1e-4)


def test_resumed_run_is_bit_identical_with_a_loader_process(place: Path, through: Path) -> None:
    for steps in (1, 3):
        halves = train(place, "encoded", "halves", "--max_steps", steps, "--num_workers", 1, "--samples_per_gpu", 0)
    assert [line["train/loss"] for line in metrics(halves)] == [line["train/loss"] for line in metrics(through)]
    assert_same_state(last_checkpoint(halves), last_checkpoint(through))


def test_text_encoders_stay_on_the_cpu_and_embed_each_prompt_once(place: Path, through: Path) -> None:
    folder = small_folder(through)
    family = HunyuanDiTSpec.load(folder, (SIZE, SIZE), latents=LatentSource(place / "encoded", SIZE))
    family.to_device(torch.device("meta"), torch.bfloat16)
    devices = [
        next(part.parameters()).device.type for part in (family.encoders.vae, family.encoders.bert, family.encoders.t5)
    ]
    assert devices == ["meta", "cpu", "cpu"]
    family = HunyuanDiTSpec.load(folder, (SIZE, SIZE))
    network, wanted = family.network().eval(), SampleSettings(steps=2)
    first = family.sample(network, ["A road"], [0], wanted)
    parts: Any = family.encoders
    parts.bert = parts.t5 = None
    assert torch.equal(family.sample(network, ["A road"], [0], wanted), first)


def test_no_frozen_component_runs_in_a_step(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: FrozenEncoders, *arguments: object) -> None:
        raise AssertionError("a frozen part was asked")

    monkeypatch.setattr(FrozenEncoders, "encode_text", never)
    monkeypatch.setattr(FrozenEncoders, "vae_posterior", never)
    train(place, "encoded", "alone", "--max_steps", 1, "--samples_per_gpu", 0)


def refused(place: Path, capfd: pytest.CaptureFixture[str], data: str, *arguments: object) -> str:
    train(place, data, "refused", "--max_steps", 1, *arguments, expect=1)
    assert not (place / "results" / "refused").exists()
    return capfd.readouterr().err


def test_latents_that_do_not_match_are_refused(place: Path, through: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "without mirror images" in refused(place, capfd, "plain")
    assert "encoded already, so --caption" in refused(place, capfd, "encoded", "--caption", "A road")
    assert "--cache device is for images, and" in refused(place, capfd, "encoded", "--cache", "device")
    assert "packed at 64 pixels, but --img_size is 32" in refused(place, capfd, "encoded", "--img_size", 32)
    said = refused(place, capfd, "encoded", "--model", "JiT-T/8")
    assert "holds latents, and JiT-T/8 is trained on pixels" in said
    other = build_small_hunyuan_dit(place / "other", seed=1)
    said = refused(place, capfd, "encoded", "--model.path", other)
    assert "was encoded by another model" in said and "They differ in text_encoder, text_encoder_2." in said


def test_another_transformer_with_the_same_encoders_is_trained(place: Path, through: Path) -> None:
    shutil.copytree(small_folder(through), place / "tuned")
    shutil.rmtree(place / "tuned" / "transformer")
    shutil.copytree(build_small_hunyuan_dit(place / "seeded", seed=2) / "transformer", place / "tuned" / "transformer")
    run = train(place, "encoded", "tuned", "--max_steps", 1, "--model.path", place / "tuned", "--samples_per_gpu", 0)
    assert metrics(run)[0]["train/loss"] != metrics(through)[0]["train/loss"]


def test_a_pipeline_trains_alike_on_pixels_and_latents(
    place: Path, tiny_pipeline: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of texts of different lengths: from the commands, resumed, with held-out images and samples."""
    model, data = tiny_pipeline("cogview4"), place / "cogview4"
    pack = ["pack", place / "train", data, "--img_size", SIZE, "--encode", model, "--num_workers", 1]
    assert main(list(map(str, pack))) == 0
    own = ["--model", "diffusers", "--model.path", model, "--lr_rule", "none"]
    pixels = train(place, "train", "pipeline-pixels", *own, "--max_steps", 3)
    for steps in (1, 3):
        latents = train(place, "cogview4", "pipeline-latents", *own, "--max_steps", steps)
    assert [line["train/loss"] for line in metrics(latents)] == [line["train/loss"] for line in metrics(pixels)]
    assert metrics(latents)[-1]["val/loss"] == metrics(pixels)[-1]["val/loss"]
    assert_same_state(last_checkpoint(pixels), last_checkpoint(latents))
    sample = Path("samples", "step_0000003", "gpu_0_sample.png")
    assert (pixels / sample).read_bytes() == (latents / sample).read_bytes()
    assert ", encoded ahead of training" in capfd.readouterr().out
    said = refused(place, capfd, "cogview4", *own, "--multireso")
    assert "--multireso cannot read the packed folder" in said
