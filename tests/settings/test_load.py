"""YAML and flags become typed settings, every mistake is one clear sentence, and a run's identity is what shapes it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from muralist import settings as all_settings
from muralist.cli import COMMANDS, main
from muralist.core.errors import UserError
from muralist.core.run_dir import RunDir
from muralist.settings import (
    DIFFUSERS_NAMES,
    TRAIN_FLAT_NAMES,
    TRAIN_MEANINGS,
    GenerateSettings,
    OptimSettings,
    PackSettings,
    TrainSettings,
)
from muralist.settings.load import (
    FLAT_NAMES,
    FlagTable,
    config_path,
    describe,
    flatten,
    identity,
    leaves,
    load,
    load_values,
    read_yaml,
    run_name,
    to_yaml,
)
from tests.conftest import REPOSITORY
from tests.support.runs import finish, start

FIELDS = dict(leaves(TrainSettings))


def settings(*arguments: object) -> TrainSettings:
    return load(TrainSettings, [str(argument) for argument in arguments], TRAIN_FLAT_NAMES)


def refusal(*arguments: object) -> UserError:
    with pytest.raises(UserError) as caught:
        settings(*arguments)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


# What is read


def test_flags_win_over_yaml_and_yaml_over_defaults(yaml_file: Any) -> None:
    config = yaml_file("data:\n  batch_size: 2\n  num_workers: 0\nepochs: 7\nmodel: JiT-S/8\n")
    for arguments in (["--config", config, "--batch_size", "5"], ["--batch_size=5", f"--config={config}"]):
        read = settings(*arguments)
        assert (read.data.batch_size, read.data.num_workers, read.epochs) == (5, 0, 7)
        assert (read.model.name, read.model.img_size) == ("JiT-S/8", 64)


@pytest.mark.parametrize(
    "written",
    ["--batch_size", "--batch-size", "--data.batch_size", "--data.batch-size", "--batch_size=", "--batch-size="],
)
def test_flat_dotted_dashes_and_underscores_mean_the_same(written: str) -> None:
    arguments = [f"{written}48"] if written.endswith("=") else [written, "48"]
    assert settings(*arguments).data.batch_size == 48


def test_every_setting_has_a_flat_and_a_dotted_flag() -> None:
    names = FlagTable(TrainSettings, TRAIN_FLAT_NAMES)
    for path in FIELDS:
        assert names.resolve(path, "") == path
        assert names.resolve(names.flags[path].replace("_", "-"), "") == path
    assert {path for path in TRAIN_FLAT_NAMES.values() if isinstance(path, str)} <= set(FIELDS)
    assert {path for values in names.values.values() for value in values.values() for path in value} <= set(FIELDS)
    assert not TRAIN_MEANINGS.keys() & {*names.paths, *names.values}


def test_the_guides_flags() -> None:
    read = settings(
        "--data_path", "./data/train", "--img_size", "64", "--model", "JiT-B/4", "--enable_condition", "--batch_size", "64",
        "--epochs", "50", "--use_wandb", "--wandb_project", "jit-diffusion", "--wandb_name", "jit-v1", "--use_amp",
        "--gradient_accumulation_steps", "2", "--ckpt-every", "500", "--sample-steps", "20", "--sample-seed", "3",
        "--lr", "1e-4", "--max_steps", "5", "--results_dir", "r", "--run_name", "n", "--init_from", "auto",
    )  # fmt: skip
    assert read.data.path == "./data/train"
    assert (read.model.name, read.model.img_size, read.model.enable_condition) == ("JiT-B/4", 64, True)
    assert (read.log.use_wandb, read.log.wandb_project, read.log.wandb_name) == (True, "jit-diffusion", "jit-v1")
    assert (read.use_amp, read.optim.gradient_accumulation_steps, read.optim.learning_rate) == (True, 2, 1e-4)
    assert (read.checkpoint.every, read.samples.steps, read.samples.seed) == (500, 20, 3)
    assert (read.max_steps, read.results_dir, read.run_name) == (5, "r", "n")
    assert (read.data.batch_size, read.epochs, read.checkpoint.init_from) == (64, 50, "auto")


DIFFUSERS_COMMAND = (
    "--train_data_dir ./data/train --resolution 128 --train_batch_size 16 --gradient_accumulation_steps 4 --seed 1337 "
    "--max_train_steps 15000 --num_train_epochs 3 --learning_rate 1e-05 --lr_scheduler constant --lr_warmup_steps 0 "
    "--mixed_precision bf16 --report_to wandb --validation_prompt cat --checkpointing_steps 500 --rank 8 "
    "--checkpoints_total_limit 2 --resume_from_checkpoint latest --adam_beta2 0.99 --max_grad_norm 1 --scale_lr "
    "--dataloader_num_workers 2 --gradient_checkpointing --random_flip"
)


OUR_COMMAND = (
    "--data_path ./data/train --img_size 128 --batch_size 16 --gradient_accumulation_steps 4 --seed 1337 "
    "--max_steps 15000 --epochs 3 --lr 1e-05 --lr_schedule constant --warmup_steps 0 --precision bf16 --use_wandb "
    "--no_use_tensorboard --sample_prompts cat --ckpt_every 500 --lora_rank 8 --keep_last 2 --resume auto --beta2 0.99 "
    "--max_grad_norm 1 --lr_rule linear --lr_base_batch 1 --num_workers 2 --gradient_checkpointing --random_flip"
)


def test_a_command_line_of_diffusers_keeps_its_meaning(yaml_file: Any) -> None:
    words = DIFFUSERS_COMMAND.split()
    read = settings(*words)
    assert read == settings(*OUR_COMMAND.split())
    text = "mixed_precision: no\nreport_to: all\nlr_scheduler: constant_with_warmup\nscale_lr: false\n"
    read = settings("--config", yaml_file(text))
    assert (read.precision, read.log.use_wandb, read.log.use_tensorboard, read.optim.warmup_steps) == (
        "fp32", True, True, 500,
    )  # fmt: skip
    assert load_values(TrainSettings, {"report_to": "wandb"}, TRAIN_FLAT_NAMES).log.use_wandb
    assert to_yaml(settings("--resolution", "32")) == to_yaml(settings("--img_size", "32"))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("--report_to comet_ml", "--report_to is 'comet_ml': expected tensorboard, wandb, all or none."),
        ("--lr_scheduler polynomial", "expected constant, constant_with_warmup or cosine."),
        ("--mixed_precision fp4", "--mixed_precision is 'fp4': expected no, fp16, bf16 or fp8."),
        (
            "--lr_scheduler constant --warmup_steps 9",
            "--lr_scheduler is 'constant', which means --warmup_steps 0, and --warmup_steps is '9'. Leave one of them out.",
        ),
        (
            "--report_to wandb --no_use_wandb",
            "--report_to is 'wandb', which means --use_wandb true, and --no_use_wandb is given. Leave one of them out.",
        ),
        ("--output_dir x", "--results_dir is the folder of all runs"),
        ("--num_processes 4", "muralist launch --nproc N train"),
        ("--use_ema", "--ema_decay"),
        ("--dataset x", "--data_path is the data set"),
        ("--local_rank 0", "set the rank in the environment"),  # spelled like --lora_rank
        ("--revision main", "--model.path takes the folder"),  # like --precision
        ("--push_to_hub", "Nothing is uploaded"),
    ],
)
def test_names_of_other_programs_are_answered_by_their_meaning(written: str, told: str) -> None:
    assert told in str(refusal(*written.split()))


@pytest.mark.parametrize(
    ("flags", "values", "told"),
    [
        (
            "--resolution 32 --img_size 16",
            {"resolution": 32, "img_size": 16},
            "--resolution is '32', and --img_size is '16'.",
        ),
        (
            "--img_size 32 --image-size 32 16",
            {"img_size": 32, "image-size": [32, 16]},
            "--img_size is '32', and --image-size is '32 16'.",
        ),
        (
            "--data.batch_size 8 --train_batch_size 4",
            {"data.batch_size": 8, "train_batch_size": 4},
            "--data.batch_size is '8', and --train_batch_size is '4'.",
        ),
        (
            "--resume none --resume_from_checkpoint latest",
            {"resume": "none", "resume_from_checkpoint": "latest"},
            "--resume is 'none', and --resume_from_checkpoint is 'latest'.",
        ),
    ],
)
def test_two_names_of_a_setting_must_agree(yaml_file: Any, flags: str, values: dict[str, Any], told: str) -> None:
    error = refusal(*flags.split())
    assert error.what == told and error.fix == "Leave one of them out."
    assert error.why.startswith("Both are names of the setting ")
    with pytest.raises(UserError, match="Both are names of the setting"):
        load_values(TrainSettings, values, TRAIN_FLAT_NAMES)
    assert "Both are names of the setting" in refusal("--config", yaml_file(json.dumps(values))).why


@pytest.mark.parametrize("name", [name for name, path in TRAIN_FLAT_NAMES.items() if isinstance(path, str)])
def test_every_flat_name_must_agree_with_its_setting(name: str) -> None:
    path = str(TRAIN_FLAT_NAMES[name])
    literals = [str(choice) for part in _parts(FIELDS[path].annotation) for choice in get_args(part)]
    found: dict[str, list[str]] = {}
    for value in ("true", "false", "7", "9", "0.3", "0.4", "0.2 0.4", "0.3 0.5", "something", "else", *literals):
        with suppress(UserError):
            found.setdefault(str(flatten(settings(f"--{path}", *value.split()))[path]), value.split())
    first, second, *_ = found.values()
    assert settings(f"--{name}", *first, f"--{path}", *first) == settings(f"--{path}", *first)
    assert refusal(f"--{name}", *first, f"--{path}", *second).why == f"Both are names of the setting {path}."


def test_two_names_of_a_setting_may_agree(yaml_file: Any) -> None:
    for words, same in (
        ("--resolution 32 --img_size 32 32", "--img_size 32"),
        ("--report_to wandb --use_wandb yes --use_tensorboard off", "--use_wandb --no_use_tensorboard"),
        ("--resume latest --resume_from_checkpoint auto", "--resume auto"),
        ("--lr 1e-3 --learning_rate 0.001", "--lr 0.001"),
        ("--img_size 16 --img_size 32", "--img_size 32"),  # one name: the last one counts
        ("--use_wandb --no_use_wandb", ""),
        ("--lr_scheduler constant --lr_scheduler cosine", "--lr_schedule cosine"),  # with the usual warm-up
    ):
        assert settings(*words.split()) == settings(*same.split()), words
    both = yaml_file("lr_scheduler: constant\nlr_warmup_steps: 0\n")
    assert settings("--config", both).optim.warmup_steps == 0
    contradiction = refusal("--config", yaml_file("lr_scheduler: constant\nlr_warmup_steps: 5\n")).what
    assert re.fullmatch(
        r"`lr_scheduler` in \S+ is 'constant', which means warmup_steps 0, and `lr_warmup_steps` in \S+ is 5\.",
        contradiction,
    )


def test_every_answer_names_existing_settings() -> None:
    names = FlagTable(TrainSettings, TRAIN_FLAT_NAMES)
    for answer in TRAIN_MEANINGS.values():
        for flag in re.findall(r"--([a-z][\w.]*\w)", answer.replace("--nproc", "")):
            assert flag in names.paths, answer


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--use_amp"], True), (["--use-amp"], True), (["--use_amp", "true"], True), (["--use_amp=1"], True),
        (["--use_amp", "ON"], True), (["--no_use_amp"], False), (["--no-use-amp"], False), (["--use_amp", "false"], False),
        (["--use_amp=no"], False), (["--use_amp", "--no_use_amp"], False), (["--no_use_amp", "--use_amp"], True),
        ([], False),
    ],
)  # fmt: skip
def test_switches(arguments: list[str], expected: bool) -> None:
    read = settings(*arguments, "--epochs", "3")
    assert (read.use_amp, read.epochs) == (expected, 3)


def test_a_switch_with_a_third_value() -> None:
    assert settings().compile == settings("--compile", "auto").compile == "auto"
    assert settings("--compile").compile is True
    assert settings("--no_compile").compile is False
    assert settings("--micro_batch_size", "auto").data.micro_batch_size == "auto"
    assert settings("--micro_batch_size", "3").data.micro_batch_size == 3


def test_lists_tuples_and_negative_numbers(yaml_file: Any) -> None:
    read = settings("--sample_prompts", "a cat", "dog", "--sample_interval", "0.2", "0.9", "--p_mean", "-1.2")
    assert (read.samples.prompts, read.samples.interval, read.objective.p_mean) == (["a cat", "dog"], (0.2, 0.9), -1.2)
    assert settings("--sample_prompts=prompts.txt").samples.prompts == ["prompts.txt"]
    read = settings("--config", yaml_file("sample_prompts: [1, tree]\nsamples:\n  interval: [0, 0.5]\n"))
    assert (read.samples.prompts, read.samples.interval) == (["1", "tree"], (0.0, 0.5))
    assert settings("--config", yaml_file("sample_prompts: 3")).samples.prompts == ["3"]


def test_a_repeatable_flag_collects_its_values(yaml_file: Any) -> None:
    common = ["--output_dir", "o", "--model_path", "m"]

    def prompts(*words: str) -> list[str]:
        return load(GenerateSettings, [*words, *common], {}).prompt

    assert prompts("--prompt", "a", "--prompt", "b", "c", "--prompt=--d, e\nf") == ["a", "b", "c", "--d, e\nf"]
    assert prompts("--prompt", "none", "--prompt=") == ["none", ""]
    config = str(yaml_file("prompt: [x, 5]\n"))
    assert prompts("--config", config) == ["x", "5"] and prompts("--config", config, "--prompt", "y") == ["y"]
    # The last one of other lists counts.
    assert load(GenerateSettings, [*common, "--prompt", "a", "--lora", "a", "b", "--lora", "c"], {}).lora == ["c"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", '--prompts_csv is missing. .*standard input.* --prompt "a red car"'),
        ("--prompt", "--prompt needs a value"),
        ("--prompts_csv none", "--prompts_csv is missing"),
        ("--prompt a --prompts_csv b", "--prompt and --prompts_csv cannot both be given. .*Leave one of them out"),
    ],
)
def test_prompts_come_from_one_place(words: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load(GenerateSettings, ["--output_dir", "o", "--model_path", "m", *words.split()], {})


def test_none_and_text_that_looks_like_a_number(yaml_file: Any) -> None:
    config = yaml_file("max_steps: 5\nrun_name: 007\nmax_grad_norm: none\nresume: none\n")
    read = settings("--config", config)
    assert (read.max_steps, read.optim.max_grad_norm, read.checkpoint.resume) == (5, None, "none")
    assert read.run_name == "7"  # a YAML number; quoted it would keep its zeros
    read = settings("--config", config, "--max_steps", "none", "--run_name", "007")
    assert (read.max_steps, read.run_name) == (None, "007")


def test_yaml_numbers_as_people_write_them(yaml_file: Any) -> None:
    read = settings(
        "--config", yaml_file("lr: 1e-4\noptim:\n  weight_decay: 1.0e-2\n  max-grad-norm: 1\n  min_lr: 5e-5\n")
    )
    assert (read.optim.learning_rate, read.optim.weight_decay, read.optim.max_grad_norm) == (1e-4, 1e-2, 1.0)
    assert read.optim.min_lr == 5e-5


def test_learning_rate_and_blr_exclude_each_other(yaml_file: Any, tmp_path: Path) -> None:
    both = yaml_file("optim:\n  blr: 5.0e-5\n  learning_rate: 2.0e-4\n")
    base = tmp_path / "base.yaml"
    base.write_text("blr: 5.0e-5\n")
    scaled = tmp_path / "scaled.yaml"
    scaled.write_text("blr: 5.0e-5\nlr_base_batch: 64\n")
    for words in (
        ["--blr", "5e-5", "--lr", "2e-4"],
        ["--config", both],
        ["--config", base, "--learning_rate", "1e-3"],
        ["--blr", "5e-5", "--scale_lr"],
        ["--config", base, "--lr_rule", "sqrt"],
        ["--config", scaled],
    ):
        with pytest.raises(UserError, match="cannot both be given") as caught:
            settings(*map(str, words))
        assert "blr is multiplied by total batch / 256" in caught.value.why
    assert settings("--blr", "5e-5").optim.blr == settings("--config", str(base)).optim.blr == 5e-5
    assert settings("--blr", "5e-5", "--config", "base_config.yaml", "--lr_rule", "linear").optim.blr == 5e-5  # agrees
    assert settings("--config", str(base), "--blr", "none", "--lr", "1e-3").optim.learning_rate == 1e-3
    rate = yaml_file("optim:\n  learning_rate: 2.0e-4\n")
    assert settings("--config", rate, "--blr", "5e-5").optim.blr == 5e-5  # flags override files


def test_use_amp_and_precision_must_agree(yaml_file: Any) -> None:
    for first, second in (("--use_amp", "--precision fp32"), ("--no_use_amp", "--mixed_precision bf16")):
        told = refusal(first, *second.split()).what
        assert told == f"{first} and {second.split()[0]} cannot both be given."
    half = yaml_file("precision: fp16\n")
    assert "--no_use_amp and `precision` in" in refusal("--config", half, "--no_use_amp").what
    assert settings("--config", half, "--use_amp").precision == "fp16"
    assert "cannot both be given" in refusal("--config", yaml_file("use_amp: true\nprecision: fp32\n")).what
    assert not settings("--config", "base_config.yaml", "--precision", "fp32").mixed  # flags override files


def test_config_of_an_older_run_may_hold_both_learning_rates(tmp_path: Path) -> None:
    older = TrainSettings(optim=OptimSettings(blr=5e-5, learning_rate=1e-3))
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(older))
    assert settings("--config", str(config)) == read_yaml(TrainSettings, config) == older
    (of_0_1,) = (REPOSITORY / "tests" / "fixtures" / "v0_1" / "results").glob("*/config.yaml")  # without later settings
    config.write_text(
        of_0_1.read_text().replace("blr: null", "blr: 5.0e-05").replace("precision: auto", "precision: fp8")
    )
    assert read_yaml(TrainSettings, config).optim.blr == 5e-5
    config.write_text(to_yaml(older))
    with pytest.raises(UserError, match=r"--lr and `optim.blr` in .*config.yaml cannot both"):
        settings("--config", str(config), "--lr", "1e-4")


def test_empty_files_and_sections(yaml_file: Any) -> None:
    for text in ("", "# nothing\n", "data:\noptim:\n  # learning_rate: 1e-4\nmodel:\n", "data: {}\n"):
        assert settings("--config", yaml_file(text)) == TrainSettings()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--bach_size", "4"], ["--bach_size", "Did you mean batch_size?"]),
        (["--BATCH_SIZE", "4"], ["--BATCH_SIZE", "Did you mean batch_size?"]),
        (["--data.bach_size=4"], ["--data.bach_size", "Did you mean data.batch_size?"]),
        (["--no_use_ampp"], ["--no_use_ampp"]),
        (["--no_use_amp=false"], ["--no_use_amp=false", "--use_amp"]),
        (["--epochs", "many"], ["--epochs", "'many'", "an integer above 0"]),
        (["--epochs", "0"], ["--epochs", "'0'", "an integer above 0"]),
        (["--epochs", "1.5"], ["--epochs", "'1.5'", "an integer above 0"]),
        (["--epochs"], ["--epochs", "needs a value"]),
        (["--epochs", "--use_amp"], ["--epochs", "needs a value"]),
        (["--epochs="], ["--epochs", "''"]),
        (["--sample_prompts"], ["--sample_prompts", "needs a value"]),
        (["--config"], ["--config", "needs a value"]),
        (["stray"], ["'stray'", "--name value"]),
        (["--epochs=3", "stray"], ["Unexpected argument 'stray'."]),
        (["--use_amp", "maybe"], ["--use_amp is 'maybe': expected true or false, or no value."]),
        (["--compile", "maybe"], ["--compile is 'maybe': expected true, false or auto, or no value."]),
        (["--no_use_amp", "true"], ["--no_use_amp takes no value, and 'true' follows it."]),
        (["--scale_lr", "maybe"], ["--scale_lr is 'maybe': expected true or false, or no value."]),
        (["--img_size", "16x24"], ["or 2 integers above 0.", "Put blanks between values: --img_size 16 24"]),
        (["--img_size", "16,24"], ["Put blanks between values: --img_size 16 24"]),
        (["--data_weights", "3,1"], ["one or more numbers above 0. Put blanks between values: --data_weights 3 1"]),
        (["-x"], ["'-x'"]),
        (["--"], ["--"]),
        (["--lr_schedule", "cosin"], ["--lr_schedule", "'cosin'", "constant, cosine or wsd"]),
        (["--prediction", "y"], ["--prediction", "x, v or eps"]),
        (["--learning_rate", "inf"], ["--learning_rate", "'inf'"]),
        (["--p_mean", "nan"], ["--p_mean", "'nan'", "a number"]),
        (["--beta2", "1"], ["--beta2", "at least 0 and below 1"]),
        (["--val_fraction", "1.1"], ["--val_fraction", "at least 0 and at most 1"]),
        (["--micro_batch_size", "some"], ["--micro_batch_size", "an integer above 0 or auto"]),
        (["--sample_interval", "0.1"], ["--sample_interval", "2 numbers at least 0 and at most 1"]),
        (["--sample_interval", "0.1", "2"], ["--sample_interval", "2 numbers"]),
        (["--seed", str(2**63)], ["--seed", "below"]),
        (["--model"], ["--model", "needs a value"]),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], parts: list[str]) -> None:
    error = refusal(*arguments)
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epoch: 3", ["`epoch`", "Did you mean epochs?"]),
        ("data:\n  bach_size: 3", ["`data.bach_size`", "Did you mean data.batch_size?"]),
        ("dta:\n  batch_size: 3", ["`dta`"]),
        ("data:\n  batch_size: {a: 1}", ["`data.batch_size`", "an integer above 0"]),
        ("epochs: [1, 2]", ["`epochs`", "[1, 2]", "an integer above 0"]),
        ("epochs: many", ["`epochs`", "'many'"]),
        ("epochs: -1", ["`epochs`", "-1", "above 0"]),
        ("epochs: yes", ["`epochs`", "True", "an integer"]),
        ("lr: true", ["`lr`", "True", "a number above 0"]),
        ("use_amp: 2", ["`use_amp`", "true or false"]),
        ("p_mean: .nan", ["`p_mean`", "nan"]),
        ("resume:", ["`resume`", "None", "text"]),
        ("run_name: 2026-13-45", ["not valid YAML", "month"]),
        ("- a\n- b", ["`name: value`", "list"]),
        ("just words", ["`name: value`", "str"]),
        ("epochs: 3\ndata:\n  batch_size: [1\n", ["not valid YAML", "line"]),
        ("epochs: 3\n\tdata: 4", ["not valid YAML", "line 2"]),
        ("epochs: 3\nseed: 1\nepochs: 4", ["not valid YAML at line 3: the key `epochs` appears twice."]),
        ("optim:\n  beta1: 0.8\n  beta1: 0.9", ["not valid YAML at line 3: the key `beta1` appears twice."]),
        ("epochs: !!python/object/apply:os.system ['true']", ["not valid YAML", "line 1"]),
        ("batch_size: 3\ndata:\n  batch_size: 4", ["`batch_size`", "is 3, and `data.batch_size`", "is 4"]),
        ("config: other.yaml", ["config"]),
    ],
)
def test_mistakes_in_a_file(yaml_file: Any, text: str, parts: list[str]) -> None:
    path = yaml_file(text)
    error = refusal("--config", path)
    for part in (*parts, str(path)):
        assert part in str(error)


def test_a_missing_config_names_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "base_config.yaml").write_text("")
    (tmp_path / "other.yml").write_text("")
    error = refusal("--config", tmp_path / "base_confg.yaml")
    assert str(tmp_path / "base_confg.yaml") in error.what
    assert f"Did you mean {tmp_path / 'base_config.yaml'}?" in error.why
    assert "Is a directory" in refusal("--config", tmp_path).what
    assert "No such file" in refusal("--config", tmp_path / "nowhere" / "x.yaml").what
    folder = tmp_path / "base_config.yaml.d"  # like its neighbor's name, which is not meant
    folder.mkdir()
    assert refusal("--config", folder).why == ""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00epochs")
    assert "not UTF-8" in refusal("--config", tmp_path / "binary.yaml").what


def test_configs_of_the_package_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings("--config", "debug_config.yaml", "--epochs", 3)
    assert (found.data.path, found.epochs) == ("driving_world", 3)
    assert "debug_config.yaml: no such file here, using the one of the package, /" in capsys.readouterr().err
    assert run_name(found, "debug_config.yaml") == run_name(found, "configs/debug_config.yaml")
    monkeypatch.setenv("RANK", "1")
    settings("--config", "debug_config.yaml")
    assert not capsys.readouterr().err, "one rank says it"
    for missing in ("configs/debug_config.yaml", "debug_confg.yaml"):
        assert "The package has base_config.yaml, cifar10.yaml, debug_config.yaml" in refusal("--config", missing).fix
    (tmp_path / "debug_config.yaml").write_text("epochs: 7\n")
    assert settings("--config", "debug_config.yaml").epochs == 7, "a file of the working directory comes first"


def test_positional_arguments() -> None:
    read = load(PackSettings, ["from", "--img_size", "32", "to"], {}, positional=("source", "destination"))
    assert (read.source, read.destination, read.img_size) == ("from", "to", 32)
    for arguments, part in ((["from"], "DESTINATION"), ([], "SOURCE"), (["a", "b", "c"], "'c'")):
        with pytest.raises(UserError, match=part):
            load(PackSettings, arguments, {}, positional=("source", "destination"))


def test_the_last_config_counts_everywhere(tmp_path: Path) -> None:
    for name, epochs in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"epochs: {epochs}")
    arguments = ["--config", str(tmp_path / "one.yaml"), f"--config={tmp_path / 'two.yaml'}"]
    assert settings(*arguments).epochs == 2
    assert config_path(arguments) == str(tmp_path / "two.yaml")
    assert config_path(["--epochs", "3"]) is None


def test_impossible_settings_are_refused_before_anything_heavy_loads() -> None:
    code = """
import sys
from muralist.cli import main
cases = {
    "--modle JiT-B/4": "Did you mean model?",
    "--data_path x --model JiT-C/4": "There is no model named JiT-C/4",
    "--data_path x --img_size 65": "cannot be divided into patches of 4",
    "--epochs 3": "No data set was given",
    "--data_path x --epochs x": "an integer above 0",
    "--data_path x --sample_interval 0.9 0.1": "is empty",
    "--data_path x --global_batch_size 8 --gradient_accumulation_steps 2": "cannot both be given",
}
import io, contextlib
for arguments, expected in cases.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(["train", *arguments.split()]) == 1, arguments
    assert expected in said.getvalue(), said.getvalue()
    assert "Traceback" not in said.getvalue()
print([name for name in ("torch", "numpy", "pyarrow", "accelerate") if name in sys.modules])
"""
    assert finish(start("python", "-c", code)).strip() == "[]"


# Identity, names, round trips

APART = {
    "data.micro_batch_size", "data.num_workers", "data.persistent_workers", "data.pin_memory", "data.cache", "log.profile",
    "checkpoint.every",
    "checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.resume", "samples.prompts", "samples.per_gpu",
    "samples.steps", "samples.guidance", "samples.interval", "samples.solver", "samples.official_last_step",
    "samples.seed", "log.every", "log.use_tensorboard", "log.use_wandb", "log.wandb_project", "log.wandb_name",
    "epochs", "max_steps", "compile", "results_dir", "run_name", "distributed.strategy", "distributed.dist_backend",
    "distributed.dist_timeout",
    "model.gradient_checkpointing", "checkpoint.latest_every", "checkpoint.at_epoch_end",
    "dry_run", "model.swap_blocks",
    "data.on_broken", "optim.non_finite",  # without it such a run has no result at all; one that stopped may go on with it
}  # fmt: skip
"""What never changes the result of a run; a new setting shapes it unless it is listed here on purpose."""


def changed(path: str, *before: str) -> TrainSettings:
    """Settings that differ from `before` in one place."""
    base = settings(*before)
    literals = [str(choice) for part in _parts(FIELDS[path].annotation) for choice in get_args(part)]
    for value in ("true", "false", "7", "0.3", "0.2 0.4", "something", *literals):
        try:
            other = settings(*before, f"--{path}", *value.split())
        except UserError:
            continue
        if flatten(other)[path] != flatten(base)[path]:
            return other
    raise AssertionError(f"no other value found for {path}")


def _parts(annotation: Any) -> Iterable[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else [annotation]


@pytest.mark.parametrize("path", FIELDS)
def test_identity_is_what_shapes_the_result(path: str) -> None:
    same = identity(changed(path)) == identity(settings())
    assert same == (path in APART)
    assert (run_name(changed(path), None) == run_name(settings(), None)) == (path in APART - {"run_name"})


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_length_shapes_a_schedule_that_ends(schedule: str) -> None:
    chosen = ["--lr_schedule", schedule]
    fixed = [*chosen, "--lr_decay_steps", "500"]  # then the length only says when to stop
    for length in ("epochs", "max_steps"):
        assert identity(changed(length, *chosen)) != identity(settings(*chosen))
        assert identity(changed(length, *fixed)) == identity(settings(*fixed))


def test_a_path_is_the_same_however_it_is_written() -> None:
    plain = identity(settings("--data_path", "data/train"))
    assert identity(settings("--data_path", "./data/train/")) == plain
    assert identity(settings("--data_path", "data//x/../train")) == plain
    assert identity(settings("--data_path", "data/val")) != plain


def test_names_have_no_clock_and_survive_other_processes() -> None:
    read = settings("--data_path", "d", "--model", "JiT-S/8", "--img_size", "32", "--enable_condition")
    name = run_name(read, None)
    assert name.startswith("JiT-S-8-32-cond-")
    code = (
        "from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings; from muralist.settings.load import load, run_name\n"
        "print(run_name(load(TrainSettings, ['--enable-condition', '--data.path=d/', '--img_size=32', "
        "'--model.name', 'JiT-S/8'], TRAIN_FLAT_NAMES), None))"
    )
    for hash_seed in ("1", "2"):
        assert finish(start("python", "-c", code, PYTHONHASHSEED=hash_seed)).strip() == name
    assert run_name(read, "configs/waymo_base.yaml").startswith("waymo_base-")
    assert run_name(settings("--run_name", "mine"), "configs/waymo_base.yaml") == "mine"


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_a_name_derived_from_any_config_is_a_folder_name(stem: str) -> None:
    name = run_name(settings(), f"configs/{stem}.yaml")
    assert RunDir.named("results", name).root.parent == Path("results")


def values_of(annotation: Any, limits: list[Any]) -> st.SearchStrategy[Any]:
    """Any value a field accepts."""
    if hasattr(annotation, "__metadata__"):
        return values_of(get_args(annotation)[0], list(annotation.__metadata__))
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(*(values_of(part, limits) for part in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is list:
        return st.lists(values_of(get_args(annotation)[0], []), max_size=4)
    if get_origin(annotation) is tuple:
        return st.tuples(*(values_of(part, []) for part in get_args(annotation)))
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        # `none` and `null` mean no value wherever there may be none; YAML folds control characters and line separators.
        plain = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])
        return st.text(plain).filter(lambda text: text.lower() not in ("none", "null"))
    flat = [part for limit in limits for part in getattr(limit, "metadata", [limit])]
    bounds = {
        name: value
        for part in flat
        for name in ("gt", "ge", "lt", "le")
        if (value := getattr(part, name, None)) is not None
    }
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    above, below = "gt" in bounds, "lt" in bounds
    if annotation is int:
        return st.integers(None if low is None else low + above, 2**70 if high is None else high - below)
    return st.floats(low, high, exclude_min=above, exclude_max=below, allow_nan=False, allow_infinity=False)


def sections(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    fields = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields[name] = sections(field.annotation)
        else:
            fields[name] = values_of(field.annotation, field.metadata)
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: model(**given))


@given(sections(TrainSettings))
def test_settings_survive_their_file(drawn: TrainSettings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(to_yaml(drawn), encoding="utf-8")
        read = read_yaml(TrainSettings, path)
        assert settings("--config", path) == read
    assert read == drawn
    assert identity(read) == identity(drawn)


# Help


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys; from muralist.cli import main; main(['--help']);"
        "print([name for name in ('torch', 'pydantic', 'numpy', 'rich', 'yaml') if name in sys.modules])"
    )
    assert finish(start("python", "-c", code)).splitlines()[-1] == "[]"

    def seconds() -> float:
        before = time.perf_counter()
        said = finish(start("muralist", "--help"))
        for command in COMMANDS:
            assert f"muralist {command}" in said
        return time.perf_counter() - before

    assert min(seconds() for _ in range(5)) < 0.5  # the quickest of five: others share this machine


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "hydit"])  # that one lists official flags
def test_help_names_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out.split()
    model = getattr(all_settings, COMMANDS[command].settings)
    names = FlagTable(model, FLAT_NAMES.get(command, {}))
    for path, field in names.fields.items():
        assert (
            path.rpartition(".")[2].upper() if path in COMMANDS[command].positional else f"--{names.flags[path]}"
        ) in said
        assert field.description, f"{path} has no help"
        first, *_ = field.description.split()
        assert first in said


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_a_terminal_and_lists_every_choice(columns: int, tmp_path: Path) -> None:
    """In a real terminal: the flags, the values of each choice and the names of diffusers, no line broken in a word."""
    page = tmp_path / "page"
    shell = f"stty cols {columns}; unset COLUMNS; TERM=xterm {shlex.quote(sys.executable)} -m muralist train --help"
    subprocess.run(
        ["script", "-qefc", shell, str(page)], check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", page.read_text()).replace("\r", "")
    lines = plain.splitlines()[1:-1]
    assert max(map(len, lines)) <= columns and max(map(len, lines)) > columns - 10
    assert not [line for line in lines if line.endswith("default")], "a default stays beside its value"
    assert plain.index("--data_path") < plain.index("--dry_run") < plain.index("--global_batch_size")
    words = plain.replace("(", " ").replace(",", " ").replace(")", " ").split()
    for path, field in FIELDS.items():
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
            assert "|".join(map(str, get_args(field.annotation))) in words, path
    assert "true|false|auto" in words, "of --compile"
    for name in DIFFUSERS_NAMES:
        assert words.count(f"--{name}") == 1, name


def test_every_setting_says_what_it_accepts() -> None:
    assert describe(FIELDS["epochs"]) == "an integer above 0"
    assert describe(FIELDS["optim.beta1"]) == "a number at least 0 and below 1"
    assert describe(FIELDS["optim.lr_rule"]) == "none, linear or sqrt"
    assert describe(FIELDS["compile"]) == "true, false or auto"
    assert describe(FIELDS["data.weights"]) == "one or more numbers above 0"
    assert describe(FIELDS["checkpoint.keep_every"]) == "an integer above 0 or none"
    for path, field in FIELDS.items():
        assert "typing" not in describe(field), path
        assert "class" not in describe(field), path


# Paths

_PATH_NAME = re.compile(
    r"(.*_)?(path|dir|csv|reference|source|destination|output|root|folders|plot|lora|encode|resume|init_from)"
    r"|inception_weights|EvaluateSettings.images"
)
_ALL = {getattr(all_settings, command.settings) for command in COMMANDS.values()}
PATHS = {
    (model, path)
    for model in _ALL
    for path, _ in leaves(model)
    if _PATH_NAME.fullmatch(path.rpartition(".")[2]) or _PATH_NAME.fullmatch(f"{model.__name__}.{path}")
}


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://b/x", "hf://org/name", "HTTPS://host/x", "file:///x", "s3:/b/x"]
)
def test_urls_are_refused_wherever_a_path_is_expected(url: str) -> None:
    assert len(PATHS) > 35
    for model, path in PATHS:
        with pytest.raises(
            UserError, match=r"is a URL, and muralist reads and writes local or mounted folders only\."
        ) as e:
            prompts = ["--prompt", "car"] if "prompt" in model.model_fields and path != "prompts_csv" else []
            load(model, [f"--{path}", url, *prompts], {})
        assert url in e.value.what and e.value.fix


@pytest.mark.parametrize("url", ["hf://org/name", "https://huggingface.co/org/name"])
def test_the_url_of_a_model_on_the_hub_is_answered_with_its_id(url: str) -> None:
    assert refusal("--model.path", url).fix.startswith("A model is named by its id, org/name; `hf download org/name ")


@pytest.mark.parametrize("path", ["C:/data", "c://data", "a/b://c", "/mnt/s3:/x", "driving_world", "./s3://x", "x:0.5"])
def test_local_paths_are_not_urls(path: str) -> None:
    assert settings("--data_path", path, "--init_from", path).data.path == path


def test_prompts_may_hold_urls() -> None:
    prompts = ["a poster of https://example.org", "s3://x"]
    assert settings("--sample_prompts", *prompts).samples.prompts == prompts


def test_a_command_with_a_url_writes_nothing(tmp_path: Path) -> None:
    for output, model, url in (("s3://bucket/x", "m", "s3://bucket/x"), ("o", "gs://b/m", "gs://b/m")):
        flags = ["--prompts_csv", "muralist", "--output_dir", output, "--model_path", model]
        said = finish(start("muralist", "generate", *flags, cwd=tmp_path), expect=1)
        assert said.startswith(f"muralist: {url} is a URL")
        assert "Mount the storage" in said and "copy it" in said
    said = finish(start("muralist", "train", "--config", "s3://bucket/c.yaml", cwd=tmp_path), expect=1)
    assert said.startswith("muralist: s3://bucket/c.yaml is a URL")
    assert not list(tmp_path.iterdir())
