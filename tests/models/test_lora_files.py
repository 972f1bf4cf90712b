"""LoRA on any pipeline: which layers it takes, and the files that diffusers, ComfyUI and PEFT open."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import muralist
from muralist.cli import main
from muralist.core.errors import UserError
from muralist.models.diffusers_model import DiffusersSpec
from muralist.models.integrity import fingerprint, read_json
from muralist.models.lora import DEFAULT_TARGETS, Lora, is_adapter
from muralist.models.lora_files import LORA_FILE, read_lora, write_lora
from muralist.models.weights import read_weights
from muralist.settings.tools import LoraFormat
from tests.conftest import REPOSITORY
from tests.support.hunyuan import write_scenes
from tests.support.pipelines import BUILDERS
from tests.support.runs import last_checkpoint

pytest.importorskip("peft")
Build = Callable[[str], Path]
RANK, ALPHA = 4, 2.0
TRAIN = ["--img_size", "64", "--batch_size", "2", "--num_workers", "0", "--no_use_tensorboard", "--data_path",
         "driving_world", "--max_samples", "8", "--val_fraction", "0", "--training_parts", "lora", "--lora_rank", RANK,
         "--lora_alpha", ALPHA, "--samples_per_gpu", "0", "--warmup_steps", "0"]  # fmt: skip


def meta_network(folder: Path, network: str) -> Any:
    config = read_json(folder / network / "config.json")
    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config)


def random_lora(folder: Path, network: str = "", targets: tuple[str, ...] = DEFAULT_TARGETS) -> tuple[Any, Any]:
    """Weights of a LoRA that changes images, and the description that a checkpoint has of it."""
    network = network or ("transformer" if (folder / "transformer").is_dir() else "unet")
    module = meta_network(folder, network)
    lora = Lora(RANK, targets, ALPHA).for_network(module)
    lora.insert(module)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: weight.shape for name, weight in module.named_parameters() if is_adapter(name)}
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    base = fingerprint(folder / network)
    adapter = {"rank": RANK, "targets": list(lora.targets), "alpha": ALPHA, "base": base}
    return weights, {"folder": str(folder), "network": network, "lora": adapter}


def image(pipe: Any) -> Tensor:
    given = {
        "prompt": "a red car", "height": 64, "width": 64, "num_inference_steps": 2, "num_frames": 1,
        "output_type": "latent", "use_resolution_binning": False, "generator": torch.Generator().manual_seed(3),
    }  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    parameters = inspect.signature(type(pipe).__call__).parameters
    return pipe(**{name: value for name, value in given.items() if name in parameters})[0]


def unit_scale(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * ALPHA / RANK if ".lora_B." in name else value for name, value in weights.items()}


def assert_same(found: dict[str, Tensor] | None, expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found is not None and found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [(name, ("diffusers", "comfy")) for name in (
        "sd", "sdxl", "sd3", "flux", "klein", "flux2", "chroma", "auraflow", "wan22", "qwenimage", "zimage", "ltx"
    )] + [(name, ("diffusers",)) for name in (
        "sana", "lumina2", "cogview4", "cogvideox", "hunyuanvideo", "mochi", "krea2", "ernie", "kandinsky5"
    )],
)  # fmt: skip
def test_plain_diffusers_loads_the_files_with_the_same_image(
    name: str, kinds: tuple[LoraFormat, ...], tiny_pipeline: Build, tmp_path: Path
) -> None:
    folder = tiny_pipeline(name)
    weights, description = random_lora(folder)
    network = description["network"]
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    untrained, own = image(pipe), getattr(pipe, network)
    trained = DiffusersSpec.trained_components(weights, description, torch.float32)[network]
    setattr(pipe, network, trained.eval())
    mine = image(pipe)
    setattr(pipe, network, own)
    assert float((mine - untrained).abs().max()) > 0.01, "or the comparisons below would say nothing"
    for kind in kinds:
        (tmp_path / kind).mkdir()
        write_lora(weights, description, kind, tmp_path / kind, "cars")
        [file] = (tmp_path / kind).iterdir()
        assert file.name == (LORA_FILE if kind == "diffusers" else "cars.safetensors")
        pipe.load_lora_weights(str(tmp_path / kind))
        torch.testing.assert_close(image(pipe), mine, rtol=0, atol=1e-4 * float(mine.abs().max()))
        pipe.unload_lora_weights()
        assert_same(read_lora(read_weights(file), list(weights), type(own).__name__), unit_scale(weights))


def test_the_second_network_of_a_pipeline(tiny_pipeline: Build, tmp_path: Path) -> None:
    """diffusers takes the LoRA of transformer_2 by the names of the first network."""
    weights, description = random_lora(tiny_pipeline("wan22"), "transformer_2")
    assert "load_into_transformer_2=True" in write_lora(weights, description, "diffusers", tmp_path)
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline("wan22"), local_files_only=True)
    pipe.load_lora_weights(str(tmp_path), load_into_transformer_2=True)
    loaded = {name: value for name, value in pipe.transformer_2.named_parameters() if is_adapter(name)}
    found = {name.replace(".default_0.", ".default."): value.detach() for name, value in loaded.items()}
    assert_same(found, unit_scale(weights))
    assert not any(is_adapter(name) for name, _ in pipe.transformer.named_parameters())


COMFY_KEYS = {  # as ComfyUI's own `model_lora_keys_unet` lists them
    "sd": "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_out_0.lora_down.weight",
    "sd3": "transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight",
    "flux": "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight",
    "klein": "diffusion_model.double_blocks.0.txt_attn.qkv.lora_B.weight",
    "wan21": "diffusion_model.blocks.1.cross_attn.o.lora_B.weight",
    "qwenimage": "diffusion_model.transformer_blocks.1.attn.to_add_out.lora_A.weight",
    "zimage": "diffusion_model.context_refiner.0.attention.to_out.0.lora_A.weight",
    "hunyuan": "diffusion_model.blocks.3.attn2.kv_proj.lora_A.weight",
    "pixart": "transformer.transformer_blocks.1.attn2.to_k.lora_A.weight",
}


@pytest.mark.parametrize("name", COMFY_KEYS)
def test_names_of_comfyui(name: str, tiny_pipeline: Build, tmp_path: Path) -> None:
    weights, description = random_lora(tiny_pipeline(name))
    assert write_lora(weights, description, "comfy", tmp_path, name) == f"for ComfyUI, in {name}.safetensors"
    stored = load_file(tmp_path / f"{name}.safetensors")
    assert COMFY_KEYS[name] in stored
    network_class = read_json(tiny_pipeline(name) / description["network"] / "config.json")["_class_name"]
    assert_same(read_lora(stored, list(weights), network_class), unit_scale(weights))


def test_fused_layers_hold_the_sum_of_their_parts(tiny_pipeline: Build, tmp_path: Path) -> None:
    """ComfyUI adds B @ A to Wqkv, whose thirds are the layers of diffusers; a part without LoRA stays as it is."""
    weights, description = random_lora(tiny_pipeline("hunyuan"), targets=("attn1.to_q", "attn1.to_v"))
    write_lora(weights, description, "comfy", tmp_path, "cars")
    stored = load_file(tmp_path / "cars.safetensors")
    name = "diffusion_model.blocks.0.attn1.Wqkv"
    q, k, v = (stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"]).chunk(3)
    assert not k.any()
    for part, added in (("to_q", q), ("to_v", v)):
        a, b = (unit_scale(weights)[f"blocks.0.attn1.{part}.lora_{end}.default.weight"] for end in "AB")
        torch.testing.assert_close(added, b @ a)
    assert_same(read_lora(stored, list(weights), "HunyuanDiT2DModel"), unit_scale(weights))
    shared = dict(stored)  # of a trainer that adapts the fused layer as one
    for file_layer in {key.rpartition(".lora_")[0] for key in stored}:
        shared[f"{file_layer}.lora_A.weight"] = torch.randn(RANK, stored[f"{file_layer}.lora_A.weight"].shape[1])
        shared[f"{file_layer}.lora_B.weight"] = torch.randn(len(stored[f"{file_layer}.lora_B.weight"]), RANK)
    found = read_lora(shared, list(weights), "HunyuanDiT2DModel")
    assert found is not None
    q_rows = (shared[f"{name}.lora_B.weight"] @ shared[f"{name}.lora_A.weight"]).chunk(3)[0]
    a, b = (found[f"blocks.0.attn1.to_q.lora_{end}.default.weight"] for end in "AB")
    torch.testing.assert_close(b @ a, q_rows)


def test_classes_without_a_file_of_the_format_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    weights, description = random_lora(tiny_pipeline("pixart"))
    with pytest.raises(
        UserError, match="PixArtSigmaPipeline of diffusers has no load_lora_weights.* --lora_format peft"
    ):
        write_lora(weights, description, "diffusers", tmp_path)
    said = DiffusersSpec.export(weights, description, tmp_path / "out")
    assert said == "for PixArtSigmaPipeline.from_pretrained; the LoRA alone, for PEFT, in lora/"
    assert_same(read_weights(tmp_path / "out" / "lora"), unit_scale(weights))
    weights, description = random_lora(tiny_pipeline("sana"))
    with pytest.raises(UserError, match="no ComfyUI layout for SanaTransformer2DModel.*WanTransformer3DModel"):
        write_lora(weights, description, "comfy", tmp_path)


def test_the_scale_in_files_of_others_is_applied(tiny_pipeline: Build, tmp_path: Path) -> None:
    """`save_lora_weights` of diffusers writes alpha into the metadata, other trainers as a tensor beside each layer."""
    weights, _ = random_lora(tiny_pipeline("wan21"))
    plain = {name.replace(".default.", "."): value for name, value in weights.items()}
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})}
    save_file({f"transformer.{name}": value for name, value in plain.items()}, tmp_path / LORA_FILE, metadata)
    assert_same(read_lora(read_weights(tmp_path), list(weights), "WanTransformer3DModel"), unit_scale(weights))
    alphas = {f"{name.partition('.lora_')[0]}.alpha": torch.tensor(ALPHA) for name in plain}
    assert_same(read_lora(plain | alphas, list(weights), "WanTransformer3DModel"), unit_scale(weights))
    other = {name: value for name, value in plain.items() if ".1." not in name}
    damaged = plain | alphas | {next(iter(alphas)): torch.ones(2)}
    for wrong in (other, damaged, plain | {next(iter(plain)): torch.ones(4)}):  # a layer is missing, shapes are wrong
        assert read_lora(wrong, list(weights), "WanTransformer3DModel") is None


@pytest.mark.parametrize("name", BUILDERS)
def test_default_targets_are_all_linear_layers_of_attention(name: str, tiny_pipeline: Build) -> None:
    folder = tiny_pipeline(name)
    network = meta_network(folder, "transformer" if (folder / "transformer").is_dir() else "unet")
    lora = Lora(RANK, DEFAULT_TARGETS).for_network(network)
    lora.insert(network)
    adapted = {key.partition(".lora_A")[0] for key, _ in network.named_parameters() if ".lora_A." in key}
    in_attention = {
        key.removesuffix(".base_layer")
        for key, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and "attn" in key.replace("attention.", "attn.") and ".lora_" not in key
    }
    assert adapted == {key for key in in_attention if "pooler" not in key and "norm" not in key}
    assert set(DEFAULT_TARGETS) <= set(lora.targets), "as nearly all networks name them"


def test_targets_of_networks_with_other_names() -> None:
    expected = {
        "PRXTransformer2DModel": {"to_out.0", "img_qkv_proj", "txt_kv_proj"},
        "Kandinsky5Transformer3DModel": {
            "cross_attention.out_layer", "self_attention.out_layer", "to_key", "to_query", "to_value"
        },
    }  # fmt: skip
    for name, targets in expected.items():
        with torch.device("meta"):
            network = getattr(diffusers, name)()
        lora = Lora(RANK, DEFAULT_TARGETS).for_network(network)
        lora.insert(network)
        assert set(lora.targets) == targets


def test_wrong_targets_are_named_with_the_layers(tiny_pipeline: Build) -> None:
    unet, klein = meta_network(tiny_pipeline("sd"), "unet"), meta_network(tiny_pipeline("klein"), "transformer")
    with pytest.raises(
        UserError, match=r"No layer matches the LoRA target 'to_w'.*the layers are attn1.to_k.*ff.net.2, time"
    ):
        Lora(2, ("to_w",)).insert(unet)
    with pytest.raises(UserError, match="'conv1' matches down_blocks.*which is not a linear layer of a block"):
        Lora(2, ("conv1",)).insert(unet)
    with pytest.raises(UserError, match="'attn.to_out' matches transformer_blocks.0.attn.to_out, which is not"):
        Lora(2, ("attn.to_out",)).insert(klein)
    many = tuple(f"single_transformer_blocks.{index}.attn.to_out" for index in range(12))
    assert Lora(2, many).summary().endswith("single_transformer_blocks.7.attn.to_out and 4 more")


@pytest.fixture(scope="module")
def run(tiny_pipeline: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    train(tiny_pipeline("flux"), root, "run", "--learning_rate", "1")
    for kind in FILES:
        words = [root / "run", root / kind, "--weights", "model", "--lora_format", kind]
        assert main(["export", *map(str, words)]) == 0
    return root / "run"


FILES = {"diffusers": LORA_FILE, "comfy": "comfy.safetensors", "peft": "adapter_model.safetensors"}


def train(folder: Path, root: Path, name: str, *more: object, expect: int = 0) -> None:
    words = [*TRAIN, "--model.path", folder, "--results_dir", root, "--run_name", name, "--max_steps", "1", *more]
    assert main(["train", *map(str, words)]) == expect


def test_export_and_train_again(
    run: Path, tiny_pipeline: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "merged"), "--weights", "model"]) == 0
    assert f"the LoRA alone, for load_lora_weights, in {LORA_FILE}" in capsys.readouterr().out
    assert (tmp_path / "merged" / LORA_FILE).is_file() and (tmp_path / "merged" / "vae").is_dir()
    trained = load_file(last_checkpoint(run) / "model.safetensors")
    for kind, file in FILES.items():
        stored = {path.name for path in (run.parent / kind).iterdir()}
        assert stored == {file, *(["adapter_config.json"] if kind == "peft" else [])}, "no copy of the model"
        again = read_weights(run.parent / kind)
        assert_same(read_lora(again, list(trained), "FluxTransformer2DModel") or again, unit_scale(trained), 1e-6)
    folder, comfy = tiny_pipeline("flux"), run.parent / "comfy" / FILES["comfy"]
    train(folder, tmp_path, "again", "--init_from", comfy, "--learning_rate", "1e-9")
    assert_same(load_file(last_checkpoint(tmp_path / "again") / "model.safetensors"), trained, 1e-6)
    capsys.readouterr()
    train(folder, tmp_path, "other", "--init_from", comfy, "--lora_rank", 8, expect=1)
    said = capsys.readouterr().err
    assert f"The weights of {comfy} do not fit the transformer" in said and "the same network, --lora_rank and" in said
    assert main(["export", str(run), str(run.parent / "peft"), "--lora_format", "peft"]) == 1
    assert "exists" in capsys.readouterr().err
    save_file({"net.weight": torch.zeros(1)}, tmp_path / "full.safetensors")
    assert main(["export", str(tmp_path / "full.safetensors"), str(tmp_path / "lora"), "--lora_format", "comfy"]) == 1
    assert "--lora_format comfy needs a LoRA, and these weights are a full network." in capsys.readouterr().err


@pytest.mark.slow
def test_every_file_generates_the_image_of_its_run(run: Path, tiny_pipeline: Build) -> None:
    def generate(path: Path, **more: Any) -> Tensor:
        settings = {"num_inference_steps": 2, "height": 64, "width": 64, "dtype": "fp32"}
        with muralist.load_pipeline(path, "cpu", **settings, **more) as pipeline:
            return torch.frombuffer(bytearray(pipeline("a red car", seeds=7)[0].tobytes()), dtype=torch.uint8).int()

    folder = tiny_pipeline("flux")
    mine = generate(run, weights="model")
    assert int((mine - generate(folder)).abs().max()) > 5
    for kind in FILES:
        assert int((mine - generate(folder, lora=[str(run.parent / kind)])).abs().max()) <= 1, kind
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.load_lora_weights(str(run.parent / "diffusers"))
    pipe.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(7)
    theirs = pipe("a red car", height=64, width=64, num_inference_steps=2, generator=seeded, output_type="pt").images[0]
    theirs = (theirs.permute(1, 2, 0) * 255).round().int().flatten()
    assert int((mine - theirs).abs().max()) <= 1, "diffusers outside muralist"


@pytest.mark.slow
def test_the_script_of_the_docs(tiny_pipeline: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "lora.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "my_pipeline").symlink_to(tiny_pipeline("flux"))
    write_scenes(tmp_path / "my_images", 64, 8)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "lora.md", "exec"), {})
    with Image.open(tmp_path / "red-car.png") as made:
        assert made.size == (64, 64) and len(made.getcolors(64 * 64)) > 100
