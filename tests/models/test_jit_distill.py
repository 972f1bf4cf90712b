"""The student's objective, sampler and files, against computations by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.core import rng
from muralist.core.errors import UserError
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.generate.model_info import inspect_model
from muralist.models.configs import forward_flops
from muralist.models.jit_distill import CRITIC, Comparison, JiTStudent, read_teacher_spec
from muralist.models.jit_spec import JiTSpec
from muralist.models.weights import export
from muralist.settings import (
    BatchScriptSettings,
    DistillationSettings,
    ExportSettings,
    GenerateSettings,
    ModelSettings,
    ObjectiveSettings,
    SampleSettings,
    TrainSettings,
)
from muralist.tools.sweep import list_combinations
from tests.generate.test_jit_pipeline import generate, load
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.tools.test_sweep import given as sweep_settings

LABELS = ["cat", "dog", "bird"]
GUIDANCE, INTERVAL = 1.7, (0.1, 0.8)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = family(*LABELS)
    return checkpoint(tmp_path_factory.mktemp("runs") / "pets", spec.describe(), network_of(spec).state_dict())


def student_of(teacher: Path, steps: int = 2, guidance: float = GUIDANCE, **model: object) -> JiTStudent:
    distill = DistillationSettings(teacher=str(teacher), steps=steps, guidance=guidance, interval=INTERVAL)
    model = {"name": "JiT-T/8", "img_size": SIDE, "enable_condition": True, **model}
    settings = TrainSettings(distill=distill, model=ModelSettings(**model))
    return JiTStudent.from_settings(settings, LABELS)


@pytest.fixture(scope="module")
def student(teacher: Path) -> JiTStudent:
    student = student_of(teacher)
    student.network()
    return student


def batch_of(*indices: int) -> Batch:
    images = torch.zeros(len(indices), SIDE, SIDE, 3, dtype=torch.uint8)
    return Batch(images, torch.tensor([index % 3 for index in indices]), [""] * len(indices), torch.tensor(indices))


@torch.no_grad()
def trained_network(student: JiTStudent) -> torch.nn.Module:
    """Build a student and a critic that are neither their teacher nor each other."""
    network = student.network()
    for factor, part in ((1.5, network), (0.6, network.get_submodule(CRITIC))):
        part.get_submodule("final_layer.linear").weight.mul_(factor)
    return network


@pytest.mark.parametrize("steps", [1, 2, 4])
@torch.no_grad()
def test_targets_and_loss_are_those_of_a_computation_by_hand(teacher: Path, steps: int) -> None:
    student, batch, plain = student_of(teacher, steps), batch_of(0, 5, 7), network_of(family(*LABELS))
    network, keys = trained_network(student), SampleKeys(3, batch.sample_indices)
    critic, encoded = network.get_submodule(CRITIC), student.encode(batch, keys)

    def normal(purpose: Purpose, k: int) -> torch.Tensor:
        return rng.normal(3, purpose, batch.sample_indices, (steps, 3, SIDE, SIDE))[:, k]

    def time(purpose: Purpose, k: int) -> torch.Tensor:
        return 0.02 + 0.96 * rng.uniform(3, purpose, batch.sample_indices, (steps,))[:, k]

    z = rng.normal(3, Purpose.NOISE, batch.sample_indices, (3, SIDE, SIDE))
    expected = torch.zeros(3)
    for k in range(steps):
        torch.testing.assert_close(encoded.states[:, k], z, rtol=1e-4, atol=1e-4)
        x = network(z, torch.full((3,), k / steps), batch.labels)
        torch.testing.assert_close(encoded.images[:, k], x, rtol=1e-4, atol=1e-4)
        noise, t = normal(Purpose.COMPARED_NOISE, k), time(Purpose.COMPARED_TIME, k)
        at = t.view(-1, 1, 1, 1)
        noised = at * x + (1 - at) * noise
        real, null = plain(noised, t, batch.labels), plain(noised, t, torch.full((3,), 3))
        inside = (t > INTERVAL[0]) & (t < INTERVAL[1])
        real = torch.where(inside.view(-1, 1, 1, 1), null + GUIDANCE * (real - null), real)
        gradient = critic(noised, t, batch.labels) - real
        gradient = gradient / (x - real).abs().mean((1, 2, 3), keepdim=True)
        torch.testing.assert_close(encoded.targets[:, k], x - gradient, rtol=1e-3, atol=1e-3)
        noise, t = normal(Purpose.CRITIC_NOISE, k), time(Purpose.CRITIC_TIME, k)
        at = t.view(-1, 1, 1, 1)
        own = critic(at * x + (1 - at) * noise, t, batch.labels)
        weight = 1 / (1 - t).clamp_min(0.05).square()
        expected += (0.5 * gradient.square().mean((1, 2, 3)) + weight * (own - x).square().mean((1, 2, 3))) / steps
        z = z + (x - z) / (1 - k / steps) / steps
    torch.testing.assert_close(student.loss(network, encoded, keys), expected, rtol=1e-3, atol=1e-4)
    one = SampleKeys(3, torch.tensor([5]))
    torch.testing.assert_close(
        student.loss(network, student.encode(batch_of(5), one), one), expected[1:2], rtol=1e-3, atol=1e-4
    )


def test_gradients_move_each_image_to_its_target_and_leave_the_teacher_alone(student: JiTStudent) -> None:
    network, batch = trained_network(student), batch_of(0, 1)
    keys = SampleKeys(0, batch.sample_indices)
    encoded = student.encode(batch, keys)
    made: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        if output.requires_grad and not made:  # the student comes before its critic
            output.retain_grad()
            made.append(output)

    network.register_forward_hook(keep)
    student.loss(network, encoded, keys).sum().backward()
    moved = (encoded.images - encoded.targets).flatten(0, 1) / (2 * 3 * SIDE * SIDE)  # mean over steps and values
    assert made[0].grad is not None
    torch.testing.assert_close(made[0].grad, moved, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.requires_grad)
    assert student.networks is not None
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in student.networks.teacher.parameters()
    )


def test_student_and_critic_start_as_the_teacher(student: JiTStudent) -> None:
    network = student.network()
    for name, weight in network_of(family(*LABELS)).state_dict().items():
        assert torch.equal(network.state_dict()[name], weight)
        assert torch.equal(network.state_dict()[f"{CRITIC}.{name}"], weight)
    assert set(student.meta_model().state_dict()) == set(network.state_dict())


def test_flops_count_all_passes(teacher: Path) -> None:
    """A step of the student: one pass of it, two of the guided teacher, one of the critic; three of both in the loss."""
    forward = forward_flops("T", 8, SIDE)
    student = student_of(teacher)
    assert student.flops_per_image() == 2 * (1 + 2 + 1 + 6) * forward
    assert student_of(teacher, 4, guidance=1.0).flops_per_image() == 4 * (1 + 1 + 1 + 6) * forward
    network, rows = student.network(), []
    assert student.networks is not None
    for one in (student.networks.teacher, network, network.get_submodule(CRITIC)):
        one.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    keys = SampleKeys(0, torch.tensor([1, 4, 6]))
    encoded = student.encode(batch_of(1, 4, 6), keys)
    assert sum(rows) == 3 * 2 * (1 + 2 + 1)
    student.loss(network, encoded, keys)
    assert sum(rows) == 3 * 2 * (1 + 2 + 1 + 2)
    assert "20 passes per image" in student.notes()[1]


@pytest.fixture(scope="module")
def trained(student: JiTStudent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a student."""
    weights = network_of(family(*LABELS)).state_dict()
    return checkpoint(tmp_path_factory.mktemp("runs") / "student", student.describe(), weights)


def test_images_are_those_of_a_sampler_by_hand(trained: Path, tmp_path: Path) -> None:
    from tests.generate.test_jit_pipeline import CAT, DOG

    network = network_of(family(*LABELS))
    z = rng.normal(0, Purpose.SAMPLE_NOISE, torch.tensor([DOG.seed, CAT.seed]), (3, SIDE, SIDE))
    with torch.no_grad():
        for t in (0.0, 0.5):
            z = z + 0.5 * (network(z, torch.full((2,), t), torch.tensor([1, 0])) - z) / (1 - t)
    expected = to_uint8_array(z.clamp(-1, 1))
    plain = {"num_inference_steps": "auto"}
    assert np.array_equal(generate(load(trained, **plain), DOG, CAT), expected)
    assert np.array_equal(generate(load(trained, num_inference_steps=2, guidance_scale=GUIDANCE), DOG, CAT), expected)
    written = export(ExportSettings(source=str(trained), destination=str(tmp_path / "export")))
    assert written.endswith("3 classes, distilled to 2 steps with guidance 1.7 folded in")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["distilled"]["steps"] == 2
    assert np.array_equal(generate(load(tmp_path / "export", **plain), DOG, CAT), expected)
    model = inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(trained)))
    assert (model.resolved["num_inference_steps"], model.resolved["guidance_scale"]) == (2, GUIDANCE)
    script = inspect_model(BatchScriptSettings(prompts_csv="", output_dir="", model_path=str(trained)))
    assert (script.resolved["num_inference_steps"], script.resolved["guidance_scale"]) == (2, GUIDANCE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_inference_steps": 4},
            r"distilled to 2 steps with guidance 1\.7 folded in: its number of steps cannot be 4",
        ),
        ({"guidance_scale": 3.0}, r"its guidance cannot be 3\.0"),
        ({"guidance_interval": (0.0, 1.0)}, r"its guidance interval cannot be 0 to 1"),
        ({"official_last_step": True}, r"--official_last_step has no effect: this model was distilled"),
        ({"scheduler": "abm2"}, r"The scheduler abm2 does not fit: this model was distilled"),
        ({"cfg_truncation_step": 1}, r"--cfg_truncation_step"),
    ],
)
def test_other_samplers_are_refused(trained: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(trained), **settings))


def test_diffusers_loads_an_exported_student(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline
    from diffusers.utils import dynamic_modules_utils

    from tests.generate.test_jit_pipeline import DOG

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    export(ExportSettings(source=str(trained), destination=str(tmp_path / "export")))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "export", trust_remote_code=True)
    seed = torch.Generator().manual_seed(DOG.seed)
    expected = generate(load(trained, num_inference_steps="auto"), DOG)[0]
    assert np.array_equal(pipeline("dog", generator=seed).images[0], expected)
    assert np.array_equal(pipeline("dog", 2, GUIDANCE, generator=seed).images[0], expected)
    with pytest.raises(UserError, match="its number of steps cannot be 50"):
        pipeline("dog", num_inference_steps=50)
    with pytest.raises(UserError, match="its guidance cannot be 1"):
        pipeline("dog", guidance_scale=1.0)


def test_an_export_can_teach(teacher: Path, tmp_path: Path) -> None:
    export(ExportSettings(source=str(teacher), destination=str(tmp_path / "export")))
    spec = read_teacher_spec(tmp_path / "export", "ema1")
    assert (spec.name, spec.label_names) == ("JiT-T/8", LABELS)
    assert student_of(tmp_path / "export").describe() != student_of(teacher).describe()  # another file of the weights


def test_models_that_cannot_teach_are_refused(teacher: Path, trained: Path) -> None:
    with pytest.raises(UserError, match="was distilled to 2 steps with guidance 1.7 folded in already"):
        read_teacher_spec(trained / "checkpoints" / "step_0000001", "ema1")
    with pytest.raises(UserError, match="classes of the data are not those of the teacher.*It has 3 .cat, dog, bird."):
        JiTStudent.from_settings(
            TrainSettings(
                distill=DistillationSettings(teacher=str(teacher)),
                model=ModelSettings(name="JiT-T/8", img_size=SIDE, enable_condition=True),
            ),
            ["cat", "dog"],
        )
    with pytest.raises(UserError, match=r"is a JiT-T/8 at 16 px, not a JiT-T/4 at 16"):
        student_of(teacher, name="JiT-T/4")


def test_a_sweep_of_a_student_compares_weights_alone() -> None:
    found, notes = list_combinations(sweep_settings(), guided=True, single_set=False, distilled=True)
    assert [combination.generate_settings for combination in found] == [{"weights": "ema1"}, {"weights": "ema2"}]
    assert notes == ["The guidance of a distilled model is fixed: only its weights are compared."]


@pytest.mark.parametrize("prediction", ["x", "v", "eps"])
def test_a_critic_that_agrees_with_the_teacher_moves_nothing(tmp_path: Path, prediction: str) -> None:
    """Without guidance, teacher and critic are the same network at first."""
    objective = ObjectiveSettings(prediction=prediction)
    settings = TrainSettings(model=ModelSettings(name="JiT-T/8", img_size=SIDE), objective=objective)
    spec = JiTSpec.from_settings(settings, [])
    run = checkpoint(tmp_path / "run", spec.describe(), network_of(spec).state_dict())
    distill = DistillationSettings(teacher=str(run), steps=2)
    student, batch = JiTStudent.from_settings(settings.model_copy(update={"distill": distill}), []), batch_of(4, 9)
    keys, network = SampleKeys(0, batch.sample_indices), student.network()
    assert student.distilled is not None and student.distilled.guidance == 1.0
    encoded = student.encode(batch, keys)
    assert torch.equal(encoded.targets, encoded.images)
    assert torch.isfinite(student.loss(network, encoded, keys)).all()
    sampled = student.sample_from(network, encoded.states[:, 0], ["", ""], SampleSettings())
    torch.testing.assert_close(sampled, encoded.images[:, -1].clamp(-1, 1), rtol=1e-4, atol=1e-4)


def assert_same(first: Comparison, second: Comparison) -> None:
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_loss_is_compiled_as_one_graph(student: JiTStudent) -> None:
    """A part that cannot be traced would run the whole step kernel by kernel."""
    keys, network = SampleKeys(0, torch.tensor([4, 9])), trained_network(student)
    encoded = student.encode(batch_of(4, 9), keys)
    compiled = torch.compile(student.loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(network, encoded, keys), student.loss(network, encoded, keys))


@pytest.mark.gpu
@NEEDS_GPU
def test_compiled_passes_see_new_weights_on_a_gpu(teacher: Path) -> None:
    """A cast of the weights that is kept would be that of the weights before."""
    device, keys = torch.device("cuda:0"), SampleKeys(0, torch.tensor([4, 9, 1]))
    keys = SampleKeys(0, keys.sample_indices.to(device))
    found = []
    for compiled in (False, True):
        student = student_of(teacher)
        network = student.network().to(device)
        student.to_device(device, torch.bfloat16)
        assert student.networks is not None and student.networks.compiled
        student.networks.compiled = compiled
        found.append([student.encode(batch_of(4, 9, 1).to(device), keys) for _ in range(2)])
        with torch.no_grad():
            for part in (network, network.get_submodule(CRITIC)):
                part.get_submodule("final_layer.linear").weight.mul_(0.5)
        found[-1].append(student.encode(batch_of(4, 9, 1).to(device), keys))
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast.images, plain.images, rtol=0, atol=0.05)
    assert torch.equal(found[1][0].images, found[1][1].images)
    assert (found[1][1].images - found[1][2].images).abs().mean() > 0.05


def run_command(*words: object) -> str:
    """Run a command in a process of its own; a crash shows where it was."""
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "muralist", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_steps_of_the_command(tmp_path: Path, compiled: bool) -> None:
    """With CUDA graphs, the second compiled step ended with a segmentation fault."""
    np.savez(tmp_path / "data.npz", train_x=np.zeros((64, SIDE, SIDE, 3), np.uint8), train_y=np.arange(64) % 3)
    common = ["--batch_size", 16, "--samples_per_gpu", 0, "--num_workers", 0, "--results_dir", tmp_path,
              "--compile", str(compiled).lower(), "--use_amp", str(compiled).lower()]  # fmt: skip
    run_command("train", "--data_path", tmp_path / "data.npz", "--model", "JiT-T/8", "--img_size", SIDE,
                "--enable_condition", "--max_steps", 2, "--run_name", "teacher", *common)  # fmt: skip
    said = run_command("distill", tmp_path / "teacher", "--epochs", 20, "--max_steps", 12, *common)
    assert "Finished at step 12." in said
