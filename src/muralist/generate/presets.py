"""The defaults of generation: the user's flags, the presets of distilled models, the model's own settings.

`DISTILLED` lists what `--distilled` sets, each row with its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muralist.core.errors import UserError
from muralist.generate.noise_schedulers import check_arguments, choose_scheduler
from muralist.models.native_settings import NAMES, ModelFiles, native_settings
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name


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
