"""HunyuanDiT training, and the commands of HunyuanDiT fine-tuning as documented."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, HunyuanDiTPipeline
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from muralist.cli import main
from muralist.core import rng
from muralist.core.errors import UserError
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import load
from muralist.tools.hydit import translate, translate_flags
from muralist.train.dataset import has_captions, open_data
from muralist.train.samples import sample_images_multi_gpu
from tests.conftest import REPOSITORY
from tests.support.disks import PAGE, leave_free, read_only_view, small_disk
from tests.support.hunyuan import SMALL, small_family
from tests.support.runs import TINY, assert_same_state, finish, last_checkpoint, losses, metrics, start


def train(results: Path, run: str, *arguments: object) -> Path:
    words = ["train", *SMALL, "--results_dir", results, "--run_name", run, *arguments]
    assert main([str(word) for word in words]) == 0
    return results / run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("results"), "through", "--max_steps", 6, "--ckpt_every", 3)


def test_resumed_run_is_bit_identical_and_samples_change_nothing(trained: Path) -> None:
    results = trained.parent
    train(results, "halves", "--max_steps", 3, "--samples_per_gpu", 0)
    halves = train(results, "halves", "--max_steps", 6, "--samples_per_gpu", 0)
    assert losses(halves) == losses(trained)
    assert_same_state(last_checkpoint(trained), last_checkpoint(halves))


def test_exported_folder_generates_the_same_image_in_diffusers(trained: Path) -> None:
    folder = trained.parent / "exported"
    assert main(["export", str(trained), str(folder)]) == 0
    pipeline = HunyuanDiTPipeline.from_pretrained(folder, safety_checker=None, requires_safety_checker=False)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    prompt = (trained / "samples" / "step_0000006" / "gpu_0_prompt.txt").read_text().strip()
    noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.tensor([0]), (4, 4, 4))
    generated = pipeline(
        prompt, height=32, width=32, num_inference_steps=2, guidance_scale=5.0, latents=noise,
        use_resolution_binning=False, output_type="pt",
    ).images  # fmt: skip
    with Image.open(trained / "samples" / "step_0000006" / "gpu_0_sample.png") as sampled:
        assert np.abs(np.asarray(sampled).astype(int) - to_uint8_array(generated * 2 - 1)[0].astype(int)).max() <= 1
    assert main(["export", str(trained), str(folder)]) == 1, "an export replaces nothing"


def test_sample_images_multi_gpu_with_components_of_a_custom_script(tmp_path: Path) -> None:
    family = small_family(tmp_path / "model", size=(32, 48))
    parts = family.encoders
    args = Namespace(samples_dir=tmp_path / "samples", image_size=[32, 48], sample_steps=2)
    for rank in range(2):
        sample_images_multi_gpu(
            torch.nn.DataParallel(family.network().eval()), DPMSolverMultistepScheduler.from_config(family.scheduler_config),
            parts.vae, parts.bert, parts.bert_tokenizer, parts.t5, parts.t5_tokenizer, rank, 2, args,
            logging.getLogger("mine"), 10,
        )  # fmt: skip
    folder = tmp_path / "samples" / "step_0000010"
    names = {path.name for path in folder.iterdir()}
    assert names == {"gpu_0_sample.png", "gpu_0_prompt.txt", "gpu_1_sample.png", "gpu_1_prompt.txt"}
    with Image.open(folder / "gpu_1_sample.png") as image:
        assert image.size == (48, 32)
    assert "urban intersection" in (folder / "gpu_1_prompt.txt").read_text()


# The official script's flags


def test_official_flags_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    official = ("--model DiT-g/2 --rope-img base512 --rope-real --qk-norm --lr 1e-4 --ckpt-every 500 "
                "--ckpt-latest-every 100 --max-training-steps=900 "
                "--global-seed 7 --use-zero-stage 3 --ckpt-every-n-epoch 1 --no-fp16")  # fmt: skip
    words, strategy, _ = translate(official.split())
    assert strategy == "zero3"
    assert " ".join(words) == (
        "--learning_rate 1e-4 --ckpt_every 500 --keep_every 500 --ckpt-latest-every 100 --max_steps=900 --seed 7 "
        "--at_epoch_end true --no_use_amp"
    )
    with pytest.raises(UserError, match="--predict-type is epsilon: expected v_prediction"):
        translate(["--predict-type", "epsilon"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "--strategy" not in translate_flags([])
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert translate_flags([])[-2:] == ["--strategy", "zero2"]
    assert translate_flags(["--strategy=ddp"])[-1] == "--strategy=ddp"


def test_missing_deepspeed_is_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert translate_flags([])[-2:] == ["--strategy", "fsdp2"]
    assert "DeepSpeed is not installed: training with FSDP2 instead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--model.path", "nowhere"], "The model nowhere was not found."), (["--img_size", 40], "of 16")],
)
def test_invalid_model_leaves_no_run_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: list[object], said: str
) -> None:
    words = ["train", *SMALL, "--results_dir", tmp_path / "results", *wrong]
    assert main([str(word) for word in words]) == 1
    assert said in capfd.readouterr().err
    assert not (tmp_path / "results").exists()


# With real processes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The repository as a user has it, with a results folder of its own."""
    (tmp_path / "scripts").mkdir()
    for script in ("train_waymo_base.sh", "test_sampling.sh"):
        (tmp_path / "scripts" / script).write_bytes((REPOSITORY / "scripts" / script).read_bytes())
    for name in ("configs", "hydit"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def in_project(project: Path, *command: object, expect: int = 0, **extra: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return finish(start(*command, cwd=project, PATH=path, **extra), expect=expect)


@pytest.mark.slow
def test_four_processes_write_four_samples_at_each_checkpoint(project: Path) -> None:
    output = in_project(project, "bash", "scripts/test_sampling.sh", NPROC="4")
    assert "Sampling works: 4 images at each of 2 checkpoints" in output
    samples = project / "results" / "test_sampling" / "samples"
    assert (samples / "sheet.png").is_file()
    assert len({path.read_text() for path in samples.glob("step_0000010/gpu_*_prompt.txt")}) == 4
    board = EventAccumulator(str(samples.parent / "tensorboard")).Reload()
    for rank in range(4):
        assert [event.step for event in board.Images(f"samples/gpu_{rank}")] == [5, 10]
    words = ["muralist", "launch", "--nproc", "4", "train", *TINY, "--data_path", "driving_world", "--max_samples", "64",
             "--global_batch_size", "4", "--max_steps", "4", "--ckpt_every", "2", "--run_name", "jit", "--val_fraction", "0",
             "--enable_condition", "--init_from", "none"]  # fmt: skip
    in_project(project, *words)
    for step in ("step_0000002", "step_0000004"):
        assert len(list((project / "results" / "jit" / "samples" / step).iterdir())) == 8


@pytest.mark.slow
def test_script_takes_gpus_from_the_environment_and_resumes(project: Path) -> None:
    small = ["--image-size", "32", "32", "--batch-size", "1", "--num-workers", "0", "--ckpt-every", "2",
             "--ckpt-latest-every", "1", "--val_fraction", "0", "--sample-steps", "2"]  # fmt: skip
    output = in_project(project, "bash", "scripts/train_waymo_base.sh", 3, *small, CUDA_VISIBLE_DEVICES="0,1")
    assert "Number of processes: 2" in output
    run = project / "results" / "waymo_base"
    assert {path.name for path in (run / "samples").iterdir()} == {
        "step_0000001", "step_0000002", "step_0000003", "sheet.png"}  # fmt: skip
    assert {path.name for path in (run / "checkpoints").glob("step_*")} == {"step_0000002", "step_0000003"}
    assert (run / "logs" / "train.log").read_text().count("Generating samples") == 3
    output = in_project(project, "bash", "scripts/train_waymo_base.sh", 5, *small, CUDA_VISIBLE_DEVICES="0,1")
    assert "at step 3" in output and len(metrics(run)) == 5


@pytest.mark.slow
def test_official_entry_point(project: Path) -> None:
    command = "python hydit/train_deepspeed.py --ckpt-every 500 --ckpt-latest-every 100 --image-size 512 512"
    process = start(*command.split(), "--batch-size", "1", "--log-every", "1", cwd=project)
    deadline = time.monotonic() + 200
    while not (found := list(project.glob("results/waymo_base-*/metrics.jsonl"))) or not found[0].read_text():
        assert process.poll() is None and time.monotonic() < deadline, "it never came to its first step"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = finish(process, expect=130)
    assert "at 512 x 512 px" in output and "Stopped by SIGINT" in output
    assert json.loads((last_checkpoint(found[0].parent) / "manifest.json").read_text())["model"]["img_size"] == 512


def test_full_disk_for_samples_does_not_stop_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "run" / "samples", "64k") as disk:
        leave_free(disk, PAGE)  # a folder fits, an image does not
        run = train(tmp_path, "run", "--max_steps", 2, "--ckpt_every", 1, "--img_size", 64)
    assert "Error during sampling on GPU 0: " in capfd.readouterr().out
    assert len(losses(run)) == 2 and last_checkpoint(run).name == "step_0000002"


def test_unwritable_samples_do_not_stop_training(trained: Path) -> None:
    run = trained.parent / "frozen"
    with read_only_view(trained.parent / "elsewhere", run / "samples"):
        train(trained.parent, "frozen", "--max_steps", 2, "--ckpt_every", 1)
    log = (run / "logs" / "train.log").read_text()
    assert log.count("Error during sampling on GPU 0: ") == log.count("Read-only file system") == 2
    assert losses(run) == losses(trained)[:2] and last_checkpoint(run).name == "step_0000002"
    assert not list((trained.parent / "elsewhere").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_sampling_error_on_one_rank_is_logged_and_training_continues(project: Path, strategy: str) -> None:
    run = project / "results" / "broken"
    for step in ("step_0000002", "step_0000004"):
        (run / "samples" / step / "gpu_1_sample.png").mkdir(parents=True)  # in the way of rank 1 alone
    words = ["muralist", "launch", "--nproc", "2", "train", *SMALL, "--max_steps", "4", "--ckpt_every", "2",
             "--run_name", "broken", "--strategy", strategy, "--dist_timeout", "60"]  # fmt: skip
    output = in_project(project, *words)
    assert "Error during sampling on GPU 1:" in output and "Finished at step 4" in output
    for step in ("step_0000002", "step_0000004"):
        folder = run / "samples" / step
        assert "directory" in (folder / "gpu_1_error.txt").read_text()
        assert (folder / "gpu_0_sample.png").is_file() and not (folder / "gpu_0_error.txt").exists()
    assert len(losses(run)) == 4


# Captions


def test_images_without_captions_are_warned_about(trained: Path, photo_folder: Path) -> None:
    run = train(trained.parent, "silent", "--data_path", photo_folder, "--max_steps", 1, "--samples_per_gpu", 0)
    log = (run / "logs" / "train.log").read_text()
    assert (
        log.count("None of the images that were checked has a caption")
        == log.count("Set --caption to the name of a column")
        == 1
    )
    assert "found      48 images, 2 classes: meadow, sunrise; 48 without captions\n" in log
    own = (trained / "logs" / "train.log").read_text()
    assert "None of the images" not in own
    warning = "warning    no --model.path was given: this trains a small HunyuanDiT from random weights"
    assert warning in own and "--model.path FOLDER fine-tunes a published one" in own
    assert len(list((trained / "samples" / "step_0000006").glob("gpu_0_sample*.png"))) == 8


def test_class_labels_of_a_captioned_model_are_warned_about(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", "HunyuanDiT", "--img_size", "32", "--results_dir", str(tmp_path), "--dry_run"]
    for more in ([], ["--enable_condition"]):
        assert main([*words, "--data_path", str(photo_folder), *more]) == 0
        told = "warning    HunyuanDiT is trained on captions: --enable_condition adds no labels\n"
        assert (told in capsys.readouterr().out) == bool(more)


def test_one_caption_avoids_the_warning(tmp_path: Path) -> None:
    def looked_at(captions: list[str], *more: str) -> bool:
        rows = [f"{number}.png,{caption}" for number, caption in enumerate(captions)]
        (tmp_path / "table.csv").write_text("\n".join(["image,caption", *rows]))
        words = ["--data_path", str(tmp_path / "table.csv"), "--img_size", "16", "--val_fraction", "0", *more]
        return has_captions(open_data(load(TrainSettings, words, TRAIN_FLAT_NAMES)))

    for number in range(5):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{number}.png")
    assert looked_at(["", "", "", "", "a road"])
    assert not looked_at(["", " ", "", "", ""])
    assert looked_at([""] * 5, "--caption", "A photo")
    (tmp_path / "4.png").write_bytes(b"broken")
    assert not looked_at([""] * 5)
