"""LoRA adapters beside a denoiser, or merged into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, HunyuanDiT2DModel, StableDiffusionPipeline

from muralist.core.errors import UserError
from muralist.generate.loras import parse_adapter
from tests.support.pipeline_calls import CAR, generate, load, max_difference

peft = pytest.importorskip("peft")
Build = Callable[[str], Path]
CONFIG = {"r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("a/b", "a/b", 1.0),
        ("a/b:0.5", "a/b", 0.5),
        ("a/b:-1e-1", "a/b", -0.1),
        ("a:b/c", "a:b/c", 1.0),
        ("a:2:0.25", "a:2", 0.25),
    ],
)
def test_paths_and_weights(text: str, path: str, weight: float) -> None:
    assert parse_adapter(text) == (Path(path), weight)


def test_a_path_that_ends_like_a_weight_is_a_path_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "style:2").mkdir()
    assert parse_adapter(f"{tmp_path}/style:2") == (tmp_path / "style:2", 1.0)


@pytest.fixture(scope="module")
def diffusers_lora(tiny_pipeline: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline("sd"), local_files_only=True)
    torch.manual_seed(1)
    pipe.unet.add_adapter(peft.LoraConfig(**CONFIG))
    layers = peft.get_peft_model_state_dict(pipe.unet)
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
    return folder


@pytest.fixture(scope="module")
def peft_lora(tiny_pipeline: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    network = HunyuanDiT2DModel.from_pretrained(tiny_pipeline("hunyuan"), subfolder="transformer")
    torch.manual_seed(1)
    peft.get_peft_model(network, peft.LoraConfig(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "kind"), [("sd", "diffusers_lora"), ("hunyuan", "peft_lora")])
def test_the_weight_scales_the_adapter(
    name: str, kind: str, tiny_pipeline: Build, request: pytest.FixtureRequest
) -> None:
    lora = request.getfixturevalue(kind)
    folder = tiny_pipeline(name)
    without, nothing, half, full = (
        generate(load(folder, lora=given), CAR)[0] for given in ([], [f"{lora}:0"], [f"{lora}:0.5"], [str(lora)])
    )
    assert np.array_equal(without, nothing)
    assert max_difference(without, half) > 0
    assert max_difference(half, full) > 0


def test_two_halves_of_an_adapter_are_the_adapter(tiny_pipeline: Build, peft_lora: Path) -> None:
    folder = tiny_pipeline("hunyuan")
    twice = generate(load(folder, lora=[f"{peft_lora}:0.5"] * 2), CAR)[0]
    assert max_difference(twice, generate(load(folder, lora=[str(peft_lora)]), CAR)[0]) <= 1


def test_adapters_that_do_not_fit_are_refused(tiny_pipeline: Build, diffusers_lora: Path, peft_lora: Path) -> None:
    with pytest.raises(UserError, match="HunyuanDiTPipeline takes LoRA only as a PEFT folder"):
        load(tiny_pipeline("hunyuan"), lora=[str(diffusers_lora)])
    with pytest.raises(UserError, match="does not fit StableDiffusionXLPipeline"):
        load(tiny_pipeline("sdxl"), lora=[str(peft_lora)])
