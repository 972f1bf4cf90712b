"""Flags of the official HunyuanDiT script: translated, ignored, or refused with one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import FlagTable, flatten, load
from muralist.tools import hydit as tables
from muralist.tools.hydit import OF_MODEL, SAME, translate, translate_flags
from tests.conftest import REPOSITORY

WORKS: dict[str, dict[str, object]] = {
    "--batch-size 1": {"data.batch_size": 1},
    "--seed 42": {"seed": 42},
    "--ema-decay 0.9999": {"optim.ema_decay": 0.9999},
    "--use-fp16": {"use_amp": True},
    "--no-fp16": {"use_amp": False},
    "--model DiT-g/2": {"model.name": "JiT-B/4"},  # no flag: the default configuration selects HunyuanDiT
    "--image-size 1024 768": {"model.img_size": [1024, 768]},
    "--training-parts lora": {"model.training_parts": "lora"},
    "--rank 32": {"model.lora_rank": 32},
    "--lora-ckpt results/earlier": {"checkpoint.init_from": "results/earlier"},
    "--target-modules Wqkv q_proj kv_proj out_proj": {"model.lora_targets": ["to_q", "to_k", "to_v", "to_out.0"]},
    "--lr 1e-5": {"optim.learning_rate": 1e-5},
    "--epochs 8": {"epochs": 8},
    "--max-training-steps 10_000_000": {"max_steps": 10_000_000},
    "--log-every 10": {"log.every": 10},
    "--ckpt-every 500": {"checkpoint.every": 500, "checkpoint.keep_every": 500},
    "--ckpt-latest-every=100": {"checkpoint.latest_every": 100},
    "--ckpt-every-n-epoch 1": {"checkpoint.at_epoch_end": True},
    "--num-workers 4": {"data.num_workers": 4},
    "--global-seed 999": {"seed": 999},
    "--warmup-num-steps 0": {"optim.warmup_steps": 0},
    "--weight-decay 0.1": {"optim.weight_decay": 0.1},
    "--uncond-p 0.44": {"model.uncond_p": 0.44},
    "--uncond-p-t5 0.44": {"model.uncond_p_t5": 0.44},
    "--results-dir ./log_EXP": {"results_dir": "./log_EXP"},
    "--task-flag mine": {"run_name": "mine"},
    "--resume": {"checkpoint.resume": "auto"},
    "--resume results/run": {"checkpoint.resume": "results/run"},
    "--index-file a.json b.json": {"data.path": ["a.json", "b.json"]},
    "--random-flip": {"data.random_flip": True},
    "--grad-accu-steps 2": {"optim.gradient_accumulation_steps": 2},
    "--gradient-checkpointing": {"model.gradient_checkpointing": True},
    "--infer-steps 100": {"samples.steps": 100},
    "--sampler dpmms": {"samples.solver": "dpm++"},
    "--sampler ddim": {"samples.solver": "ddim"},
    "--cfg-scale 6.0": {"samples.guidance": 6.0},
}
IGNORED = (
    "--extra-fp16 --qk-norm --norm layer --text-states-dim 1024 --text-len 77 --text-states-dim-t5 2048 --text-len-t5 256 "
    "--learn-sigma --predict-type v_prediction --noise-schedule scaled_linear --mse-loss-weight-type constant "
    "--noise-offset 0 --gc-interval 40 --rope-img base512 --rope-real --use-ema --ema-dtype fp32 --use-flash-attn "
    "--gc-rate 1 --save-optimizer-state --deepspeed --local_rank=0 --load-key ema --ckpt_every_n_epoch=0"
)
REFUSED = {
    "--norm rms": "--norm is rms: expected layer.",
    "--text-states-dim 768": "expected 1024; the model folder defines it",
    "--output-merge-path merged": "`muralist export RUN FOLDER`",
    "--predict-type epsilon": "expected v_prediction",
    "--mse-loss-weight-type min_snr_5": "expected constant",
    "--noise-offset 0.1": "expected 0.0",
    "--ckpt-every-n-epoch 2": "--ckpt-every-n-epoch is 2: expected 0 or 1.",
    "--warmup-min-lr 1e-6": "starts at the learning rate divided by --warmup_steps + 1; leave it out",
    "--rope-img extend": "expected base512",
    "--resume-module-root x.pt": "convert_hunyuandit_to_diffusers.py of diffusers, and give the folder as --model.path",
    "--resume-ema-root=x.pt": "convert_hunyuandit_to_diffusers.py",
    "--resume-split": "resumes a run automatically",
    "--no-strict": "weights must match the model exactly",
    "--reset-loader": "--init_from RUN with another --run_name",
    "--target-ratios 1:1 3:4": "follow from --reso-step",
    "--ema-dtype fp16": "expected fp32 or none; EMA weights have the precision of the weights",
    "--ema-warmup": "--ema1_half_life N",
    "--ema-warmup-power 0.75": "--ema1_half_life N",
    "--ema-reset-decay": "--ema1_half_life N",
    "--cpu-offloading": "training does not offload to host memory; --use-zero-stage 3",
    "--gc-rate 0.5": "expected 1.0; --gradient-checkpointing applies to all blocks",
    "--use-zero-stage 4": "expected 1, 2 or 3",
    "--sampler ddpm": "--sampler is ddpm: expected ddim or dpmms.",
    "--load-key module": "expected ema; samples use the EMA weights",
    "--dit-weight x.pt": "give the folder as --model.path",
}


@pytest.mark.parametrize("written", WORKS)
def test_translated_flags(written: str) -> None:
    settings = load(TrainSettings, translate([*written.split(), "--wandb_name", "next"]).flags, TRAIN_FLAT_NAMES)
    values = flatten(settings)
    assert {path: values[path] for path in WORKS[written]} == WORKS[written]
    assert settings.log.wandb_name == "next", "it consumed only its own values"


def test_ignored_flags() -> None:
    flags, strategy, model_flags = translate([*IGNORED.split(), "--lr", "1"])
    assert (flags, strategy, model_flags) == (["--at_epoch_end", "false", "--learning_rate", "1"], None, {})
    assert translate(["--use-ema=true", "--gc-interval", "--lr=1"]).flags == ["--learning_rate=1"]
    assert translate(["--use-zero-stage", "1"]).strategy == translate(["--use-zero-stage=2"]).strategy == "zero2"


@pytest.mark.parametrize("written", REFUSED)
def test_refused_flags_name_an_alternative(written: str) -> None:
    with pytest.raises(UserError) as caught:
        translate(written.split())
    message = str(caught.value)
    assert message.startswith(written.split()[0].partition("=")[0]) and REFUSED[written] in message
    assert (message.count(". "), message[-1], caught.value.why, caught.value.fix) == (0, ".", "", ""), "one sentence"


@pytest.mark.parametrize("written", ["--multireso --reso-step 64", "--lowbit-opt", "--caption {text_zh}"])
def test_other_flags_are_passed_through(written: str) -> None:
    assert translate(written.split()).flags == written.split()


def test_model_flags_must_agree_with_the_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    old, new = (build_small_hunyuan_dit(tmp_path / version, version) for version in ("1.1", "1.2"))  # type: ignore[arg-type]
    official = ["--beta-start", "0.00085", "--beta-end", "0.03", "--use-style-cond", "--size-cond", "1024", "1024"]
    default = ["--config", "configs/waymo_base.yaml"]
    expected = [*default, "--learning_rate", "1", f"--model.path={old}"]
    assert translate_flags([*official, "--lr", "1", f"--model.path={old}"]) == expected
    with pytest.raises(UserError, match=r"--beta-end is 0.03: expected 0.018; the model folder defines it\."):
        translate_flags([*official, "--model.path", str(new)])
    for flag in ("--use-style-cond", "--size-cond 512 512"):
        with pytest.raises(UserError, match=f"{flag.split()[0]} is for models before version 1.2"):
            translate_flags([*flag.split(), "--model.path", str(new)])
    assert translate_flags(["--beta-end", "0.018", "--beta-start=8.5e-4"]) == default, "as in the small model"
    with pytest.raises(UserError, match=r"--beta-end is 0\.02: expected 0\.018"):
        translate_flags(["--beta-end", "0.02"])
    with pytest.raises(UserError, match="The model nowhere was not found"):
        translate_flags(["--beta-end", "1", "--model.path", "nowhere"])


def test_refused_flag_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hydit", "--cpu-offloading"]) == 1
    assert capsys.readouterr().err.startswith(
        "muralist: --cpu-offloading is not supported: training does not offload to host memory;"
    )


def test_help_lists_every_official_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hydit", "--help"]) == 0
    accepted, _, refused = capsys.readouterr().out.partition("\nrefused")
    shown, shown_refused = (re.findall(r"^--([\w-]+)  ", part, re.MULTILINE) for part in (accepted, refused))
    official = [word[2:].partition("=")[0].replace("_", "-") for word in " ".join([*WORKS, IGNORED]).split()
                if word.startswith("--")]  # fmt: skip
    assert set(official) <= set(shown) and {*OF_MODEL, "multireso", "use-zero-stage"} <= set(shown)
    assert shown_refused == sorted(tables.REFUSED) and not set(shown) & set(shown_refused)
    assert set(SAME) <= {flag.replace("_", "-") for flag in FlagTable(TrainSettings, TRAIN_FLAT_NAMES).paths}
    text = " ".join(accepted.split())
    assert "--lr --learning_rate --" in text and "--sampler --sample_solver: ddim is ddim, dpmms is dpm++" in text


def test_the_default_configuration_is_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = translate_flags([])
    assert packaged == ["--config", str(REPOSITORY / "src" / "muralist" / "configs" / "waymo_base.yaml")]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "waymo_base.yaml").write_text("epochs: 3\n")
    assert translate_flags([]) == ["--config", "configs/waymo_base.yaml"], "a clone's own file, which users edit"
    assert translate_flags(["--config", "own.yaml"])[:2] == ["--config", "own.yaml"]
