"""A model folder in which any file is missing or damaged: refused by name, or the same images."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from muralist.core.errors import UserError
from muralist.generate.model_info import inspect_model
from muralist.models.integrity import check_integrity
from muralist.settings import GenerateSettings
from tests.support.generating import generate_arguments, read_images, write_table
from tests.support.pipelines import REPRESENTATIVE
from tests.support.runs import finish, fork

Build = Callable[[str], Path]
# Files without which the images are the same: these pipelines have their template in their code, or none.
NOT_NEEDED = {
    ("qwenimage", "tokenizer/chat_template.jinja"),
    ("qwenimage", "text_encoder/generation_config.json"),
    ("cogview4", "tokenizer/chat_template.jinja"),
}


def inspect(folder: Path, **changes: Any) -> None:
    inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(folder), **changes))


def copy(folder: Path, target: Path) -> Path:
    """Copy a model; files are links until one is replaced."""
    shutil.copytree(folder, target, copy_function=os.link)
    return target


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_missing_file_is_named(name: str, tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline(name)
    for index, file in enumerate(sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())):
        damaged = copy(folder, tmp_path / str(index))
        (damaged / file).unlink()
        if (name, str(file)) in NOT_NEEDED:
            inspect(damaged)
            continue
        with pytest.raises(UserError) as error:
            inspect(damaged)
        said = str(error.value)
        expected = (
            "its weights" if file.suffix == ".safetensors" else "tokenizer.json" if "jinja" not in file.name else ""
        )
        assert file.name in said or expected in said, f"{file}: {said}"
        assert file.parent.name in said and error.value.fix, f"{file}: {said}"


@pytest.mark.parametrize("file", ["scheduler/scheduler_config.json", "tokenizer/tokenizer.json", "vae/config.json"])
def test_a_truncated_json_file_is_named(file: str, tiny_pipeline: Build, tmp_path: Path) -> None:
    damaged = copy(tiny_pipeline("sd"), tmp_path / "model")
    text = (damaged / file).read_text()
    (damaged / file).unlink()
    (damaged / file).write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=f"{file} cannot be read"):
        inspect(damaged)
    (damaged / file).write_text(text[:-2] + " " * (2 << 20))  # large files are not parsed
    with pytest.raises(UserError, match=f"{file} is truncated"):
        inspect(damaged)


@pytest.mark.parametrize(
    ("kind", "files", "missing"),
    [
        ("CLIPTokenizer", ["vocab.json", "merges.txt"], ""),
        ("CLIPTokenizer", ["vocab.json"], "lacks merges.txt"),
        ("CLIPTokenizer", ["merges.txt"], "lacks vocab.json"),
        ("T5TokenizerFast", ["spiece.model"], ""),
        ("BertTokenizer", ["vocab.txt"], ""),
        ("GemmaTokenizer", ["tokenizer.model"], ""),
        ("GemmaTokenizer", ["special_tokens_map.json"], "lacks its vocabulary"),
        ("PixtralProcessor", ["tokenizer.json"], "lacks preprocessor_config.json"),
        ("PixtralProcessor", ["processor_config.json"], "lacks its vocabulary"),
        ("PixtralProcessor", ["processor_config.json", "tokenizer.json"], ""),
        ("CLIPImageProcessor", ["preprocessor_config.json"], ""),
        ("CLIPImageProcessor", [], "lacks preprocessor_config.json"),
    ],
)
def test_files_of_tokenizers_as_the_hub_has_them(kind: str, files: list[str], missing: str, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    for file in files:
        (tmp_path / "part" / file).write_text("{}")
    if not missing:
        return check_integrity(tmp_path, {"part": kind})
    with pytest.raises(UserError, match=missing):
        check_integrity(tmp_path, {"part": kind})
    return None


def test_a_clip_tokenizer_without_a_length_is_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    damaged = copy(tiny_pipeline("sd"), tmp_path / "model")
    file = damaged / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps({key: value for key, value in settings.items() if key != "model_max_length"}))
    with pytest.raises(UserError, match="tokenizer lacks model_max_length in tokenizer_config.json"):
        inspect(damaged)


def test_shards_need_their_index_and_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: torch.zeros(1)}, folder / name)
    with pytest.raises(UserError, match=r"lacks diffusion_pytorch_model\.safetensors\.index\.json"):
        check_integrity(tmp_path, {"vae": "AutoencoderKL"})
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: name for name in names}}))
    check_integrity(tmp_path, {"vae": "AutoencoderKL"})
    (folder / names[1]).unlink()
    with pytest.raises(UserError, match=f"vae lacks {names[1]}"):
        check_integrity(tmp_path, {"vae": "AutoencoderKL"})


def test_a_model_with_only_a_variant_is_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    model = copy(tiny_pipeline("sd"), tmp_path / "model")
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(UserError, match=r"only the variant fp16: remove \.fp16 from the names"):
        inspect(model)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def as_pickle(model: Path, part: str, name: str, extra: dict[str, Any]) -> Path:
    weights = next((model / part).glob("*.safetensors"))
    torch.save(load_file(weights) | extra, model / part / name)
    weights.unlink()
    return model / part / name


def test_pickles_of_tensors_are_read_and_others_refused_once(tiny_pipeline: Build, tmp_path: Path) -> None:
    table = write_table(tmp_path, 1)
    images = {}
    for name, extra in (("safe", {}), ("code", {"x": _Code()})):
        model = copy(tiny_pipeline("sd"), tmp_path / name)
        file = as_pickle(model, "text_encoder", "pytorch_model.bin", extra)
        arguments = generate_arguments(table, model, tmp_path / f"{name}-images", steps=1)
        said = finish(fork("muralist", "generate", *arguments), expect=1 if extra else 0)
        if extra:
            assert said.startswith(f"muralist: {file} was not read, because it asks to run builtins.print.\n"), said
            assert said.count("\n") == 3 and "save_file(" in said and "model.safetensors" in said
            doctor = finish(fork("muralist", "doctor", "generate", *arguments), expect=1)
            assert f"{file} was not read, because it asks to run builtins.print." in doctor
        else:
            images = read_images(tmp_path / "safe-images")
    assert len(images) == 1
    file = as_pickle(copy(tiny_pipeline("sd"), tmp_path / "cut"), "unet", "diffusion_pytorch_model.bin", {})
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"diffusion_pytorch_model\.bin is damaged or truncated"):
        inspect(tmp_path / "cut")


def test_files_that_are_not_needed_change_no_image(tiny_pipeline: Build, tmp_path: Path) -> None:
    table, pixels = write_table(tmp_path, 1), []
    model = copy(tiny_pipeline("qwenimage"), tmp_path / "model")
    for step in ("whole", "without"):
        finish(fork("muralist", "generate", *generate_arguments(table, model, tmp_path / step, steps=1)))
        pixels.append([np.asarray(Image.open(file)) for file in (tmp_path / step).glob("*.png")])
        for _, file in NOT_NEEDED:
            (model / file).unlink(missing_ok=True)
    assert len(pixels[0]) == 1 and np.array_equal(pixels[0], pixels[1])


def test_the_commands_say_what_is_missing(tiny_pipeline: Build, tmp_path: Path) -> None:
    model = copy(tiny_pipeline("sd"), tmp_path / "model")
    (model / "tokenizer" / "tokenizer_config.json").unlink()
    arguments = generate_arguments(write_table(tmp_path, 1), model, tmp_path / "images", steps=1)
    sentence = f"The model in {model} is incomplete: tokenizer lacks tokenizer_config.json."
    said = finish(fork("muralist", "generate", *arguments), expect=1)
    assert said.startswith(f"muralist: {sentence}\n") and said.endswith("Copy the model again.\n")
    assert sentence in finish(fork("muralist", "doctor", "generate", *arguments), expect=1)
    assert not (tmp_path / "images").exists()
