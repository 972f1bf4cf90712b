"""What lies at --model_path, told from small files."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muralist.errors import UserError
from muralist.generate.models import check_model
from muralist.settings import GenerateSettings

Build = Callable[[str], Path]


def given(path: Path, **changes: object) -> GenerateSettings:
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(path), **changes)  # type: ignore[arg-type]


def test_defaults_of_pipelines(tiny_pipeline: Build) -> None:
    checked = check_model(given(tiny_pipeline("wan21")))
    assert checked.kind == "pipeline"
    assert checked.identity["model"] == "WanPipeline"
    expected = {"height": 480, "width": 832, "guidance_scale": 7.5, "num_frames": 1, "enable_half_frame": False}
    assert checked.settled == expected
    asked = check_model(given(tiny_pipeline("wan21"), height=64, guidance_scale=3.0)).settled
    assert (asked["height"], asked["width"], asked["guidance_scale"]) == (64, 832, 3.0)
    assert check_model(given(tiny_pipeline("schnell"))).settled["guidance_scale"] == 1.0


@pytest.mark.parametrize(
    ("frames", "half", "made"), [(1, True, 1), (5, False, 5), (6, False, 5), (81, True, 41), (8, True, 5), (2, True, 1)]
)
def test_frames_that_the_model_can_make(frames: int, half: bool, made: int, tiny_pipeline: Build) -> None:
    settings = given(tiny_pipeline("wan21"), num_frames=frames, enable_half_frame=half)
    settled = check_model(settings).settled
    assert settled["num_frames"] == made
    assert check_model(settings.model_copy(update=settled)).settled == settled


def test_half_of_one_frame_says_that_it_does_nothing(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "info", said.append)
    check_model(given(tiny_pipeline("wan21"), enable_half_frame=True))
    assert said == ["--enable_half_frame does nothing for one frame."]


def test_a_negative_prompt_that_does_nothing_is_said(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "info", lambda text, *words: said.append(text % words))
    check_model(given(tiny_pipeline("flux"), negative_prompt="rain"))
    check_model(given(tiny_pipeline("sd"), negative_prompt="rain"))
    assert said == ["--negative_prompt does nothing here: FluxPipeline runs without classifier-free guidance."]


def test_the_fingerprint_is_of_the_files_and_not_of_the_place(tiny_pipeline: Build, tmp_path: Path) -> None:
    first = tiny_pipeline("pixart")
    copy = tmp_path / "elsewhere"
    shutil.copytree(first, copy)
    assert check_model(given(copy)).identity == check_model(given(first)).identity
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert check_model(given(copy)).identity != check_model(given(first)).identity


def test_a_path_without_a_model(tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd")
    with pytest.raises(UserError, match=r"no model at .*sdd\. Nothing is downloaded.*Did you mean sd"):
        check_model(given(folder.with_name("sdd")))
    with pytest.raises(UserError, match="no model at org/name.*Check the path"):
        check_model(given(Path("org/name")))
    with pytest.raises(UserError, match=f"holds no model.*model_index.json.*Did you mean {folder.parent}/"):
        check_model(given(folder.parent))
    with pytest.raises(UserError, match="holds no model.*Give the folder"):
        check_model(given(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        check_model(given(tmp_path))


def test_a_pipeline_that_is_not_whole(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pipeline("sd"), copy)
    shutil.rmtree(copy / "vae")
    with pytest.raises(UserError, match="not whole: it has no vae.*Copy the model anew"):
        check_model(given(copy))
    (copy / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="model_index.json cannot be read"):
        check_model(given(copy))
    (copy / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(UserError, match="names no pipeline"):
        check_model(given(copy))


def test_a_lora_that_is_not_there(tiny_pipeline: Build, tmp_path: Path) -> None:
    (tmp_path / "style").mkdir()
    with pytest.raises(UserError, match="no LoRA at .*stile.*Did you mean style?"):
        check_model(given(tiny_pipeline("sd"), lora=[f"{tmp_path}/stile:0.5"]))


def test_flags_of_jit_are_refused_elsewhere(tiny_pipeline: Build) -> None:
    for changes in ({"weights": "ema1"}, {"guidance_interval": (0.1, 1)}, {"official_last_step": True}):
        (flag,) = changes
        with pytest.raises(UserError, match=f"--{flag} is for JiT models, and this is a pipeline of diffusers"):
            check_model(given(tiny_pipeline("sd"), **changes))


def test_what_a_pipeline_is_can_be_told_without_torch(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("wan21")
    script = (
        "import sys; from muralist.generate import job; from muralist.settings import GenerateSettings as Settings\n"
        "job.check_model(Settings(prompts_csv='none', output_dir='none', model_path=sys.argv[1]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
