"""`muralist distill`: what a student takes from its teacher, exact resumption, refusals, ranks, and that it is better."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import muralist
from muralist.cli import main
from muralist.core import rng
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.diffusion import samplers
from muralist.models.configs import parameter_count
from muralist.models.jit import JiT
from muralist.models.jit_distill import Comparison, JiTStudent
from muralist.models.jit_spec import infer_jit_config, jit_arguments
from muralist.models.weights import WEIGHTS_FILE, read_weights
from muralist.settings import EstimateSettings, TrainSettings
from muralist.settings.load import read_yaml
from muralist.tools.estimate import TrainingEstimate, read_measured
from muralist.train.preflight import estimate_memory
from tests.support.runs import (
    assert_same_state,
    finish,
    fork,
    last_checkpoint,
    losses,
    metrics,
    only_run,
    tensors,
    train,
)
from tests.support.scene_classifier import kernel_distance, train_classifier

QUIET = ["--batch_size", "4", "--num_workers", "0", "--warmup_steps", "3", "--learning_rate", "1e-4",
         "--no_use_tensorboard", "--guidance", "1.5"]  # fmt: skip


def distill(teacher: Path, *arguments: object, expect: int = 0) -> None:
    """Distill in this process."""
    assert main(["distill", str(teacher), *QUIET, *map(str, arguments)]) == expect


@pytest.fixture(scope="module")
def teacher(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two classes, with two checkpoints."""
    results = tmp_path_factory.mktemp("teachers")
    train("--data_path", photo_folder, "--enable_condition", "--results_dir", results, "--run_name", "pets",
          "--max_steps", 20, "--ckpt_every", 10, "--samples_per_gpu", 0, "--val_fraction", 0.1)  # fmt: skip
    return results / "pets"


@pytest.fixture(scope="module")
def through(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that was trained without interruption."""
    results = tmp_path_factory.mktemp("through")
    distill(teacher, "--results_dir", results, "--max_steps", 12, "--ckpt_every", 4)
    return only_run(results)


def test_a_student_is_a_run_like_any_other(teacher: Path, through: Path, photo_folder: Path) -> None:
    assert through.name.startswith("pets-2step-")
    settings = read_yaml(TrainSettings, through / "config.yaml")
    assert settings.data.path == str(photo_folder) and settings.data.val_fraction == 0.1
    assert (settings.model.name, settings.model.img_size, settings.model.enable_condition) == ("JiT-T/8", 16, True)
    assert settings.distill.teacher == str(teacher / "checkpoints" / "step_0000020")
    checkpoint = last_checkpoint(through)
    described = json.loads((checkpoint / "manifest.json").read_text())["model"]
    assert described["label_names"] == ["meadow", "sunrise"]
    assert described["distilled"].items() >= {"steps": 2, "guidance": 1.5, "interval": [0.1, 1.0]}.items()
    own, theirs = (
        tensors(checkpoint).keys(),
        tensors(last_checkpoint(teacher)).keys(),
    )  # nothing of the teacher is saved
    assert {name for name in own if "critic." not in name} == theirs
    assert {name.replace("critic.", "") for name in own if "critic." in name} == theirs
    assert read_weights(through).keys() == read_weights(teacher).keys()  # nor is the critic a part of the model
    lines = metrics(through)
    assert [line["step"] for line in lines if "val/loss" in line] == [4, 8, 12]
    assert len(list((through / "samples" / "step_0000012").glob("*.png"))) == 4
    log = (through / "logs" / "train.log").read_text()
    assert (
        f"teacher    {teacher / 'checkpoints' / 'step_0000020' / 'ema1.safetensors'}, guidance 1.5 in t 0.1 to 1" in log
    )
    measured = read_measured(through, None)
    assert measured.model == "JiT-T/8" and measured.origin.endswith("with the passes of its teacher")
    assert read_measured(teacher, None).origin == str(teacher)
    plain = settings.model_copy(update={"distill": TrainSettings().distill})
    student, alone = (estimate_memory(one, 2, False) for one in (settings, plain))
    assert student.state == 2 * alone.state + 4 * parameter_count("T", 8, 1000)  # of all classes there might be
    assert student.per_image and alone.per_image and student.per_image == 2 * 2 * alone.per_image
    assert student.checkpoint == 2 * alone.checkpoint
    runs = (TrainingEstimate(EstimateSettings(source=str(one)), read_measured(one, None)) for one in (through, teacher))
    measured, plain_run = (run.memory["ddp"] for run in runs)
    assert measured.checkpoint == 2 * plain_run.checkpoint and measured.state > 2 * plain_run.state
    assert measured.per_image == 4 * plain_run.per_image


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_critic_takes_larger_steps(teacher: Path, tmp_path: Path, optimizer: str) -> None:
    """The first step of AdamW is as long as the learning rate, in every weight that has a gradient."""
    more = ("--warmup_steps", 0, "--max_steps", 1, "--samples_per_gpu", 0, "--optimizer", optimizer)
    distill(teacher, "--results_dir", tmp_path, *more)
    before = read_weights(teacher)
    after = read_weights(last_checkpoint(only_run(tmp_path)), "model", training=True)
    name = "final_layer.linear.weight"  # not one of Muon's
    moved = {part: float((after[part + name] - before[name]).abs().max()) for part in ("", "critic.")}
    assert moved == {"": pytest.approx(1e-4, rel=0.02), "critic.": pytest.approx(8e-4, rel=0.02)}


def test_samples_of_training_are_those_of_generate(through: Path, tmp_path: Path) -> None:
    folder = through / "samples" / "step_0000012"
    prompt = (folder / "gpu_0_prompt.txt").read_text().strip()
    command = ["generate", "--model_path", through, "--prompt", prompt, "--seed_start", 0, "--dtype", "fp32"]
    assert main([*map(str, command), "--output_dir", str(tmp_path / "images")]) == 0
    (image,) = (tmp_path / "images").glob("*.png")
    with Image.open(image) as mine, Image.open(folder / "gpu_0_sample.png") as theirs:
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))
        settings = json.loads(mine.info["settings"])
    assert (settings["num_inference_steps"], settings["guidance_scale"]) == (2, 1.5)


def test_interrupted_distillation_equals_uninterrupted(teacher: Path, through: Path, tmp_path: Path) -> None:
    for stop in (1, 5, 12):
        distill(teacher, "--results_dir", tmp_path, "--max_steps", stop, "--ckpt_every", 4)
    assert_same_state(last_checkpoint(through), last_checkpoint(only_run(tmp_path)))
    assert losses(through) == losses(only_run(tmp_path))


def test_its_config_and_the_python_function_continue_it(teacher: Path, through: Path, tmp_path: Path) -> None:
    shutil.copytree(through, tmp_path / through.name)
    run = tmp_path / through.name
    config = ["train", "--config", run / "config.yaml", "--run_name", run.name, "--results_dir", tmp_path]
    assert main([*map(str, config), "--max_steps", "14"]) == 0
    given = {"batch_size": 4, "num_workers": 0, "warmup_steps": 3, "learning_rate": 1e-4, "guidance": 1.5}
    result = muralist.distill(teacher, 2, **given, results_dir=tmp_path, max_steps=16)
    assert result.run == run and result.step == 16
    assert losses(run)[:12] == losses(through)
    with pytest.raises(muralist.UserError, match="steps is 3: expected 1, 2 or 4"):
        muralist.distill(teacher, 3)


def test_a_changed_or_missing_teacher_is_refused(
    teacher: Path, through: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "pets"
    shutil.copytree(teacher, own)
    shutil.copytree(through, tmp_path / "results" / through.name)
    again = ("--results_dir", tmp_path / "results", "--max_steps", 13)
    distill(own, *again)  # the same weights at another place
    written = (tmp_path / "results" / through.name / "config.yaml").read_text()
    distill(own / "checkpoints" / "step_0000010", *again, expect=1)
    said = capsys.readouterr().err
    assert f"The teacher of the run {tmp_path / 'results' / through.name} has changed" in said
    assert f"It started from {own / 'checkpoints' / 'step_0000020'}, --distill.weights ema1." in said
    distill(own, "--weights", "model", "--run_name", through.name, *again, expect=1)
    assert "has changed" in capsys.readouterr().err
    file = own / "checkpoints" / "step_0000020" / "ema1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    distill(own, *again, expect=1)
    assert "is damaged: ema1.safetensors does not match its hash" in capsys.readouterr().err
    shutil.rmtree(own)
    distill(own, *again, expect=1)
    assert f"The model {own} was not found" in capsys.readouterr().err
    config = tmp_path / "results" / through.name / "config.yaml"
    assert main(["train", "--config", str(config), "--run_name", through.name, *map(str, again)]) == 1
    assert f"{own / 'checkpoints' / 'step_0000020'}" in capsys.readouterr().err
    assert config.read_text() == written  # a refused command leaves the run's settings as they were


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps is '3': expected 1, 2 or 4"),
        (["--model", "JiT-T/4"], "The student cannot have model.name 'JiT-T/4'"),
        (["--img_size", "32"], "The student cannot have model.img_size"),
        (["--init_from", "auto"], "--init_from auto has no effect"),
        (["--sample_steps", "10"], "--sample_steps 10 has no effect"),
        (["--sample_guidance", "3"], "--sample_guidance 3.0 has no effect"),
        (["--official_last_step"], "--official_last_step True has no effect"),
        (["--interval", "1", "0.5"], "--distill.interval 1 0.5 is empty"),
        (["--optimizer", "prodigy", "--learning_rate", "1"], "--optimizer prodigy is not for distillation"),
    ],
)
def test_settings_that_a_student_does_not_have_are_refused(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    distill(teacher, *arguments, "--results_dir", tmp_path, expect=1)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_runs_in_its_folder_are_refused(
    teacher: Path, through: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(through, tmp_path / through.name)
    distill(teacher, "--steps", 4, "--run_name", through.name, "--results_dir", tmp_path, expect=1)
    assert "distill.steps: 2 there, 4 here" in capsys.readouterr().err
    plain = ("--data_path", photo_folder, "--enable_condition", "--results_dir", tmp_path, "--val_fraction", 0.1)
    train(*plain, "--run_name", through.name, expect=1)
    assert "which plain training cannot continue" in capsys.readouterr().err
    assert read_yaml(TrainSettings, tmp_path / through.name / "config.yaml").distill.teacher
    train(*plain, "--run_name", "fork", "--resume", tmp_path / through.name, expect=1)
    assert "is that of a student, which plain training cannot continue" in capsys.readouterr().err
    distill(teacher, "--resume", teacher, "--run_name", "fork", "--results_dir", tmp_path, expect=1)
    assert "is of another model: distilled: None there" in capsys.readouterr().err


def test_files_of_a_student_are_known_as_such_wherever_they_lie(
    teacher: Path, through: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run, a checkpoint, one of its files, an export, an export of that, and a file without its folder."""
    whole, half = tmp_path / "export", tmp_path / "half.safetensors"
    assert main(["export", str(through), str(whole)]) == 0
    assert main(["export", str(whole), str(tmp_path / "again")]) == 0
    shutil.copy(tmp_path / "again" / WEIGHTS_FILE, half)
    assert main(["export", str(half), str(tmp_path / "third")]) == 0
    checkpoint = last_checkpoint(through)
    plain = ("--data_path", photo_folder, "--enable_condition", "--results_dir", tmp_path / "results")
    sources = (
        through,
        checkpoint,
        checkpoint / "ema2.safetensors",
        whole,
        tmp_path / "again",
        half,
        tmp_path / "third",
    )
    images = []
    for number, source in enumerate(sources):
        capsys.readouterr()
        distill(source, "--data_path", photo_folder, "--results_dir", tmp_path / "results", expect=1)
        assert "was distilled to 2 steps with guidance 1.5 folded in already" in capsys.readouterr().err
        train(*plain, "--run_name", f"start-{number}", "--init_from", source, expect=1)
        assert "training cannot start from a student" in capsys.readouterr().err
        command = ["generate", "--model_path", source, "--prompt", "sunrise", "--dtype", "fp32", "--output_dir"]
        assert main([*map(str, command), str(tmp_path / "no"), "--num_inference_steps", "50"]) == 1
        assert "its number of steps cannot be 50" in capsys.readouterr().err
        assert main([*map(str, command), str(tmp_path / str(number))]) == 0
        (image,) = (tmp_path / str(number)).glob("*.png")
        with Image.open(image) as found:
            images.append(np.asarray(found))
    assert all(np.array_equal(images[0], image) for at, image in enumerate(images) if at != 2)  # ema2 is another one
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "distilled"}))
    assert (
        main(["generate", "--model_path", str(whole), "--prompt", "sunrise", "--output_dir", str(tmp_path / "no")]) == 1
    )
    assert "config.json is not the config of the weights beside it" in capsys.readouterr().err


def test_no_run_is_trained_on_the_noise_of_its_val_loss(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[bool, list[torch.Tensor]] = {False: [], True: []}  # by whether a validation is under way
    encode = JiTStudent.encode

    def watched(self: JiTStudent, batch: Batch, keys: SampleKeys) -> Comparison:
        found = encode(self, batch, keys)
        drawn[not torch.is_grad_enabled()] += list(found.states[:, 0])
        return found

    monkeypatch.setattr(JiTStudent, "encode", watched)
    held_out = []
    for seed in (0, 7):
        more = ("--results_dir", tmp_path, "--max_steps", 6, "--ckpt_every", 6, "--samples_per_gpu", 0)
        distill(teacher, *more, "--val_fraction", 0.2, "--seed", seed, "--run_name", seed)
        held_out.append(torch.stack(drawn[True]))
        assert len(held_out[-1]) >= 4 and len(drawn[False]) >= 24
        assert not (held_out[-1][:, None] == torch.stack(drawn[False])[None]).flatten(2).all(-1).any()
        drawn[True].clear(), drawn[False].clear()
    assert torch.equal(*held_out), "it is comparable between runs"


def test_runs_of_before_with_a_setting_that_has_gone(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every config.yaml held solver_steps, also that of plain training."""
    old = tmp_path / "pets"
    shutil.copytree(teacher, old)
    config = old / "config.yaml"
    config.write_text(config.read_text().replace("distill:\n", "distill:\n  solver_steps: 4\n"))
    assert "solver_steps: 4" in config.read_text()
    distill(old, "--results_dir", tmp_path / "out", "--max_steps", 1, "--samples_per_gpu", 0)
    assert (
        main(["train", "--config", str(config), "--run_name", "pets", "--results_dir", str(tmp_path), "--dry_run"]) == 0
    )
    distill(old, "--results_dir", tmp_path / "out", "--solver_steps", 2, expect=1)
    assert "solver_steps" in capsys.readouterr().err


def test_an_export_needs_a_data_set(
    teacher: Path, photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(teacher), str(tmp_path / "export")]) == 0
    distill(tmp_path / "export", "--results_dir", tmp_path / "results", expect=1)
    assert "does not say which data set it was trained on" in capsys.readouterr().err
    more = ("--data_path", photo_folder, "--results_dir", tmp_path / "results", "--dry_run")
    distill(tmp_path / "export", "--steps", 1, *more)
    said = capsys.readouterr()
    assert "distilled to 1 step with guidance 1.5 folded in" in said.out + said.err
    assert not (tmp_path / "results").exists()


def test_an_unconditional_student(photo_folder: Path, tmp_path: Path) -> None:
    train("--data_path", photo_folder, "--results_dir", tmp_path, "--run_name", "one", "--max_steps", 4)
    words = [word for word in QUIET if word not in ("--guidance", "1.5")]
    command = ["distill", tmp_path / "one", *words, "--steps", 4, "--results_dir", tmp_path / "out", "--max_steps", 2]
    assert main([*map(str, command)]) == 0
    described = json.loads((last_checkpoint(only_run(tmp_path / "out")) / "manifest.json").read_text())["model"]
    assert described["distilled"]["guidance"] == 1.0 and described["label_names"] == []


def on_ranks(ranks: int, teacher: Path, results: Path, *more: object) -> list[object]:
    return ["muralist", "launch", "--nproc", ranks, "distill", teacher, *QUIET, "--global_batch_size", 4,
            "--results_dir", results, *more]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_the_same_student(teacher: Path, through: Path, tmp_path: Path, strategy: str) -> None:
    finish(fork(*on_ranks(2, teacher, tmp_path / "two", "--strategy", strategy, "--max_steps", 12)))
    finish(fork(*on_ranks(1, teacher, tmp_path / "one", "--max_steps", 12)))
    assert losses(only_run(tmp_path / "two")) == pytest.approx(losses(only_run(tmp_path / "one")), rel=1e-5)
    assert losses(only_run(tmp_path / "one")) == pytest.approx(losses(through), rel=1e-5)
    finish(fork(*on_ranks(1, teacher, tmp_path / "two", "--max_steps", 16)))  # two ranks, then one
    finish(fork(*on_ranks(2, teacher, tmp_path / "one", "--max_steps", 16)))
    assert losses(only_run(tmp_path / "two")) == pytest.approx(losses(only_run(tmp_path / "one")), rel=1e-5)


@pytest.mark.slow
def test_a_killed_distillation_resumes_with_the_same_bits(teacher: Path, tmp_path: Path) -> None:
    words = ["muralist", "distill", teacher, *QUIET, "--ckpt_every", 5, "--keep_last", 1000, "--samples_per_gpu", 0]
    process = fork(*words, "--results_dir", tmp_path / "killed", "--max_steps", 100_000)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("killed/*/checkpoints/step_0000010/manifest.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    (heartbeat,) = tmp_path.glob("killed/*/heartbeats/rank_0.json")
    os.kill(json.loads(heartbeat.read_text())["process"], signal.SIGKILL)
    finish(process, expect=None)
    run = only_run(tmp_path / "killed")
    reached = int(last_checkpoint(run).name.removeprefix("step_"))
    finish(fork(*words, "--results_dir", tmp_path / "killed", "--max_steps", reached + 7))
    finish(fork(*words, "--results_dir", tmp_path / "through", "--max_steps", reached + 7))
    assert losses(run) == losses(only_run(tmp_path / "through"))
    assert_same_state(last_checkpoint(run), last_checkpoint(only_run(tmp_path / "through")))


@pytest.mark.slow
def test_a_student_is_better_than_its_teacher_in_as_many_passes(tmp_path: Path) -> None:
    """By a classifier of the scenes: KID of its features to those of images that the teacher makes in many steps.

    Without guidance, so that the teacher too makes as many passes as steps; the student starts as its Euler sampler.
    """
    common = ["--num_workers", 0, "--results_dir", tmp_path, "--samples_per_gpu", 0, "--lr_schedule", "cosine",
              "--log_every", 100, "--no_random_flip", "--epochs", 1000]  # fmt: skip
    train("--data_path", "driving_world", "--img_size", 32, "--enable_condition", "--init_from", "none", *common,
          "--max_samples", 3200, "--max_steps", 600, "--batch_size", 16, "--learning_rate", 4e-3, "--beta2", 0.99,
          "--warmup_steps", 50, "--run_name", "teacher")  # fmt: skip
    command = ["distill", tmp_path / "teacher", "--steps", 2, "--guidance", 1, "--max_steps", 150, "--batch_size", 16,
               "--learning_rate", 1e-4, "--warmup_steps", 20, *common, "--run_name", "student"]  # fmt: skip
    assert main([*map(str, command)]) == 0
    classify = train_classifier(32, samples=2000, steps=200, seed=0)
    labels = torch.arange(400) % 8

    def sampled(run: str, first_seed: int = 1000, **settings: Any) -> torch.Tensor:
        weights = read_weights(tmp_path / run, "ema1")
        network = JiT(**jit_arguments(infer_jit_config(weights)))
        network.load_state_dict(weights)
        noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.arange(first_seed, first_seed + 400), (3, 32, 32))
        images = samplers.sample(network.eval(), noise, labels, 8, samplers.SamplerSettings(**settings))
        return torch.from_numpy(to_uint8_array(images.clamp(-1, 1)))

    target = classify.features(sampled("teacher", first_seed=5000, steps=12))

    def distance(images: torch.Tensor) -> float:
        return kernel_distance(classify.features(images), labels, target, labels)

    student = sampled("student", solver="euler", steps=2)
    few = [distance(sampled("teacher", solver=solver, steps=2)) for solver in ("euler", "abm2")]
    assert distance(student) < 0.6 * min(few)
    assert (classify(student) == labels).float().mean() >= 0.9
