"""Image inputs of a table: which pipeline its columns ask for, and the sizes of its images.

A folder is loaded as its own class, or as the class for image-to-image or inpainting of the same family, which has the
same components.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.data.image_inputs import IMAGE_COLUMNS, STRENGTH, ImageInputs, read_input_shape
from muralist.data.prompts import PromptTable
from muralist.generate.model_info import ModelInfo
from muralist.generate.presets import user_value
from muralist.models.integrity import read_json
from muralist.models.pipeline_class import IMAGE_TO_IMAGE, INPAINTING, PIPELINES, PipelineInputs
from muralist.settings import GenerateSettings

log = logging.getLogger("muralist")
_ROWS_READ_AT_ONCE = 1024
_READERS = 8  # threads: headers on a network disk are mostly waited for
_NOTICE_AFTER = 2.0  # seconds
_MEGAPIXEL = 1024 * 1024


def choose_pipeline(model: ModelInfo, table: PromptTable, settings: GenerateSettings) -> ModelInfo:
    """Choose the class for the table's image inputs; refuse columns that are missing, or that no class can use."""
    given = tuple(column for column in table.input_columns if column in IMAGE_COLUMNS)
    own = model.inputs
    name = next((name for name in _candidates(model.pipeline_class) if _fits(PIPELINES.get(name), given)), None)
    if name is None and (own or given):
        raise _mismatch(model, own, given, table)
    if name is None:
        if STRENGTH in table.input_columns:
            log.warning("Unused columns of %s: %s.", table.name, STRENGTH)
        return model
    inputs = PIPELINES[name]
    if STRENGTH in table.input_columns and STRENGTH not in inputs.arguments:
        log.warning("The column %s of %s has no effect: %s has no such input.", STRENGTH, table.name, name)
    _check_controlnet(model)
    guided_in_pairs = inputs.task in (IMAGE_TO_IMAGE, INPAINTING)
    for flag, is_given in ((f"preset {settings.preset}", settings.preset != "exact"),
                           ("cfg_truncation_step", settings.cfg_truncation_step is not None)):  # fmt: skip
        if is_given and not guided_in_pairs:
            raise UserError(
                f"--{flag} is not for {name}.",
                f"It is for text-to-image, {IMAGE_TO_IMAGE} and {INPAINTING}.",
                "Leave it out.",
            )
    identity = model.identity | ({"model": name} if model.identity["model"] == model.pipeline_class else {})
    return replace(model, pipeline_class=name, identity=identity, inputs=inputs)


def read_input_sizes(model: ModelInfo, table: PromptTable, settings: GenerateSettings) -> np.ndarray | None:
    """Read the headers of all image inputs: heights and widths, int32 [N, 2], of rows without a size of their own.

    0 stands for an input that cannot be read: its row fails when it is generated, unless this holds for all of them.
    None where --height or --width applies to every row.
    """
    assert model.inputs
    sizes = np.zeros((len(table), 2), dtype=np.int32)
    multiple, began, noticed, failed = _pixel_multiple(model.folder), time.monotonic(), False, 0
    first: UserError | None = None
    for index, shape in enumerate(_shapes(model.inputs, table)):
        if isinstance(shape, UserError):
            first, failed = first or shape, failed + 1
        elif shape is not None:
            sizes[index] = _image_size(shape, multiple, model.inputs.own_resize)
        if not noticed and time.monotonic() - began > _NOTICE_AFTER:
            log.info("Reading the sizes of the input images of %s rows.", f"{len(table):,}")
            noticed = True
    if first and failed == len(table):
        raise UserError(f"No row of {table.name} has usable inputs. The first: {first.what}", first.why, first.fix)
    if first:
        log.warning("%s of %s rows will fail. The first: %s", f"{failed:,}", f"{len(table):,}", first)
    return None if user_value(settings, "height") or user_value(settings, "width") else sizes


def _shapes(inputs: PipelineInputs, table: PromptTable) -> Iterator[tuple[int, int] | UserError | None]:
    """Yield for each row the shape of its first image input, None without any, or why an input cannot be read."""

    def shape(row_inputs: ImageInputs | None) -> tuple[int, int] | UserError | None:
        given = row_inputs or ImageInputs()
        try:
            shapes = [read_input_shape(given, column) for column in inputs.images_of(given)]
        except UserError as error:
            return error
        return shapes[0] if shapes else None

    with ThreadPoolExecutor(_READERS) as readers:
        for start in range(0, len(table), _ROWS_READ_AT_ONCE):
            rows = table.rows(range(start, min(start + _ROWS_READ_AT_ONCE, len(table))))
            yield from readers.map(shape, [row.inputs for row in rows])


def _image_size(shape: tuple[int, int], multiple: int, megapixel: bool) -> tuple[int, int]:
    """The size of an image made from an input: as the input, or a megapixel of its aspect ratio, in whole tokens."""
    height, width = shape
    if megapixel:  # as QwenImageEditPipeline
        height, width = (round((_MEGAPIXEL * side / other) ** 0.5 / 32) * 32 for side, other in (shape, shape[::-1]))
    return max(multiple, height - height % multiple), max(multiple, width - width % multiple)


def _pixel_multiple(folder: Path | None) -> int:
    """The pixels that one token of the denoiser covers, from the configurations in a pipeline's folder."""
    assert folder
    vae, network = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
    blocks = vae.get("block_out_channels")
    factor = 2 ** (len(blocks) - 1) if isinstance(blocks, list) and blocks else 8
    packed = "guidance_embeds" in network or "all_patch_size" in network
    patch = network.get("patch_size", 1)
    return factor * (2 if packed else patch if isinstance(patch, int) and patch > 0 else 1)


def _candidates(name: str) -> list[str]:
    """The classes that a folder of a class can be loaded as, its own first."""
    stem = name.removesuffix("Pipeline")
    family = stem.removesuffix("Img2Img")
    return [name, f"{stem}Img2ImgPipeline", f"{family}InpaintPipeline"]


def _fits(inputs: PipelineInputs | None, given: tuple[str, ...]) -> bool:
    return inputs is not None and set(inputs.required) <= set(given) <= set(inputs.images)


def _mismatch(model: ModelInfo, own: PipelineInputs | None, given: tuple[str, ...], table: PromptTable) -> UserError:
    name = model.pipeline_class or str(model.identity["model"])
    if own and (missing := [column for column in own.required if column not in given]):
        return UserError(
            f"{name} needs the column {format_list(missing, 3)}, which {table.name} does not have.",
            f"Its task is {own.task}.",
            "Add the column, with paths relative to the table's folder, or give another --model_path.",
        )
    used = own.images if own else ()
    extra = [column for column in given if column not in used]
    return UserError(
        f"{name} cannot use the column {format_list(extra, 3)} of {table.name}.",
        f"Its image inputs are {format_list(list(used), 3)}." if used else "It generates images from text alone.",
        "Rename or remove the column, or give another --model_path.",
    )


def _check_controlnet(model: ModelInfo) -> None:
    """Refuse several ControlNets in one pipeline, each of which needs an image of its own."""
    assert model.folder
    if "controlnet" in model.components and (model.folder / "controlnet_1").is_dir():  # as diffusers saves them
        raise UserError(
            f"{model.folder} holds several ControlNets.",
            "generate has one control image for each row.",
            "Give a pipeline with one ControlNet.",
        )
