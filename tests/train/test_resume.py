"""Where a run starts from, when what it should start from is old, damaged or was left behind."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from muralist.settings import TRAIN_FLAT_NAMES, CheckpointSettings, ModelSettings, TrainSettings
from muralist.settings.load import load, run_name
from muralist.train import checkpoint
from muralist.train.loggers import start_log
from muralist.train.resume import find_initial_weights
from tests.support.runs import TINY, assert_same_state, last_checkpoint, losses, metrics, only_run, train


def write_run(results: Path, name: str, value: float, steps: tuple[int, ...] = (1,), **model: object) -> list[Path]:
    described = {"model": "JiT-T/8", "img_size": 16, "label_names": []} | model
    folder, state = results / name / "checkpoints", {"s": torch.ones(1)}
    sets = {step: {"ema1": {"a": torch.full((3,), value + step)}} for step in steps}
    return [checkpoint.write(folder, step, sets[step], state, {"images": step, "model": described}) for step in steps]


def test_the_run_with_most_images_counts_not_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_log(None, 0)
    write_run(tmp_path, "trained", 100, steps=(2000, 5000))
    write_run(tmp_path, "smoke_test", 200, steps=(3,))
    assert found(tmp_path) == 5100
    said = " ".join(capsys.readouterr().out.split())
    assert "has seen 5,000 images, the most of 2 such runs; --init_from RUN names another." in said


def found(results: Path, init_from: str = "default", condition: bool = True) -> float | None:
    settings = TrainSettings(
        model=ModelSettings(name="JiT-T/8", img_size=16, enable_condition=condition),
        checkpoint=CheckpointSettings(init_from=init_from),
        results_dir=str(results),
    )
    initial = find_initial_weights(settings)
    return None if initial is None else float(initial[0]["a"][0])


def test_only_unconditional_runs_of_the_same_model_and_size_count(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    write_run(tmp_path, "wide", 10, model="JiT-S/8")
    write_run(tmp_path, "large", 20, img_size=32)
    write_run(tmp_path, "labelled", 30, label_names=["cat"])
    assert found(tmp_path) is None
    write_run(tmp_path, "zebra", 40)
    assert found(tmp_path) == 41
    write_run(tmp_path, "apple", 50)  # the newest, whatever its name
    assert found(tmp_path) == 51
    assert found(tmp_path, condition=False) is None
    assert found(tmp_path, "none") is None
    assert found(tmp_path, str(tmp_path / "wide")) == 11


def test_rectangular_images_start_from_a_run_of_the_same_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_log(None, 0)
    settings = TrainSettings(
        model=ModelSettings(name="HunyuanDiT", img_size=(32, 48)),
        checkpoint=CheckpointSettings(init_from="auto"),
        results_dir=str(tmp_path),
    )
    write_run(tmp_path, "tall", 10, model="HunyuanDiT", img_size=[48, 32])
    write_run(tmp_path, "square", 20, model="HunyuanDiT", img_size=32)
    assert find_initial_weights(settings) is None
    assert "No unconditional run of HunyuanDiT at 32 x 48 px under" in capsys.readouterr().out
    write_run(tmp_path, "wide", 30, model="HunyuanDiT", img_size=[32, 48])
    initial = find_initial_weights(settings)
    assert initial is not None and float(initial[0]["a"][0]) == 31


def test_damaged_checkpoint_of_the_pretrained_run_is_skipped(tmp_path: Path) -> None:
    paths = write_run(tmp_path, "pretrained", 60, steps=(1, 2, 3))
    (paths[-1] / "ema1.safetensors").write_bytes(b"")
    assert found(tmp_path) == 62
    assert found(tmp_path, str(tmp_path / "pretrained")) == 62
    for path in paths:
        (path / "ema1.safetensors").write_bytes(b"")
    assert found(tmp_path) is None


def test_run_set_back_by_hand_resumes_there_with_every_step_once(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--ckpt_every", "2", "--samples_per_gpu", "0"]
    train(*common, "--results_dir", tmp_path / "back", "--max_steps", "6", "--keep_last", "9")
    back = only_run(tmp_path / "back")
    train(*common, "--results_dir", tmp_path / "back", "--max_steps", "3", "--keep_last", "1",
          "--resume", back / "checkpoints" / "step_0000002")  # fmt: skip
    assert last_checkpoint(back).name == "step_0000003"
    assert last_checkpoint(back).is_dir()
    train(*common, "--results_dir", tmp_path / "back", "--max_steps", "8")
    train(*common, "--results_dir", tmp_path / "through", "--max_steps", "8")
    through = only_run(tmp_path / "through")
    assert [line["step"] for line in metrics(back)] == list(range(1, 9))
    assert [line["train/loss"] for line in metrics(back)] == [line["train/loss"] for line in metrics(through)]
    assert_same_state(last_checkpoint(back), last_checkpoint(through))


def test_holding_out_every_image_is_refused(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--data_path", photo_folder, "--val_fraction", "1", "--results_dir", tmp_path, expect=1)
    said = capsys.readouterr().err
    assert "--val_fraction 1 holds out all " in said
    assert "Give a smaller one; 0 holds none out." in said


def test_fork_has_the_batch_and_the_learning_rate_it_was_given(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--samples_per_gpu", "0", "--val_fraction", "0"]
    train(*common, "--run_name", "base", "--max_steps", "3")  # 12 images
    train(*common, "--run_name", "base", "--max_steps", "5", "--learning_rate", "1e-4", expect=1)
    fork = [*common, "--resume", tmp_path / "base", "--batch_size", "8", "--learning_rate", "1e-4"]
    assert f"--resume {tmp_path / 'base'} --run_name NEW" in capsys.readouterr().err
    train(*fork, "--run_name", "fork", "--init_from", tmp_path / "base", expect=1)
    assert "both name the weights to start from" in capsys.readouterr().err
    for stop in (3, 5):  # the second command goes on with the fork, not with the base again
        train(*fork, "--run_name", "fork", "--max_steps", stop)
    said = capsys.readouterr().out
    assert "at step 1: 12 images in batches of 4 until now, the last 4 of which are seen again" in said
    assert "has checkpoints of its own: resuming from its last one, not from" in said
    lines = metrics(tmp_path / "fork")
    assert [(line["step"], line["images"]) for line in lines] == [(2, 16), (3, 24), (4, 32), (5, 40)]
    assert lines[-1]["train/learning_rate"] == 1e-4
    train(*fork, "--run_name", "through", "--max_steps", "5")
    assert_same_state(last_checkpoint(tmp_path / "fork"), last_checkpoint(tmp_path / "through"))
    assert metrics(tmp_path / "through") == lines
    large = ["--resume", tmp_path / "base", "--batch_size", "16", "--run_name", "large", "--max_steps", "1"]
    train(*common, *large)
    said = " ".join(capsys.readouterr().out.split())
    assert "12 images seen are fewer than a batch of 16: this run keeps weights and optimizer, and starts at" in said
    weights = {
        name: load_file(last_checkpoint(tmp_path / "large") / f"{name}.safetensors") for name in ("model", "ema1")
    }
    assert all(torch.equal(weights["ema1"][name], tensor) for name, tensor in weights["model"].items())
    train(*common, "--resume", tmp_path / "base", "--run_name", "half", "--precision", "fp16", "--max_steps", "5")
    shutil.rmtree(tmp_path / "base")  # the fork has checkpoints of its own
    train(*fork, "--run_name", "fork", "--max_steps", "6")
    assert metrics(tmp_path / "fork")[-1]["step"] == 6


def cosine(data: Path, results: Path) -> list[object]:
    common = ["--data_path", data, "--results_dir", results, "--samples_per_gpu", "0", "--warmup_steps", "0"]
    return [*common, "--lr_schedule", "cosine"]


def test_cosine_ends_where_training_ends(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*cosine(photo_folder, tmp_path), "--min_lr", "1e-5"]
    train(*common, "--run_name", "short", "--max_steps", "4")
    said = capsys.readouterr().out
    rates = [line["train/learning_rate"] for line in metrics(tmp_path / "short")]
    assert rates == pytest.approx([1e-5 + 9.9e-4 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])
    assert f"then cosine to 1e-05 at step 4; {rates[-1]:.3g} in the last step" in said
    train(*common, "--run_name", "short", "--max_steps", "4")
    assert f"continue in a new run, --resume {tmp_path / 'short'} --run_name NEW" in capsys.readouterr().out
    train(*common, "--run_name", "short", "--max_steps", "6", expect=1)
    assert "max_steps: 4 there, 6 here" in capsys.readouterr().err
    for stop in (2, 4):  # asked otherwise: the length only says when to stop
        train(*common, "--run_name", "long", "--lr_decay_steps", "8", "--max_steps", stop)
    rates = [line["train/learning_rate"] for line in metrics(tmp_path / "long")]
    assert rates == pytest.approx([1e-5 + 9.9e-4 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(4)])
    train(*common[:-4], "--run_name", "constant", "--lr_decay_steps", "8", expect=1)
    assert "--lr_decay_steps 8 has no effect under a constant learning rate" in capsys.readouterr().err
    train(*common, "--run_name", "none", "--lr_decay_steps", "8", "--warmup_steps", "8", expect=1)
    assert "--lr_decay_steps 8 is not after the warm-up of 8 steps." in capsys.readouterr().err


def test_warm_up_that_does_not_end_is_warned_about(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*cosine(photo_folder, tmp_path), "--max_steps", "4", "--dry_run"]
    told = "warning    the warm-up is longer than the run: the rate stays below 0.001"
    for more, line in (
        (["--warmup_steps", "4"], f"{told}, and cosine does not begin"),
        (["--warmup_steps", "4", "--lr_schedule", "constant"], told),
        (["--warmup_steps", "3"], None),
    ):
        train(*common, *more)
        lines = capsys.readouterr().out.splitlines()
        assert [found for found in lines if "warm-up is longer" in found] == ([line] if line else [])


def test_wsd_resumes_to_the_bit_and_decays_a_constant_run(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*cosine(photo_folder, tmp_path)[:-2], "--lr_decay_fraction", "0.5", "--min_lr", "1e-4"]
    decayed = [*common, "--lr_schedule", "wsd", "--lr_decay_steps", "8"]
    train(*decayed, "--run_name", "through", "--max_steps", "8")
    assert "then wsd (decay from step 4) to 0.0001 at step 8; 0.000325 in the last step" in capsys.readouterr().out
    for stop in (3, 6, 8):
        train(*decayed, "--run_name", "resumed", "--max_steps", stop)
    rates = [line["train/learning_rate"] for line in metrics(tmp_path / "through")]
    assert rates == pytest.approx([1e-3] * 5 + [7.75e-4, 5.5e-4, 3.25e-4])
    assert losses(tmp_path / "resumed") == losses(tmp_path / "through")
    assert_same_state(last_checkpoint(tmp_path / "resumed"), last_checkpoint(tmp_path / "through"))
    train(*common, "--run_name", "constant", "--max_steps", "4")
    said = " ".join(capsys.readouterr().out.split())
    assert "without effect: --lr_decay_fraction (--lr_schedule is not wsd)" in said
    train(*decayed, "--run_name", "fork", "--resume", tmp_path / "constant", "--max_steps", "8")
    assert_same_state(last_checkpoint(tmp_path / "fork"), last_checkpoint(tmp_path / "through"))
    train(*decayed, "--lr_decay_fraction", "0.25", "--run_name", "resumed", "--max_steps", "9", expect=1)
    assert "lr_decay_fraction: 0.5 there, 0.25 here" in capsys.readouterr().err


def test_cosine_of_version_0_1_goes_on_to_the_end_of_its_epochs(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*cosine(photo_folder, tmp_path), "--epochs", "2", "--val_fraction", "0"]  # 24 steps
    name = run_name(load(TrainSettings, [*TINY, *map(str, common)], TRAIN_FLAT_NAMES), None)  # without --max_steps
    train(*common, "--run_name", name, "--max_steps", "1")
    for stop in (2, 3):
        manifest = last_checkpoint(tmp_path / name) / "manifest.json"
        content = json.loads(manifest.read_text())
        assert ("lr_decay_steps" in content) == (stop == 2), "such a run stays one"
        content = {key: value for key, value in content.items() if key not in ("lr_decay_steps", "sha256")}
        manifest.write_text(json.dumps(content | {"sha256": checkpoint._seal(content)}))
        train(*common, "--run_name", name, "--max_steps", stop)
    rates = [line["train/learning_rate"] for line in metrics(tmp_path / name)]
    assert rates[1:] == pytest.approx([1e-3 * (1 + math.cos(math.pi * step / 24)) / 2 for step in (1, 2)])
    warning = f"Version 0.1 trained these settings as {tmp_path / name}: `--run_name {name}` resumes it."
    assert warning not in " ".join(capsys.readouterr().out.split())
    for told in (True, False):  # of the default name, once: the new run then has a checkpoint of its own
        train(*common, "--max_steps", "1")
        assert (warning in " ".join(capsys.readouterr().out.split())) == told
