"""Size, steps and guidance default to what the model's own pipeline and config files say."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from muralist.core.errors import UserError
from muralist.generate.model_info import ModelInfo, inspect_model, settings_identity
from muralist.generate.presets import DISTILLED
from muralist.models.diffusers_source import find_class
from muralist.models.native_settings import NAMES, VARIANTS, ModelFiles, native_settings
from muralist.settings import BatchScriptSettings, GenerateSettings
from tests.conftest import REPOSITORY
from tests.support.generating import SCRIPT, read_images, write_table
from tests.support.runs import finish, fork

Build = Callable[[str], Path]
# height, width, steps, guidance; the tiny U-Nets and transformers with a sample_size of 8 make 64 x 64 pixels
EXPECTED = {
    "hunyuan": (64, 64, 50, 5.0),
    "sd": (64, 64, 50, 7.5),
    "sdxl": (64, 64, 50, 5.0),
    "sd3": (64, 64, 28, 7.0),
    "flux": (1024, 1024, 28, 3.5),
    "schnell": (1024, 1024, 4, 1.0),
    "pixart": (64, 64, 20, 4.5),
    "sana": (64, 64, 20, 4.5),
    "wan21": (480, 832, 50, 5.0),
    "wan22": (480, 832, 50, 5.0),
    "zimage": (1024, 1024, 50, 5.0),
    "qwenimage": (1024, 1024, 50, 4.0),
}


def inspected(path: Path, kind: type[GenerateSettings] = GenerateSettings, **changes: Any) -> ModelInfo:
    return inspect_model(kind(prompts_csv="", output_dir="", model_path=str(path), **changes))


def values(model: ModelInfo) -> tuple[Any, ...]:
    return tuple(model.resolved[name] for name in NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_defaults_are_the_model_s(name: str, tiny_pipeline: Build) -> None:
    model = inspected(tiny_pipeline(name))
    assert values(model) == EXPECTED[name]
    whose = "the defaults of FLUX.1-schnell" if name == "schnell" else "the model's defaults"
    assert model.origins == f"size, steps and guidance are {whose}"


class _SizeKnown(Exception):
    pass


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("sana", "schnell")])
def test_they_are_those_that_diffusers_uses(name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the pipeline without arguments asks for latents of this size, and its signature has these numbers."""
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    signature = inspect.signature(type(pipe).prepare_latents)
    parameters = inspect.signature(type(pipe).__call__).parameters
    asked: dict[str, Any] = {}

    def note(*arguments: Any, **named: Any) -> None:
        asked.update(signature.bind(*arguments, **named).arguments)
        raise _SizeKnown

    monkeypatch.setattr(type(pipe), "prepare_latents", note)
    binning = {"use_resolution_binning": False} if "use_resolution_binning" in parameters else {}
    with pytest.raises(_SizeKnown), torch.no_grad():
        pipe("a cat", **binning)
    height, width, steps, guidance = EXPECTED[name]
    assert (asked["height"], asked["width"]) == (height, width)
    scale = "true_cfg_scale" if name == "qwenimage" else "guidance_scale"
    assert (parameters["num_inference_steps"].default, parameters[scale].default) == (steps, guidance)


def test_signatures_read_from_source_are_those_of_the_imported_classes() -> None:
    pattern = r"(StableDiffusion|Flux|Wan|Sana|Kolors|Bria)\w*Pipeline"
    classes = [name for name in dir(diffusers) if re.fullmatch(pattern, name)]
    assert len(classes) > 40
    for name in classes:
        kind = getattr(diffusers, name)
        if "dummy" in kind.__module__ or "onnx" in kind.__module__ or "Flax" in name or "Modular" in name:
            continue
        source = find_class(name, "pipelines")
        assert source is not None, name
        expected = {key: value.default for key, value in inspect.signature(kind.__call__).parameters.items()}
        found = source.parameters("__call__")
        if name == "SanaWMPipeline":  # its defaults are imported constants: such a size must be given
            continue
        for parameter in (*NAMES, "true_cfg_scale"):
            assert (parameter in found) == (parameter in expected), (name, parameter)
            if parameter in found and expected[parameter] is not inspect.Parameter.empty:
                assert found[parameter].default == expected[parameter], (name, parameter)


def test_the_user_s_values_are_told_from_the_model_s(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("wan21")
    some = inspected(folder, height=64, guidance_scale=3.0)
    assert values(some) == (64, 832, 50, 3.0)
    assert some.origins == "width and steps are the model's defaults"
    every = inspected(folder, height=64, width=64, num_inference_steps=4, guidance_scale=3.0)
    assert values(every) == (64, 64, 4, 3.0) and every.origins == ""
    assert inspected(folder, num_inference_steps="auto", height=None).origins.startswith("size, steps and guidance")


def variant(folder: Path, target: Path, part: str, **changes: Any) -> Path:
    """Copy a pipeline with another config of one component; its weights are not loaded."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    file = target if not part else target / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    file = file / "model_index.json" if not part else file
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return target


@pytest.mark.parametrize(
    ("pipeline", "folder", "part", "changes", "name", "steps", "guidance"),
    [
        ("zimage", "a", "scheduler", {"shift": 3.0}, "Z-Image-Turbo", 8, 0.0),
        ("zimage", "a", "scheduler", {"shift": 6.0}, "", 50, 5.0),
        ("sdxl", "a", "scheduler",
         {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}, "SDXL-Turbo", 4, 0.0),
        ("sdxl", "sdxl-lightning-4step", "scheduler", {}, "SDXL-Lightning", 4, 0.0),
        ("sd", "a", "scheduler",
         {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing"}, "SD-Turbo", 4, 0.0),
        ("sd", "a", "scheduler",
         {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
         "", 50, 7.5),
        ("sd3", "stable-diffusion-3.5-large-turbo", "scheduler", {}, "SD 3.5 Large Turbo", 4, 0.0),
        ("sd3", "a", "transformer", {"num_layers": 38}, "SD 3.5 Large", 40, 4.5),
        ("sd3", "a", "transformer", {"dual_attention_layers": [0]}, "SD 3.5 Medium", 40, 4.5),
        ("flux", "a", "scheduler", {"use_dynamic_shifting": True}, "", 28, 3.5),
    ],
)  # fmt: skip
def test_published_variants_are_recognized_by_their_files(
    pipeline: str, folder: str, part: str, changes: dict[str, Any], name: str, steps: int, guidance: float,
    tmp_path: Path, tiny_pipeline: Build,
) -> None:  # fmt: skip
    model = inspected(variant(tiny_pipeline(pipeline), tmp_path / folder, part, **changes))
    assert values(model)[2:] == (steps, guidance)
    assert (f"the defaults of {name}" in model.origins) if name else ("the model's defaults" in model.origins)


def test_a_distilled_flux_2_klein_says_so_in_its_index() -> None:
    files = ModelFiles("Flux2KleinPipeline", {"": {"is_distilled": True}, "vae": {"block_out_channels": [1, 2, 3, 4]}})
    assert native_settings(files).settings == {
        "height": 1024, "width": 1024, "num_inference_steps": 4, "guidance_scale": 1.0,
    }  # fmt: skip
    assert native_settings(ModelFiles("Flux2KleinPipeline", {"": {}})).settings["num_inference_steps"] == 50


def test_guidance_without_effect_and_unknown_defaults_are_refused(tmp_path: Path, tiny_pipeline: Build) -> None:
    plain = variant(tiny_pipeline("sd3"), tmp_path / "a", "", _class_name="HunyuanImagePipeline")
    with pytest.raises(UserError, match="--guidance_scale has no effect: HunyuanImagePipeline has no such argument"):
        inspected(plain, guidance_scale=4.0)
    odd = variant(tiny_pipeline("sd3"), tmp_path / "b", "", _class_name="NoSuchPipeline")
    with pytest.raises(UserError, match="NoSuchPipeline does not say which --height.*Give --height"):
        inspected(odd)
    inspected(odd, height=64, width=64, num_inference_steps=4, guidance_scale=4.0)


def test_the_script_keeps_its_own_defaults(tiny_pipeline: Build) -> None:
    for name in ("wan21", "sdxl", "qwenimage"):
        model = inspected(tiny_pipeline(name), BatchScriptSettings)
        assert values(model) == (480, 832, 20, 7.5)
        assert model.origins == "size, steps and guidance are the script's defaults"
    assert values(inspected(tiny_pipeline("schnell"), BatchScriptSettings)) == (480, 832, 20, 1.0), "not guided"
    asked = inspected(tiny_pipeline("sdxl"), BatchScriptSettings, num_inference_steps=8, height=64)
    assert values(asked) == (64, 832, 8, 7.5) and asked.origins == "width and guidance are the script's defaults"


def test_the_script_and_the_command_differ_only_in_their_defaults(tmp_path: Path, tiny_pipeline: Build) -> None:
    """A folder goes on with its own settings where the command leaves them out; other flags are refused."""
    model, table = tiny_pipeline("sd"), write_table(tmp_path, 2)
    words = ["--prompts_csv", table, "--model_path", model, "--dtype", "fp32", "--width", 64, "--height", 64]
    words += ["--batch_size", 1, "--gpu_ids", 0]
    done = finish(fork("python", REPOSITORY / SCRIPT, *words, "--output_dir", tmp_path / "script"))
    assert "64 x 64, from" in done and "20 steps, guidance 7.5; steps and guidance are the script's defaults)" in done
    write_table(tmp_path, 3)
    command = ["python", "-m", "muralist", "generate", *words, "--output_dir", tmp_path / "script"]
    refused = finish(fork(*command, "--num_inference_steps", 50), expect=1)
    assert "num_inference_steps 20 -> 50" in refused and "Continue with --num_inference_steps 20, or" in refused
    assert len(read_images(tmp_path / "script")) == 2
    resumed = finish(fork(*command))
    assert "2 of 3 images exist" in resumed and "steps and guidance are as in the folder)" in resumed
    whole = ["python", REPOSITORY / SCRIPT, *words, "--output_dir", tmp_path / "whole"]
    finish(fork(*whole))
    assert read_images(tmp_path / "script") == read_images(tmp_path / "whole")


def test_the_defaults_cost_no_import_of_diffusers(tiny_pipeline: Build) -> None:
    script = (
        "import sys; from muralist.generate.model_info import inspect_model\n"
        "from muralist.settings import GenerateSettings\n"
        "given = dict(distilled='lcm', scheduler_options=['original_inference_steps=40'])\n"
        "inspect_model(GenerateSettings(prompts_csv='', output_dir='', model_path=sys.argv[1], **given))\n"
        "print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, tiny_pipeline("sd")], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("name", "pipeline", "expected"),
    [
        ("lcm", "sd", ("lcm", [], 4, 1.0)),
        ("lightning", "sdxl", ("eulerdiscrete", ["timestep_spacing=trailing"], 4, 0.0)),
        ("turbo", "sdxl", ("eulerancestraldiscrete", ["timestep_spacing=trailing"], 4, 0.0)),
        ("turbo", "sd3", (None, [], 4, 0.0)),
        ("hyper", "sdxl", ("ddim", ["timestep_spacing=trailing"], 4, 0.0)),
        ("hyper", "flux", (None, [], 8, 3.5)),
        ("tcd", "sdxl", ("tcd", ["eta=0.3"], 4, 0.0)),
        ("dmd2", "sdxl", ("lcm", [], 4, 0.0)),
    ],
)
def test_presets_of_distilled_weights(
    name: str, pipeline: str, expected: tuple[Any, ...], tiny_pipeline: Build
) -> None:
    resolved = inspected(tiny_pipeline(pipeline), distilled=name).resolved
    names = ("scheduler", "scheduler_options", "num_inference_steps", "guidance_scale")
    assert tuple(resolved[each] for each in names) == expected
    assert resolved["timesteps"] == ([999, 749, 499, 249] if name == "dmd2" else [])
    assert inspected(tiny_pipeline(pipeline), **resolved).resolved == resolved, "resolving twice changes nothing"


def test_flags_override_a_preset_and_its_effect_is_in_the_ledger(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sdxl")

    def identity(**changes: Any) -> dict[str, Any]:
        settings = GenerateSettings(prompts_csv="", output_dir="", model_path=str(folder), **changes)
        return settings_identity(settings, inspect_model(settings))

    assert identity(distilled="lightning", num_inference_steps=8)["num_inference_steps"] == 8
    by_hand = {"scheduler": "euler", "scheduler_options": {"timestep_spacing": "trailing"}}
    by_hand |= {"num_inference_steps": 4, "guidance_scale": 0.0}
    assert identity(distilled="lightning") == identity(**by_hand)
    assert identity(distilled="dmd2")["timesteps"] == [999, 749, 499, 249]
    assert identity(distilled="dmd2", num_inference_steps=1)["timesteps"] == [399]
    plain = identity(num_inference_steps=4)
    assert "timesteps" not in plain and "scheduler_options" not in plain and plain["scheduler"] is None
    other = inspected(folder, distilled="tcd", scheduler="ddim").resolved
    assert (other["scheduler"], other["scheduler_options"]) == ("ddim", [])
    with pytest.raises(UserError, match="dmd2 has time steps for 1 or 4 steps, not 2"):
        identity(distilled="dmd2", num_inference_steps=2)
    with pytest.raises(UserError, match="--distilled lightning has no settings for WanPipeline"):
        inspected(tiny_pipeline("wan21"), distilled="lightning")
    with pytest.raises(UserError, match="2 time steps, and --num_inference_steps is 4"):
        identity(timesteps=[500, 100], num_inference_steps=4)
    assert identity(timesteps=[500, 100])["num_inference_steps"] == 2


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    page = (REPOSITORY / "docs" / "generating.md").read_text(encoding="utf-8")

    def shown(settings: Any) -> tuple[str, str]:
        steps, guidance = settings.get("num_inference_steps"), settings.get("guidance_scale")
        return ("-" if steps is None else str(steps)), ("-" if guidance is None else f"{guidance:g}")

    for row in VARIANTS:
        steps, guidance = shown(row.settings)
        assert f"| {row.model} | {row.sign} | {steps} | {guidance} | {row.source} |\n" in page
    for preset in DISTILLED:
        steps, guidance = shown(preset.settings)
        words = [preset.settings.get("scheduler") or "-", *preset.settings.get("scheduler_options", ())]
        if preset.timesteps:
            words.append("--timesteps " + " ".join(map(str, preset.timesteps[preset.settings["num_inference_steps"]])))
        cells = (
            f"`{preset.name}`",
            f"{preset.pipelines}...",
            ", ".join(words),
            steps,
            guidance,
            preset.needs,
            preset.source,
        )
        assert f"| {' | '.join(cells)} |\n" in page, cells
