"""Memory against what autograd really keeps and a measured peak; FP8, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.kernels import fp8
from muralist.kernels.fp8 import why_no_fp8
from muralist.kernels.ops import Linear
from muralist.models import configs
from muralist.models.jit_spec import JiTInputs, JiTSpec
from muralist.models.spec import build_spec
from muralist.settings import TRAIN_FLAT_NAMES, DataSettings, ModelSettings, TrainSettings
from muralist.settings.load import CONFIG_NAMES, identity, load
from muralist.train import preflight
from muralist.train.preflight import CONTEXT, MemoryEstimate, estimate_memory, state_bytes
from muralist.train.step import autocast_dtype
from tests.conftest import REPOSITORY
from tests.support.runs import last_checkpoint, losses, only_run, tensors, train, train_through_and_in_legs


def settings(*words: str) -> TrainSettings:
    return load(TrainSettings, ["--data_path", "driving_world", *words], TRAIN_FLAT_NAMES)


def kept_by_autograd(name: str, side: int, bf16: bool, images: int, *more: str) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights not counted."""
    family = JiTSpec.from_settings(settings("--model", name, "--img_size", str(side), *more), [])
    network = family.network()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    inputs = JiTInputs(torch.zeros(images, side, side, 3, dtype=torch.uint8), torch.zeros(images, dtype=torch.int64))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        loss = family.loss(network, inputs, SampleKeys(0, torch.arange(images)))
    assert loss.requires_grad
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


@pytest.mark.parametrize("bf16", [False, True])
def test_formula_counts_what_autograd_saves(bf16: bool) -> None:
    more, fewer = (kept_by_autograd("JiT-T/4", 32, bf16, images) for images in (3, 2))
    assert configs.activation_bytes("JiT-T/4", 32, bf16, compiled=False) == pytest.approx(more - fewer, rel=0.06)


@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_checkpointing_saves_less(bf16: bool) -> None:
    more, fewer = (kept_by_autograd("JiT-T/4", 64, bf16, images, "--activation_checkpointing") for images in (3, 2))
    full = configs.activation_bytes("JiT-T/4", 64, bf16, compiled=False)
    blocks = 6 * 256 + 4 * 4  # positions, with context tokens in the last four
    one_block = full * (256 + 4) / blocks
    told = configs.activation_bytes("JiT-T/4", 64, bf16, compiled=False, gradient_checkpointing=True)
    assert told == pytest.approx(more - fewer + one_block, rel=0.1)
    assert more - fewer < 0.15 * full


def test_checkpointing_lets_larger_batches_fit() -> None:
    flags = ([], ["--gradient_checkpointing"], ["--activation_checkpointing"])
    needs = [estimate_memory(settings("--model", "JiT-B/4", *more), 1, True) for more in flags]
    most = [need.largest_batch(80e9) for need in needs]
    assert most[0] and most[1] and most[1] > 4 * most[0] and most[1] == most[2]


def test_formula_is_near_a_measured_peak() -> None:
    record = json.loads((REPOSITORY / "bench" / "results" / "cifar10_jit_s2_h200.json").read_text())
    count, per_image = configs.parameter_count("S", 2, 10), configs.activation_bytes("JiT-S/2", 32, True, True)
    need = MemoryEstimate(count, state_bytes("ddp", count, 0, 1), per_image)
    assert (need.total(256) - CONTEXT) / 1e9 == pytest.approx(record["peak memory, GB"], rel=0.05)


def test_largest_batch() -> None:
    need = estimate_memory(settings("--model", "JiT-B/4", "--use_amp"), ranks=1, compiled=True)
    most = need.largest_batch(141e9)
    assert most and need.total(most) <= 141e9 < need.total(most + 1)
    assert need.largest_batch(1e9) == 0
    strategies = ("ddp", "fsdp2", "zero2", "zero3")
    assert [state_bytes(strategy, 100, 0, 4) for strategy in strategies] == [2400, 600, 1600, 700]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--precision fp16 --strategy fsdp2", "--precision fp16 is not supported with --strategy fsdp2. Loss scaling"),
        ("--ema_decay 0.999 --ema_half_life 5000", "--ema_decay and --ema1_half_life cannot both be given."),
        (
            "--sample_solver ddim",
            "--sample_solver ddim does not sample from JiT-B/4. Use heun or euler or abm2, or leave it out.",
        ),
        ("--sample_solver abm2 --samples.official_last_step true", "--sample_solver abm2 has no official last step."),
        ("--model HunyuanDiT --sample_solver heun", "heun does not sample from HunyuanDiT. Use dpm++ or ddim, or"),
        ("--lora_target to_q to_v", "--lora_targets to_q to_v has no effect without --training_parts lora. Give both"),
        ("--rank 8", "--lora_rank 8 has no effect without --training_parts lora. Give both"),
    ],
)
def test_settings_that_exclude_each_other(words: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight.check_settings(settings(*words.split()))
    assert told in str(caught.value)


def test_settings_without_effect_are_named_with_the_reason(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--min_lr 1e-5 --lr_base_batch 64 --model.path {tmp_path} --uncond_p 0.3 --label_drop_prob 0.5"
    words += " --persistent_workers false --num_workers 0"
    told = [
        "--min_lr (the learning rate is constant)",
        "--lr_base_batch (there is no --lr_rule)",
        "--model.path (JiT-T/8 is built from its name)",
        "--persistent_workers (--num_workers 0 has no processes)",
        "--uncond_p (JiT-T/8 is trained without captions)",
        "--label_drop_prob (there is no --enable_condition)",
    ]
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--dry_run", *words.split())
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "without effect" in line] == [f"warning    without effect: {one}" for one in told]
    useful = (
        "--lr_schedule cosine --lr_rule sqrt --min_lr 1e-5 --lr_base_batch 64 --enable_condition --label_drop_prob 0.5 "
        "--persistent_workers false"
    )
    assert not preflight.settings_without_effect(settings(*useful.split()))
    hunyuan = "--model HunyuanDiT --model.path small --uncond_p 0.3 --caption {label}"
    assert not preflight.settings_without_effect(settings(*hunyuan.split()))
    for config in CONFIG_NAMES:
        assert not preflight.settings_without_effect(settings("--config", config)), config


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--network transformer_2", ["--network (for diffusers models only)"]),
        ("--model HunyuanDiT --attn_dropout 0.1", ["--attn_dropout (for JiT models only)"]),
        ("--model HunyuanDiT --sample_interval 0.2 0.8", ["--sample_interval (for JiT models only)"]),
        ("--uncond_p_t5 0.3", ["--uncond_p_t5 (for HunyuanDiT models only)"]),
        ("--sample_steps 5 --samples_per_gpu 0", ["--sample_steps (--samples_per_gpu is 0)"]),
        ("--wandb_project p --wandb_name n", ["--wandb_project, --wandb_name (there is no --use_wandb)"]),
        ("--distill.steps 4", ["--distill.steps (for `muralist distill`)"]),
        ("--strategy fsdp2", ["--strategy (there is one process)"]),
        (
            "--strategy ddp --enable_condition --sample_interval 0.2 0.8 --attn_dropout 0.1 --use_wandb --wandb_name n",
            [],
        ),
        ("--model HunyuanDiT --uncond_p_t5 0.3 --sample_steps 5", []),
    ],
)
def test_settings_of_other_models_and_commands_are_named(words: str, told: list[str]) -> None:
    assert preflight.settings_without_effect(settings(*words.split()), processes=1) == told
    assert not preflight.settings_without_effect(settings("--strategy", "fsdp2"), processes=2)


def test_precision_decides_before_use_amp() -> None:
    cpu = torch.device("cpu")
    for words, dtype in (
        ("", None), ("--use_amp", torch.bfloat16), ("--precision bf16", torch.bfloat16),
        ("--config base_config.yaml --precision fp32", None), ("--mixed_precision no", None),
        ("--precision fp16", torch.float16), ("--precision fp8", torch.bfloat16),
    ):  # fmt: skip
        assert autocast_dtype(settings(*words.split()), cpu) is dtype, words


def test_fp8_implies_bf16_and_changes_the_run_name() -> None:
    plain, mixed, eight = settings(), settings("--use_amp"), settings("--precision", "fp8")
    assert [one.mixed for one in (plain, mixed, eight)] == [False, True, True]
    assert identity(eight) == identity(plain) | {"precision": "fp8"}
    assert identity(settings("--precision", "auto")) == identity(plain)


def test_fp8_covers_the_four_large_layers_of_each_block() -> None:
    family = build_spec(settings("--precision", "fp8", "--model", "JiT-B/16"), [])
    network, plain = family.meta_model(), build_spec(settings("--model", "JiT-B/16"), []).meta_model()
    told = [name for name, layer in network.named_modules() if isinstance(layer, Linear) and layer.fp8]
    layers = ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3")
    assert told == [f"blocks.{block}.{layer}" for block in range(12) for layer in layers]
    assert not any(layer.fp8 for layer in plain.modules() if isinstance(layer, Linear))
    assert family.describe() == build_spec(settings("--model", "JiT-B/16"), []).describe()
    assert network.state_dict().keys() == plain.state_dict().keys()
    assert family.summary() == "JiT-B/16 at 64 px, x-prediction with v-loss, FP8 matmuls"


def test_hunyuandit_and_deepspeed_refuse_fp8() -> None:
    with pytest.raises(UserError, match="HunyuanDiT cannot be trained with --precision fp8"):
        preflight.check_settings(settings("--precision", "fp8", "--model", "HunyuanDiT"))
    with pytest.raises(UserError, match="--precision fp8 is not supported with --strategy zero3"):
        preflight.check_settings(settings("--precision", "fp8", "--strategy", "zero3"))
    preflight.check_settings(settings("--precision", "fp8", "--strategy", "fsdp2"))


def test_gpu_without_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match=r"needs a GPU with FP8 matmuls: compute capability 8\.9") as refused:
        preflight.check_strategy(settings("--precision", "fp8"), "ddp", torch.device("cuda"))
    assert refused.value.why == "NVIDIA A100 has 8.0."
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert (
        why_no_fp8(torch.device("cuda"))
        == f"NVIDIA A100 has 12.0, but torch {torch.__version__} has no FP8 matmul for it."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_fp8_without_a_gpu_is_refused_before_anything_is_written(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train("--data_path", photo_folder, "--results_dir", tmp_path / "results", "--precision", "fp8", expect=1)
    told = capfd.readouterr().err
    assert "--precision fp8 needs a GPU with FP8 matmuls" in told
    assert "There is no GPU here." in told and "Use --precision bf16, or leave it out." in told
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_resumed_fp8_run_is_bit_identical(photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "has_fp8", lambda device: True)  # a CPU computes them too, slowly
    common = ["--data_path", photo_folder, "--precision", "fp8", "--samples_per_gpu", "0"]
    through, _ = train_through_and_in_legs(tmp_path, common, 1, 3)
    train(*common[:2], "--use_amp", "--samples_per_gpu", "0", "--results_dir", tmp_path / "bf16", "--max_steps", "3")
    bf16 = only_run(tmp_path / "bf16")
    assert losses(through) != losses(bf16) and losses(through) == pytest.approx(losses(bf16), rel=0.02)
    assert tensors(last_checkpoint(through)).keys() == tensors(last_checkpoint(bf16)).keys()


def test_weights_of_data_sets_do_not_go_with_buckets() -> None:
    data = DataSettings(path="a", weights=[1.0], multireso=True)
    with pytest.raises(UserError, match="--data_weights is not supported with --multireso"):
        preflight.check_settings(TrainSettings(data=data, model=ModelSettings(name="HunyuanDiT")))
