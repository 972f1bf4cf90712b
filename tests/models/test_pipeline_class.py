"""Pipeline classes that no table can run are refused by their source, before torch is imported."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest

from muralist.core.errors import UserError
from muralist.generate.model_info import inspect_model
from muralist.models.diffusers_source import find_class
from muralist.models.pipeline_class import check_pipeline_class
from muralist.settings import GenerateSettings
from tests.support.generating import generate_arguments, write_table
from tests.support.runs import finish, fork

Build = Callable[[str], Path]
_REFUSED = {
    "DDPMPipeline": "It takes no prompt.",
    "DiTPipeline": "It takes no prompt.",
    "StableAudioPipeline": "It generates audio.",
    "AudioLDM2Pipeline": "It generates audio.",
    "WanVideoToVideoPipeline": "It needs video.",
    "WanAnimatePipeline": "It needs pose_video, face_video.",
    "StableCascadeDecoderPipeline": "It needs image_embeddings.",
    "KandinskyV22PriorPipeline": "It takes neither an image nor a height and width.",
    "MusicLDMPipeline": "It generates audio.",
}
_ACCEPTED = (
    "StableDiffusionPipeline", "StableDiffusionXLPipeline", "FluxPipeline", "WanPipeline", "ZImagePipeline",
    "HunyuanDiTPipeline", "SanaPipeline", "QwenImagePipeline", "PixArtSigmaPipeline", "StableDiffusion3Pipeline",
    "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline", "FluxKontextPipeline",
    "StableDiffusionInstructPix2PixPipeline", "StableDiffusionXLControlNetPipeline", "StableDiffusionSAGPipeline",
)  # fmt: skip


_UNSUPPORTED_IMAGES = (
    "QwenImageEditPipeline", "FluxFillPipeline", "StableDiffusionUpscalePipeline", "WanImageToVideoPipeline",
    "QwenImageLayeredPipeline", "HunyuanImageRefinerPipeline", "I2VGenXLPipeline", "Cosmos2VideoToWorldPipeline",
)  # fmt: skip


@pytest.mark.parametrize("name", _UNSUPPORTED_IMAGES)
def test_classes_whose_image_inputs_are_not_supported_are_refused(name: str) -> None:
    source = find_class(name, "pipelines")
    assert source
    for known in (source, None):  # None: a class that the source does not have
        with pytest.raises(UserError, match=f"{name} needs image inputs that generate does not support"):
            check_pipeline_class(name, known)


@pytest.mark.parametrize("name", [*_REFUSED, *_ACCEPTED])
def test_the_source_says_what_the_class_says(name: str) -> None:
    source = find_class(name, "pipelines")
    assert source
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    assert {each: parameter.required for each, parameter in source.parameters("__call__").items()} == {
        each: parameter.default is parameter.empty
        for each, parameter in parameters.items()
        if each != "self" and parameter.kind in kinds
    }
    if name in _ACCEPTED:
        return check_pipeline_class(name, source)
    with pytest.raises(UserError, match=f"{name} does not generate images from a table of prompts") as error:
        check_pipeline_class(name, source)
    assert error.value.why == _REFUSED[name]
    return None


def test_unknown_classes_are_left_to_the_loader() -> None:
    assert find_class("NoSuchPipeline", "pipelines") is None


def test_chat_templates() -> None:
    needed = {name: find_class(name, "pipelines") for name in ("ZImagePipeline", "QwenImagePipeline", "WanPipeline")}
    assert [source and source.needs_chat_template for source in needed.values()] == [True, False, False]


def test_the_commands_refuse_such_a_pipeline_before_loading(tiny_pipeline: Build, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    index = {"_class_name": "DDPMPipeline", "scheduler": ["diffusers", "DDPMScheduler"]}
    (model / "model_index.json").write_text(json.dumps(index))  # no weights: refused before they are looked for
    arguments = generate_arguments(write_table(tmp_path, 1), model, tmp_path / "images")
    sentence = "DDPMPipeline does not generate images from a table of prompts."
    assert finish(fork("muralist", "generate", *arguments), expect=1).startswith(f"muralist: {sentence}\n")
    assert sentence in finish(fork("muralist", "doctor", "generate", *arguments), expect=1)
    assert not (tmp_path / "images").exists()


def test_pipelines_without_a_scheduler_are_refused(tmp_path: Path) -> None:
    index = {
        "_class_name": "StableCascadeCombinedPipeline",
        "prior_scheduler": ["diffusers", "DDPMWuerstchenScheduler"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="StableCascadeCombinedPipeline is several pipelines in one"):
        inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(tmp_path)))


def test_the_id_of_a_model_that_is_not_in_the_cache_is_explained() -> None:
    with pytest.raises(UserError, match="stabilityai/sdxl was not found.*HF_HUB_OFFLINE is set") as error:
        inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path="stabilityai/sdxl"))
    assert "from where `hf download stabilityai/sdxl` ran" in error.value.fix
