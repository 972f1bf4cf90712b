"""LoRA that does not fit the model is refused by names and shapes, before any weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from muralist.core.errors import UserError
from muralist.generate.model_info import inspect_model
from muralist.settings import GenerateSettings
from tests.support.generating import generate_arguments, read_images, write_table
from tests.support.runs import finish, fork

pytest.importorskip("peft")
Build = Callable[[str], Path]
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
Tensors = dict[str, torch.Tensor]


def inspect(folder: Path, lora: Path) -> None:
    inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(folder), lora=[str(lora)]))


def refusal(folder: Path, lora: Path) -> UserError:
    with pytest.raises(UserError) as error:
        inspect(folder, lora)
    return error.value


def matrices(folder: Path, layer: str, down: str, up: str, name: str = "", width: int = 0) -> Tensors:
    """A LoRA of one layer of the U-Net; `width` replaces the layer's own."""
    weight = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")[f"{layer}.weight"]
    torch.manual_seed(0)
    shapes = {down: (2, width or weight.shape[1]), up: (weight.shape[0], 2)}
    return {f"{name or f'unet.{layer}'}.{end}.weight": torch.randn(shape) for end, shape in shapes.items()}


def write(tensors: Tensors, file: Path, metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, file, metadata)
    return file


@pytest.mark.parametrize(
    ("down", "up", "name"),
    [
        ("lora_A", "lora_B", ""),
        ("lora.down", "lora.up", ""),
        ("lora_down", "lora_up", f"lora_unet_{LAYER.replace('.', '_')}"),
    ],
)
def test_formats_of_diffusers_and_kohya(down: str, up: str, name: str, tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd")
    inspect(folder, write(matrices(folder, LAYER, down, up, name), tmp_path / "fits.safetensors"))
    wide = matrices(folder, LAYER, down, up, name, width=2048)
    error = refusal(folder, write(wide, tmp_path / "wide.safetensors", {"ss_base_model_version": "sdxl_base_v1-0"}))
    stored = name or f"unet.{LAYER}"
    assert error.what.endswith(
        f"wide.safetensors does not fit StableDiffusionPipeline: its layer {stored} is 64 x 2048, the model's is 64 x 32."
    )
    assert error.why == "It was made for sdxl_base_v1-0." and "--model_path" in error.fix


def test_kohya_names_of_the_original_network_are_compared_by_their_text_width(
    tiny_pipeline: Build, tmp_path: Path
) -> None:
    folder, name = tiny_pipeline("sd"), "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k"
    inspect(folder, write(matrices(folder, LAYER, "lora_down", "lora_up", name), tmp_path / "fits.safetensors"))
    wide = matrices(folder, LAYER, "lora_down", "lora_up", name, width=2048)
    error = refusal(folder, write(wide, tmp_path / "wide.safetensors"))
    assert "reads text embeddings 2048 wide, the model's are 32 wide" in error.what


def test_layers_and_components_that_the_model_lacks(tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd")
    missing = write({"unet.blocks.7.to_q.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "a.safetensors")
    assert "does not fit StableDiffusionPipeline: unet has no layer blocks.7.to_q." in refusal(folder, missing).what
    short = write({"unet.nothing.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "d.safetensors")
    assert "does not fit StableDiffusionPipeline: unet has no layer nothing." in refusal(folder, short).what
    other = write({"transformer.blocks.7.to_q.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "b.safetensors")
    assert "the model has no transformer." in refusal(folder, other).what
    unrelated = write({"vae.weight": torch.zeros(2, 4)}, tmp_path / "c.safetensors")
    assert "holds no LoRA layers." in refusal(folder, unrelated).what
    (tmp_path / "empty").mkdir()
    assert "holds no LoRA." in refusal(folder, tmp_path / "empty").what


def test_text_encoders(tiny_pipeline: Build, tmp_path: Path) -> None:
    name = "text_model.encoder.layers.0.self_attn.q_proj"
    for stored in (f"text_encoder.{name}.lora_A.weight", f"lora_te_{name.replace('.', '_')}.lora_down.weight"):
        inspect(tiny_pipeline("sd"), write({stored: torch.ones(2, 32)}, tmp_path / "fits.safetensors"))
        error = refusal(tiny_pipeline("sd"), write({stored: torch.ones(2, 48)}, tmp_path / "wide.safetensors"))
        assert "is ? x 48, the model's is 32 x 32." in error.what


def test_peft_folders(tiny_pipeline: Build, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "org/other"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    key = "base_model.model.blocks.0.attn1.to_q.lora_A.weight"
    write({key: torch.ones(2, 32)}, tmp_path / "adapter_model.safetensors")
    inspect(tiny_pipeline("hunyuan"), tmp_path)
    write({key: torch.ones(2, 48)}, tmp_path / "adapter_model.safetensors")
    error = refusal(tiny_pipeline("hunyuan"), tmp_path)
    assert "is ? x 48, the model's is 32 x 32." in error.what and error.why == "It was made for org/other."
    assert "unet has no layer blocks.0.attn1.to_q." in refusal(tiny_pipeline("sd"), tmp_path).what


def test_non_finite_lora(tiny_pipeline: Build, tmp_path: Path) -> None:
    folder = tiny_pipeline("sd")
    weights = matrices(folder, LAYER, "lora_A", "lora_B")
    weights[f"unet.{LAYER}.lora_B.weight"][3, 1] = torch.nan
    error = refusal(folder, write(weights, tmp_path / "nan.safetensors"))
    assert error.what.endswith(f"nan.safetensors holds NaN or Inf in the tensor unet.{LAYER}.lora_B.weight.")


def test_the_commands_refuse_a_wrong_lora(tiny_pipeline: Build, tmp_path: Path) -> None:
    folder, table = tiny_pipeline("sd"), write_table(tmp_path, 1)
    wrong = write(matrices(folder, LAYER, "lora_A", "lora_B", width=48), tmp_path / "wrong.safetensors")
    arguments = generate_arguments(table, folder, tmp_path / "wrong", "--lora", wrong, steps=1)
    sentence = f"The LoRA at {wrong} does not fit StableDiffusionPipeline: its layer unet.{LAYER} is 64 x 48"
    said = finish(fork("muralist", "generate", *arguments), expect=1)
    assert said.startswith(f"muralist: {sentence}") and "Traceback" not in said
    assert sentence in finish(fork("muralist", "doctor", "generate", *arguments), expect=1)
    # Names that only diffusers could convert, of which it finds none, are an error and not an image without LoRA.
    ignored = write({f"foreign.{LAYER}.lora_A.weight": torch.ones(2, 32)}, tmp_path / "ignored.safetensors")
    arguments = generate_arguments(table, folder, tmp_path / "ignored", "--lora", ignored, steps=1)
    said = finish(fork("muralist", "generate", *arguments), expect=1)
    assert f"The LoRA at {ignored} does not fit StableDiffusionPipeline" in said
    assert not read_images(tmp_path / "ignored")


def test_non_finite_weights_are_found_by_file_and_tensor(tiny_pipeline: Build, tmp_path: Path) -> None:
    from tests.models.test_integrity import copy

    model = copy(tiny_pipeline("sd"), tmp_path / "model")
    file = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights: dict[str, Any] = load_file(file)
    weights["conv_in.weight"][0, 0, 0, 0] = -torch.inf
    file.unlink()
    save_file(weights, file, {"format": "pt"})
    arguments = generate_arguments(write_table(tmp_path, 1), model, tmp_path / "images", steps=1)
    said = finish(fork("muralist", "generate", *arguments), expect=1)
    assert f"muralist: {file} holds NaN or Inf in the tensor conv_in.weight." in said
    assert "--dtype" not in said and said.count("NaN or Inf") == 1
    weights["conv_in.weight"][0, 0, 0, 0] = 1e6  # finite, and too large for fp16
    save_file(weights, file, {"format": "pt"})
    said = finish(fork("muralist", "generate", *arguments, "--dtype", "fp16"), expect=1)
    assert "The weights conv_in.weight of" in said and "Try --dtype bf16 or fp32." in said
