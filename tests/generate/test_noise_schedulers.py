"""Schedulers by short names with options: equal to plain diffusers, independent of the batch, refused where unfit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.generate import command
from muralist.generate.noise_schedulers import SCHEDULERS, choose_scheduler
from muralist.models.diffusers_source import find_class
from tests.support.equality import CASES
from tests.support.generating import generate_arguments, read_images, write_table
from tests.support.pipeline_calls import (
    CAR,
    GUIDANCE,
    NIGHT,
    SNOW,
    generate,
    generate_with_diffusers,
    load,
    max_difference,
)
from tests.support.worker_pools import ModelThreadPool

Build = Callable[[str], Path]
DIFFUSION = {"_class_name": "DDIMScheduler", "beta_start": 0.1, "prediction_type": "epsilon", "solver_order": 2}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
AS_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    ("written", "diffusion", "flow"),
    [
        ("euler", "EulerDiscrete", "FlowMatchEulerDiscrete"),
        ("Heun", "HeunDiscrete", "FlowMatchHeunDiscrete"),
        ("DPM++", "DPMSolverMultistep", "DPMSolverMultistep"),
        ("dpm++-2s", "DPMSolverSinglestep", "DPMSolverSinglestep"),
        ("dpmpp_2m", "DPMSolverMultistep", "DPMSolverMultistep"),
        ("unipc", "UniPCMultistep", "UniPCMultistep"),
        ("lcm", "LCM", "FlowMatchLCM"),
        ("UniPCMultistepScheduler", "UniPCMultistep", "UniPCMultistep"),
        ("euler_a", "EulerAncestralDiscrete", ""),
        ("TCD", "TCD", ""),
        ("DDIM", "DDIM", ""),
        ("flow_euler", "", "FlowMatchEulerDiscrete"),
        ("FlowMatchHeunDiscrete", "", "FlowMatchHeunDiscrete"),
    ],
)
def test_a_short_name_means_the_class_for_the_model(written: str, diffusion: str, flow: str) -> None:
    for config, expected, other in ((DIFFUSION, diffusion, "flow matching"), (FLOW, flow, "diffusion")):
        if expected:
            assert choose_scheduler(config, written, []).class_name == f"{expected}Scheduler"
        else:
            with pytest.raises(UserError, match=f"does not fit this model. It is for {other}, and this is a model of"):
                choose_scheduler(config, written, [])


def test_every_class_of_the_table_exists() -> None:
    for names in SCHEDULERS:
        for name in filter(None, (names.diffusion, names.flow)):
            assert hasattr(diffusers, f"{name}Scheduler") and find_class(f"{name}Scheduler", "schedulers")


def test_unknown_names_options_and_values_are_refused() -> None:
    def refused(wanted: str | None, *words: str, config: dict[str, Any] = DIFFUSION) -> str:
        with pytest.raises(UserError) as error:
            choose_scheduler(config, wanted, words)
        return str(error.value)

    assert "These do: euler, euler_a" in refused("eulr") and "Did you mean euler?" in refused("eulr")
    message = refused("dpm++", "use_karas_sigmas=true")
    assert "no option use_karas_sigmas. It has algorithm_type, " in message
    assert "Did you mean use_karras_sigmas?" in message
    assert "'maybe': expected bool" in refused("dpm++", "use_karras_sigmas=maybe")
    assert "'three': expected int" in refused("dpm++", "solver_order=three")
    assert "expected midpoint or heun. Did you mean midpoint?" in refused("dpm++", "solver_type=midpiont")
    assert "is not name=value" in refused("dpm++", "use_karras_sigmas")
    assert "gives solver_order twice" in refused("dpm++", "solver_order=3", "solver_order=1")
    assert "cannot be given" in refused("dpm++", "use_flow_sigmas=true")
    assert "from 0 to 1" in refused("tcd", "eta=2")
    assert "cannot be replaced by euler" in refused("euler", config={"_class_name": "SCMScheduler"})


def test_options_are_typed_and_those_that_change_nothing_are_left_out() -> None:
    words = ["use_karras_sigmas=true", "solver_order=2", "flow_shift=1", "algorithm_type=sde-dpmsolver++"]
    choice = choose_scheduler(DIFFUSION, "dpm++", words)
    assert choice.options == {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"}
    assert choice.words == ["algorithm_type=sde-dpmsolver++", "use_karras_sigmas=true"]
    assert choose_scheduler(DIFFUSION, None, ["eta=0.5"]).eta == 0.5


def equal_to_diffusers(folder: Path, kind: Any, changes: dict[str, Any], **settings: Any) -> None:
    """Compare with `pipe.scheduler = X.from_config(pipe.scheduler.config, **changes)`, one image at a time."""

    class Changed:
        @staticmethod
        def from_config(config: Any) -> Any:
            return kind.from_config(config, **changes)

    call: dict[str, Any] = {"guidance_scale": GUIDANCE, **CASES[folder.name].arguments}
    call |= {name: settings[name] for name in ("timesteps",) if name in settings}
    call |= {"eta": 0.3} if "eta=0.3" in settings.get("scheduler_options", ()) else {}
    call |= {"guidance_scale": settings["guidance_scale"]} if "guidance_scale" in settings else {}
    pipeline = load(folder, **settings)
    for request in (CAR, NIGHT):
        (ours,) = generate(pipeline, request)
        (theirs,) = generate_with_diffusers(folder, request, scheduler=Changed, **call)
        assert max_difference(ours, theirs) <= 1
    together, alone = generate(pipeline, CAR, NIGHT, SNOW), [generate(pipeline, each)[0] for each in (CAR, NIGHT, SNOW)]
    for one, other in zip(together, alone, strict=True):
        assert max_difference(one, other) <= 1, "an image depends on its neighbors"


KARRAS = {"use_karras_sigmas": True}


@pytest.mark.parametrize(
    ("name", "wanted", "options", "kind", "changes"),
    [
        (
            "sd",
            "dpm++",
            ["use_karras_sigmas=true", "solver_type=heun"],
            "DPMSolverMultistep",
            KARRAS | {"solver_type": "heun"},
        ),
        (
            "sd",
            "dpm++",
            ["algorithm_type=sde-dpmsolver++"],
            "DPMSolverMultistep",
            {"algorithm_type": "sde-dpmsolver++"},
        ),
        ("sd", "dpm++_2s", [], "DPMSolverSinglestep", {}),
        ("sd", "lcm", [], "LCM", {}),
        ("sdxl", "euler_a", [], "EulerAncestralDiscrete", {}),
        ("sdxl", "unipc", [], "UniPCMultistep", {}),
        ("sdxl", "tcd", ["eta=0.3"], "TCD", {}),
        ("sdxl", None, ["timestep_spacing=trailing"], "EulerDiscrete", {"timestep_spacing": "trailing"}),
        ("sd3", "heun", [], "FlowMatchHeunDiscrete", {}),
        ("sd3", "dpm++", [], "DPMSolverMultistep", AS_FLOW | {"flow_shift": 1.0}),
        ("sd3", None, ["shift=3"], "FlowMatchEulerDiscrete", {"shift": 3.0}),
        ("flux", "unipc", ["use_dynamic_shifting=true"], "UniPCMultistep", AS_FLOW | {"use_dynamic_shifting": True}),
        ("wan21", "euler", [], "FlowMatchEulerDiscrete", {"shift": 3.0}),
        ("wan21", "flow_heun", [], "FlowMatchHeunDiscrete", {"shift": 3.0}),
        ("hunyuan", "dpm++", [], "DPMSolverMultistep", {}),
        ("pixart", "euler", [], "EulerDiscrete", {}),
    ],
)
def test_images_are_those_of_diffusers_whatever_the_batch(
    name: str, wanted: str | None, options: list[str], kind: str, changes: dict[str, Any], tiny_pipeline: Build
) -> None:
    given: dict[str, Any] = {"scheduler_options": options} | ({"scheduler": wanted} if wanted else {})
    equal_to_diffusers(tiny_pipeline(name), getattr(diffusers, f"{kind}Scheduler"), changes, **given)


def test_time_steps_are_those_of_diffusers(tiny_pipeline: Build) -> None:
    settings = {"timesteps": [999, 749, 499, 249], "scheduler": "lcm", "guidance_scale": 0.0}
    equal_to_diffusers(tiny_pipeline("sdxl"), diffusers.LCMScheduler, {}, **settings)
    with pytest.raises(UserError, match="WanPipeline takes no time steps"):
        load(tiny_pipeline("wan21"), timesteps=[900, 500, 100, 1])
    with pytest.raises(UserError, match="DDIMScheduler takes no time steps"):
        load(tiny_pipeline("sd"), timesteps=[900, 500, 100, 1])
    with pytest.raises(UserError, match="must fall from the first to the last"):
        load(tiny_pipeline("sd"), timesteps=[1, 100, 500, 900], scheduler="lcm")


@pytest.mark.parametrize(
    ("name", "wanted", "option"),
    [
        ("sd", "dpm++", "dynamic_thresholding_ratio=0.9"),  # without thresholding
        ("sd", "dpm++", "solver_order=3"),  # in four steps
        ("sd", "dpm++", "flow_shift=3"),  # without flow sigmas
        ("sd3", None, "base_shift=0.7"),  # without dynamic shifting
        ("sd", None, "clip_sample_range=2"),  # without clip_sample
    ],
)
def test_options_without_effect_are_refused(name: str, wanted: str | None, option: str, tiny_pipeline: Build) -> None:
    given: dict[str, Any] = {"scheduler_options": [option]} | ({"scheduler": wanted} if wanted else {})
    with pytest.raises(UserError, match=f"The option {option.partition('=')[0]} has no effect"):
        load(tiny_pipeline(name), **given)


def test_a_pipeline_that_computes_its_own_sigmas_says_which_schedulers_it_cannot_use(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("zimage"), scheduler="heun")
    with pytest.raises(UserError, match="ZImagePipeline cannot use FlowMatchHeunDiscreteScheduler"):
        pipeline.supports_batching()


def test_noise_of_schedulers_does_not_depend_on_workers_and_batches(
    tmp_path: Path, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)  # threads instead of processes
    table, model = write_table(tmp_path, 7), tiny_pipeline("sd")
    options = ("--distilled", "lcm", "--scheduler_options", "original_inference_steps=40")
    outputs = [tmp_path / "one", tmp_path / "three"]
    for output, gpus in zip(outputs, ([0], [0, 1, 2]), strict=True):
        words = generate_arguments(table, model, output, *options, "--gpu_ids", *gpus)
        assert main(["generate", *map(str, words)]) == 0
        printed = capsys.readouterr().err
        assert (
            "4 steps, guidance 1, lcm, original_inference_steps=40; guidance is the default of --distilled lcm)"
            in printed
        )
    assert len(read_images(outputs[0])) == 7 and read_images(outputs[0]) == read_images(outputs[1])
