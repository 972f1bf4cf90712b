"""Few-step distillation of JiT by distribution matching: the student's images become as likely as its guided teacher's.

The student samples in `steps` Euler steps: at the beginning of each, from state z at time t, its network predicts the
clean image x and moves to z + (x - z) / (steps left). Each of these images is noised again, at a random time, and shown to
two networks: the teacher, with guidance, and the critic, a copy of the teacher that is trained meanwhile on the student's
own images. Their predictions differ where the student makes too much or too little of something: this difference,
relative to the teacher's distance from the image, is the gradient of the image (DMD, arXiv 2311.18828 and 2405.14867).
The student is a JiT like any other, sampled by Euler's method at the same times, without guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes
from muralist.core.hardware import can_compile
from muralist.core.image_size import height_width
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch
from muralist.data.packed import LatentSource
from muralist.diffusion import flow
from muralist.models import configs, jit
from muralist.models.hub import find_model
from muralist.models.integrity import fingerprint
from muralist.models.jit_spec import CONFIG_FILE, Distilled, JiTSpec, infer_jit_config, read_config, read_jit_spec
from muralist.models.spec import find_family_by_key
from muralist.models.weights import (
    TRAINING_ONLY,
    WeightSet,
    latest_checkpoint,
    read_description,
    read_weights,
    weights_file,
)
from muralist.settings import DistillationSettings, TrainSettings

CRITIC = TRAINING_ONLY.removesuffix(".")  # a submodule of the student's network
_CRITIC_RATE = 8.0  # its learning rate over the student's: a slower critic lets the student run away from the teacher
_TIMES = 0.02, 0.98  # at which images are compared: at 1 there is no noise, and at 0 nothing else


class Comparison(NamedTuple):
    """What student and critic learn from, for each sample and step of the student."""

    states: Tensor  # [B, steps, 3, H, W], where the steps begin
    targets: Tensor  # the student's images, moved to where the teacher finds them likelier than the critic does
    images: Tensor  # the student's images
    noise: Tensor  # for the critic
    times: Tensor  # [B, steps], for the critic
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
            "It predicts images at the times of its own steps alone, and a teacher is asked at every time.",
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


class EvaluatedNetworks:
    """Teacher, student and critic as functions that need no gradients, compiled where that is possible."""

    def __init__(self, teacher: nn.Module, compiled: bool) -> None:
        self.teacher, self.compiled = teacher, compiled
        self.trained: nn.Module | None = None  # the student, with its critic
        self.autocast: torch.dtype | None = None
        self._forwards: dict[str, Callable[..., Tensor]] = {}

    def use(self, trained: nn.Module) -> None:
        """Set the student, with its critic."""
        self.trained, self._forwards = trained, {}

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teacher; its weights keep their precision, because the student starts from them."""
        self.teacher.to(device)
        self.autocast = None if dtype == torch.float32 else dtype
        self.compiled = self.compiled and device.type == "cuda" and can_compile()

    def __call__(self, name: str, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """One pass of the teacher, the student or the critic."""
        if name not in self._forwards:
            assert self.trained is not None, "network() is called before the first step"
            network = {"teacher": self.teacher, "student": self.trained, CRITIC: getattr(self.trained, CRITIC)}[name]
            whole = self.compiled and not is_sharded(network)
            self._forwards[name] = torch.compile(network, dynamic=False) if whole else network
        return self._forwards[name](z, t, labels).float()

    @contextmanager
    def evaluating(self, device: torch.device) -> Iterator[None]:
        """Surround the passes of one step, in which the student has no dropout."""
        assert self.trained is not None, "network() is called before the first step"
        was_training = self.trained.training
        self.trained.eval()  # also so that training and validation share compiled code
        try:
            with torch.no_grad(), torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            self.trained.train(was_training)


def is_sharded(network: nn.Module) -> bool:
    """Return whether this process holds a part of the weights alone, and gathers the others in a pass."""
    return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in network.parameters())


@dataclass(frozen=True)
class JiTStudent(JiTSpec):
    """A JiT that learns to sample in a few steps, beside its critic; once trained, it is a JiTSpec with `distilled`."""

    networks: EvaluatedNetworks | None = None
    origin: str = ""
    """Where the teacher was read, for the run summary."""
    held_out_seed = -1
    """Not that of any run, which is at least 0: the student is trained on noise, so other noise must be held out."""
    captures_step = False
    """On an H200 a captured step crashed, beside CUDA graphs of `encode` that are gone."""

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
        teacher = taught.meta_model()
        teacher.load_state_dict(read_weights(path, distill.weights), assign=True)
        networks = EvaluatedNetworks(teacher.eval().requires_grad_(False), compiled=settings.compile is not False)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        weights = weights_file(path, distill.weights)
        return cls(**values | {"distilled": distilled, "networks": networks, "origin": str(weights)})

    @property
    def _networks(self) -> EvaluatedNetworks:
        assert self.networks is not None, "from_settings reads the teacher"
        return self.networks

    @property
    def _distilled(self) -> Distilled:
        assert self.distilled is not None, "from_settings sets it"  # torch.compile cannot trace its truth value
        return self.distilled

    def network(self) -> nn.Module:
        """Build student and critic with the teacher's weights."""
        network, teacher = self._build(), self._networks.teacher.state_dict()
        network.load_state_dict({**teacher, **{f"{CRITIC}.{name}": value for name, value in teacher.items()}})
        self._networks.use(network)
        return network

    def _build(self) -> jit.JiT:
        network = super()._build()
        network.add_module(CRITIC, super()._build())
        return network

    def lr_scale(self, name: str) -> float:
        """The critic learns faster, because it must know the student's images as they are now."""
        return _CRITIC_RATE if name.startswith(TRAINING_ONLY) else 1.0

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the teacher."""
        self._networks.to_device(device, dtype)

    def encode(self, batch: Batch, keys: SampleKeys) -> Any:
        """Sample the student from the noise of each sample, for the label of its image, and compare teacher and critic."""
        labels = batch.labels if self.label_names else torch.zeros_like(batch.labels)
        with self._networks.evaluating(labels.device):
            return self._compare(self._networks, labels, keys)

    def _compare(self, networks: EvaluatedNetworks, labels: Tensor, keys: SampleKeys) -> Comparison:
        steps, count = self._distilled.steps, len(labels)
        shape = (configs.IMAGE_CHANNELS, *height_width(self.img_size))
        z, states, made = flow.sample_noise(keys, shape, self.objective.noise_scale), [], []
        for k in range(steps):
            t = torch.full((count,), k / steps, device=z.device)
            states.append(z)
            made.append(self._clean(networks("student", z, t, labels), z, t))
            z = z + (made[-1] - z) / (steps - k)
        images, of_steps = torch.stack(made, 1).flatten(0, 1), labels.repeat_interleave(steps)

        def draw(purpose: Purpose) -> tuple[Tensor, Tensor]:
            """Draw noise and times, [B * steps, ...]: those of a sample do not depend on the batch."""
            noise = keys.normal(purpose, (steps, *shape)) * self.objective.noise_scale
            low, high = _TIMES
            return noise.flatten(0, 1), (low + (high - low) * keys.uniform(purpose + 1, (steps,))).flatten()

        noise, t = draw(Purpose.COMPARED_NOISE)
        z = flow.interpolate(images, noise, t)
        real, own = self._guided(networks, z, t, of_steps), self._clean(networks(CRITIC, z, t, of_steps), z, t)
        distance = (images - real).abs().flatten(1).mean(1).clamp_min(1e-3)
        targets = images - (own - real) / distance.view(-1, 1, 1, 1)
        noise, t = draw(Purpose.CRITIC_NOISE)
        targets, images, noise, t = (one.unflatten(0, (count, steps)) for one in (targets, images, noise, t))
        return Comparison(torch.stack(states, 1), targets, images, noise, t, labels)

    def _guided(self, networks: EvaluatedNetworks, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The teacher's prediction of the clean image, with guidance."""
        x, distilled = self._clean(networks("teacher", z, t, labels), z, t), self._distilled
        if distilled.guidance == 1:
            return x
        unconditional = self._clean(networks("teacher", z, t, torch.full_like(labels, self.null_label)), z, t)
        low, high = distilled.interval
        scale = torch.where((t < high) & ((t > low) | (low == 0)), distilled.guidance, 1.0).view(-1, 1, 1, 1)
        return unconditional + scale * (x - unconditional)

    def _clean(self, output: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Convert an output of a network to the clean image that it predicts."""
        prediction = self.objective.prediction
        t_eps = self.objective.t_eps if prediction == "eps" else 0.0  # as in the sampler
        return z + (1 - t).view(-1, 1, 1, 1) * flow.to_v(prediction, output.float(), z, t, t_eps)

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """Half the squared distance of the student's images to their targets, plus the critic's own loss on them."""
        steps, count, objective = self._distilled.steps, len(encoded.labels), self.objective
        z, targets, images, noise, t = (value.flatten(0, 1) for value in encoded[:-1])
        labels = encoded.labels.repeat_interleave(steps)
        begins = torch.arange(steps, dtype=torch.float32, device=z.device).repeat(count) / steps
        of_steps = SampleKeys(keys.seed, keys.sample_indices.repeat_interleave(steps))
        image = self._clean(network(z, begins, labels, of_steps), z, begins)
        moved = 0.5 * (image - targets).square().flatten(1).mean(1)
        output = getattr(network, CRITIC)(flow.interpolate(images, noise, t), t, labels, of_steps)
        own = flow.loss(objective.prediction, objective.loss, output, images, noise, t, objective.t_eps)
        return (moved + own).view(count, steps).mean(1)

    def flops_per_image(self) -> int:
        """Passes without gradients of student, teacher and critic; forward and backward passes of student and critic."""
        letter, patch = configs.parse_jit_name(self.name)
        return self._passes() * configs.forward_flops(letter, patch, self.img_size)

    def _passes(self) -> int:
        return self._distilled.steps * (1 + (2 if self._distilled.guidance != 1 else 1) + 1 + 3 + 3)

    def summary(self) -> str:
        """What is trained: the student, and beside it the critic."""
        return f"{super().summary()}, and its critic"

    def notes(self) -> list[str]:
        """Teacher, guidance and method."""
        low, high = self._distilled.interval
        scale = self._distilled.guidance
        guided = f"guidance {scale:g} in t {low:g} to {high:g}" if scale != 1 else "no guidance"
        weights = self._networks.teacher.parameters()
        taken = format_bytes(sum(weight.numel() * weight.element_size() for weight in weights))
        return [
            f"teacher    {self.origin}, {guided}, folded into the student; it takes {taken} on each GPU",
            f"method     distribution matching, with a critic of the student's size: {self._passes()} passes per image",
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
