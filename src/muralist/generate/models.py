"""What lies at --model_path: told from its small files, before anything heavy is imported or loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muralist.errors import UserError, nearest
from muralist.models.complete import check_whole
from muralist.models.fingerprint import fingerprint
from muralist.settings import GenerateSettings

if TYPE_CHECKING:
    from muralist.models.jit_family import JiTFamily

log = logging.getLogger("muralist")
INDEX_FILE = "model_index.json"
_PIPELINE_SIZE = (480, 832)
_PIPELINE_GUIDANCE, _JIT_GUIDANCE = 7.5, 2.9
_LIBRARIES = ("diffusers", "transformers")
_WEIGHTS = (".pth", ".pt", ".safetensors")


@dataclass(frozen=True)
class CheckedModel:
    """A model that is there."""

    kind: Literal["pipeline", "hunyuandit", "jit"]
    settled: dict[str, Any]
    """Settings whose defaults depend on the model: height, width, guidance_scale, num_frames, enable_half_frame."""
    identity: dict[str, Any]
    """What tells it from others: `model`, its kind in words; `fingerprint`, of its files; `lora`, of those added."""
    description: dict[str, Any] = field(default_factory=dict)
    """What is known of it, for JiT and for models trained here."""
    family: JiTFamily | None = field(default=None, compare=False)
    """A JiT, which knows its classes and no other prompts."""


def check_model(settings: GenerateSettings) -> CheckedModel:
    """Refuse what is no model, or cannot do what is asked of it; else say what it is and settle its defaults."""
    path = Path(settings.model_path)
    if not path.exists():
        raise _missing(path)
    if (path / INDEX_FILE).is_file():
        _refuse_jit_flags(settings, "a pipeline of diffusers")
        return _pipeline(path, settings)
    from muralist.models.weights import read_description

    if path.is_dir() and (path / "config.yaml").is_file() and not (path / "checkpoints" / "latest").is_file():
        raise UserError(f"The run {path} has no checkpoint yet.", fix="Wait for its first one.")
    description = read_description(path)
    if description.get("family") == "hunyuandit":
        _refuse_jit_flags(settings, "a HunyuanDiT")
        return _trained_hunyuan(path, description, settings)
    if description or path.suffix in _WEIGHTS or _holds_jit(path):
        return _jit(path, description, settings)
    inside = sorted(file.parent for file in path.glob(f"*/{INDEX_FILE}")) if path.is_dir() else []
    inside += sorted(file.parent for file in path.glob(f"snapshots/*/{INDEX_FILE}"))
    raise UserError(
        f"{path} holds no model that generate knows.",
        f"A pipeline in diffusers layout has a {INDEX_FILE}; a run trained here has checkpoints.",
        f"Did you mean {inside[0]}?" if inside else "Give the folder that holds one of them.",
    )


def _missing(path: Path) -> UserError:
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return UserError(
        f"There is no model at {path}.",
        "Nothing is downloaded: --model_path is a folder or a file on this machine.",
        nearest(path.name, names) or "Check the path.",
    )


def _pipeline(folder: Path, settings: GenerateSettings) -> CheckedModel:
    name, parts = _index(folder)
    network = _read(folder / "transformer" / "config.json")
    distilled = network.get("guidance_embeds") is True and not name.startswith("Sana")
    # Flux without the scale as an input was distilled to few steps and is not guided.
    default = 1.0 if name.startswith("Flux") and network.get("guidance_embeds") is False else _PIPELINE_GUIDANCE
    guidance = default if settings.guidance_scale == "auto" else settings.guidance_scale
    _check_cut(settings, name, guidance=1.0 if distilled else guidance, least=0.0 if name.startswith("ZImage") else 1.0)
    if settings.negative_prompt and (distilled or guidance <= 1):
        log.info("--negative_prompt does nothing here: %s runs without classifier-free guidance.", name)
    height, width = settings.height or _PIPELINE_SIZE[0], settings.width or _PIPELINE_SIZE[1]
    settled = _settled(height, width, guidance, _frames(folder, settings))
    prints = {part: fingerprint(folder / part) for part in parts}
    return CheckedModel("pipeline", settled, _identity(name, prints, settings))


def _index(folder: Path) -> tuple[str, list[str]]:
    """The pipeline's class, and the folders of its parts."""
    index = _read(folder / INDEX_FILE)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise UserError(f"{folder / INDEX_FILE} is damaged: it names no pipeline.", fix="Copy the model anew.")
    parts = [part for part, origin in index.items() if isinstance(origin, list) and origin[:1] not in ([], [None])]
    for part in parts:
        _check_library(folder, part, index[part][0])
    missing = [part for part in parts if not (folder / part).is_dir()]
    if missing:
        raise UserError(
            f"The pipeline in {folder} is not whole: it has no {' and no '.join(missing)}.",
            f"{INDEX_FILE} names {', '.join(parts)}.",
            "Copy the model anew.",
        )
    check_whole(folder, parts)
    return name, parts


def pipeline_parts(settings: GenerateSettings, model: CheckedModel) -> tuple[Path, list[str]]:
    """The folder in diffusers layout that a model is, or was trained from, and its parts."""
    folder = Path(model.description["folder"] if model.kind == "hunyuandit" else settings.model_path)
    return folder, _index(folder)[1]


def _check_library(folder: Path, part: str, library: Any) -> None:
    """Refuse parts that are not the field's own libraries': to load one, diffusers imports whatever is named there."""
    diffusers = importlib.util.find_spec("diffusers")
    assert diffusers and diffusers.origin  # a dependency
    pipelines = Path(diffusers.origin).parent / "pipelines"
    own = isinstance(library, str) and library.isidentifier() and (pipelines / library).is_dir()
    if (library not in _LIBRARIES and not own) or Path(part).name != part:
        raise UserError(
            f"The pipeline in {folder} was not read, because its part {part!r:.60} asks to run {library!r:.60}.",
            f"Parts may come from {' and '.join(_LIBRARIES)}; anything else could run foreign code.",
            "Give a model without code of its own.",
        )


def _trained_hunyuan(path: Path, description: dict[str, Any], settings: GenerateSettings) -> CheckedModel:
    from muralist.models.hunyuan_export import check_base
    from muralist.models.weights import weights_file

    base = Path(description["folder"])
    check_base(base, description.get("lora"))
    _, parts = _index(base)
    size = description["img_size"]
    own = (size, size) if isinstance(size, int) else tuple(size)
    guidance = _PIPELINE_GUIDANCE if settings.guidance_scale == "auto" else settings.guidance_scale
    _check_cut(settings, "HunyuanDiT", guidance)
    settled = _settled(settings.height or own[0], settings.width or own[1], guidance, _asked_frames(settings))
    prints = {part: fingerprint(base / part) for part in parts} | {"trained": fingerprint(weights_file(path, "ema1"))}
    return CheckedModel("hunyuandit", settled, _identity("HunyuanDiT trained here", prints, settings), description)


def _refuse_jit_flags(settings: GenerateSettings, kind: str) -> None:
    for flag in ("weights", "guidance_interval", "official_last_step"):
        if flag in settings.model_fields_set:
            raise UserError(f"--{flag} is for JiT models, and this is {kind}.", fix="Leave it out.")


def _jit(path: Path, description: dict[str, Any], settings: GenerateSettings) -> CheckedModel:
    from muralist.diffusion.solvers import SolverSettings
    from muralist.generate.jit_painter import read_family
    from muralist.models.weights import holds_one_set, weights_file

    SolverSettings(interval=settings.guidance_interval)  # which refuses an empty one
    if "weights" in settings.model_fields_set and holds_one_set(path):
        raise UserError(f"{path} holds one set of weights: there is nothing to choose.", fix="Leave --weights out.")
    file = weights_file(path, settings.weights)
    if not file.is_file():
        raise UserError(
            f"There are no weights at {file}.", fix="Wait for a whole checkpoint, or choose other --weights."
        )
    family = read_family(path, description, settings.weights)
    side = family.img_size
    if (settings.height or side, settings.width or side) != (side, side):
        raise UserError(
            f"This JiT model makes pictures of {side} x {side} pixels, not {settings.height or side} x "
            f"{settings.width or side}.",
            "It was trained at that size and has no other.",
            "Leave --height and --width out.",
        )
    fast = settings.preset == "fast"
    for flag, value in (("scheduler", settings.scheduler), ("lora", settings.lora), ("preset fast", fast)):
        if value:
            raise UserError(f"--{flag} is for pipelines of diffusers, and this is a JiT model.", fix="Leave it out.")
    if settings.num_frames > 1:
        raise UserError("JiT makes pictures, not clips.", fix="Leave --num_frames out.")
    guidance = _JIT_GUIDANCE if settings.guidance_scale == "auto" else settings.guidance_scale
    _check_cut(settings, "JiT", guidance if family.label_names else 1.0, unguided=1.0)
    settled = _settled(side, side, guidance, _asked_frames(settings))
    identity = _identity(f"{family.name} at {side} px", {"weights": fingerprint(file)}, settings)
    return CheckedModel("jit", settled, identity | _unusual(settings), family.describe(), family)


def _unusual(settings: GenerateSettings) -> dict[str, Any]:
    """Settings of JiT alone that are not the default: a folder made before there were such settings stays what it is."""
    told = {name: getattr(settings, name) for name in ("weights", "guidance_interval", "official_last_step")}
    usual = {name: GenerateSettings.model_fields[name].default for name in told}
    unusual = {name: value for name, value in told.items() if value != usual[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in unusual.items()}


def _settled(height: int, width: int, guidance: float, frames: int) -> dict[str, Any]:
    return {
        "height": height,
        "width": width,
        "guidance_scale": guidance,
        "num_frames": frames,
        "enable_half_frame": False,  # it is done
    }


def _identity(name: str, prints: dict[str, str], settings: GenerateSettings) -> dict[str, Any]:
    from muralist.generate.adapters import check_adapters

    whole = hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()[:16]
    adapters = [[fingerprint(adapter.path), adapter.weight] for adapter in check_adapters(settings.lora)]
    return {"model": name, "fingerprint": whole, "lora": adapters}


def _check_cut(
    settings: GenerateSettings, name: str, guidance: float, least: float = 1.0, unguided: float | None = None
) -> None:
    """Refuse to cut guidance where there is none: up to a scale of `least`, or where it is exactly `unguided`."""
    without = guidance == unguided if unguided is not None else guidance <= least
    if settings.cfg_truncation_step is not None and without:
        from muralist.generate.painter import nothing_to_cut

        raise nothing_to_cut(name)


def _asked_frames(settings: GenerateSettings) -> int:
    """How many frames are asked for: half with --enable_half_frame."""
    if not settings.enable_half_frame:
        return settings.num_frames
    if settings.num_frames == 1:
        log.info("--enable_half_frame does nothing for one frame.")
    return (settings.num_frames + 1) // 2


def _frames(folder: Path, settings: GenerateSettings) -> int:
    """How many frames come out: a number that the video's autoencoder can make."""
    frames = _asked_frames(settings)
    vae = _read(folder / "vae" / "config.json")
    every = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio") or 1
    if type(every) is not int or every < 1:
        raise UserError(f"{folder / 'vae' / 'config.json'} is damaged: {every!r:.60} frames cannot become one.")
    if frames == 1 or every == 1 or frames % every == 1:
        return frames
    possible = frames // every * every + 1  # as diffusers rounds
    log.info("%d frames instead of %d: this model makes one more than a multiple of %d.", possible, frames, every)
    return possible


def _holds_jit(path: Path) -> bool:
    from muralist.models.weights import CLASS_NAME, CONFIG_FILE, OFFICIAL_FILE

    return (path / OFFICIAL_FILE).is_file() or _read(path / CONFIG_FILE).get("_class_name") == CLASS_NAME


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}.", fix="Copy the model anew.") from None
    return content if isinstance(content, dict) else {}
