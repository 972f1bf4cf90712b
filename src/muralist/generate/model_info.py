"""The model at --model_path, identified by its small files before anything heavy is imported or loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError, closest_match
from muralist.core.image_size import format_size, height_width
from muralist.core.run_dir import exists
from muralist.generate.lora_check import PEFT_CONFIG, check_lora
from muralist.generate.presets import describe_origins, folder_value, resolve_settings, script_value, user_value
from muralist.models.configs import JIT_GUIDANCE
from muralist.models.hub import find_model
from muralist.models.integrity import check_base, fingerprint, read_json
from muralist.models.native_settings import ModelFiles
from muralist.models.pipeline_class import INDEX_FILE, PIPELINES, PipelineInputs, read_index
from muralist.models.spec import JIT, ModelFamily, find_family_by_key
from muralist.settings import GenerateSettings

log = logging.getLogger("muralist")
_JIT_STEPS = 50  # of the official sampler
_JIT_FLAGS = ("weights", "guidance_interval", "official_last_step")
_IDENTITY = (
    "dtype",
    "num_inference_steps",
    "guidance_scale",
    "cfg_truncation_step",
    "height",
    "width",
    "negative_prompt",
    "seed_start",
    "num_frames",
    "scheduler",
)
_IDENTITY_IF_GIVEN = ("scheduler_options", "timesteps")  # older ledgers do not have them
PIPELINE_SETTINGS = (
    *_IDENTITY,
    *_IDENTITY_IF_GIVEN,
    *_JIT_FLAGS,
    "distilled",
    "enable_half_frame",
    "lora",
    "preset",
    "compile",
    "cpu_offload",
)
"""Settings of a loaded model; the others concern the command: its table, its files and its workers."""
_ROUNDING_PIPELINES = ("Wan", "SkyReels", "Kandinsky", "ChronoEdit", "Lucy", "AnyFlow")  # the others round down
_TEMPORAL_FACTORS = {
    "AutoencoderKLCogVideoX": 4,
    "AutoencoderKLCosmos": 8,
    "AutoencoderKLHunyuanVideo": 4,
    "AutoencoderKLHunyuanVideo15": 4,
    "AutoencoderKLLTXVideo": 8,
    "AutoencoderKLMochi": 6,
    "AutoencoderKLWan": 4,
}  # where a VAE's config does not say it
SHARD_SETTINGS = ("shards", "images_per_prompt")
"""Settings that decide which samples a tar file of --shards holds."""
_WEIGHTS = (".pth", ".pt", ".safetensors")
FP8_PIPELINES = ("WanPipeline", "HunyuanDiTPipeline")
"""Pipelines whose large matmuls run in FP8 in fast mode; U-Nets spend their time in convolutions."""


@dataclass(frozen=True)
class ModelInfo:
    """A model that exists and fits the settings: a diffusers pipeline, a fine-tuned one, or a JiT."""

    resolved: dict[str, Any]
    """Settings whose defaults depend on the model: height, width, num_inference_steps, guidance_scale, num_frames, ..."""
    identity: dict[str, Any]
    """The model's identity in the ledger: `model`, its name; `fingerprint`, of its files; `lora`, of its adapters."""
    description: dict[str, Any] = field(default_factory=dict)  # of a JiT or a model trained here, as in a manifest
    folder: Path | None = None  # in diffusers layout: the model, or what it was fine-tuned from; None for a JiT
    components: tuple[str, ...] = ()  # the names of that folder's components
    pipeline_class: str = ""  # the diffusers class that generates the images
    inputs: PipelineInputs | None = None  # of that class
    default_owners: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as `Resolution.owners`

    @property
    def origins(self) -> str:
        """Which of the resolved settings are whose defaults, in words; empty if every value is the user's."""
        return describe_origins(self.default_owners)

    def without_default_size(self) -> ModelInfo:
        """Return the model for rows whose sizes are those of their image inputs."""
        owners = {
            owner: [name for name in names if name not in ("height", "width")]
            for owner, names in self.default_owners.items()
        }
        return replace(self, default_owners=owners)

    @property
    def is_jit(self) -> bool:
        """Whether it is a JiT, whose prompts are its classes."""
        return self.folder is None


def inspect_model(settings: GenerateSettings) -> ModelInfo:
    """Identify the model and resolve the defaults that depend on it; refuse a model that cannot do the job."""
    _check_format(settings)
    path = find_model(settings.model_path, "--model_path")
    if path == Path(settings.model_path):
        return _inspect(path, settings)
    local = {"model_path": str(path)}  # of a model of the Hub: workers read its folder in the cache
    model = _inspect(path, settings.model_copy(update=local))
    return replace(model, resolved=model.resolved | local)


def _inspect(path: Path, settings: GenerateSettings) -> ModelInfo:
    if (path / INDEX_FILE).is_file() and not _is_jit_export(path):
        _refuse_jit_flags(settings, "a diffusers pipeline")
        return _pipeline(path, settings)
    from muralist.models.weights import read_description

    if path.is_dir() and (path / "config.yaml").is_file() and not (path / "checkpoints" / "latest").is_file():
        raise UserError(f"The run {path} has no checkpoint yet.", fix="Wait for its first checkpoint.")
    description = read_description(path)
    family = find_family_by_key(description["family"]) if "family" in description else None
    if family and family.pipeline_class:
        _refuse_jit_flags(settings, f"a {family.name}", [flag for flag in _JIT_FLAGS if flag != "weights"])
        return _fine_tuned(path, family, description, settings)
    if description or path.suffix in _WEIGHTS or _is_jit_folder(path):
        return _jit(path, description, settings)
    nested = sorted(file.parent for file in path.glob(f"*/{INDEX_FILE}")) if path.is_dir() else []
    nested += sorted(file.parent for file in path.glob(f"snapshots/*/{INDEX_FILE}"))
    raise UserError(
        f"{path} holds no model that generate can load.",
        f"A pipeline in diffusers layout has a {INDEX_FILE}; a run trained here has checkpoints.",
        f"Did you mean {nested[0]}?" if nested else "Give the folder that holds one of them.",
    )


def _check_format(settings: GenerateSettings) -> None:
    """Refuse an image format or quality that would have no effect."""
    quality, image_format = settings.image_quality, settings.image_format
    if settings.num_frames > 1:
        for flag in ("image_format", "image_quality"):
            if flag in settings.model_fields_set:
                raise UserError(
                    f"--{flag} is for images, and --num_frames {settings.num_frames} makes clips.",
                    fix="Leave it out; --video_format is the format of clips.",
                )
    if quality is not None and image_format == "png":
        raise UserError(
            f"--image_quality {quality} has no effect on PNG, which is lossless.",
            fix="Leave it out, or give --image_format jpg or webp.",
        )
    if quality == "lossless" and image_format == "jpg":
        raise UserError("--image_quality lossless is for WebP: a JPEG is not lossless.", fix="Give a number, or webp.")


def _pipeline(folder: Path, settings: GenerateSettings) -> ModelInfo:
    name, components = read_index(folder)
    files = ModelFiles.read(folder, name, components)
    found, owners = resolve_settings(files, settings)
    distilled = files.network.get("guidance_embeds") is True and not name.startswith("Sana")
    guidance = found["guidance_scale"]
    least = 0.0 if name.startswith("ZImage") else 1.0
    _check_truncation(settings, name, guided=not distilled and guidance > least)
    resolved = found | _resolved_frames(_possible_frames(folder, name, settings))
    _check_loras(settings, folder, components, name)
    fingerprints = {part: fingerprint(folder / part) for part in components}
    identity = _identity(name, fingerprints, settings)
    return ModelInfo(resolved, identity, {}, folder, components, name, PIPELINES.get(name), owners)


def _fine_tuned(path: Path, family: ModelFamily, description: dict[str, Any], settings: GenerateSettings) -> ModelInfo:
    from muralist.models.weights import weights_file

    base = Path(description["folder"])
    check_base(base, description)
    name, components = read_index(base)
    size = description["img_size"]
    own = (size, size) if isinstance(size, int) else tuple(size)
    found, owners = resolve_settings(ModelFiles.read(base, name, components), settings, (own[0], own[1]))
    _check_truncation(settings, family.name, guided=found["guidance_scale"] > 1)
    resolved = found | _resolved_frames(_requested_frames(settings))
    _check_loras(settings, base, components, name)
    fingerprints = {part: fingerprint(base / part) for part in components}
    fingerprints["trained"] = fingerprint(weights_file(path, settings.weights))
    identity = _identity(f"{description['model']} trained here", fingerprints, settings)
    identity |= settings.model_dump(mode="json", include={"weights"}, exclude_defaults=True)
    return ModelInfo(resolved, identity, description, base, components, name, default_owners=owners)


def _refuse_jit_flags(settings: GenerateSettings, kind: str, flags: Sequence[str] = _JIT_FLAGS) -> None:
    for flag in flags:
        if flag in settings.model_fields_set:
            raise UserError(f"--{flag} is for JiT models, and this is {kind}.", fix="Leave it out.")


def _jit(path: Path, description: dict[str, Any], settings: GenerateSettings) -> ModelInfo:
    from muralist.diffusion.samplers import SamplerSettings
    from muralist.models.jit_spec import read_jit_spec
    from muralist.models.weights import has_single_weight_set, weights_file

    solver = settings.scheduler or "heun"
    if solver not in JIT.solvers:
        raise UserError(
            f"The scheduler {solver} does not fit a JiT model.",
            f"These do: {', '.join(JIT.solvers)}.",
            closest_match(solver, JIT.solvers),
        )
    # Refuses an empty interval, and solvers that the official sampler does not have.
    SamplerSettings(solver, interval=settings.guidance_interval, official_last_step=settings.official_last_step)  # type: ignore[arg-type]
    if "weights" in settings.model_fields_set and has_single_weight_set(path):
        raise UserError(f"{path} holds one set of weights: there is nothing to choose.", fix="Leave --weights out.")
    file = weights_file(path, settings.weights)
    if not file.is_file():
        raise UserError(
            f"There are no weights at {file}.", fix="Wait for a complete checkpoint, or choose other --weights."
        )
    spec = read_jit_spec(path, description, settings.weights)
    own_height, own_width = height_width(spec.img_size)
    height, width = user_value(settings, "height") or own_height, user_value(settings, "width") or own_width
    if (height, width) != (own_height, own_width):
        raise UserError(
            f"This JiT model generates images of {own_width} x {own_height} pixels, not {width} x {height}.",
            "It was trained at that size and has no other.",
            "Leave --height and --width out.",
        )
    refused = {name: getattr(settings, name) for name in ("scheduler_options", "timesteps", "distilled")}
    for flag, value in (
        refused | {"lora": settings.lora, f"preset {settings.preset}": settings.preset != "exact"}
    ).items():
        if value:
            raise UserError(f"--{flag} is for diffusers pipelines, and this is a JiT model.", fix="Leave it out.")
    if settings.num_frames > 1:
        raise UserError("JiT generates images, not clips.", fix="Leave --num_frames out.")
    asked_steps, asked_guidance = (
        folder_value(settings, name) if (given := user_value(settings, name)) is None else given
        for name in ("num_inference_steps", "guidance_scale")
    )
    asked_steps = asked_steps or script_value(settings, "num_inference_steps")
    guided = bool(spec.label_names)
    asked = {flag: user_value(settings, flag) for flag in ("guidance_scale", "guidance_interval")}
    for flag, value in asked.items():
        if not guided and value not in (None, 1.0):
            number = f" {value:g}" if isinstance(value, float) else ""
            raise UserError(
                f"--{flag}{number} has no effect: this JiT model is unconditional.",
                "Guidance needs a model that was trained with classes (--enable_condition).",
                f"Leave --{flag} out.",
            )
    if distilled := spec.distilled:
        distilled.check(
            user_value(settings, "num_inference_steps"), asked["guidance_scale"], asked["guidance_interval"]
        )
        if settings.official_last_step:
            raise UserError(f"--official_last_step has no effect: this model was {distilled}.", fix="Leave it out.")
        if settings.scheduler not in (None, "euler"):
            raise UserError(
                f"The scheduler {settings.scheduler} does not fit: this model was {distilled}.",
                "It samples in Euler steps.",
                "Leave --scheduler out.",
            )
        asked_steps, asked_guidance = None, None
    own_guidance = distilled.guidance if distilled else JIT_GUIDANCE if guided else 1.0
    guidance = own_guidance if asked_guidance is None else asked_guidance
    _check_truncation(settings, "JiT", guided=guided and guidance != 1 and not distilled)
    steps = asked_steps or (distilled.steps if distilled else _JIT_STEPS)
    resolved = {"height": height, "width": width, "num_inference_steps": steps, "guidance_scale": guidance}
    resolved["scheduler"] = None if distilled or solver == "heun" else solver  # the default, as in older ledgers
    resolved |= _resolved_frames(_requested_frames(settings))
    own = [] if asked_steps else ["num_inference_steps"]
    own += ["guidance_scale"] if guided and asked_guidance is None else []
    identity = _identity(f"{spec.name} at {format_size(spec.img_size)} px", {"weights": fingerprint(file)}, settings)
    # Defaults are left out, so that older ledgers keep their identity.
    identity |= settings.model_dump(mode="json", include=set(_JIT_FLAGS), exclude_defaults=True)
    return ModelInfo(resolved, identity, spec.describe(), default_owners={"the model's {}": own})


def _resolved_frames(frames: int) -> dict[str, Any]:
    return {"num_frames": frames, "enable_half_frame": False}  # applied


def _identity(name: str, fingerprints: dict[str, str], settings: GenerateSettings) -> dict[str, Any]:
    combined = hashlib.sha256(json.dumps(fingerprints, sort_keys=True).encode()).hexdigest()[:16]
    adapters = [[fingerprint(adapter.path), adapter.weight] for adapter in check_adapters(settings.lora)]
    return {"model": name, "fingerprint": combined, "lora": adapters}


def _check_truncation(settings: GenerateSettings, name: str, guided: bool) -> None:
    """Refuse to truncate guidance where there is none."""
    if settings.cfg_truncation_step is not None and not guided:
        from muralist.generate.pipeline import no_guidance_error

        raise no_guidance_error(name)


def _requested_frames(settings: GenerateSettings) -> int:
    """The number of frames that the settings ask for: half with --enable_half_frame."""
    if not settings.enable_half_frame:
        return settings.num_frames
    if settings.num_frames == 1:
        log.info("--enable_half_frame has no effect on one frame.")
    return (settings.num_frames + 1) // 2


def _possible_frames(folder: Path, pipeline_class: str, settings: GenerateSettings) -> int:
    """The number of frames that the pipeline really makes, as diffusers rounds."""
    frames, factor = _requested_frames(settings), _temporal_factor(folder)
    # Allegro has a rule of its own, and its VAE no single first frame.
    if frames == 1 or factor == 1 or frames % factor == 1 or pipeline_class.startswith("Allegro"):
        return frames
    rounds = pipeline_class.startswith(_ROUNDING_PIPELINES)
    possible = (frames if rounds else frames - 1) // factor * factor + 1
    log.info("%d frames instead of %d: this model needs one more than a multiple of %d.", possible, frames, factor)
    return possible


def _temporal_factor(folder: Path) -> int:
    """The frames of a clip for each latent frame after the first; configs may leave it to the defaults of diffusers."""
    file = folder / "vae" / "config.json"
    vae = read_json(file)
    factor = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio")
    halvings = vae.get("temperal_downsample") or vae.get("spatio_temporal_scaling")  # diffusers spells it so
    if factor is None and isinstance(halvings, list):
        patch = vae.get("patch_size_t", 1) if "spatio_temporal_scaling" in vae else 1
        factor = patch * 2 ** sum(map(bool, halvings)) if isinstance(patch, int) else patch
    if factor is None:
        factor = _TEMPORAL_FACTORS.get(str(vae.get("_class_name")), 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor < 1 or factor != int(factor):
        raise UserError(f"{file} is damaged: a temporal factor of {factor!r:.60}.")
    return int(factor)


def _is_jit_folder(path: Path) -> bool:
    from muralist.models.jit_spec import CONFIG_FILE, JIT_CLASS_NAME
    from muralist.models.weights import OFFICIAL_FILE

    return (path / OFFICIAL_FILE).is_file() or read_json(path / CONFIG_FILE).get("_class_name") == JIT_CLASS_NAME


def _is_jit_export(path: Path) -> bool:
    """Whether the index is the one that an exported JiT has for diffusers; imports torch only where code is named."""
    return isinstance(read_json(path / INDEX_FILE).get("_class_name"), list) and _is_jit_folder(path)


def settings_identity(settings: GenerateSettings, model: ModelInfo) -> dict[str, Any]:
    """Return everything that shapes an image beside its row, for the header."""
    settings = settings.model_copy(update=model.resolved)
    names = _IDENTITY + (("video_format",) if settings.num_frames > 1 else ())
    identity = model.identity | {name: getattr(settings, name) for name in names}
    identity |= {name: value for name in _IDENTITY_IF_GIVEN if (value := getattr(settings, name))}
    if settings.num_frames == 1 and settings.image_format != "png":
        identity |= {"image_format": settings.image_format, "image_quality": settings.resolved_quality}
    if settings.shards:
        identity |= {name: getattr(settings, name) for name in SHARD_SETTINGS}
    if settings.preset != "exact":  # exact mode has no entry: folders from before there were presets stay valid
        assert settings.num_inference_steps != "auto", "resolved by inspect_model"
        steps, truncation = settings.num_inference_steps, settings.cfg_truncation_step
        identity["preset"] = describe_step_caching(settings.preset, model.pipeline_class, steps, truncation)
    return identity


class LoraAdapter(NamedTuple):
    """An adapter's path and weight."""

    path: Path
    weight: float

    @property
    def is_peft(self) -> bool:
        """Whether it is a folder as PEFT writes it, for the denoiser alone."""
        return (self.path / PEFT_CONFIG).is_file()


def parse_adapter(text: str) -> LoraAdapter:
    """Parse a path, optionally followed by a colon and a weight."""
    head, colon, tail = text.rpartition(":")
    try:
        weight = float(tail) if colon and not exists(Path(text)) else None
    except ValueError:
        weight = None
    return LoraAdapter(Path(text), 1.0) if weight is None else LoraAdapter(Path(head), weight)


def check_adapters(texts: Sequence[str]) -> list[LoraAdapter]:
    """Parse adapters and find those of the Hub, and refuse those that do not exist."""
    parsed = [parse_adapter(text) for text in texts]
    for adapter in parsed:
        if not math.isfinite(adapter.weight):
            raise UserError(
                f"The weight of the LoRA at {adapter.path} is {adapter.weight}.", fix="Give a finite weight."
            )
    if parsed:
        from muralist.models.lora import require_peft

        require_peft()
    return [adapter._replace(path=find_model(str(adapter.path), "--lora", "LoRA")) for adapter in parsed]


def _check_loras(settings: GenerateSettings, folder: Path, components: Sequence[str], pipeline_class: str) -> None:
    """Refuse adapters that do not fit the model, or hold NaN or Inf."""
    for adapter in check_adapters(settings.lora):
        from muralist.models.weights import check_finite_file  # imports torch

        if file := check_lora(adapter.path, folder, components, pipeline_class):
            check_finite_file(file, "Copy the LoRA again, or use one from before its weights diverged.")


class StepCaching(NamedTuple):
    """Step caching guides the first steps only; after a beginning, the denoiser runs in some steps only.

    In between its output is extrapolated. The schedule depends on the number of steps alone: caches that look at the
    data, such as FirstBlockCache, decide for the entire batch, so that an image would depend on its neighbors.
    """

    guided: float  # fraction of the steps, from the first on
    beginning: (
        float  # fraction of the steps, from the first on, in all of which the denoiser runs: they form the layout
    )
    interval: int  # afterwards the denoiser runs in every second or third step, the last one included

    def guided_steps(self, steps: int) -> int:
        """The number of guided steps."""
        return math.ceil(self.guided * steps)

    def computed_stages(self, stages: int) -> frozenset[int]:
        """The stages of a scheduler in which the denoiser runs."""
        beginning = max(2, math.ceil(self.beginning * stages))  # a line needs two points
        computed = (stage for stage in range(stages) if stage < beginning or (stages - 1 - stage) % self.interval == 0)
        return frozenset(computed)


STEP_CACHING = {"exact": None, "fast": StepCaching(0.5, 0.2, 2), "faster": StepCaching(0.25, 0.15, 3)}
"""By --preset."""


def describe_step_caching(preset: str, pipeline_class: str, steps: int, truncation: int | None = None) -> str:
    """One line for the ledger and the user; `truncation` replaces the number of guided steps."""
    caching = STEP_CACHING[preset]
    assert caching, "exact mode has no step caching"
    guided = caching.guided_steps(steps) if truncation is None else truncation
    computed = len(caching.computed_stages(steps))
    line = f"{preset}: guidance in {guided} and the network in {computed} of {steps} steps"
    return f"{line}, fp8" if pipeline_class in FP8_PIPELINES else line
