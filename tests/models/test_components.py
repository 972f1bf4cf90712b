"""Loading components of a pipeline: what is missing, or of another model, is refused instead of drawn at random."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from transformers import BertModel, PreTrainedModel

from muralist.core.errors import UserError
from muralist.models.components import checked_loading, component_class, load_network, load_pipeline
from muralist.models.pipeline_class import read_index
from tests.support.pipelines import drop_last_tensor


@pytest.fixture
def folder(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_pipeline("sd"), tmp_path / "sd")


def change(config: Path, **changes: Any) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def load(folder: Path) -> Any:
    kind = component_class(folder / "unet")
    unet = kind.from_config(kind.load_config(folder, subfolder="unet"))
    return load_pipeline(folder, "StableDiffusionPipeline", {"unet": unet}, lambda: torch.device("cpu"))


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_frozen_component_without_some_weights_is_refused(part: str, folder: Path) -> None:
    load(folder)
    name = drop_last_tensor(folder / part)
    with pytest.raises(UserError, match=f"{part} are incomplete: {name} missing"):
        load(folder)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_missing_package_of_a_component_is_named(folder: Path) -> None:
    """The message of transformers begins with an empty line; the processor of Qwen-Image 2.1 needs torchvision."""
    shutil.copytree(folder / "tokenizer", folder / "feature_extractor")
    config = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "feature_extractor" / "preprocessor_config.json").write_text(json.dumps(config))
    change(folder / "model_index.json", feature_extractor=["transformers", "Qwen3VLProcessor"])
    with pytest.raises(UserError, match="VideoProcessor requires the Torchvision library .* `pip install torchv"):
        load(folder)


def test_head_that_no_pipeline_calls_may_be_missing(tiny_pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """The pooler of HunyuanDiT's BERT."""
    folder = shutil.copytree(tiny_pipeline("hunyuan"), tmp_path / "hunyuan")
    assert drop_last_tensor(folder / "text_encoder").startswith("pooler.")
    with checked_loading():
        BertModel.from_pretrained(folder / "text_encoder")


def test_network_without_some_weights_is_refused(folder: Path) -> None:
    load_network(folder / "unet")
    name = drop_last_tensor(folder / "unet")
    with pytest.raises(UserError, match=f"unet are incomplete: {name} missing"):
        load_network(folder / "unet")


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    change(folder / "unet" / "config.json", cross_attention_dim=64)
    with pytest.raises(UserError, match="unet cannot be loaded: .*expected shape"):
        load_network(folder / "unet")


@pytest.mark.parametrize(
    ("name", "said"), [("UNetOfTomorrow", "names the class UNetOfTomorrow. diffusers 0"), (None, "names no class")]
)
def test_unknown_class_is_named(name: str | None, said: str, folder: Path) -> None:
    change(folder / "unet" / "config.json", _class_name=name)
    with pytest.raises(UserError) as caught:
        component_class(folder / "unet")
    assert said in str(caught.value)


def test_loading_is_as_before_afterwards() -> None:
    before = [vars(kind)["from_pretrained"] for kind in (ModelMixin, PreTrainedModel)]
    with pytest.raises(ZeroDivisionError), checked_loading():
        assert [vars(kind)["from_pretrained"] for kind in (ModelMixin, PreTrainedModel)] != before
        raise ZeroDivisionError
    assert [vars(kind)["from_pretrained"] for kind in (ModelMixin, PreTrainedModel)] == before


@pytest.mark.parametrize("path", ["unet", "unet/diffusion_pytorch_model.safetensors"])
def test_what_is_not_a_pipeline_is_named(path: str, folder: Path) -> None:
    with pytest.raises(UserError, match="is not a pipeline in diffusers layout: it has no model_index.json"):
        read_index(folder / path)
