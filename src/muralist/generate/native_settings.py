"""The settings that a model was published with: size, steps, guidance, and the presets of distilled models.

They come from the pipeline itself, where it says them: the defaults of its `__call__` and the sizes in its config files.
Two tables hold the rest, each row with its source. `VARIANTS` lists published models whose settings their pipeline does
not say: distilled models have the same class as the model they come from. `DISTILLED` lists what `--distilled` sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError
from muralist.generate.diffusers_source import Configs, find_class
from muralist.generate.noise_schedulers import check_arguments, choose_scheduler
from muralist.generate.pipeline_class import PIPELINES, text_class
from muralist.models.integrity import read_json
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name

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
    ),
    Variant(
        "FLUX.2-klein", "Flux2Klein", "`is_distilled` in model_index.json",
        lambda files: files.configs[""].get("is_distilled") is True,
        {"num_inference_steps": 4, "guidance_scale": 1.0},
        "README of black-forest-labs/flux2 (4 steps); diffusers' Flux2KleinPipeline (ignores guidance)",
    ),
    Variant(
        "Z-Image-Turbo", "ZImage", "the scheduler's `shift` is 3",
        lambda files: files.scheduler.get("shift") == 3.0,
        {"num_inference_steps": 8, "guidance_scale": 0.0}, "src/config/inference.py and model.py of Tongyi-MAI/Z-Image",
    ),
    Variant(
        "SDXL-Turbo", "StableDiffusionXL", "EulerAncestralDiscrete with `trailing` time steps",
        lambda files: _spaced(files, "EulerAncestralDiscreteScheduler"),
        {"num_inference_steps": 4, "guidance_scale": 0.0}, "diffusers docs, SDXL Turbo: 1 to 4 steps, guidance 0",
    ),
    Variant(
        "SD-Turbo", "StableDiffusionP", "EulerDiscrete with `trailing` time steps, epsilon",
        lambda files: _spaced(files, "EulerDiscreteScheduler") and files.scheduler.get("prediction_type") == "epsilon",
        {"num_inference_steps": 4, "guidance_scale": 0.0},
        "README of stabilityai/sd-turbo; Stability-AI/generative-models, scripts/demo/turbo.py: 1 to 4 steps",
    ),
    Variant(
        "SDXL-Lightning", "StableDiffusionXL", "`lightning` in the folder's name",
        _has_name("lightning"),
        {"num_inference_steps": 4, "guidance_scale": 0.0}, "app.py of ByteDance's space SDXL-Lightning, 4 steps",
    ),
    Variant(
        "SD 3.5 Large Turbo", "StableDiffusion3", "`turbo` in the folder's name",
        _has_name("turbo"),
        {"num_inference_steps": 4, "guidance_scale": 0.0},
        "app.py of stabilityai's space stable-diffusion-3.5-large-turbo",
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
    ),
    Variant(
        "HiDream-I1-Fast", "HiDreamImage", "`hidream-i1-fast` in the folder's name",
        _has_name("hidream-i1-fast"),
        {"num_inference_steps": 16, "guidance_scale": 0.0}, "inference.py of HiDream-ai/HiDream-I1",
    ),
)  # fmt: skip
"""The first that matches counts."""


@dataclass(frozen=True)
class Preset:
    """What `--distilled NAME` sets for pipelines whose names begin alike, unless the user gives it."""

    name: str
    pipelines: str
    settings: Mapping[str, Any]
    source: str
    needs: str = ""
    """What the weights must be, where the name does not say it."""
    timesteps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Time steps by number of steps; other numbers are refused."""


_TRAILING = ("timestep_spacing=trailing",)
DISTILLED = (
    Preset(
        "lcm", "StableDiffusion", {"scheduler": "lcm", "num_inference_steps": 4, "guidance_scale": 1.0},
        "diffusers docs, Latent Consistency Model (LCM-LoRA)",
    ),
    Preset(
        "turbo", "StableDiffusionXL",
        {"scheduler": "eulerancestraldiscrete", "scheduler_options": _TRAILING, "num_inference_steps": 4,
         "guidance_scale": 0.0},
        "diffusers docs, SDXL Turbo",
    ),
    Preset(
        "turbo", "StableDiffusion3", {"num_inference_steps": 4, "guidance_scale": 0.0},
        "app.py of stabilityai's space stable-diffusion-3.5-large-turbo",
    ),
    Preset(
        "turbo", "StableDiffusion",
        {"scheduler": "eulerdiscrete", "scheduler_options": _TRAILING, "num_inference_steps": 4, "guidance_scale": 0.0},
        "README and scheduler_config.json of stabilityai/sd-turbo",
    ),
    Preset(
        "lightning", "StableDiffusionXL",
        {"scheduler": "eulerdiscrete", "scheduler_options": _TRAILING, "num_inference_steps": 4, "guidance_scale": 0.0},
        "app.py of ByteDance's space SDXL-Lightning", "2, 4 or 8 steps, as in the name of the file",
    ),
    Preset(
        "hyper", "FluxP", {"num_inference_steps": 8, "guidance_scale": 3.5},
        "README of ByteDance/Hyper-SD", "LoRA weight 0.125; 8 or 16 steps, as in the name of the file",
    ),
    Preset(
        "hyper", "StableDiffusion",
        {"scheduler": "ddim", "scheduler_options": _TRAILING, "num_inference_steps": 4, "guidance_scale": 0.0},
        "README of ByteDance/Hyper-SD", "2, 4 or 8 steps, as in the name of the file",
    ),
    Preset(
        "tcd", "StableDiffusion",
        {"scheduler": "tcd", "scheduler_options": ("eta=0.3",), "num_inference_steps": 4, "guidance_scale": 0.0},
        "diffusers docs, Trajectory Consistency Distillation-LoRA",
    ),
    Preset(
        "dmd2", "StableDiffusionXL", {"scheduler": "lcm", "num_inference_steps": 4, "guidance_scale": 0.0},
        "README of tianweiy/DMD2", "4 steps or 1, as in the name of the file",
        timesteps={4: (999, 749, 499, 249), 1: (399,)},
    ),
)  # fmt: skip
"""The first whose name and pipeline match counts."""


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
    for variant in VARIANTS:
        if files.pipeline.startswith(variant.pipelines) and variant.matches(files):
            return Native({**found, **variant.settings}, variant.model, takes_guidance)
    return Native(found, takes_guidance=takes_guidance)


def _sana_factor(files: ModelFiles) -> int:
    channels = files.configs.get("vae", {}).get("encoder_block_out_channels")
    return int(2 ** (len(channels) - 1)) if isinstance(channels, list) and channels else 32


def find_preset(name: str, pipeline: str) -> Preset:
    """Return the row of `DISTILLED` for a pipeline, or refuse."""
    for preset in DISTILLED:
        if preset.name == name and pipeline.startswith(preset.pipelines):
            return preset
    fitting = dict.fromkeys(preset.name for preset in DISTILLED if pipeline.startswith(preset.pipelines))
    raise UserError(
        f"--distilled {name} has no settings for {pipeline}.",
        f"For this pipeline there are: {', '.join(fitting)}." if fitting else "No preset is for this pipeline.",
        "Leave it out, and give --num_inference_steps, --guidance_scale and --scheduler as the weights' authors say.",
    )


class Resolution(NamedTuple):
    """Settings with all defaults applied, and where these come from."""

    settings: dict[str, Any]
    owners: dict[str, list[str]]
    """The names of settings by their origin, as `describe_origins` takes them."""


def user_value(settings: GenerateSettings, name: str) -> Any:
    """Return a setting that the user gave; None for a default."""
    value = getattr(settings, name)
    return value if name in settings.model_fields_set and value != "auto" else None


def script_value(settings: GenerateSettings, name: str) -> Any:
    """Return a default that the script has for all models; None if the command has none."""
    default = type(settings).model_fields[name].default
    return default if name not in settings.model_fields_set and getattr(settings, name) == default != "auto" else None


def folder_value(settings: GenerateSettings, name: str) -> Any:
    """Return a default that `output_dir.keep_folder_settings` took from the images in the folder; else None."""
    return getattr(settings, name) if name in settings.from_folder else None


def resolve_settings(
    files: ModelFiles, settings: GenerateSettings, own_size: tuple[int, int] | None = None
) -> Resolution:
    """Apply the user's flags, else the defaults of --distilled, a model trained here, the command, or the model."""
    native = native_settings(files)
    preset = find_preset(settings.distilled, files.pipeline) if settings.distilled else None
    if not native.takes_guidance and user_value(settings, "guidance_scale") is not None:
        raise UserError(
            f"--guidance_scale has no effect: {files.pipeline} has no such argument.", fix="Leave --guidance_scale out."
        )
    own = dict(zip(("height", "width"), own_size, strict=True)) if own_size else {}
    script = {name: script_value(settings, name) for name in NAMES}
    if own_size:
        script["guidance_scale"] = None  # trained here: as in the samples of its training
    if files.pipeline.startswith("Flux") and files.network.get("guidance_embeds") is False:
        script["guidance_scale"] = None  # not guided, with the script too
    timesteps = list(settings.timesteps)
    layers = (
        ("", {name: user_value(settings, name) for name in NAMES}),
        ("", {"num_inference_steps": len(timesteps) or None}),
        (f"the {{}} of --distilled {settings.distilled}", preset.settings if preset else {}),
        ("the model's {}", own),
        ("as in the folder", {name: folder_value(settings, name) for name in NAMES}),
        ("the script's {}", script),
        (f"the {{}} of {native.variant}" if native.variant else "the model's {}", native.settings),
        ("", {} if native.takes_guidance else {"guidance_scale": 1.0}),
    )
    values: dict[str, Any] = {}
    origins: dict[str, list[str]] = {}
    for name in NAMES:
        origin, layer = next(((origin, layer) for origin, layer in layers if layer.get(name) is not None), ("", {}))
        if not layer:
            raise UserError(
                f"{files.pipeline} does not say which --{name} it was made for.",
                "Neither the defaults of its call nor its config files do.",
                f"Give --{name}.",
            )
        values[name] = layer[name]
        origins.setdefault(origin, []).append(name)
    steps = values["num_inference_steps"]
    if preset and preset.timesteps and not timesteps:
        if steps not in preset.timesteps:
            counts = " or ".join(map(str, sorted(preset.timesteps)))
            raise UserError(f"--distilled {preset.name} has time steps for {counts} steps, not {steps}.")
        timesteps = list(preset.timesteps[steps])
    if timesteps and len(timesteps) != steps:
        raise UserError(
            f"--timesteps has {len(timesteps)} time steps, and --num_inference_steps is {steps}.",
            fix="Leave --num_inference_steps out.",
        )
    values |= {"timesteps": timesteps, "distilled": None} | _resolve_scheduler(files, settings, preset, timesteps)
    return Resolution(values, origins)


def _resolve_scheduler(
    files: ModelFiles, settings: GenerateSettings, preset: Preset | None, timesteps: list[int]
) -> dict[str, Any]:
    wanted, words = settings.scheduler, list(settings.scheduler_options)
    if preset and wanted is None:
        wanted = preset.settings.get("scheduler")
        names = {word.partition("=")[0] for word in words}
        defaults = preset.settings.get("scheduler_options", ())
        words += [word for word in defaults if word.partition("=")[0] not in names]
    if wanted is None and not words and not timesteps:
        return {"scheduler": None, "scheduler_options": []}
    choice = choose_scheduler(files.scheduler, wanted, words)
    check_arguments(choice, timesteps, files.pipeline)
    return {"scheduler": scheduler_name(choice.class_name) if wanted else None, "scheduler_options": choice.words}


def describe_origins(origins: Mapping[str, Sequence[str]]) -> str:
    """Say which settings are whose defaults: {"the model's {}": names}; those without an owner are the user's."""
    words = {"num_inference_steps": "steps", "guidance_scale": "guidance"}
    parts = []
    for origin, names in origins.items():
        if origin and names:
            sizes = [name for name in names if name in ("height", "width")]
            shown = ["size"] if len(sizes) == 2 else sizes
            shown += [words[name] for name in names if name in words]
            listed = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
            plural = len(shown) > 1 or shown[0] == "steps"
            parts.append(f"{listed} {'are' if plural else 'is'} {origin.format('defaults' if plural else 'default')}")
    return "; ".join(parts)
