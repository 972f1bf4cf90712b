"""JiT's ModelSpec: flow matching on pixels, conditioned on class labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muralist.core import rng
from muralist.core.errors import UserError, closest_match
from muralist.core.hardware import copy_to_device
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch, to_unit_range
from muralist.data.packed import LatentSource
from muralist.diffusion import flow, samplers
from muralist.models import configs, jit
from muralist.settings import ObjectiveSettings, Precision, SampleSettings, TrainSettings

_LABEL_EMBEDDING = "y_embedder."
UNCONDITIONAL = "unconditional"
_MAX_DEFAULT_PROMPTS = 8


class JiTInputs(NamedTuple):
    """Stored images and their labels."""

    images_u8: Tensor  # [B, H, W, 3]
    labels: Tensor  # [B] int64


@dataclass(frozen=True)
class Objective:
    """The training objective with every default resolved."""

    prediction: flow.Prediction
    loss: flow.Prediction
    p_mean: float
    p_std: float
    noise_scale: float
    t_eps: float
    label_drop_prob: float

    @classmethod
    def from_settings(cls, settings: ObjectiveSettings, img_size: int) -> Objective:
        """Resolve the settings at an image size."""
        scale = settings.noise_scale
        return cls(**settings.model_dump() | {"noise_scale": max(1.0, img_size / 256) if scale == "auto" else scale})


@dataclass(frozen=True)
class JiTSpec:
    """A JiT: its name, image size, classes and objective."""

    name: str
    img_size: int
    label_names: list[str]  # empty: unconditional
    objective: Objective
    random_flip: bool = False
    attn_dropout: float = 0.0
    proj_dropout: float = 0.0
    gradient_checkpointing: bool = False
    precision: Precision = "auto"
    seed: int = 0

    @classmethod
    def from_settings(
        cls, settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None
    ) -> JiTSpec:
        """Build the spec of a training run; `label_names` are the classes of its data."""
        model = settings.model
        img_size = configs.square(model.img_size)
        objective = Objective.from_settings(settings.objective, img_size)
        if not model.enable_condition:
            objective = replace(objective, label_drop_prob=0.0)
        return cls(
            name=model.name,
            img_size=img_size,
            label_names=list(label_names) if model.enable_condition else [],
            objective=objective,
            random_flip=settings.data.random_flip,
            attn_dropout=model.attn_dropout,
            proj_dropout=model.proj_dropout,
            gradient_checkpointing=model.gradient_checkpointing,
            precision=settings.precision,
            seed=settings.seed,
        )

    @property
    def num_classes(self) -> int:
        """The number of classes; an unconditional model has one."""
        return max(1, len(self.label_names))

    @property
    def null_label(self) -> int:
        """The label of the unconditional pass of classifier-free guidance."""
        return self.num_classes

    def network(self) -> nn.Module:
        """Build the network with initial weights from the seed."""
        network = self._build()
        network.init_weights(self.seed)
        return network

    def meta_model(self) -> nn.Module:
        """Build the network on the meta device."""
        with torch.device("meta"):
            return self._build()

    def _build(self) -> jit.JiT:
        drops = self.attn_dropout, self.proj_dropout
        network = jit.build(self.name, self.img_size, self.num_classes, *drops, self.gradient_checkpointing)
        if self.precision == "fp8":
            network.use_fp8()
        return network

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Do nothing: JiT has no frozen components."""

    def encode(self, batch: Batch, keys: SampleKeys) -> JiTInputs:
        """Return the stored bytes: their conversion to pixels is part of the loss, and compiled with it."""
        labels = batch.labels if self.label_names else torch.zeros_like(batch.labels)
        return JiTInputs(batch.images_u8, labels)

    def pixels(self, encoded: JiTInputs, keys: SampleKeys) -> Tensor:
        """Convert stored bytes to [-1, 1], [B, 3, H, W], with random flips."""
        return to_unit_range(encoded.images_u8, keys if self.random_flip else None)

    def loss(self, network: nn.Module, encoded: JiTInputs, keys: SampleKeys) -> Tensor:
        """Compute the flow-matching loss of each sample."""
        objective, x = self.objective, self.pixels(encoded, keys)
        t = flow.sample_time(keys, objective.p_mean, objective.p_std)
        e = flow.sample_noise(keys, tuple(x.shape[1:]), objective.noise_scale)
        labels = flow.drop_labels(encoded.labels, keys, objective.label_drop_prob, self.null_label)
        output = network(flow.interpolate(x, e, t), t, labels, keys)
        return flow.loss(objective.prediction, objective.loss, output, x, e, t, objective.t_eps)

    def default_prompts(self) -> list[str]:
        """Return the first classes, or one unconditional prompt."""
        return self.label_names[:_MAX_DEFAULT_PROMPTS] or [UNCONDITIONAL]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that do not name a class."""
        for prompt in prompts:
            self.label_of(prompt)

    def label_of(self, prompt: str) -> int:
        """Return the label that a prompt names, by class name or number; an unconditional model accepts any prompt."""
        found = self.find_label(prompt)
        if found is None:
            raise UserError(
                f"The prompt {prompt!r} does not name a class of this model.",
                closest_match(prompt.strip(), self.label_names),
                f"Prompts are class names or labels from 0 to {len(self.label_names) - 1}.",
            )
        return found

    def find_label(self, prompt: str) -> int | None:
        """Return the label that a prompt names, or None."""
        if not self.label_names:
            return 0
        if prompt in self.label_names:  # before case folding: Cat and cat may be two classes
            return self.label_names.index(prompt)
        folded = [name.casefold() for name in self.label_names]
        wanted = prompt.strip().casefold()
        if wanted in folded:
            return folded.index(wanted)
        return int(wanted) if wanted.isdecimal() and int(wanted) < len(folded) else None

    @torch.no_grad()
    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Integrate the flow from each seed's noise."""
        return self.sample_from(network, self.sample_noise(seeds), prompts, settings)

    def sample_noise(self, seeds: Sequence[int]) -> Tensor:
        """Draw the initial noise on the CPU: a seed gives the same noise on every device."""
        shape = (configs.IMAGE_CHANNELS, self.img_size, self.img_size)
        return rng.normal_chunked(0, Purpose.SAMPLE_NOISE, torch.tensor(list(seeds), dtype=torch.int64), shape)

    @torch.no_grad()
    def sample_from(
        self,
        network: nn.Module,
        noise: Tensor,
        prompts: Sequence[str],
        settings: SampleSettings,
        compiled: bool = False,
    ) -> Tensor:
        """Integrate the flow from this noise; `compiled`: compile the sampler's arithmetic around the network."""
        device = next(network.parameters()).device
        guidance = configs.JIT_GUIDANCE if settings.guidance == "auto" else settings.guidance
        labels = copy_to_device(torch.tensor([self.label_of(prompt) for prompt in prompts]), device)
        solver = samplers.SamplerSettings(
            solver="heun" if settings.solver == "auto" else settings.solver,  # type: ignore[arg-type]
            steps=settings.steps,
            guidance=guidance if self.label_names else 1.0,
            interval=settings.interval,
            t_eps=self.objective.t_eps,
            official_last_step=settings.official_last_step,
        )
        start = copy_to_device(noise, device) * self.objective.noise_scale
        images = samplers.sample(network, start, labels, self.null_label, solver, self.objective.prediction, compiled)
        return images.clamp(-1, 1)

    def is_saved(self, name: str) -> bool:
        """Save everything, the fixed position embedding too."""
        return True

    @torch.no_grad()
    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Copy everything but the label embedding, whose rows are other classes."""
        own = network.state_dict()
        for name, value in own.items():
            if name.startswith(_LABEL_EMBEDDING):
                continue
            if name not in weights or weights[name].shape != value.shape:
                theirs = tuple(weights[name].shape) if name in weights else "nothing"
                raise UserError(
                    f"The weights of {origin} do not fit {self.name} at {self.img_size} px.",
                    f"{name} has shape {tuple(value.shape)} here and {theirs} there.",
                    "Start from a run of the same model and size, or give --init_from none.",
                )
            value.copy_(weights[name])

    def flops_per_image(self) -> int:
        """Forward FLOPs, and twice as many backward."""
        letter, patch = configs.parse_jit_name(self.name)
        return 3 * configs.forward_flops(letter, patch, self.img_size)

    def tokens_per_image(self) -> int:
        """Patches per image."""
        return configs.tokens_per_image(configs.parse_jit_name(self.name)[1], self.img_size)

    def summary(self) -> str:
        """Name, image size and objective."""
        objective = self.objective
        matmuls = ", FP8 matmuls" if self.precision == "fp8" else ""
        return (
            f"{self.name} at {self.img_size} px, {objective.prediction}-prediction with {objective.loss}-loss{matmuls}"
        )

    def describe(self) -> dict[str, Any]:
        """Name, image size, classes and objective."""
        return {
            "family": "jit",
            "model": self.name,
            "img_size": self.img_size,
            "label_names": self.label_names,
            "objective": asdict(self.objective),
        }

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        """Write config.json and one weights file."""
        from muralist.models.export import infer_jit_config, write_jit_folder

        config = infer_jit_config(weights)
        config |= {key: description[key] for key in ("label_names", "objective") if key in description}
        write_jit_folder(folder, weights, config)
        return f"{config['input_size']} px, patch {config['patch_size']}, {config['num_classes']} classes"
