"""Few-step distillation of JiT: a student whose every step goes as far as several of its guided teacher.

The teacher's sampler goes from noise to data in `steps` segments of equal length, each in `solver_steps` Heun steps. The
student learns to cross a segment in one Euler step: at its beginning, state z and time t, the network's prediction gives
a velocity v, and the loss is the distance of z + (t' - t) v to the teacher's state at the end t'. So the student is a JiT
like any other, sampled by Euler's method at the same times, without guidance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes
from muralist.core.hardware import can_compile
from muralist.core.image_size import height_width
from muralist.core.rng import SampleKeys
from muralist.data.loader import Batch
from muralist.data.packed import LatentSource
from muralist.diffusion import flow, samplers
from muralist.kernels.cuda_graphs import CudaGraphs, is_out_of_memory
from muralist.models import configs
from muralist.models.hub import find_model
from muralist.models.integrity import fingerprint
from muralist.models.jit_spec import CONFIG_FILE, Distilled, JiTSpec, infer_jit_config, read_config, read_jit_spec
from muralist.models.spec import find_family_by_key
from muralist.models.weights import WeightSet, latest_checkpoint, read_description, read_weights, weights_file
from muralist.settings import DistillationSettings, TrainSettings


class TeacherPath(NamedTuple):
    """What the student learns from: the teacher's states of each sample."""

    states: Tensor  # [B, steps + 1, 3, H, W] from noise to data
    labels: Tensor  # [B] int64


def find_teacher(distill: DistillationSettings) -> Path:
    """Return the folder or file of the teacher's weights: of a run, that of its newest checkpoint."""
    return latest_checkpoint(find_model(distill.teacher or "", "TEACHER"))


def fingerprint_of(teacher: Path, which: WeightSet) -> str:
    """Identify the teacher by its weights."""
    return fingerprint(weights_file(teacher, which))


def read_teacher_spec(teacher: Path, which: WeightSet) -> JiTSpec:
    """Read what the teacher is; refuse a model that cannot teach."""
    description = read_description(teacher)
    if (key := description.get("family", "jit")) != "jit":
        raise UserError(
            f"{teacher} is a {find_family_by_key(key).name}, and only a JiT can be distilled.",
            fix="Give a run, a checkpoint or an export of a JiT.",
        )
    spec = read_jit_spec(teacher, description, which)
    if spec.distilled:
        raise UserError(
            f"{teacher} was {spec.distilled} already.",
            "It has no velocity between its steps, which a student would follow.",
            f"Give its own teacher, whose weights have the fingerprint {spec.distilled.teacher}.",
        )
    if configs.is_jit_name(spec.name):
        return spec
    is_export = (teacher / CONFIG_FILE).is_file()
    config = read_config(teacher) if is_export else infer_jit_config(read_weights(teacher, which, shapes_only=True))
    for letter, sizes in configs.JIT_CONFIGS.items():
        if all(config[name] == value for name, value in vars(sizes).items()):
            values = {field.name: getattr(spec, field.name) for field in fields(spec)}
            return JiTSpec(**values | {"name": f"JiT-{letter}/{config['patch_size']}"})
    raise UserError(
        f"{teacher} is a JiT of other sizes than JiT-{', JiT-'.join(configs.JIT_CONFIGS)}.",
        "A student is trained under the name of one of these.",
        "Distill a model that was trained here.",
    )


class GuidedTeacher:
    """The frozen teacher on its device, with the sampler whose path the student follows."""

    def __init__(self, network: nn.Module, spec: JiTSpec, sampler: samplers.SamplerSettings, compiled: bool) -> None:
        self.network, self.spec, self.sampler, self.compiled = network, spec, sampler, compiled
        self.autocast: torch.dtype | None = None
        self.graphs = CudaGraphs(wanted=False)
        self.forward: Callable[..., Tensor] = network

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the network; its weights keep their precision, because the student starts from them."""
        self.network.to(device)
        self.autocast = None if dtype == torch.float32 else dtype
        if self.compiled and device.type == "cuda" and can_compile():
            self.network.compile(dynamic=False)
            # Dozens of passes a step: launched one kernel after the other, a small network leaves the GPU idle.
            self.use_graphs(CudaGraphs(wanted=True))

    def use_graphs(self, graphs: CudaGraphs) -> None:
        """Capture the network's passes."""
        self.graphs, self.forward = graphs, graphs.wrap(self.network.__call__)

    def path(self, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
        """Return its states at the ends of so many segments, [B, steps + 1, ...]; the first is the noise."""
        captured = self.graphs.wanted
        try:
            return self._path(noise, labels, steps)
        except RuntimeError as error:
            if not (captured and is_out_of_memory(error)):
                raise
        torch.cuda.empty_cache()
        return self._path(noise, labels, steps)  # without graphs, which need memory of their own

    @torch.no_grad()
    def _path(self, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
        states = [noise]
        autocast = torch.autocast(noise.device.type, self.autocast, enabled=self.autocast is not None)
        with self.graphs.enabled(True), autocast:
            end = samplers.sample(
                self.forward, noise, labels, self.spec.null_label, self.sampler, self.spec.objective.prediction,
                states=states,
            )  # fmt: skip
        return torch.stack([*states, end][:: self.sampler.steps // steps], dim=1)

    def passes(self) -> int:
        """Network passes of one path: two velocities a step but one in the last, each of two passes where guided."""
        times = samplers.time_grid(self.sampler.steps)
        evaluated = [*times[:-1], *times[1:-1]]
        return sum(1 + (samplers.guidance_at(t, self.sampler) != 1.0) for t in evaluated)


@dataclass(frozen=True)
class JiTStudent(JiTSpec):
    """A JiT that learns to sample in a few steps; once trained, it is an ordinary JiTSpec with `distilled`."""

    teacher: GuidedTeacher | None = None
    origin: str = ""
    """Where the teacher was read, for the run summary."""
    held_out_seed = -1
    """Not that of any run, which is at least 0: the student is trained on noise, so other noise must be held out."""

    @classmethod
    def from_settings(
        cls, settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None
    ) -> JiTStudent:
        """Read the teacher and build the student's spec; `label_names` are the classes of the data."""
        distill, path = settings.distill, find_teacher(settings.distill)
        taught, plain = read_teacher_spec(path, distill.weights), JiTSpec.from_settings(settings, label_names)
        _check_fit(path, taught, plain)
        guidance = configs.JIT_GUIDANCE if distill.guidance == "auto" else distill.guidance
        distilled = Distilled(
            steps=distill.steps,
            guidance=guidance if taught.label_names else 1.0,
            interval=distill.interval,
            teacher=fingerprint_of(path, distill.weights),
        )
        sampler = samplers.SamplerSettings(
            steps=distill.steps * distill.solver_steps,
            guidance=distilled.guidance,
            interval=distilled.interval,
            t_eps=plain.objective.t_eps,
        )
        network = taught.meta_model()
        network.load_state_dict(read_weights(path, distill.weights), assign=True)
        teacher = GuidedTeacher(
            network.eval().requires_grad_(False), taught, sampler, compiled=settings.compile is not False
        )
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        weights = weights_file(path, distill.weights)
        return cls(**values | {"distilled": distilled, "teacher": teacher, "origin": str(weights)})

    @property
    def _teacher(self) -> GuidedTeacher:
        assert self.teacher is not None, "from_settings reads it"
        return self.teacher

    @property
    def _steps(self) -> int:
        assert self.distilled is not None, "from_settings sets it"  # torch.compile cannot trace its truth value
        return self.distilled.steps

    def network(self) -> nn.Module:
        """Build the network with the teacher's weights."""
        network = self._build()
        network.load_state_dict(self._teacher.network.state_dict())
        return network

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teacher."""
        self._teacher.to_device(device, dtype)

    def release_graphs(self) -> None:
        """Capture the teacher's passes again when they are needed."""
        self._teacher.use_graphs(CudaGraphs(self._teacher.graphs.wanted))

    def encode(self, batch: Batch, keys: SampleKeys) -> Any:
        """Let the teacher sample from the noise of each sample, for the label of its image."""
        shape = (configs.IMAGE_CHANNELS, *height_width(self.img_size))
        noise = flow.sample_noise(keys, shape, self.objective.noise_scale)
        labels = batch.labels if self.label_names else torch.zeros_like(batch.labels)
        return TeacherPath(self._teacher.path(noise, labels, self._steps), labels)

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """Compute the mean squared distance of each sample's steps to the teacher's states, all steps as one batch."""
        states, labels = encoded
        z, target = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
        t = torch.arange(self._steps, dtype=torch.float32, device=z.device).repeat(len(labels)) / self._steps
        of_steps = SampleKeys(keys.seed, keys.sample_indices.repeat_interleave(self._steps))
        output = network(z, t, labels.repeat_interleave(self._steps), of_steps)
        prediction = self.objective.prediction
        t_eps = self.objective.t_eps if prediction == "eps" else 0.0  # as in the sampler
        end = z + flow.to_v(prediction, output.float(), z, t, t_eps) / self._steps
        return (end - target).square().flatten(1).mean(dim=1).view(-1, self._steps).mean(dim=1)

    def flops_per_image(self) -> int:
        """The teacher's passes forward, and the student's forward and backward."""
        letter, patch = configs.parse_jit_name(self.name)
        passes = self._teacher.passes() + 3 * self._steps
        return passes * configs.forward_flops(letter, patch, self.img_size)

    def notes(self) -> list[str]:
        """Teacher, guidance and method."""
        sampler, distilled = self._teacher.sampler, self.distilled
        assert distilled
        low, high = distilled.interval
        guided = (
            f"guidance {distilled.guidance:g} in t {low:g} to {high:g}" if distilled.guidance != 1 else "no guidance"
        )
        taken = format_bytes(
            sum(weight.numel() * weight.element_size() for weight in self._teacher.network.parameters())
        )
        return [
            f"teacher    {self.origin}, {guided}, folded into the student; it takes {taken} on each GPU",
            f"method     regression of {self._steps} Euler steps to its path of {sampler.steps} Heun steps: "
            f"{self._teacher.passes()} passes of the teacher per image",
        ]


def _check_fit(path: Path, taught: JiTSpec, student: JiTSpec) -> None:
    """Refuse a student of another shape, and data with other classes."""
    if (taught.name, taught.img_size) != (student.name, student.img_size):
        raise UserError(
            f"The teacher {path} is a {taught.name} at {taught.img_size} px, not a {student.name} at {student.img_size}.",
            "A student has the network of its teacher.",
            "Start it with `muralist distill`, which takes the model from the teacher.",
        )
    numbered = taught.label_names == [str(index) for index in range(len(taught.label_names))]  # as in official weights
    if taught.label_names == student.label_names or (numbered and taught.num_classes == student.num_classes):
        return
    raise UserError(
        f"The classes of the data are not those of the teacher {path}.",
        f"It has {len(taught.label_names)} ({', '.join(taught.label_names)[:80]}), the data "
        f"{len(student.label_names)} ({', '.join(student.label_names)[:80]}).",
        "Distill on data with the classes of the teacher: leave --data_path out to use its own.",
    )
