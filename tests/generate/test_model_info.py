"""Models at --model_path, identified by their small files."""

from __future__ import annotations

import inspect
import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from muralist.core.errors import UserError
from muralist.generate import model_info
from muralist.generate.model_info import inspect_model, parse_adapter
from muralist.settings import GenerateSettings

Build = Callable[[str], Path]


def given(path: Path, **changes: object) -> GenerateSettings:
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(path), **changes)  # type: ignore[arg-type]


def test_defaults_of_diffusers_pipelines(tiny_pipeline: Build) -> None:
    checked = inspect_model(given(tiny_pipeline("wan21")))
    assert checked.folder == tiny_pipeline("wan21") and "vae" in checked.components and not checked.is_jit
    assert checked.identity["model"] == checked.pipeline_class == "WanPipeline"
    assert checked.resolved["num_frames"] == 1 and checked.resolved["enable_half_frame"] is False


@pytest.mark.parametrize(
    ("frames", "half", "made"), [(1, True, 1), (5, False, 5), (6, False, 5), (81, True, 41), (8, True, 5), (2, True, 1)]
)
def test_the_number_of_frames_is_rounded_to_a_possible_one(
    frames: int, half: bool, made: int, tiny_pipeline: Build
) -> None:
    settings = given(tiny_pipeline("wan21"), num_frames=frames, enable_half_frame=half)
    settled = inspect_model(settings).resolved
    assert settled["num_frames"] == made
    assert inspect_model(settings.model_copy(update=settled)).resolved == settled


def test_half_of_one_frame_has_no_effect(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "info", messages.append)
    inspect_model(given(tiny_pipeline("wan21"), enable_half_frame=True))
    assert messages == ["--enable_half_frame has no effect on one frame."]


def test_the_fingerprint_depends_on_the_files_and_not_on_their_path(tiny_pipeline: Build, tmp_path: Path) -> None:
    first = tiny_pipeline("pixart")
    copy = tmp_path / "elsewhere"
    shutil.copytree(first, copy)
    assert inspect_model(given(copy)).identity == inspect_model(given(first)).identity
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert inspect_model(given(copy)).identity != inspect_model(given(first)).identity


def test_paths_without_a_model_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd")
    with pytest.raises(UserError, match="The model .*sdd was not found.*Did you mean sd.*or the id of a model"):
        inspect_model(given(folder.with_name("sdd")))
    with pytest.raises(UserError, match="The model org/name was not found, neither on this machine nor in the cache"):
        inspect_model(given(Path("org/name")))
    with pytest.raises(UserError, match=f"holds no model.*model_index.json.*Did you mean {folder.parent}/"):
        inspect_model(given(folder.parent))
    with pytest.raises(UserError, match="holds no model.*Give the folder"):
        inspect_model(given(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        inspect_model(given(tmp_path))


def test_incomplete_pipelines_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pipeline("sd"), copy)
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged or truncated: .* Copy the model again"):
        inspect_model(given(copy))
    shutil.rmtree(copy / "vae")
    with pytest.raises(UserError, match="incomplete: vae missing.*Copy the model again"):
        inspect_model(given(copy))
    (copy / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="model_index.json cannot be read"):
        inspect_model(given(copy))
    (copy / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(UserError, match="names no pipeline"):
        inspect_model(given(copy))


def test_a_missing_lora_is_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    (tmp_path / "style").mkdir()
    with pytest.raises(UserError, match="The LoRA .*stile was not found.*Did you mean style?"):
        inspect_model(given(tiny_pipeline("sd"), lora=[f"{tmp_path}/stile:0.5"]))
    with pytest.raises(UserError, match=r"LoRA org/name was not found, neither.* The folder .*org does not exist"):
        inspect_model(given(tiny_pipeline("sd"), lora=["org/name:0.5"]))


def test_jit_flags_are_refused_for_diffusers_pipelines(tiny_pipeline: Build) -> None:
    for changes in ({"weights": "ema1"}, {"guidance_interval": (0.1, 1)}, {"official_last_step": True}):
        (flag,) = changes
        with pytest.raises(UserError, match=f"--{flag} is for JiT models, and this is a diffusers pipeline"):
            inspect_model(given(tiny_pipeline("sd"), **changes))


def test_pipelines_are_inspected_without_torch(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("wan21")
    script = (
        "import sys, muralist.generate.command; from muralist.generate import model_info\n"
        "from muralist.settings import GenerateSettings\n"
        "model_info.inspect_model(GenerateSettings(prompts_csv='none', output_dir='none', model_path=sys.argv[1]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


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


@pytest.mark.parametrize(
    ("pipeline", "vae", "asked", "made"),
    [
        # A config may leave the factor to the defaults of diffusers. Wan rounds as its pipeline does, others round down.
        ("WanPipeline", {"_class_name": "AutoencoderKLWan", "temperal_downsample": [False, True, True]}, 16, 17),
        ("WanPipeline", {"_class_name": "AutoencoderKLWan"}, 16, 17),
        ("WanPipeline", {"_class_name": "AutoencoderKLWan", "scale_factor_temporal": 4}, 15, 13),
        ("HunyuanVideoPipeline", {"_class_name": "AutoencoderKLHunyuanVideo"}, 16, 13),
        ("LTXPipeline", {"spatio_temporal_scaling": [True, True, True, False], "patch_size_t": 1}, 24, 17),
        ("CogVideoXPipeline", {"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4.0}, 49, 49),
        ("MochiPipeline", {"_class_name": "AutoencoderKLMochi"}, 24, 19),
        ("CosmosTextToWorldPipeline", {"_class_name": "AutoencoderKLCosmos"}, 121, 121),
    ],
)
def test_the_number_of_frames_is_that_of_diffusers(
    tmp_path: Path, pipeline: str, vae: dict[str, Any], asked: int, made: int
) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(vae))
    settings = given(tmp_path, num_frames=asked)
    assert model_info._possible_frames(tmp_path, pipeline, settings) == made
    doubled = given(tmp_path, num_frames=2 * asked, enable_half_frame=True)
    assert model_info._possible_frames(tmp_path, pipeline, doubled) == made


def test_the_temporal_factors_are_the_defaults_of_diffusers() -> None:
    for name, factor in model_info._TEMPORAL_FACTORS.items():
        defaults = inspect.signature(getattr(diffusers, name).__init__).parameters
        names = ("scale_factor_temporal", "temporal_compression_ratio")
        found = [defaults[key].default for key in names if key in defaults and defaults[key].default]
        if "spatio_temporal_scaling" in defaults:
            found = [2 ** sum(defaults["spatio_temporal_scaling"].default)]
        if name == "AutoencoderKLMochi":
            found = [math.prod(defaults["temporal_expansions"].default)]
        assert found == [factor], name
