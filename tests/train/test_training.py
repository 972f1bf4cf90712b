"""Training end to end: learning, resuming, fine-tuning, and refused settings."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.disks import leave_free, small_disk
from tests.support.runs import (
    assert_same_state,
    last_checkpoint,
    losses,
    metrics,
    only_run,
    tensors,
    train,
    train_through_and_in_legs,
)


def test_interrupted_run_equals_uninterrupted_run(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--epochs", "2", "--enable_condition", "--ckpt_every", "100"]
    through, legs = train_through_and_in_legs(tmp_path, common, 1, 7, 12, 19, 24)
    own = [{k: v for k, v in line.items() if k != "val/loss"} for line in metrics(through)]
    assert own == [{k: v for k, v in line.items() if k != "val/loss"} for line in metrics(legs)]
    assert metrics(through)[-1] == metrics(legs)[-1]


def test_loss_falls_and_epochs_are_counted(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path]
    train(*common, "--epochs", "20", "--val_fraction", "0.1", "--ckpt_every", "50")
    lines = metrics(only_run(tmp_path))
    curve = [line["train/loss"] for line in lines]
    assert np.mean(curve[-20:]) < 0.5 * np.mean(curve[:20])
    held_out = [line["val/loss"] for line in lines if "val/loss" in line]
    assert held_out[-1] < 0.75 * held_out[0]
    samples = 48 - 5
    ends = [line["step"] for line in lines if "train/epoch_loss" in line]
    assert ends == [epoch * samples // 4 for epoch in range(1, 21)]
    first = [line["train/loss"] for line in lines[: ends[0]]]
    assert lines[ends[0] - 1]["train/epoch_loss"] == pytest.approx(np.mean(first), rel=1e-12)


def test_accumulation_and_micro_batches_change_nothing(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--max_steps", "12"]
    train(*common, "--batch_size", "8", "--results_dir", tmp_path / "undivided")
    train(*common, "--batch_size", "2", "--gradient_accumulation_steps", "4", "--results_dir", tmp_path / "parts")
    train(*common, "--batch_size", "4", "--global_batch_size", "8", "--results_dir", tmp_path / "derived")
    train(*common, "--batch_size", "8", "--micro_batch_size", "3", "--results_dir", tmp_path / "micro")
    undivided = losses(only_run(tmp_path / "undivided"))
    for name in ("parts", "derived", "micro"):
        assert losses(only_run(tmp_path / name)) == pytest.approx(undivided, rel=1e-4), name


def test_gpu_resident_dataset_changes_nothing(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--enable_condition", "--max_samples", "37", "--val_fraction", "0.1"]
    train(*common, "--max_steps", "11", "--results_dir", tmp_path / "read", "--cache", "none")
    for stop in (4, 11):
        train(*common, "--max_steps", stop, "--results_dir", tmp_path / "kept", "--cache", "device")
    read, kept = only_run(tmp_path / "read"), only_run(tmp_path / "kept")
    assert read.name == kept.name
    assert metrics(read)[-1] == metrics(kept)[-1] and "val/loss" in metrics(kept)[-1]
    assert losses(read) == losses(kept)
    assert_same_state(last_checkpoint(read), last_checkpoint(kept))
    said = (kept / "logs" / "train.log").read_text()
    assert "33 images to train on, 4 held out; training images are kept on the device (0.00 GB)" in said
    assert said.count("33 images are on the device after") == 2
    assert "on the device" not in (read / "logs" / "train.log").read_text()


def test_sampling_does_not_change_training(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--max_steps", "8", "--ckpt_every", "2"]
    train(*common, "--results_dir", tmp_path / "with", "--samples_per_gpu", "1")
    train(*common, "--results_dir", tmp_path / "without", "--samples_per_gpu", "0")
    with_samples, without = only_run(tmp_path / "with"), only_run(tmp_path / "without")
    assert metrics(with_samples) == metrics(without)
    assert_same_state(last_checkpoint(with_samples), last_checkpoint(without))
    assert (with_samples / "samples" / "step_0000008" / "gpu_0_sample.png").is_file()
    assert not list((without / "samples").iterdir())


def test_sampling_error_is_written_down_and_training_continues(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muralist.diffusion import samplers

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(samplers, "sample", out_of_memory)
    train("--data_path", photo_folder, "--max_steps", "3", "--results_dir", tmp_path)
    run = only_run(tmp_path)
    assert len(losses(run)) == 3
    assert "out of memory" in (run / "samples" / "step_0000003" / "gpu_0_error.txt").read_text()
    assert "Error during sampling on GPU 0: CUDA out of memory" in (run / "logs" / "train.log").read_text()


def test_fine_tuning_starts_from_an_unconditional_run(photo_folder: Path, tmp_path: Path) -> None:
    train("--data_path", photo_folder, "--max_steps", "6", "--results_dir", tmp_path, "--run_name", "pretrained")
    pretrained = load_file(last_checkpoint(tmp_path / "pretrained") / "ema1.safetensors")
    # A learning rate of almost nothing shows where the fine-tuned run started.
    tuned = ["--data_path", photo_folder, "--enable_condition", "--max_steps", "1", "--learning_rate", "1e-30"]
    train(*tuned, "--results_dir", tmp_path, "--run_name", "tuned")
    weights = load_file(last_checkpoint(tmp_path / "tuned") / "model.safetensors")
    assert weights["y_embedder.embedding_table.weight"].shape[0] == 3  # two classes and none
    for name, value in weights.items():
        if not name.startswith("y_embedder"):
            assert torch.equal(value, pretrained[name]), name
    assert "starting from the weights of" in (tmp_path / "tuned" / "logs" / "train.log").read_text()
    train(*tuned, "--init_from", "none", "--results_dir", tmp_path, "--run_name", "scratch")
    scratch = load_file(last_checkpoint(tmp_path / "scratch") / "model.safetensors")
    assert not torch.equal(scratch["blocks.0.attn.qkv.weight"], pretrained["blocks.0.attn.qkv.weight"])


def test_same_command_finds_its_finished_run_and_other_settings_are_refused(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--run_name", "mine", "--max_steps", "2"]
    for _ in range(2):
        train(*common)
    assert len(losses(tmp_path / "mine")) == 2
    assert "Nothing left to do" in capfd.readouterr().out
    train(*common, "--seed", "5", expect=1)
    assert "seed: 0 there, 5 here" in capfd.readouterr().err
    train(*common, "--resume", "none", expect=1)
    assert "start over" in capfd.readouterr().err


def test_resume_from_a_missing_path_is_an_error(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--resume", tmp_path / "nowhere", expect=1)
    assert f"The run or checkpoint {tmp_path / 'nowhere'} was not found." in capfd.readouterr().err
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_damaged_checkpoint_falls_back_to_the_previous_one(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--ckpt_every", "3"]
    train(*common, "--max_steps", "9", "--results_dir", tmp_path / "through")
    train(*common, "--max_steps", "6", "--results_dir", tmp_path / "hurt")
    hurt = last_checkpoint(only_run(tmp_path / "hurt"))
    file = hurt / "ema1.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capfd.readouterr()
    train(*common, "--max_steps", "9", "--results_dir", tmp_path / "hurt", "--resume", hurt, expect=1)
    assert "ema1.safetensors does not match its hash" in capfd.readouterr().err
    train(*common, "--max_steps", "9", "--results_dir", tmp_path / "hurt")
    assert "Falling back" in capfd.readouterr().out
    through, mended = only_run(tmp_path / "through"), only_run(tmp_path / "hurt")
    assert_same_state(last_checkpoint(through), last_checkpoint(mended))
    assert metrics(through) == metrics(mended)


def test_broken_image_is_named_and_the_run_is_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "train"
    data.mkdir()
    for number in range(12):
        Image.fromarray(np.full((20, 20, 3), number * 20, np.uint8)).save(data / f"{number}.png")
    broken = data / "7.png"
    broken.write_bytes(broken.read_bytes()[:40])
    common = ["--data_path", data, "--results_dir", tmp_path / "r"]
    train(*common, "--batch_size", "1", "--epochs", "1", "--val_fraction", "0", expect=1)
    assert "7.png" in capfd.readouterr().err
    run = only_run(tmp_path / "r")
    checkpoints = list((run / "checkpoints").glob("step_*"))
    assert len(losses(run)) == 0 or len(checkpoints) == 1
    assert [path.name for path in checkpoints] == [f"step_{len(losses(run)):07d}"]


def test_broken_images_are_skipped_counted_and_listed_with_exact_resumption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = split_folder(tmp_path)  # 16 images, 4 held out
    for name in ("train/cat/3.png", "train/dog/5.png", "train/dog/6.png", "val/dog/1.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])
    for name in ("a.heic", "b.heic", "c.avif"):
        (data / "cat" / name).write_bytes(b"")
    (data / "dog" / "7.txt").write_text("a dog")
    common = ["--data_path", data, "--ckpt_every", "2", "--enable_condition", "--samples_per_gpu", "0"]
    train(*common, "--results_dir", tmp_path / "legs", "--epochs", "2", expect=1)  # at the first broken image
    said = capfd.readouterr()
    assert "is a broken image" in said.err and "--on_broken skip" in said.err
    found = "16 images, 2 classes: cat, dog; captions, which JiT-T/8 does not use; 3 files skipped: 2 .heic, 1 .avif"
    assert f"found      {found}\n" in said.out
    common += ["--on_broken", "skip"]
    through, legs = train_through_and_in_legs(tmp_path, common, 3, 8)
    assert metrics(through)[-1] == metrics(legs)[-1] and "val/loss" in metrics(legs)[-1]
    listed = sorted((legs / "broken.txt").read_text().splitlines())
    assert [line.partition(": ")[0] for line in listed] == [
        str(tmp_path / name) for name in ("train/cat/3.png", "train/dog/5.png", "train/dog/6.png", "val/dog/1.png")
    ]
    assert f"Skipped broken images: 4, listed in {legs / 'broken.txt'}." in capfd.readouterr().out
    for number, more in enumerate((["--cache", "device"], ["--num_workers", "1"])):
        train(*common, "--max_steps", "8", "--results_dir", tmp_path / str(number), *more)
        other = only_run(tmp_path / str(number))
        assert losses(other) == losses(through)
        assert sorted((other / "broken.txt").read_text().splitlines()) == listed
    strange = os.fsencode(data / "cat") + b"/bro\xffken.png"  # not UTF-8
    for file in (strange, *(os.fsencode(path) for path in (tmp_path / "val").rglob("*.png"))):
        Path(os.fsdecode(file)).write_bytes(b"broken")
    train(*common, "--max_steps", "8", "--results_dir", tmp_path, "--run_name", "all")
    assert "The held-out images are broken: there is no val/loss." in capfd.readouterr().out
    assert "val/loss" not in metrics(tmp_path / "all")[-1]
    names = (tmp_path / "all" / "broken.txt").read_text()
    assert "bro\\udcffken.png" in names and "val/cat" in names


def test_non_finite_loss_stops_the_run_and_is_never_saved(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--run_name", "hot", "--learning_rate", "1e30"]
    train(*common, "--warmup_steps", "0", "--max_steps", "20", "--ckpt_every", "1", expect=1)
    assert "The loss became" in capfd.readouterr().err
    for line in metrics(tmp_path / "hot"):
        assert math.isfinite(line["train/loss"])
    for checkpoint in (tmp_path / "hot" / "checkpoints").glob("step_*"):
        weights = load_file(checkpoint / "model.safetensors")
        assert all(torch.isfinite(value).all() for value in weights.values()), checkpoint.name


def test_keep_last_and_keep_every(photo_folder: Path, tmp_path: Path) -> None:
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--max_steps", "10", "--ckpt_every", "1",
          "--keep_last", "2", "--keep_every", "4", "--samples_per_gpu", "0")  # fmt: skip
    names = sorted(path.name for path in (only_run(tmp_path) / "checkpoints").glob("step_*"))
    assert names == ["step_0000004", "step_0000008", "step_0000009", "step_0000010"]


def test_mixed_precision_has_nearly_the_same_curve(photo_folder: Path, tmp_path: Path) -> None:
    for flag in ("--use_amp", "--no_use_amp"):
        train("--data_path", photo_folder, "--max_steps", "20", "--results_dir", tmp_path / flag, flag)
    mixed, plain = (losses(only_run(tmp_path / flag)) for flag in ("--use_amp", "--no_use_amp"))
    assert mixed != plain
    assert mixed == pytest.approx(plain, rel=0.05)


def test_wandb_offline_records_metrics(photo_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--max_steps", "2", "--use_wandb",
          "--wandb_project", "jit-diffusion", "--wandb_name", "jit-v1")  # fmt: skip
    (record,) = (only_run(tmp_path) / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for text in (b"train/loss", b"train/learning_rate", b"train/grad_norm", b"jit-diffusion", b"jit-v1"):
        assert text in content


def test_tensorboard_has_scalars_and_images(photo_folder: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("--data_path", photo_folder, "--results_dir", tmp_path, "--max_steps", "3", "--use_tensorboard")
    run = only_run(tmp_path)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(run))
    assert events.Images("samples/gpu_0")[0].step == 3


def test_fp16_scales_the_loss_and_resumes_exactly(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--mixed_precision", "fp16"]
    through, legs = train_through_and_in_legs(tmp_path, common, 5, 12)
    scale = [json.loads((last_checkpoint(run) / "manifest.json").read_text())["loss_scale"] for run in (through, legs)]
    assert scale[0] == scale[1] and scale[0]["scale"] > 1
    assert "adamw, mixed precision (float16)" in (through / "logs" / "train.log").read_text()
    train("--data_path", photo_folder, "--max_steps", "12", "--results_dir", tmp_path / "plain")
    assert losses(through) == pytest.approx(losses(only_run(tmp_path / "plain")), rel=0.02)


def test_dry_run_prints_the_summary_and_writes_nothing(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data_path", photo_folder, "--results_dir", tmp_path / "results", "--samples_per_gpu", "0"]
    hunyuan = ["--model", "HunyuanDiT", "--img_size", "32", "--multireso"]
    for more, told in (([], "JiT-T/8 at 16 px"), (hunyuan, "HunyuanDiT")):
        train(*flags, *more, "--dry_run")
        said = " ".join(capfd.readouterr().out.split())
        assert told in said and "starting at step 0" in said
        assert said.endswith("Dry run: nothing was trained or written.")
        assert not (tmp_path / "results").exists()
    train(*flags, "--max_steps", "3")
    before = {path: path.is_file() and path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train(*flags, "--max_steps", "7", "--dry_run")
    said = " ".join(capfd.readouterr().out.split())
    assert "step_0000003 at step 3" in said and "stopping after 7" in said
    train(*flags, "--run_name", only_run(tmp_path / "results").name, "--learning_rate", "2e-3", "--dry_run", expect=1)
    assert "learning_rate: 0.001 there, 0.002 here" in capfd.readouterr().err
    assert {path: path.is_file() and path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_clipping_bounds_the_gradient(photo_folder: Path, tmp_path: Path) -> None:
    # AdamW's step hardly depends on the gradient's scale, but its first moment does.
    train("--data_path", photo_folder, "--max_steps", "1", "--max_grad_norm", "0.01", "--results_dir", tmp_path)
    state = tensors(last_checkpoint(only_run(tmp_path)))
    moments = [value for name, value in state.items() if name.endswith(".exp_avg")]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(moment) for moment in moments]))
    assert float(norm) == pytest.approx(0.1 * 0.01, rel=1e-3)  # (1 - beta1) x the clipped gradient
    assert metrics(only_run(tmp_path))[0]["train/grad_norm"] > 0.01  # what is logged is the norm before clipping


def test_mistyped_path_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    train("--data_path", tmp_path / "trian", "--results_dir", tmp_path / "results", expect=1)
    assert "Did you mean train?" in capfd.readouterr().err
    assert not (tmp_path / "results").exists()


def split_folder(root: Path, held_out: str = "val") -> Path:
    """A folder of two classes with a held-out folder beside it, as many data sets have it."""
    for part, count in (("train", 8), (held_out, 2)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((20, 20, 3), 20 * number + (5 if name == "cat" else 0), np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root / "train"


def test_broken_held_out_image_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = split_folder(tmp_path)
    content = (tmp_path / "val" / "cat" / "1.png").read_bytes()
    (tmp_path / "val" / "cat" / "1.png").write_bytes(content[:50])
    common = ["--data_path", data, "--results_dir", tmp_path / "r", "--ckpt_every", "3", "--max_steps", "6"]
    train(*common, expect=1)
    assert "val/cat/1.png" in capfd.readouterr().err
    run = only_run(tmp_path / "r")
    assert len(losses(run)) == 3
    assert last_checkpoint(run).name == "step_0000003"
    (tmp_path / "val" / "cat" / "1.png").write_bytes(content)
    train(*common)
    assert len(losses(run)) == 6 and "val/loss" in metrics(run)[-1]


def test_held_out_folder_with_other_classes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = split_folder(tmp_path, held_out="other")
    (tmp_path / "test").mkdir()
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / "test" / "flat.png")
    train("--data_path", data, "--results_dir", tmp_path / "r", "--max_steps", "1")
    assert "val/loss" in metrics(only_run(tmp_path / "r"))[-1]
    train("--data_path", data, "--results_dir", tmp_path / "c", "--max_steps", "1", "--enable_condition", expect=1)
    assert "--val_fraction 0" in capfd.readouterr().err


def poison_steps(monkeypatch: pytest.MonkeyPatch, broken: set[int]) -> None:
    """Make the gradient of some steps, numbered from 1 whatever run they are of, NaN."""
    from muralist.train.step import TrainState

    backward = TrainState._backward

    def poisoned(state: TrainState, parts: Any, *rest: Any) -> torch.Tensor:
        batches = list(parts)
        loss = backward(state, batches, *rest)
        if int(batches[0].sample_indices[0]) // state.plan.total + 1 in broken:
            next(p for p in state.network.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
            return loss * float("nan")
        return loss

    monkeypatch.setattr(TrainState, "_backward", poisoned)


def test_non_finite_steps_are_skipped_and_counted(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    poison_steps(monkeypatch, {3, 5})
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--ckpt_every", "1", "--keep_last", "9"]
    train(*common, "--max_steps", "4", expect=1)
    assert "The loss became nan at step 3" in (told := capfd.readouterr().err) and "--non_finite skip" in told
    train(*common, "--max_steps", "4", "--non_finite", "skip")
    assert "Skipped step 3: its gradient is not finite (1 so far)." in capfd.readouterr().out
    train(*common, "--max_steps", "6", "--non_finite", "skip")  # the count goes on with the run
    run = only_run(tmp_path)
    lines = metrics(run)
    assert [line.get("train/skipped_steps") for line in lines] == [None, None, 1, 1, 2, 2]
    assert ["train/loss" in line for line in lines] == [True, True, False, True, False, True]
    before, after = (tensors(run / "checkpoints" / f"step_{step:07d}") for step in (2, 3))
    kept = [name for name in before if not name.startswith("ema")]  # EMA weights follow the images, skipped or not
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert all(torch.isfinite(value).all() for value in tensors(last_checkpoint(run)).values())


def test_deepspeed_cannot_skip_steps(photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--data_path", photo_folder, "--results_dir", tmp_path / "results", "--strategy", "zero2"]
    train(*words, "--non_finite", "skip", expect=1)
    assert "--non_finite skip is not supported with --strategy zero2" in capfd.readouterr().err
    assert not (tmp_path / "results").exists()


def test_too_many_skipped_steps_in_a_row_end_the_run(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    poison_steps(monkeypatch, set(range(3, 99)))
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--ckpt_every", "4", "--non_finite", "skip"]
    train(*common, "--max_steps", "8")
    train(*common, "--max_steps", "20", expect=1)
    assert "at step 12, the last of 10 skipped in a row." in capfd.readouterr().err
    assert last_checkpoint(only_run(tmp_path)).name == "step_0000008"


def test_non_finite_gradient_is_never_saved(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from muralist.train.parallel import DataParallel

    optimizer_step, steps = DataParallel.optimizer_step, []

    def poisoned(strategy: DataParallel, state: Any, *rest: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 3:  # a checkpoint step: the loss is still fine, the weights will not be
            next(p for p in state.network.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return optimizer_step(strategy, state, *rest)

    monkeypatch.setattr(DataParallel, "optimizer_step", poisoned)
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--ckpt_every", "1", "--max_steps", "6"]
    train(*common, expect=1)
    assert "The gradient norm became nan at step 3" in capfd.readouterr().err
    run = only_run(tmp_path)
    assert last_checkpoint(run).name == "step_0000002"
    train(*common)
    assert len(losses(run)) == 6


def test_run_resumed_from_an_earlier_checkpoint_stays_there(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muralist.train.step import TrainState

    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--ckpt_every", "2", "--keep_last", "9"]
    train(*common, "--max_steps", "6")
    run = only_run(tmp_path)
    before = metrics(run)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "step", dies)
        train(*common, "--max_steps", "8", "--resume", run / "checkpoints" / "step_0000002", expect=130)
    train(*common, "--max_steps", "8")
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["train/loss"] for line in metrics(run)[:6]] == [line["train/loss"] for line in before]


def test_failed_start_does_not_claim_the_run_name(photo_folder: Path, tmp_path: Path) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--run_name", "mine", "--max_steps", "1"]
    train(*common, "--init_from", tmp_path / "nowhere", expect=1)
    train(*common)
    assert len(losses(tmp_path / "mine")) == 1


def test_disk_that_fills_up_is_one_error(photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ["--data_path", photo_folder, "--use_tensorboard", "--ckpt_every", "1", "--max_steps", "9"]
    common += ["--keep_last", "9"]
    with small_disk(tmp_path / "disk", "100m") as disk:
        train(*common, "--results_dir", disk, "--samples_per_gpu", "0", expect=1)
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err and "Free some space" in said.err
        run = only_run(disk)
        kept = sorted((run / "checkpoints").glob("step_*"))
        assert [path.name for path in kept] == ["step_0000001", "step_0000002"]  # 38 MB each
        leave_free(disk, 0)
        train(*common, "--results_dir", disk, expect=1)
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err and "No space left on the disk" in said.err
        (disk / "filler").unlink()
        shutil.rmtree(kept[0])
        train(*common, "--results_dir", disk, "--keep_last", "1", "--samples_per_gpu", "0")
        assert len(losses(run)) == 9


def test_wandb_without_a_login_is_one_error(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")

    def not_logged_in(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb, "init", not_logged_in)
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--max_steps", "1", "--use_wandb", expect=1)
    said = capfd.readouterr().err
    assert "No API key configured" in said and "WANDB_MODE=offline" in said and "Traceback" not in said


def test_every_prompt_is_sampled_on_one_process_and_unconditional_models_take_none(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data_path", photo_folder, "--results_dir", tmp_path, "--max_steps", "1", "--val_fraction", "0"]
    train(*common, "--run_name", "plain", "--samples_per_gpu", "3")
    train(*common, "--run_name", "default")
    train(*common, "--run_name", "classes", "--enable_condition", "--sample-prompts", "sunrise", "0", "1")
    samples = {name: tmp_path / name / "samples" / "step_0000001" for name in ("plain", "default", "classes")}
    assert len(list(samples["plain"].glob("gpu_0_sample*.png"))) == 3
    assert len({path.read_bytes() for path in samples["default"].glob("gpu_0_sample*.png")}) == 4
    texts = sorted(samples["classes"].glob("gpu_0_prompt*.txt"))
    assert [path.read_text() for path in texts] == ["sunrise\n", "0\n", "1\n"]
    capfd.readouterr()
    for flags in (["--sample_prompts", "dog"], ["--sample_guidance", "3"]):
        train(*common, "--run_name", "refused", *flags, expect=1)
        said = capfd.readouterr().err
        assert f"{' '.join(flags)} has no effect".replace("dog", "'dog'") in said and "--enable_condition" in said
