"""The student's objective, sampler and files, against computations by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muralist.core import rng
from muralist.core.errors import UserError
from muralist.core.images import to_uint8_array
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.generate.model_info import inspect_model
from muralist.kernels.cuda_graphs import CudaGraphs
from muralist.models.configs import forward_flops
from muralist.models.jit_distill import JiTStudent, read_teacher_spec
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
from tests.support.graph_capture import FakeCudaGraphs
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.tools.test_sweep import given as sweep_settings

LABELS = ["cat", "dog", "bird"]
GUIDANCE, INTERVAL = 1.7, (0.1, 0.8)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = family(*LABELS)
    return checkpoint(tmp_path_factory.mktemp("runs") / "pets", spec.describe(), network_of(spec).state_dict())


def student_of(teacher: Path, steps: int = 2, solver_steps: int = 3, **model: object) -> JiTStudent:
    distill = DistillationSettings(
        teacher=str(teacher), steps=steps, guidance=GUIDANCE, interval=INTERVAL, solver_steps=solver_steps
    )
    model = {"name": "JiT-T/8", "img_size": SIDE, "enable_condition": True, **model}
    settings = TrainSettings(distill=distill, model=ModelSettings(**model))
    return JiTStudent.from_settings(settings, LABELS)


@pytest.fixture(scope="module")
def student(teacher: Path) -> JiTStudent:
    return student_of(teacher)


def batch_of(*indices: int) -> Batch:
    images = torch.zeros(len(indices), SIDE, SIDE, 3, dtype=torch.uint8)
    return Batch(images, torch.tensor([index % 3 for index in indices]), [""] * len(indices), torch.tensor(indices))


def guided_velocity(network: torch.nn.Module, z: torch.Tensor, t: float, labels: torch.Tensor) -> torch.Tensor:
    times = torch.full((len(z),), t)
    x = network(z, times, labels)
    if INTERVAL[0] < t < INTERVAL[1]:
        x_null = network(z, times, torch.full_like(labels, 3))
        x = x_null + GUIDANCE * (x - x_null)
    return (x - z) / (1 - t)


@torch.no_grad()
def states_by_hand(spec: JiTSpec, z: torch.Tensor, labels: torch.Tensor, steps: int, solver_steps: int) -> torch.Tensor:
    """Heun on a uniform grid with an Euler step at the end; the states at the student's times."""
    network, count, kept = network_of(spec), steps * solver_steps, [z]
    for i in range(count):
        t, t_next = i / count, (i + 1) / count
        v = guided_velocity(network, z, t, labels)
        if i < count - 1:
            v = (v + guided_velocity(network, z + v / count, t_next, labels)) / 2
        z = z + v / count
        if (i + 1) % solver_steps == 0:
            kept.append(z)
    return torch.stack(kept, dim=1)


@pytest.mark.parametrize(("steps", "solver_steps"), [(1, 3), (2, 3), (4, 1)])
def test_loss_is_the_distance_to_the_teachers_states(teacher: Path, steps: int, solver_steps: int) -> None:
    student, batch = student_of(teacher, steps, solver_steps), batch_of(0, 5, 7)
    keys = SampleKeys(3, batch.sample_indices)
    encoded = student.encode(batch, keys)
    noise = rng.normal(3, Purpose.NOISE, batch.sample_indices, (3, SIDE, SIDE))
    states = states_by_hand(family(*LABELS), noise, batch.labels, steps, solver_steps)
    torch.testing.assert_close(encoded.states, states, rtol=1e-4, atol=1e-4)
    other = network_of(family(*LABELS))
    with torch.no_grad():
        next(iter(other.final_layer.linear.parameters())).mul_(1.5)  # a student that is not its teacher
        expected = torch.zeros(3)
        for k in range(steps):
            z, t = states[:, k], k / steps
            end = z + (other(z, torch.full((3,), t), batch.labels) - z) / (1 - t) / steps
            expected += (end - states[:, k + 1]).square().mean((1, 2, 3)) / steps
    torch.testing.assert_close(student.loss(other, encoded, keys), expected, rtol=1e-3, atol=1e-5)
    alone = student.encode(batch_of(5), SampleKeys(3, torch.tensor([5])))
    torch.testing.assert_close(
        student.loss(other, alone, SampleKeys(3, torch.tensor([5]))), expected[1:2], rtol=1e-3, atol=1e-5
    )


def test_the_student_starts_as_its_teacher_and_trains_its_own_weights_alone(student: JiTStudent) -> None:
    network, batch = student.network(), batch_of(0, 1)
    for name, weight in network_of(family(*LABELS)).state_dict().items():
        assert torch.equal(network.state_dict()[name], weight)
    keys = SampleKeys(0, batch.sample_indices)
    student.loss(network, student.encode(batch, keys), keys).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.requires_grad)
    assert student.teacher is not None
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in student.teacher.network.parameters()
    )


def test_flops_count_the_passes_of_the_teacher(teacher: Path) -> None:
    """Two velocities in each of 6 Heun steps but one in the last; guided at 1/6, 2/6, 3/6 and 4/6."""
    forward = forward_flops("T", 8, SIDE)
    assert student_of(teacher).flops_per_image() == (11 + 8 + 3 * 2) * forward
    calls: list[int] = []
    student = student_of(teacher)
    assert student.teacher is not None
    student.teacher.network.register_forward_hook(lambda *_: calls.append(1))
    student.encode(batch_of(1), SampleKeys(0, torch.tensor([1])))
    assert len(calls) == 11 + 8
    assert "19 passes of the teacher per image" in student.notes()[1]


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


@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_the_loss_is_zero_for_a_network_that_makes_the_teachers_steps(tmp_path: Path, prediction: str) -> None:
    """One Heun step a segment in the last segment is Euler's: the unguided teacher itself makes it."""
    objective = ObjectiveSettings(prediction=prediction)
    settings = TrainSettings(model=ModelSettings(name="JiT-T/8", img_size=SIDE), objective=objective)
    spec = JiTSpec.from_settings(settings, [])
    run = checkpoint(tmp_path / "run", spec.describe(), network_of(spec).state_dict())
    distill = DistillationSettings(teacher=str(run), steps=1, solver_steps=1)
    student, batch = JiTStudent.from_settings(settings.model_copy(update={"distill": distill}), []), batch_of(4, 9)
    keys = SampleKeys(0, batch.sample_indices)
    assert student.distilled is not None and student.distilled.guidance == 1.0
    loss = student.loss(student.network(), student.encode(batch, keys), keys)
    torch.testing.assert_close(loss, torch.zeros(2), rtol=0, atol=1e-8)
    images = student.sample(student.network(), ["unconditional"], [4], SampleSettings())
    assert images.shape == (1, 3, SIDE, SIDE)


def test_the_teachers_passes_are_replays_of_one_graph(teacher: Path) -> None:
    """One shape, one graph; the states are those of plain calls, also in a second path."""
    student = student_of(teacher)
    assert student.teacher is not None
    keys, graphs = SampleKeys(0, torch.tensor([4, 9, 1])), FakeCudaGraphs()
    plain = [student.encode(batch_of(*rows), keys).states for rows in ((4, 9, 1), (2, 3, 5))]
    student.teacher.use_graphs(graphs)
    for states, rows in zip(plain, ((4, 9, 1), (2, 3, 5)), strict=True):
        assert torch.equal(student.encode(batch_of(*rows), keys).states, states)
    assert (graphs.captures, graphs.replays) == (1, 2 * student.teacher.passes())


def test_the_teacher_goes_on_without_graphs_when_memory_runs_out(teacher: Path) -> None:
    class NoMemory(FakeCudaGraphs):
        def _capture(self, work: Callable[[], Any]) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    student = student_of(teacher)
    assert student.teacher is not None
    keys, graphs = SampleKeys(0, torch.tensor([4, 9, 1])), NoMemory()
    plain = student.encode(batch_of(4, 9, 1), keys).states
    student.teacher.use_graphs(graphs)
    assert torch.equal(student.encode(batch_of(4, 9, 1), keys).states, plain)
    assert not graphs.wanted
    student.release_graphs()
    assert not student.teacher.graphs.wanted, "nor are they captured later"


def test_the_students_loss_is_compiled_as_one_graph(student: JiTStudent) -> None:
    """A part that cannot be traced would run the whole step kernel by kernel."""
    keys = SampleKeys(0, torch.tensor([4, 9]))
    encoded, network = student.encode(batch_of(4, 9), keys), student.network()
    compiled = torch.compile(student.loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(network, encoded, keys), student.loss(network, encoded, keys))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_of_the_teacher_give_the_same_states_on_a_gpu(teacher: Path) -> None:
    device = torch.device("cuda:0")
    keys = SampleKeys(0, torch.tensor([4, 9, 1], device=device))
    states = []
    for wanted in (False, True):
        student = student_of(teacher)
        student.to_device(device, torch.bfloat16)
        assert student.teacher is not None
        if not wanted:
            student.teacher.use_graphs(CudaGraphs(wanted=False))
        states += [student.encode(batch_of(4, 9, 1).to(device), keys).states for _ in range(2)]
        assert student.teacher.graphs.hold_memory == wanted
    assert all(torch.equal(states[0], other) for other in states[1:])
