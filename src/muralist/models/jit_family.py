"""JiT as a family: pixels in, pixels out, classes as conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muralist import keyed_random
from muralist.copies import to_device
from muralist.data.loader import Batch
from muralist.diffusion import flow, solvers
from muralist.errors import UserError, nearest
from muralist.keyed_random import Purpose, SampleKeys
from muralist.models import jit, variants
from muralist.models.family import to_unit
from muralist.settings import ObjectiveSettings, Precision, SampleSettings, TrainSettings

LABEL_TABLE = "y_embedder."
UNCONDITIONAL = "unconditional"
_MOST_DEFAULT_PROMPTS = 8
_GUIDANCE = 2.9


class JiTEncoded(NamedTuple):
    """Pictures as they are stored, and their classes."""

    images_u8: Tensor  # [B, H, W, 3]
    labels: Tensor  # [B] int64


@dataclass(frozen=True)
class Objective:
    """The objective with every default resolved."""

    prediction: flow.Kind
    loss: flow.Kind
    p_mean: float
    p_std: float
    noise_scale: float
    t_eps: float
    label_drop_prob: float

    @classmethod
    def from_settings(cls, settings: ObjectiveSettings, img_size: int) -> Objective:
        """What settings ask for at a picture size."""
        scale = settings.noise_scale
        return cls(**settings.model_dump() | {"noise_scale": max(1.0, img_size / 256) if scale == "auto" else scale})


@dataclass(frozen=True)
class JiTFamily:
    """One JiT model: its name, size, classes and objective."""

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
    def from_settings(cls, settings: TrainSettings, label_names: list[str]) -> JiTFamily:
        """The family a training run asks for; `label_names` are the classes of its data."""
        model = settings.model
        img_size = variants.square(model.img_size)
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
        """An unconditional model has one class."""
        return max(1, len(self.label_names))

    @property
    def null_label(self) -> int:
        """The row of the label table that stands for no label."""
        return self.num_classes

    def network(self) -> nn.Module:
        """The network with keyed initial weights."""
        network = self._build()
        network.initialise(self.seed)
        return network

    def skeleton(self) -> nn.Module:
        """The network's shapes, without memory for its weights."""
        with torch.device("meta"):
            return self._build()

    def _build(self) -> jit.JiT:
        drops = self.attn_dropout, self.proj_dropout
        network = jit.build(self.name, self.img_size, self.num_classes, *drops, self.gradient_checkpointing)
        if self.precision == "fp8":
            network.train_in_8_bits()
        return network

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Nothing is frozen here."""

    def encode(self, batch: Batch, keys: SampleKeys) -> JiTEncoded:
        """The stored bytes: what becomes of them is part of the loss, so that it is compiled with it."""
        labels = batch.labels if self.label_names else torch.zeros_like(batch.labels)
        return JiTEncoded(batch.images_u8, labels)

    def pixels(self, encoded: JiTEncoded, keys: SampleKeys) -> Tensor:
        """Stored bytes to [-1, 1], [B, 3, H, W], mirrored or not as the sample's key says."""
        return to_unit(encoded.images_u8, keys if self.random_flip else None)

    def loss(self, network: nn.Module, encoded: JiTEncoded, keys: SampleKeys) -> Tensor:
        """The flow objective of each sample."""
        goal, x = self.objective, self.pixels(encoded, keys)
        t = flow.draw_time(keys, goal.p_mean, goal.p_std)
        e = flow.draw_noise(keys, tuple(x.shape[1:]), goal.noise_scale)
        labels = flow.drop_labels(encoded.labels, keys, goal.label_drop_prob, self.null_label)
        output = network(flow.interpolate(x, e, t), t, labels, keys)
        return flow.loss(goal.prediction, goal.loss, output, x, e, t, goal.t_eps)

    def default_prompts(self) -> list[str]:
        """The first classes, or one unconditional picture."""
        return self.label_names[:_MOST_DEFAULT_PROMPTS] or [UNCONDITIONAL]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Every prompt must name a class."""
        for prompt in prompts:
            self.label_of(prompt)

    def label_of(self, prompt: str) -> int:
        """The class a prompt names, by name or number; an unconditional model draws the same for every prompt."""
        found = self.find_label(prompt)
        if found is None:
            raise UserError(
                f"The prompt {prompt!r} names no class of this model.",
                nearest(prompt.strip(), self.label_names),
                f"Prompts are class names or numbers from 0 to {len(self.label_names) - 1}.",
            )
        return found

    def find_label(self, prompt: str) -> int | None:
        """That class, or None where there is no such class."""
        if not self.label_names:
            return 0
        if prompt in self.label_names:  # before folding: Cat and cat may be two classes
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
        """Solve the flow from each seed's noise."""
        return self.sample_from(network, self.sample_noise(seeds), prompts, settings)

    def sample_noise(self, seeds: Sequence[int]) -> Tensor:
        """Where pictures begin; drawn on the CPU: the same seed is the same noise whatever the card."""
        numbers = torch.tensor(list(seeds), dtype=torch.int64)
        shape = (3, self.img_size, self.img_size)
        return keyed_random.normal_in_parts(0, Purpose.SAMPLE_NOISE, numbers, shape)

    @torch.no_grad()
    def sample_from(
        self,
        network: nn.Module,
        noise: Tensor,
        prompts: Sequence[str],
        settings: SampleSettings,
        compiled: bool = False,
    ) -> Tensor:
        """Solve the flow from this noise; `compiled`: the arithmetic between the network's passes too."""
        device = next(network.parameters()).device
        labels = to_device(torch.tensor([self.label_of(prompt) for prompt in prompts]), device)
        solver = solvers.SolverSettings(
            solver="heun" if settings.solver == "auto" else settings.solver,  # type: ignore[arg-type]
            steps=settings.steps,
            guidance=(_GUIDANCE if settings.guidance == "auto" else settings.guidance) if self.label_names else 1.0,
            interval=settings.interval,
            t_eps=self.objective.t_eps,
            official_last_step=settings.official_last_step,
        )
        start = to_device(noise, device) * self.objective.noise_scale
        images = solvers.sample(network, start, labels, self.null_label, solver, self.objective.prediction, compiled)
        return images.clamp(-1, 1)

    def stores(self, name: str) -> bool:
        """Everything, the fixed position table too: a checkpoint is a whole network."""
        return True

    @torch.no_grad()
    def adopt(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Copy everything but the label table, whose rows mean other classes."""
        own = network.state_dict()
        for name, value in own.items():
            if name.startswith(LABEL_TABLE):
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
        """Forward, and twice as much backward."""
        variant, patch = variants.parse_name(self.name)
        return 3 * variants.forward_flops(variant, patch, self.img_size)

    def tokens_per_image(self) -> int:
        """Patches per picture."""
        return variants.tokens_per_image(variants.parse_name(self.name)[1], self.img_size)

    def summary(self) -> str:
        """Name, size and objective."""
        goal = self.objective
        products = ", large products in 8 bits" if self.precision == "fp8" else ""
        return f"{self.name} at {self.img_size} px, {goal.prediction}-prediction with {goal.loss}-loss{products}"

    def describe(self) -> dict[str, Any]:
        """Name, size, classes and objective."""
        return {
            "family": "jit",
            "model": self.name,
            "img_size": self.img_size,
            "label_names": self.label_names,
            "objective": asdict(self.objective),
        }
