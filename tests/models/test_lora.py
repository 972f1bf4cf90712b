"""LoRA on HunyuanDiT: starts as the base model, trains and saves nothing else, exports to diffusers and PEFT."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline
from peft import LoraConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters

from muralist.cli import main
from muralist.core import rng
from muralist.core.errors import UserError
from muralist.core.rng import Purpose, SampleKeys
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.hunyuan_dit import HunyuanDiTSpec
from muralist.models.lora import Lora, set_dropout_keys
from muralist.models.weights import read_weights
from muralist.settings import TRAIN_FLAT_NAMES, OptimSettings, SampleSettings, TrainSettings
from muralist.settings.load import load
from muralist.tools.hydit import translate
from muralist.train import checkpoint
from muralist.train.optim import build_optimizer
from tests.support.hunyuan import SMALL, scenes
from tests.support.runs import assert_same_state, finish, last_checkpoint, losses, start, tensors

SIZE = (64, 64)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
LORA = Lora(4, TARGETS)
TRAIN = [*SMALL, "--img_size", "64", "--training_parts", "lora", "--lora_rank", "4", "--ckpt_every", "2"]
QUIET = ["--samples_per_gpu", "0"]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
PROMPTS = ["A highway scene with clear lane markings and distant cars", "A parking lot"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_hunyuan_dit(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def run(model: Path, results: Path) -> Path:
    train(model, results, "through", 4, "--learning_rate", "1e-2")
    return results / "through"


def train(model: Path, results: Path, name: str, steps: int, *more: object, expect: int = 0) -> None:
    words = [*TRAIN, "--model.path", model, "--results_dir", results, "--run_name", name, "--max_steps", steps, *more]
    assert main(["train", *map(str, words)]) == expect


def family_of(model: Path, lora: Lora | None = LORA, seed: int = 0) -> HunyuanDiTSpec:
    return HunyuanDiTSpec.load(model, SIZE, lora=lora, seed=seed)


def loss_of(family: HunyuanDiTSpec, network: nn.Module, first: int = 0) -> Tensor:
    batch = scenes(64, 3, first)
    keys = SampleKeys(0, batch.sample_indices)
    return family.loss(network, family.encode(batch, keys), keys)


def adapters(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.named_parameters() if ".lora_" in name}


def test_fresh_lora_changes_nothing_and_depends_on_the_seed_alone(model: Path) -> None:
    full, family = family_of(model, None), family_of(model)
    network = family.network()
    assert torch.equal(loss_of(family, network), loss_of(full, full.network()))
    torch.manual_seed(17)
    fresh, again, other = adapters(network), adapters(family.network()), adapters(family_of(model, seed=1).network())
    assert len(fresh) == 2 * 6 * 8, "a pair at each of eight projections in six blocks"
    inner = {name for name in fresh if ".lora_A." in name}
    for name, value in fresh.items():
        assert torch.equal(value, again[name])
        if name in inner:
            assert 0.9 < float(value.abs().max()) * value.shape[1] ** 0.5 < 1 and not torch.equal(value, other[name])
        else:
            assert not value.any()
    assert len({fresh[name].sum().item() for name in inner}) == len(inner), "each has its own random values"


def test_training_changes_every_lora_weight_and_nothing_else(model: Path) -> None:
    family = family_of(model)
    network = family.network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = build_optimizer(network, OptimSettings(weight_decay=0.1))
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        loss_of(family, network, 3 * step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]) is not family.is_saved(name), name


def test_a_checkpoint_holds_lora_alone(model: Path, run: Path) -> None:
    found = last_checkpoint(run)
    sets = [load_file(found / f"{which}.safetensors") for which in ("model", "ema1", "ema2")]
    names = set(adapters(family_of(model).network()))
    assert all(part.keys() == names for part in sets)
    assert all(value.any() for value in sets[0].values())
    assert all(not torch.equal(sets[0][name], sets[1][name]) for name in names)
    size = sum(file.stat().st_size for file in found.rglob("*") if file.is_file())
    assert size < (model / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size / 4
    contract = (run / "logs" / "train.log").read_text()
    assert re.search(r"LoRA of rank 4 on to_q to_k to_v to_out.0, 0\.0M of [24]\.\dM parameters trained", contract)
    with Image.open(run / "samples" / "step_0000004" / "gpu_0_sample.png") as drawn:
        mine = np.asarray(drawn).astype(int)
    family = family_of(model)
    network = family.network().eval()
    network.load_state_dict(sets[1], strict=False)
    prompt = (run / "samples" / "step_0000004" / "gpu_0_prompt.txt").read_text().strip()
    expected = family.sample(network, [prompt], [0], SampleSettings(steps=2))[0].permute(1, 2, 0)
    assert np.abs(mine - ((expected.numpy() + 1) * 127.5).round()).max() <= 1, "sampled with the EMA weights"


def test_a_resumed_run_ends_the_same_to_the_bit(model: Path, run: Path, results: Path) -> None:
    for steps in (2, 4):
        train(model, results, "resumed", steps, "--learning_rate", "1e-2", *QUIET)
    assert "at step 2" in (results / "resumed" / "logs" / "train.log").read_text()
    assert_same_state(last_checkpoint(run), last_checkpoint(results / "resumed"))
    assert losses(run) == losses(results / "resumed")


def test_a_checkpoint_with_more_or_less_than_lora_is_refused(model: Path, run: Path, tmp_path: Path) -> None:
    family = family_of(model)
    network = family.network()
    weights = load_file(last_checkpoint(run) / "ema1.safetensors")
    first = next(iter(weights))
    for wrong in ({**weights, "proj_out.bias": torch.zeros(1)}, {n: v for n, v in weights.items() if n != first}):
        save_file(wrong, tmp_path / "ema1.safetensors")
        with pytest.raises(UserError, match="1 are missing or unknown"):
            checkpoint.read_saved_weights(tmp_path, "ema1", network, family)


def generate(family: HunyuanDiTSpec, network: nn.Module) -> Tensor:
    return family.sample(network.eval(), PROMPTS, [3, 8], SampleSettings(steps=4))


def test_export_merges_lora_into_a_pipeline_and_writes_it_for_peft(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert "the LoRA alone, for PEFT, in lora/" in capsys.readouterr().out
    files = [file.stat() for file in out.rglob("*") if file.is_file()]
    assert {stat.st_mode & 0o444 for stat in files} == {(out.stat().st_mode & 0o444)}, (
        "for others too, as the folder is"
    )
    assert sorted(path.name for path in (out / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    family, full = family_of(model), family_of(model, None)
    network = family.network()
    network.load_state_dict(load_file(last_checkpoint(run) / "ema1.safetensors"), strict=False)
    mine, untrained = generate(family, network), generate(full, full.network())
    assert float((mine - untrained).abs().max()) > 0.02, "or the comparisons below would say nothing"

    pipeline = HunyuanDiTPipeline.from_pretrained(out, safety_checker=None, requires_safety_checker=False)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.tensor([3, 8]), (4, 8, 8))
    theirs = pipeline(
        PROMPTS, height=64, width=64, num_inference_steps=4, guidance_scale=5.0, latents=noise,
        use_resolution_binning=False, output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(mine, theirs * 2 - 1, rtol=0, atol=1e-4)

    base = HunyuanDiT2DModel.from_pretrained(model, subfolder="transformer")
    torch.testing.assert_close(generate(full, PeftModel.from_pretrained(base, out / "lora")), mine, rtol=0, atol=1e-4)
    base = HunyuanDiT2DModel.from_pretrained(model, subfolder="transformer")
    inject_adapter_in_model(LoraConfig.from_pretrained(out / "lora"), base)
    stored = load_file(out / "lora" / "adapter_model.safetensors")
    loaded = set_peft_model_state_dict(
        base, {name.removeprefix("base_model.model."): value for name, value in stored.items()}
    )
    assert not loaded.unexpected_keys
    torch.testing.assert_close(generate(full, base), mine, rtol=0, atol=1e-4)

    # What was exported can be trained on, by LoRA again, and exported again.
    train(out, tmp_path, "further", 1, *QUIET)
    assert main(["export", str(tmp_path / "further"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "lora" / "adapter_model.safetensors").is_file()


def test_another_base_model_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = shutil.copytree(model, tmp_path / "mine")
    train(mine, tmp_path, "run", 1, *QUIET)
    file = mine / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    train(mine, tmp_path, "run", 2, *QUIET, expect=1)
    assert "is of another model: lora:" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "is not the one that LoRA was trained on" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_init_from_other_runs(model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(model, tmp_path, "further", 1, "--init_from", run, "--learning_rate", "1e-9", *QUIET)
    mine, theirs = (load_file(last_checkpoint(one) / "model.safetensors") for one in (tmp_path / "further", run))
    expected = load_file(last_checkpoint(run) / "ema1.safetensors")
    for name, value in mine.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)
    assert any(not torch.equal(mine[name], value) for name, value in theirs.items())
    capsys.readouterr()
    train(model, tmp_path, "wider", 1, "--init_from", run, "--lora_rank", "8", expect=1)
    assert "Give LoRA of the same network, --lora_rank and --lora_targets." in capsys.readouterr().err
    train(model, tmp_path, "full", 1, "--init_from", run, "--training_parts", "all", "--lora_rank", "64", expect=1)
    said = capsys.readouterr().err
    assert "This run trains the full network, and they are LoRA weights" in said and "muralist export" in said
    weights = family_of(model, None).network().state_dict()
    save_file(weights, tmp_path / "full.safetensors")
    train(model, tmp_path, "narrow", 1, "--init_from", tmp_path / "full.safetensors", expect=1)
    assert "This run trains LoRA, and they are a full network" in capsys.readouterr().err


def test_alpha_scales_the_adapter_everywhere(model: Path, run: Path, tmp_path: Path) -> None:
    """Started from weights of another scale, a run with alpha has the same network; so has its export."""
    unscaled = load_file(last_checkpoint(run) / "ema1.safetensors")
    words = ["--lora_alpha", "16", "--init_from", run, "--learning_rate", "1e-9", *QUIET]
    train(model, tmp_path, "scaled", 1, *words)
    scaled = load_file(last_checkpoint(tmp_path / "scaled") / "model.safetensors")
    for name, value in unscaled.items():
        torch.testing.assert_close(scaled[name], value / 4 if ".lora_B." in name else value, rtol=0, atol=1e-7)
    losses_of = []
    for lora, weights in ((LORA, unscaled), (Lora(4, TARGETS, 16.0), scaled)):
        family = family_of(model, lora)
        network = family.network()
        network.load_state_dict(weights, strict=False)
        losses_of.append(loss_of(family, network))
    torch.testing.assert_close(*losses_of)
    assert "LoRA of rank 4 and alpha 16 on to_q" in (tmp_path / "scaled" / "logs" / "train.log").read_text()
    assert main(["export", str(tmp_path / "scaled"), str(tmp_path / "out")]) == 0
    for name, value in read_weights(tmp_path / "out" / "lora").items():
        torch.testing.assert_close(value, unscaled[name], rtol=0, atol=1e-6)
    train(model, tmp_path, "back", 1, "--init_from", tmp_path / "scaled", "--learning_rate", "1e-9", *QUIET)
    back = load_file(last_checkpoint(tmp_path / "back") / "model.safetensors")
    for name, value in unscaled.items():
        torch.testing.assert_close(back[name], value, rtol=0, atol=1e-6)


def test_dropout_is_seeded_per_sample(model: Path, tmp_path: Path) -> None:
    """A sample's mask depends on neither its batch, nor on checkpointed blocks; a resumed run ends the same to the bit."""
    lora = Lora(4, LORA.targets, dropout=0.5)
    family = family_of(model, lora)
    network = family.network()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.linspace(-0.2, 0.3, weight.numel()).view_as(weight))
    dropped, later = loss_of(family, network), loss_of(family, network, first=2)
    assert torch.allclose(dropped[2:], later[:-2], rtol=1e-5) and torch.equal(dropped, loss_of(family, network))
    network.eval()
    assert not torch.allclose(dropped, loss_of(family, network), rtol=1e-3)
    plain = family_of(model).network().eval()
    plain.load_state_dict(network.state_dict())
    assert torch.equal(loss_of(family, network), loss_of(family_of(model), plain))
    words = ["--lora_dropout", "0.5", "--ckpt_every", "2", *QUIET]
    train(model, tmp_path, "through", 4, *words)
    train(model, tmp_path, "stopped", 2, *words)
    train(model, tmp_path, "stopped", 4, *words, "--gradient_checkpointing")
    files = [tmp_path / name / "checkpoints" / "step_0000004" / "model.safetensors" for name in ("through", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (files[1].parents[1] / "step_0000002" / "model.safetensors").read_bytes()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.to_q(x))


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_dropout_has_the_masks_of_each_batch(whole: bool) -> None:
    """Blocks that are compiled one by one, as under fsdp2, share a graph."""
    torch.manual_seed(0)
    network: Any = nn.Module()
    network.blocks = nn.ModuleList(Block() for _ in range(3))
    Lora(2, ("to_q",), dropout=0.5).insert(network)
    drawn = {name: torch.randn(weight.shape) for name, weight in network.named_parameters() if ".lora_" in name}
    network.load_state_dict(drawn, strict=False, assign=True)
    inputs = torch.randn(3, 4, 8, requires_grad=True)  # as the output of a block: a graph of its own else

    def loss(sample_indices: Tensor) -> Tensor:
        set_dropout_keys(network, SampleKeys(7, sample_indices))
        x = inputs
        for block in network.blocks:
            x = block(x)
        return x.square().mean(dim=(1, 2))

    def gradients(run: Callable[[Tensor], Tensor], first: int) -> list[Tensor]:
        network.zero_grad()
        losses = run(torch.arange(first, first + 3))
        losses.sum().backward()
        return [losses.detach(), *(weight.grad for name, weight in network.named_parameters() if ".lora_" in name)]

    eager = {first: gradients(loss, first) for first in (0, 2, 4)}
    compiled = torch.compile(loss, backend="aot_eager") if whole else loss
    for block in network.blocks if not whole else ():
        block.compile(backend="aot_eager")
    counters.clear()
    for first in (0, 2, 4, 0):
        torch.testing.assert_close(gradients(compiled, first), eager[first])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not torch.isclose(eager[0][0], eager[4][0]).any(), "other samples have other masks"


def official_adapter(weights: dict[str, Tensor], folder: Path, alpha: int) -> dict[str, Tensor]:
    """LoRA as the official script saves it, of fused layers; returns the sums it stands for, by our names."""
    blocks = {name.partition(".attn")[0] for name in weights}
    layers = {"attn1.Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn2.kv_proj": ("attn2.to_k", "attn2.to_v"),
              "attn2.q_proj": ("attn2.to_q",), "attn1.out_proj": ("attn1.to_out.0",),
              "attn2.out_proj": ("attn2.to_out.0",)}  # fmt: skip
    stored, added = {"base_model.model.pooler.q_proj.lora_A.weight": torch.ones(4, 64)}, {}
    stored["base_model.model.pooler.q_proj.lora_B.weight"] = torch.zeros(64, 4)
    for block in sorted(blocks):
        for fused, parts in layers.items():
            inner = weights[f"{block}.{parts[0]}.lora_A.default.weight"]
            outer = torch.cat([weights[f"{block}.{part}.lora_B.default.weight"] for part in parts])
            stored[f"base_model.model.{block}.{fused}.lora_A.weight"] = inner
            stored[f"base_model.model.{block}.{fused}.lora_B.weight"] = outer
            for part, rows in zip(parts, (outer @ inner * (alpha / 4)).chunk(len(parts)), strict=True):
                added[f"{block}.{part}"] = rows
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    return added


def test_init_from_peft_and_official_lora(model: Path, run: Path, tmp_path: Path) -> None:
    """A folder that PEFT wrote, and one of the official script, whose layers are fused."""
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    mine = load_file(last_checkpoint(run) / "ema1.safetensors")
    again = read_weights(tmp_path / "out" / "lora")
    assert again.keys() == mine.keys() and all(torch.equal(value, mine[name]) for name, value in again.items())

    (tmp_path / "official").mkdir()
    added = official_adapter(mine, tmp_path / "official", alpha=8)
    theirs = read_weights(tmp_path / "official")
    assert theirs.keys() == mine.keys()
    for layer, expected in added.items():
        product = theirs[f"{layer}.lora_B.default.weight"] @ theirs[f"{layer}.lora_A.default.weight"]
        torch.testing.assert_close(product, expected)
    words, _, _ = translate(["--lora-ckpt", str(tmp_path / "official")])
    train(model, tmp_path, "further", 1, *words, "--learning_rate", "1e-9", *QUIET)
    stored = load_file(last_checkpoint(tmp_path / "further") / "model.safetensors")
    for name, value in theirs.items():
        torch.testing.assert_close(stored[name], value, rtol=0, atol=1e-7)

    (tmp_path / "official" / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "use_dora": True}))
    with pytest.raises(UserError, match="is not supported"):
        read_weights(tmp_path / "official")
    (tmp_path / "official" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        read_weights(tmp_path / "official")


def test_flags_of_the_official_script() -> None:
    def words(*flags: str) -> list[str]:
        return translate(flags)[0]

    assert words("--training-parts", "lora", "--rank", "32") == ["--training-parts", "lora", "--lora_rank", "32"]
    all_four = words("--target-modules", "Wqkv", "q_proj", "kv_proj", "out_proj", "--rank=8")
    assert all_four == ["--lora_targets", *TARGETS, "--lora_rank=8"]
    assert words("--target-modules=Wqkv", "--lr", "1") == [
        "--lora_targets", "attn1.to_q", "attn1.to_k", "attn1.to_v", "--learning_rate", "1"
    ]  # fmt: skip
    assert words("--target-modules", "kv_proj", "ff.net.2") == [
        "--lora_targets", "attn2.to_k", "attn2.to_v", "ff.net.2"
    ]  # fmt: skip
    settings = load(TrainSettings, words("--target-modules", "q_proj", "out_proj"), TRAIN_FLAT_NAMES)
    assert settings.model.lora_targets == ["attn2.to_q", "to_out.0"]


def test_targets_are_suffixes_of_layer_names(model: Path) -> None:
    chosen = adapters(family_of(model, Lora(2, ("attn2.to_q", "ff.net.0.proj"))).network())
    assert len(chosen) == 2 * 6 * 2 and all(".attn2.to_q." in name or ".ff.net.0.proj." in name for name in chosen)
    for wrong in ("to_w", "q_proj", "attn1", "proj_out"):  # unknown, of the text pooler, no linear layer, in no block
        with pytest.raises(UserError, match=f"LoRA target '{wrong}'"):
            family_of(model, Lora(2, ("to_q", wrong))).network()


def test_invalid_lora_settings_are_refused_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "no model", tmp_path, "run", 1, "--model", "JiT-T/8", expect=1)
    assert "JiT-T/8 cannot be trained by LoRA" in capsys.readouterr().err
    (tmp_path / "none.yaml").write_text("model: {lora_targets: []}")
    train(tmp_path / "no model", tmp_path, "run", 1, "--config", tmp_path / "none.yaml", expect=1)
    assert "--lora_targets is empty" in capsys.readouterr().err
    (tmp_path / "none.yaml").unlink()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    train(tmp_path / "no model", tmp_path, "run", 1, expect=1)
    assert "Install it with `pip install 'muralist[lora]'`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies", [("fsdp2", "fsdp2"), pytest.param(("zero2", "zero3"), marks=needs_deepspeed)], ids="-".join
)
def test_sharded_training_equals_single_process_and_resumes_elsewhere(
    model: Path, tmp_path: Path, strategies: tuple[str, str]
) -> None:
    more = ["--global_batch_size", "4", "--max_grad_norm", "1"]
    train(model, tmp_path, "alone", 4, *more)
    parts = tmp_path / "parts"
    words = [*TRAIN, *more, "--model.path", model, "--results_dir", tmp_path, "--run_name", "parts"]
    for steps, strategy in zip((2, 3), strategies, strict=True):
        launcher = ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
        finish(start(*launcher, *words, "--max_steps", steps, "--strategy", strategy))
        assert len(list(parts.glob(f"samples/step_{steps:07d}/gpu_?_sample.png"))) == 2
    assert len(list((last_checkpoint(parts) / "state").glob("*.distcp"))) == (2 if strategy == "fsdp2" else 1)
    train(model, tmp_path, "parts", 4, *more)
    assert losses(parts) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    mine, theirs = tensors(last_checkpoint(parts)), tensors(last_checkpoint(tmp_path / "alone"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4)
