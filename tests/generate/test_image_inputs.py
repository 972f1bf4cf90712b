"""Image inputs: the same pixels as diffusers alone, whatever the neighbors, and rows that fail alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils import load_image
from PIL import Image

from muralist.core.errors import UserError
from muralist.data.image_inputs import ImageInputs, load_inputs
from muralist.generate.model_info import inspect_model
from muralist.generate.pipeline import GenerationMode, Pipeline, SampleRequest, load_pipeline
from muralist.models.pipeline_class import PIPELINES
from tests.support.pipeline_calls import CPU, max_difference, no_callback, settings

Build = Callable[[str], Path]
SIZE = (64, 48)
STEPS = 4
STRENGTH = 0.6
SEEDS = {"one": 1, "two": 2, "three": 3}
UNEVEN = ("qwenimage", "zimage")
CONTROL, CONTROL_XL = "StableDiffusionControlNet", "StableDiffusionXLControlNet"
FOLDERS = {
    "StableDiffusion": "sd", "StableDiffusionXL": "sdxl", "StableDiffusion3": "sd3_16", "Flux": "flux",
    "QwenImage": "qwenimage", "ZImage": "zimage", CONTROL: "sd_controlnet", CONTROL_XL: "sdxl_controlnet",
}  # fmt: skip
CASES = [
    *((f"{family}{kind}Pipeline", folder) for family, folder in FOLDERS.items() for kind in ("Img2Img", "Inpaint")),
    (f"{CONTROL}Pipeline", "sd_controlnet"),
    (f"{CONTROL_XL}Pipeline", "sdxl_controlnet"),
    ("StableDiffusionInpaintPipeline", "sd_inpaint"),
    ("StableDiffusionInstructPix2PixPipeline", "pix2pix"),
]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, masks and control images of one size; a photo that EXIF rotates."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for name in ("one", "two", "three"):
        small = random.integers(0, 255, (6, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((50, 70)).save(folder / f"{name}.png")
        mask = np.zeros((70, 50), dtype=np.uint8)
        mask[20:50, 10:40] = 255
        Image.fromarray(mask).rotate(random.integers(0, 90)).save(folder / f"{name}_mask.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(folder / "one.png").rotate(90, expand=True).save(folder / "rotated.jpg", exif=exif)
    return folder


def request(photos: Path, name: str, columns: tuple[str, ...], strength: float | None = STRENGTH) -> SampleRequest:
    """A request whose seed and prompt belong to the name of its image."""
    inputs = ImageInputs(f"{name}.png", f"{name}_mask.png", f"{name}.png", strength, str(photos)).keep(columns)
    images = tuple(column for column in columns if column != "strength")
    return SampleRequest(f"a {name} cat", "dark", SEEDS[name], load_inputs(inputs, images))


def load_class(folder: Path, name: str, **changes: Any) -> Pipeline:
    given = settings(folder, **{"num_inference_steps": STEPS, "height": SIZE[0], "width": SIZE[1], **changes})
    model = replace(inspect_model(given), pipeline_class=name, inputs=PIPELINES[name])
    return load_pipeline(given, CPU, model)


def by_diffusers(folder: Path, name: str, photos: Path, photo: str, **changes: Any) -> np.ndarray:
    """The same image by diffusers alone, as its documentation writes the call."""
    pipe: Any = getattr(diffusers, name).from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    parameters = inspect.signature(pipe.__call__).parameters
    files = {"image": f"{photo}.png", "mask": f"{photo}_mask.png", "control_image": f"{photo}.png"}
    arguments: dict[str, Any] = {
        "prompt": f"a {photo} cat", "negative_prompt": "dark", "num_inference_steps": STEPS, "height": SIZE[0],
        "width": SIZE[1], "guidance_scale": 7.5, "true_cfg_scale": 7.5, "strength": STRENGTH,
        "generator": torch.Generator().manual_seed(SEEDS[photo]),
    }  # fmt: skip
    if "guidance_embeds" in getattr(pipe, "transformer", pipe).config and name.startswith("Flux"):
        arguments |= {"true_cfg_scale": 1.0, "negative_prompt": None}
    for column in PIPELINES[name].images:
        arguments[PIPELINES[name].arguments[column]] = load_image(str(photos / files[column]))
    arguments |= changes
    arguments = {key: value for key, value in arguments.items() if key in parameters and value is not None}
    return np.asarray(pipe(**arguments).images[0])


def generate(
    pipeline: Pipeline, *requests: SampleRequest, size: tuple[int, int] = SIZE, **more: Any
) -> list[np.ndarray]:
    return pipeline.generate(requests, size, no_callback, **more)


@pytest.mark.parametrize(("name", "folder"), CASES)
def test_image_inputs_give_the_pixels_of_diffusers_whatever_the_neighbors(
    name: str, folder: str, tiny_pipeline: Build, photos: Path
) -> None:
    columns = tuple(PIPELINES[name].arguments)
    pipeline = load_class(tiny_pipeline(folder), name)
    one, two, three = (request(photos, image, columns) for image in ("one", "two", "three"))
    alone = generate(pipeline, one)[0]
    assert max_difference(alone, by_diffusers(tiny_pipeline(folder), name, photos, "one")) == 0
    assert max_difference(alone, generate(pipeline, two)[0]) > 5
    pipeline.prepare([one._replace(inputs=None)])  # as workers do
    assert np.array_equal(alone, generate(pipeline, one)[0])
    batches = folder != "pix2pix"
    assert pipeline.supports_batching() is batches
    assert pipeline.groups_by_text() is (folder in UNEVEN)
    if batches:
        if folder in UNEVEN:  # in a batch of their own length
            two, three = (each._replace(prompt=one.prompt) for each in (two, three))
        first, last = generate(pipeline, one, two, three), generate(pipeline, three, two, one)
        assert np.array_equal(first[0], last[2]) and np.array_equal(first[1], last[1])
        assert max_difference(alone, first[0]) <= 1
    probe = generate(pipeline, *[one._replace(inputs=None)] * 2, mode=GenerationMode.MEMORY_PROBE) if batches else []
    assert all(image.shape == (*SIZE, 3) for image in probe)


@pytest.mark.parametrize(("name", "folder"), CASES[::3])  # of each task; the equality above holds for all
def test_every_input_matters(name: str, folder: str, tiny_pipeline: Build, photos: Path) -> None:
    pipeline, inputs = load_class(tiny_pipeline(folder), name), PIPELINES[name]
    one = request(photos, "one", tuple(inputs.arguments))
    assert one.inputs
    before = generate(pipeline, one)[0]
    for column in inputs.images:
        other = Image.new("RGB", (50, 70), "white") if column == "mask" else Image.open(photos / "two.png")
        changed = replace(one.inputs, images=one.inputs.images | {column: other})
        assert not np.array_equal(before, generate(pipeline, one._replace(inputs=changed))[0]), column
    if "strength" in inputs.arguments:
        weaker = one._replace(inputs=replace(one.inputs, strength=0.3))
        assert not np.array_equal(before, generate(pipeline, weaker)[0])


def test_the_table_of_pipelines_is_that_of_diffusers() -> None:
    assert {name for name, _ in CASES} | {"FluxKontextPipeline"} == set(PIPELINES)
    for name, inputs in PIPELINES.items():
        parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
        assert set(inputs.arguments.values()) <= set(parameters), name


def test_inputs_are_read_as_diffusers_reads_them(photos: Path) -> None:
    loaded = load_inputs(ImageInputs("rotated.jpg", "one_mask.png", folder=str(photos)), ("image", "mask"))
    for column, file in (("image", "rotated.jpg"), ("mask", "one_mask.png")):
        assert np.array_equal(np.asarray(loaded.images[column]), np.asarray(load_image(str(photos / file))))


@pytest.mark.parametrize(("written", "reason"), [("gone.png", "does not exist"), ("/dev/zero", "is not a plain file"),
                                                 ("a\0b.png", "does not exist"), (".", "is not a plain file")])  # fmt: skip
def test_an_input_that_is_not_a_file_is_refused(written: str, reason: str, photos: Path) -> None:
    with pytest.raises(UserError, match=reason):
        load_inputs(ImageInputs(written, folder=str(photos)), ("image",))


# -- Kontext scales its input to about a megapixel, so its tests are few.


def test_kontext_gives_the_pixels_of_diffusers(tiny_pipeline: Build, photos: Path) -> None:
    folder, name = tiny_pipeline("kontext"), "FluxKontextPipeline"
    pipeline = load_class(folder, name, num_inference_steps=1)
    assert not pipeline.supports_batching()
    one = request(photos, "one", ("image",))
    image = generate(pipeline, one)[0]
    given = {"num_inference_steps": 1, "max_area": SIZE[0] * SIZE[1]}
    assert max_difference(image, by_diffusers(folder, name, photos, "one", **given)) == 0
    text_only = by_diffusers(folder, name, photos, "one", image=None, **given)
    assert max_difference(image, text_only) > 0
    empty = one._replace(inputs=load_inputs(ImageInputs(), ()))
    assert max_difference(generate(pipeline, empty)[0], text_only) == 0
