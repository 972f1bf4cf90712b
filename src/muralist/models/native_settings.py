"""The settings that a model was published with: size, steps and guidance.

They come from the pipeline itself, where it says them: the defaults of its `__call__` and the sizes in its config files.
`VARIANTS` lists published models whose settings their pipeline does not say, each with its source: distilled models have
the same class as the model they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muralist.models.diffusers_source import Configs, find_class
from muralist.models.integrity import read_json
from muralist.models.pipeline_class import PIPELINES, text_class

NAMES = ("height", "width", "num_inference_steps", "guidance_scale")
"""The settings whose defaults are the model's."""
_SANA = ("SanaPipeline", "SanaPAGPipeline", "SanaSprintPipeline")


@dataclass(frozen=True)
class ModelFiles:
    """The small files of a pipeline's folder."""

    pipeline: str  # the class
    configs: Configs
    names: str = ""
    """The folder's name and what the configs say about their origin, in lower case: a hint, for lack of a fact."""

    @classmethod
    def read(cls, folder: Path, pipeline: str, components: tuple[str, ...]) -> ModelFiles:
        """Read the config files of all components."""
        configs = {"": read_json(folder / "model_index.json")}
        for part in components:
            configs[part] = read_json(folder / part / "config.json") or read_json(
                folder / part / "scheduler_config.json"
            )
        origins = (str(config.get("_name_or_path", "")) for config in configs.values())
        parts = [part for part in folder.absolute().parts[-3:] if part.startswith("models--")]
        return cls(pipeline, configs, " ".join((folder.name, *parts, *origins)).casefold())

    @property
    def network(self) -> Mapping[str, Any]:
        """The config of the denoiser."""
        return self.configs.get("transformer") or self.configs.get("unet") or {}

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The config of the scheduler."""
        return self.configs.get("scheduler", {})


@dataclass(frozen=True)
class Variant:
    """A published model whose settings differ from the defaults of its pipeline."""

    model: str
    pipelines: str
    """How the names of its pipelines begin."""
    sign: str
    """What tells it from other models of the pipeline, in words."""
    matches: Callable[[ModelFiles], bool]
    settings: Mapping[str, Any]
    source: str
    undistilled: str = ""
    """Of a model that was distilled to few steps: the one to train instead."""


def _has_name(word: str) -> Callable[[ModelFiles], bool]:
    return lambda files: word in files.names


def _spaced(files: ModelFiles, scheduler: str) -> bool:
    """Whether the scheduler is of this class and places its time steps as distilled models need them."""
    config = files.scheduler
    return config.get("_class_name") == scheduler and config.get("timestep_spacing") == "trailing"


VARIANTS = (
    Variant(
        "FLUX.1-schnell", "FluxP", "`guidance_embeds` is false, no dynamic shifting",
        lambda files: files.network.get("guidance_embeds") is False and not files.scheduler.get("use_dynamic_shifting"),
        {"num_inference_steps": 4}, "README of black-forest-labs/FLUX.1-schnell; its guidance 0 is none, as is 1",
        "FLUX.1-dev",
    ),
    Variant(
        "FLUX.2-klein", "Flux2Klein", "`is_distilled` in model_index.json",
        lambda files: files.configs[""].get("is_distilled") is True,
        {"num_inference_steps": 4, "guidance_scale": 1.0},
        "README of black-forest-labs/flux2 (4 steps); diffusers' Flux2KleinPipeline (ignores guidance)",
        "FLUX.2-klein-base",
    ),
    Variant(
        "Krea 2 distilled", "Krea2", "`is_distilled` in model_index.json",
        lambda files: files.configs[""].get("is_distilled") is True,
        {"num_inference_steps": 8, "guidance_scale": 0.0}, "example and docs of diffusers' Krea2Pipeline",
        "the base Krea 2",
    ),
    Variant(
        "Z-Image-Turbo", "ZImage", "the scheduler's `shift` is 3",
        lambda files: files.scheduler.get("shift") == 3.0,
        {"num_inference_steps": 8, "guidance_scale": 0.0}, "src/config/inference.py and model.py of Tongyi-MAI/Z-Image",
        "Z-Image",
    ),
    Variant(
        "SDXL-Turbo", "StableDiffusionXL", "EulerAncestralDiscrete with `trailing` time steps",
        lambda files: _spaced(files, "EulerAncestralDiscreteScheduler"),
        {"num_inference_steps": 4, "guidance_scale": 0.0}, "diffusers docs, SDXL Turbo: 1 to 4 steps, guidance 0",
        "SDXL 1.0",
    ),
    Variant(
        "SD-Turbo", "StableDiffusionP", "EulerDiscrete with `trailing` time steps, epsilon",
        lambda files: _spaced(files, "EulerDiscreteScheduler") and files.scheduler.get("prediction_type") == "epsilon",
        {"num_inference_steps": 4, "guidance_scale": 0.0},
        "README of stabilityai/sd-turbo; Stability-AI/generative-models, scripts/demo/turbo.py: 1 to 4 steps",
        "Stable Diffusion 2.1",
    ),
    Variant(
        "SDXL-Lightning", "StableDiffusionXL", "`lightning` in the folder's name",
        _has_name("lightning"),
        {"num_inference_steps": 4, "guidance_scale": 0.0}, "app.py of ByteDance's space SDXL-Lightning, 4 steps",
        "SDXL 1.0",
    ),
    Variant(
        "SD 3.5 Large Turbo", "StableDiffusion3", "`turbo` in the folder's name",
        _has_name("turbo"),
        {"num_inference_steps": 4, "guidance_scale": 0.0},
        "app.py of stabilityai's space stable-diffusion-3.5-large-turbo",
        "SD 3.5 Large",
    ),
    Variant(
        "SD 3.5 Large", "StableDiffusion3", "38 layers",
        lambda files: files.network.get("num_layers") == 38,
        {"num_inference_steps": 40, "guidance_scale": 4.5},
        "sd3_infer.py of Stability-AI/sd3.5; Hugging Face blog, sd3-5",
    ),
    Variant(
        "SD 3.5 Medium", "StableDiffusion3", "`dual_attention_layers`",
        lambda files: bool(files.network.get("dual_attention_layers")),
        {"num_inference_steps": 40, "guidance_scale": 4.5}, "README of stabilityai/stable-diffusion-3.5-medium",
    ),
    Variant(
        "HiDream-I1-Dev", "HiDreamImage", "`hidream-i1-dev` in the folder's name",
        _has_name("hidream-i1-dev"),
        {"num_inference_steps": 28, "guidance_scale": 0.0}, "inference.py of HiDream-ai/HiDream-I1",
        "HiDream-I1-Full",
    ),
    Variant(
        "HiDream-I1-Fast", "HiDreamImage", "`hidream-i1-fast` in the folder's name",
        _has_name("hidream-i1-fast"),
        {"num_inference_steps": 16, "guidance_scale": 0.0}, "inference.py of HiDream-ai/HiDream-I1",
        "HiDream-I1-Full",
    ),
)  # fmt: skip
"""The first that matches counts."""
_CONSISTENCY = ("LCMScheduler", "TCDScheduler")  # schedulers of latent consistency models


@dataclass(frozen=True)
class Native:
    """What a model's files say about settings that the user may leave out."""

    settings: Mapping[str, Any]
    """Those of `NAMES` that are known."""
    variant: str = ""
    """The published model that was recognized by the table, if any."""
    takes_guidance: bool = True
    """Whether the pipeline has an argument for the guidance scale."""


def native_settings(files: ModelFiles) -> Native:
    """Return the settings that the pipeline's signature and configs say, or the table where it knows better."""
    source = find_class(files.pipeline, "pipelines")
    found: dict[str, Any] = {}
    parameters = source.parameters("__call__") if source else {}
    sized = source
    if files.pipeline in PIPELINES:  # classes with image inputs take the size from them, or have no argument for it
        sized = find_class(text_class(files.pipeline), "pipelines")
    if sized and (size := sized.default_size(files.configs)):
        found["height"], found["width"] = size
    scale = "guidance_scale"
    if "true_cfg_scale" in parameters and files.network.get("guidance_embeds") is not True:
        scale = "true_cfg_scale"
    for name, parameter in (("num_inference_steps", "num_inference_steps"), ("guidance_scale", scale)):
        if parameter in parameters and type(value := parameters[parameter].default) in (int, float):
            found[name] = value if name == "num_inference_steps" else float(value)
    if files.pipeline in _SANA and type(side := files.network.get("sample_size")) is int:
        # SanaPipeline's signature has the size of one of the published models; the network knows its own.
        found["height"] = found["width"] = side * _sana_factor(files)
    takes_guidance = "prompt" not in parameters or scale in parameters  # without a prompt it is refused elsewhere
    if variant := _find_variant(files):
        return Native({**found, **variant.settings}, variant.model, takes_guidance)
    return Native(found, takes_guidance=takes_guidance)


def _find_variant(files: ModelFiles) -> Variant | None:
    matching = (each for each in VARIANTS if files.pipeline.startswith(each.pipelines) and each.matches(files))
    return next(matching, None)


def distillation_warning(files: ModelFiles) -> str:
    """Say what training on images changes in a distilled model, and what to do; empty for other models."""
    variant = _find_variant(files)
    name, instead = (variant.model, variant.undistilled) if variant else ("", "")
    if files.scheduler.get("_class_name") in _CONSISTENCY:
        name, instead = "this latent consistency model", "the model it comes from"
    if instead:
        steps = native_settings(files).settings.get("num_inference_steps", 4)
        return (
            f"{name} was distilled to {steps} steps, which training on images can undo: images in {steps} steps may blur "
            f"after some hundred training steps; train {instead} and try its LoRA here, or keep the run short, with LoRA, "
            "and watch the samples"
        )
    if files.network.get("guidance_embeds") is True:
        return (
            "guidance is distilled into this network: it is trained with an embedded guidance of 1 and keeps all captions, "
            "as other trainers do to keep its guidance; samples use its own guidance"
        )
    return ""


def _sana_factor(files: ModelFiles) -> int:
    channels = files.configs.get("vae", {}).get("encoder_block_out_channels")
    return int(2 ** (len(channels) - 1)) if isinstance(channels, list) and channels else 32
