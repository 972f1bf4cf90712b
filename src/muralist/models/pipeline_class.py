"""A pipeline's folder and class: whether it can be loaded, whether a table of prompts can run it, its image inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from muralist.core.errors import UserError
from muralist.data.image_inputs import STRENGTH, ImageInputs
from muralist.models.diffusers_source import ClassSource, diffusers_folder, find_class
from muralist.models.integrity import check_integrity, read_json

INDEX_FILE = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_IMAGE_INPUT = re.compile(
    r"(?!num_|.*(embed|attention|latent))(.*_)?(images?|mask)(_.*)?"
)  # arguments that hold images

# Names of diffusers' classes that generate nothing from text alone.
_NEEDS_IMAGES = re.compile(
    "Img2Img|Inpaint|Control|Edit|Pix2Pix|Fill|Adapter|Upscale|SuperResolution|Depth2Img|Variation|Redux"
    "|Image(To|2)Video|VideoToVideo|VideoToWorld|I2VGen|Layered|Refiner"
)


class PipelineInputs(NamedTuple):
    """The image inputs of a pipeline's class."""

    task: str
    arguments: Mapping[str, str]
    """The argument of the pipeline's call for each column."""
    optional: tuple[str, ...] = (STRENGTH,)
    own_resize: bool = False
    """The pipeline scales its input itself, to about a megapixel; its images have any size. One image at a time, because
    it would scale all inputs of a call to the size of the first."""

    @property
    def images(self) -> tuple[str, ...]:
        """The columns of images."""
        return tuple(column for column in self.arguments if column != STRENGTH)

    def images_of(self, given: ImageInputs) -> tuple[str, ...]:
        """The columns of images to read for a row: those that it has, and those that it must have."""
        return tuple(name for name in self.images if name in self.required or getattr(given, name) is not None)

    @property
    def required(self) -> tuple[str, ...]:
        """The columns without which a row has no image."""
        return tuple(column for column in self.images if column not in self.optional)


IMAGE_TO_IMAGE, INPAINTING = "image-to-image", "inpainting"
_IMG2IMG = PipelineInputs(IMAGE_TO_IMAGE, {"image": "image", STRENGTH: STRENGTH})
_INPAINT = PipelineInputs(INPAINTING, {"image": "image", "mask": "mask_image", STRENGTH: STRENGTH})
_CONTROL = {"control_image": "control_image"}
_FAMILIES = ("StableDiffusion", "StableDiffusionXL", "StableDiffusion3", "Flux", "QwenImage", "ZImage")
_CONTROL_FAMILIES = ("StableDiffusionControlNet", "StableDiffusionXLControlNet")

PIPELINES: dict[str, PipelineInputs] = {
    **{f"{family}Img2ImgPipeline": _IMG2IMG for family in _FAMILIES},
    **{f"{family}InpaintPipeline": _INPAINT for family in _FAMILIES},
    **{f"{family}Pipeline": PipelineInputs("ControlNet", {"control_image": "image"}) for family in _CONTROL_FAMILIES},
    **{
        f"{family}{kind}Pipeline": PipelineInputs(f"ControlNet {inputs.task}", {**inputs.arguments, **_CONTROL})
        for family in _CONTROL_FAMILIES
        for kind, inputs in (("Img2Img", _IMG2IMG), ("Inpaint", _INPAINT))
    },
    "StableDiffusionInstructPix2PixPipeline": PipelineInputs("image editing", {"image": "image"}),
    "FluxKontextPipeline": PipelineInputs("image editing", {"image": "image"}, ("image",), own_resize=True),
}
"""Every supported class with image inputs; each is compared with diffusers alone in a test."""


def text_class(name: str) -> str:
    """Return the text-to-image class that a class with image inputs was made from."""
    return re.sub("Img2Img|Inpaint|ControlNet|InstructPix2Pix", "", name)


def read_index(folder: Path, flag: str = "--model_path") -> tuple[str, tuple[str, ...]]:
    """Return the class of the pipeline in a folder and the names of its components; refuse what cannot be loaded.

    `flag` named the folder.
    """
    if not (folder / INDEX_FILE).is_file():
        raise UserError(
            f"{folder} is not a pipeline in diffusers layout: it has no {INDEX_FILE}.",
            "Weights in one file, or one component alone, do not say which pipeline they are of.",
            f"Give {flag} the folder that holds {INDEX_FILE}; of a single file, `PIPELINE.from_single_file(FILE)."
            "save_pretrained(FOLDER)` of diffusers makes one.",
        )
    index = read_json(folder / INDEX_FILE)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise UserError(f"{folder / INDEX_FILE} is damaged: it names no pipeline.", fix="Copy the model again.")
    origins = {part: origin for part, origin in index.items() if isinstance(origin, list) and not _is_setting(origin)}
    components = {part: str(origin[-1]) for part, origin in origins.items() if origin[:1] not in ([], [None])}
    for part in components:
        _check_library(folder, part, index[part][0])
    source = find_class(name, "pipelines")
    check_pipeline_class(name, source, flag)
    if "scheduler" not in components:
        raise UserError(
            f"{name} is several pipelines in one.",
            "Pipelines with one scheduler are supported.",
            f"Give another {flag}.",
        )
    missing = [part for part in components if not (folder / part).is_dir()]
    if missing:
        raise UserError(
            f"The pipeline in {folder} is incomplete: {' and '.join(missing)} missing.",
            f"{INDEX_FILE} names {', '.join(components)}.",
            "Copy the model again.",
        )
    check_integrity(folder, components, chat_template=source is not None and source.needs_chat_template)
    return name, tuple(components)


def _is_setting(value: list[Any]) -> bool:
    """Whether a list is a pipeline's setting, such as Krea 2's layers, instead of the library and class of a component."""
    return all(isinstance(each, int | float) for each in value)


def _check_library(folder: Path, part: str, library: Any) -> None:
    """Refuse components of other libraries: to load one, diffusers imports whatever module is named there."""
    own = isinstance(library, str) and library.isidentifier() and (diffusers_folder() / "pipelines" / library).is_dir()
    if (library not in _LIBRARIES and not own) or Path(part).name != part:
        raise UserError(
            f"The pipeline in {folder} was not loaded, because its component {part!r:.60} asks to run {library!r:.60}.",
            f"Components may come from {' and '.join(_LIBRARIES)}; anything else could run foreign code.",
            "Give a model without code of its own.",
        )


def check_pipeline_class(name: str, source: ClassSource | None, flag: str = "--model_path") -> None:
    """Refuse a class that no table can run, by its name and the parameters of its `__call__`, if these are known."""
    found = source.parameters("__call__") if source else {}
    parameters = {each: parameter.required for each, parameter in found.items()}
    if parameters:
        _check_parameters(name, parameters, flag)
    needed = [each for each, required in parameters.items() if required and _IMAGE_INPUT.fullmatch(each)]
    if name not in PIPELINES and (needed or _NEEDS_IMAGES.search(name)):
        raise UserError(
            f"{name} needs image inputs that generate does not support.",
            "docs/generating.md lists the pipelines that it supports.",
            f"Give another {flag}.",
        )


def _check_parameters(name: str, parameters: dict[str, bool], flag: str) -> None:
    images = [each for each in parameters if _IMAGE_INPUT.fullmatch(each)]
    needed = [each for each, required in parameters.items() if required and each not in ("prompt", *images)]
    first = next(iter(parameters), "")
    why = ""
    if "prompt" not in parameters:
        why = "It takes no prompt."
    elif needed or "video" in first:
        why = f"It needs {', '.join(needed or [first])}."
    elif "height" not in parameters and not images:
        makes_audio = any("audio" in each for each in parameters)
        why = "It generates audio." if makes_audio else "It takes neither an image nor a height and width."
    if why:
        raise UserError(f"{name} does not generate images from a table of prompts.", why, f"Give another {flag}.")
