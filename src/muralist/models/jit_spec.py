"""JiT's ModelSpec: flow matching on pixels, conditioned on class labels; and the folder that `muralist export` writes."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveFloat, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from muralist import __version__
from muralist.core import rng
from muralist.core.errors import UserError, closest_match
from muralist.core.formatting import format_list
from muralist.core.hardware import copy_to_device
from muralist.core.image_size import Size, as_size, format_size, height_width
from muralist.core.rng import Purpose, SampleKeys
from muralist.core.run_dir import atomic_folder, atomic_write, atomic_write_json
from muralist.data.loader import Batch, to_unit_range
from muralist.data.packed import LatentSource
from muralist.diffusion import flow, samplers
from muralist.models import configs, jit
from muralist.models.spec import ModelSpec
from muralist.models.weights import (
    MAX_PIXELS,
    WEIGHTS_FILE,
    WeightSet,
    damaged_file,
    description_metadata,
    read_description,
    read_weights,
)
from muralist.settings import ObjectiveSettings, Precision, SampleSettings, TrainSettings
from muralist.settings.section import Fraction, Section
from muralist.settings.train import PIPELINE_OBJECTIVE, StudentSteps

_LABEL_EMBEDDING = "y_embedder."
UNCONDITIONAL = "unconditional"
_MAX_DEFAULT_PROMPTS = 8

JIT_CLASS_NAME = "JiTTransformer2DModel"
CONFIG_FILE = "config.json"
# With these two files diffusers loads an export as a pipeline, if the caller trusts the code; muralist reads neither.
_PIPELINE_MODULE = "muralist.generate.jit_diffusers"
_PIPELINE_INDEX = {"_class_name": ["pipeline", "JiTPipeline"], "transformer": [_PIPELINE_MODULE, JIT_CLASS_NAME]}
_PIPELINE_CODE = f"""# DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True) imports this file.
from {_PIPELINE_MODULE} import JiTPipeline  # noqa: F401
"""
_MAX_TOKENS_PER_SIDE = 1024
_MAX_SIZES = {"depth": 1000, "num_classes": 10**6}  # MAX_PIXELS for the others
# The arguments that define a network; gradient_checkpointing is about training.
_JIT_ARGUMENTS = tuple(name for name in inspect.signature(jit.JiT).parameters if name != "gradient_checkpointing")
_FLOAT_ARGUMENTS = ("mlp_ratio", "attn_drop", "proj_drop")


class JiTInputs(NamedTuple):
    """Stored images and their labels."""

    images_u8: Tensor  # [B, H, W, 3]
    labels: Tensor  # [B] int64


class Objective(ObjectiveSettings):
    """The training objective with every default resolved."""

    noise_scale: PositiveFloat = 1.0

    @classmethod
    def from_settings(cls, settings: ObjectiveSettings, img_size: Size) -> Objective:
        """Resolve the settings at an image size; a rectangle has the noise of a square of its area."""
        scale = settings.noise_scale
        side = img_size if isinstance(img_size, int) else math.sqrt(math.prod(img_size))
        return cls(**settings.model_dump() | {"noise_scale": max(1.0, side / 256) if scale == "auto" else scale})


class Distilled(Section):
    """How a student samples: in Euler steps of equal length, without guidance, which is part of its weights."""

    steps: StudentSteps
    guidance: NonNegativeFloat
    """The guidance scale of its teacher."""
    interval: tuple[Fraction, Fraction]
    """The times at which its teacher was guided."""
    teacher: str
    """The fingerprint of its teacher's weights."""

    def __str__(self) -> str:
        """Steps and guidance, for a person."""
        guidance = "" if self.guidance == 1 else f" with guidance {self.guidance:g} folded in"
        return f"distilled to {self.steps} step{'s' * (self.steps > 1)}{guidance}"

    def check(
        self, steps: int | str | None, guidance: float | str | None, interval: tuple[float, float] | None = None
    ) -> None:
        """Refuse another number of steps or another guidance; None and auto are its own."""
        shown = "" if interval is None else f"{interval[0]:g} to {interval[1]:g}"
        for name, asked, own, words in (
            ("number of steps", steps, self.steps, f"{steps}"),
            ("guidance", guidance, self.guidance, f"{guidance}"),
            ("guidance interval", interval, self.interval, shown),
        ):
            if asked not in (None, "auto", own):
                raise UserError(
                    f"This model was {self}: its {name} cannot be {words}.",
                    "It was trained to sample in its own steps, with the guidance of its teacher.",
                    f"Leave the {name} out; `muralist distill` trains a student with another one.",
                )


@dataclass(frozen=True)
class JiTSpec(ModelSpec):
    """A JiT: its name, image size, classes and objective."""

    name: str
    img_size: Size
    label_names: list[str]  # empty: unconditional
    objective: Objective
    random_flip: bool = False
    attn_dropout: float = 0.0
    proj_dropout: float = 0.0
    gradient_checkpointing: bool = False
    precision: Precision = "auto"
    seed: int = 0
    distilled: Distilled | None = None

    @classmethod
    def from_settings(
        cls, settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None
    ) -> JiTSpec:
        """Build the spec of a training run; `label_names` are the classes of its data."""
        model = settings.model
        img_size = model.img_size
        objective = Objective.from_settings(settings.objective, img_size)
        if not model.enable_condition:
            objective = objective.model_copy(update={"label_drop_prob": 0.0})
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
        network = jit.build(
            self.name,
            self.img_size,
            self.num_classes,
            attn_drop=self.attn_dropout,
            proj_drop=self.proj_dropout,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        if self.precision == "fp8":
            network.use_fp8()
        return network

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
            last = len(self.label_names) - 1
            names = "" if self.label_names[0] == "0" else f" The names: {format_list(self.label_names)}."
            raise UserError(
                f"The prompt {prompt!r} does not name a class of this model.",
                closest_match(prompt.strip(), self.label_names),
                f"Prompts are class names or labels from 0 to {last}.{names}",
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
        shape = (configs.IMAGE_CHANNELS, *height_width(self.img_size))
        return rng.normal_chunked(0, Purpose.SAMPLE_NOISE, torch.tensor(list(seeds), dtype=torch.int64), shape)

    @staticmethod
    def solver(settings: SampleSettings) -> samplers.Solver:
        """The solver of JiT."""
        return "heun" if settings.solver == "auto" else settings.solver  # type: ignore[return-value]

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
        labels = copy_to_device(torch.tensor([self.label_of(prompt) for prompt in prompts]), device)
        start = copy_to_device(noise, device) * self.objective.noise_scale
        images = samplers.sample(
            network, start, labels, self.null_label, self.sampler(settings), self.objective.prediction, compiled
        )
        return images.clamp(-1, 1)

    def sampler(self, settings: SampleSettings) -> samplers.SamplerSettings:
        """Return the settings of the ODE sampler; a distilled model has its own, and refuses others."""
        if self.distilled:
            self.distilled.check(settings.steps, settings.guidance)
            return samplers.SamplerSettings(solver="euler", steps=self.distilled.steps, t_eps=self.objective.t_eps)
        guidance = configs.JIT_GUIDANCE if settings.guidance == "auto" else settings.guidance
        return samplers.SamplerSettings(
            solver=self.solver(settings),
            steps=settings.step_count,
            guidance=guidance if self.label_names else 1.0,
            interval=settings.interval,
            t_eps=self.objective.t_eps,
            official_last_step=settings.official_last_step,
        )

    @torch.no_grad()
    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Copy everything but the label embedding, whose rows are other classes."""
        source = Path(origin)
        found = (read_description(source) or self.describe_export(source)).get("distilled")
        if distilled := _validated("distilled", Distilled | None, found):
            raise UserError(
                f"{origin} was {distilled}: training cannot start from a student.",
                "It predicts images at the times of its own steps alone, not at every time.",
                f"Start from its teacher, whose weights have the fingerprint {distilled.teacher}.",
            )
        own = network.state_dict()
        for name, value in own.items():
            if name.startswith(_LABEL_EMBEDDING):
                continue
            if name not in weights or weights[name].shape != value.shape:
                theirs = tuple(weights[name].shape) if name in weights else "nothing"
                raise UserError(
                    f"The weights of {origin} do not fit {self.name} at {format_size(self.img_size)} px.",
                    f"{name} has shape {tuple(value.shape)} here and {theirs} there.",
                    "Start from a run of the same model and size, or give --init_from none.",
                )
            value.copy_(weights[name])
        size = as_size(_input_size(weights["pos_embed"], configs.parse_jit_name(self.name)[1]))
        if height_width(size) != height_width(self.img_size):  # as many tokens in another shape
            raise UserError(
                f"The weights of {origin} do not fit {self.name} at {format_size(self.img_size)} px.",
                f"They are those of a model at {format_size(size)} px.",
                "Start from a run of the same model and size, or give --init_from none.",
            )

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
        kind = str(self.distilled or f"{objective.prediction}-prediction with {objective.loss}-loss")
        return f"{self.name} at {format_size(self.img_size)} px, {kind}{matmuls}"

    def describe(self) -> dict[str, Any]:
        """Name, image size, classes and objective."""
        return {
            "family": "jit",
            "model": self.name,
            "img_size": self.img_size if isinstance(self.img_size, int) else list(self.img_size),
            "label_names": self.label_names,
            "objective": self.objective.model_dump(exclude=set(PIPELINE_OBJECTIVE)),
            **({"distilled": self.distilled.model_dump(mode="json")} if self.distilled else {}),
        }

    @staticmethod
    def describe_export(folder: Path) -> dict[str, Any]:
        """Return the description that the config of an export holds; empty for another folder, or a file."""
        if not (folder / CONFIG_FILE).is_file():
            return {}
        config = read_config(folder)
        stored = read_description(folder / WEIGHTS_FILE)
        if stored and stored["distilled"] != config.get("distilled"):
            raise UserError(
                f"{folder / CONFIG_FILE} is not the config of the weights beside it.",
                "The weights are those of a student, which the config samples in another way.",
                "Export the model again.",
            )
        facts = {"model": "JiT", "img_size": config["input_size"], "label_names": _indices(config["num_classes"])}
        return facts | {key: config[key] for key in ("label_names", "objective", "distilled") if key in config}

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        """Write config.json and one weights file."""
        config = infer_jit_config(weights)
        config |= {key: description[key] for key in ("label_names", "objective", "distilled") if key in description}
        write_jit_folder(folder, weights, config, description_metadata(description))
        size = format_size(as_size(config["input_size"]))
        kind = (
            f", {distilled}"
            if (distilled := _validated("distilled", Distilled | None, config.get("distilled")))
            else ""
        )
        return f"{size} px, patch {config['patch_size']}, {config['num_classes']} classes{kind}"


def _indices(classes: int) -> list[str]:
    """Return names for classes that have none."""
    return [str(index) for index in range(classes)] if classes > 1 else []


def infer_jit_config(state: Mapping[str, Tensor], in_context_start: int | None = None) -> dict[str, Any]:
    """Infer the network's arguments from the shapes of its weights.

    `in_context_start` does not show in the weights: unless given, it is that of the named configuration of the same
    width and depth.
    """
    try:
        bottleneck, channels, patch, _ = state["x_embedder.proj1.weight"].shape
        (head_dim,) = state["blocks.0.attn.q_norm.weight"].shape
        _, _, hidden = state["pos_embed"].shape
        rows, _ = state["y_embedder.embedding_table.weight"].shape
        heads = hidden // head_dim
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            "These are not the weights of a JiT network.", f"Missing or of another shape: {error}."
        ) from None
    depth = sum(name.endswith(".attn.qkv.weight") for name in state)
    context = state["in_context_posemb"].shape[1] if "in_context_posemb" in state else 0
    if in_context_start is None and context:
        known = {(one.hidden_size, one.depth): one.in_context_start for one in configs.JIT_CONFIGS.values()}
        if (hidden, depth) not in known:
            raise UserError(
                f"in_context_start is unknown for {hidden} channels and {depth} blocks.",
                "It does not show in the weights, and no named configuration has these sizes.",
                f"Load from a folder whose {CONFIG_FILE} holds in_context_start.",
            )
        in_context_start = known[hidden, depth]
    config = {
        "input_size": _input_size(state["pos_embed"], patch),
        "patch_size": patch,
        "in_channels": channels,
        "hidden_size": hidden,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": configs.MLP_RATIO,
        "attn_drop": 0.0,
        "proj_drop": 0.0,
        "num_classes": rows - 1,
        "bottleneck_dim": bottleneck,
        "in_context_len": context,
        "in_context_start": in_context_start or 0,
    }
    _check_fit(config, state)
    return config


def _input_size(pos_embed: Tensor, patch: int) -> int | list[int]:
    """Infer the image size: the second half of the position embedding is that of the row, and tells where one ends."""
    _, tokens, hidden = pos_embed.shape
    side = math.isqrt(tokens) * patch
    if pos_embed.is_meta or not tokens:
        return side
    stored = pos_embed.float()
    of_row = stored[0, :, hidden // 2 :]
    columns = int(((of_row - of_row[:1]).abs().amax(-1) < 0.1).long().cumprod(0).sum())
    if not columns or columns**2 == tokens or tokens % columns:
        return side
    grid = tokens // columns, columns
    is_rectangle = torch.allclose(stored, jit.sincos_position_embedding(grid, hidden), atol=0.02)  # maybe bf16
    return [grid[0] * patch, grid[1] * patch] if is_rectangle else side


def jit_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments of the network's constructor from a folder's config."""
    return {name: config.get(name) for name in _JIT_ARGUMENTS}


def _check_sizes(config: Mapping[str, Any], origin: str) -> None:
    """Refuse impossible sizes before anything of that size is allocated."""
    wrong = [f"{name} is {value!r:.60}" for name, value in jit_arguments(config).items() if not _is_size(name, value)]
    if not wrong and max(height_width(config["input_size"])) // max(1, config["patch_size"]) > _MAX_TOKENS_PER_SIDE:
        wrong = [f"{config['input_size']} pixels in patches of {config['patch_size']}"]
    if wrong:
        raise UserError(f"No network has the sizes in {origin}.", f"{wrong[0]}.", "Export the model again.")


def _is_size(name: str, value: Any) -> bool:
    if name == "input_size" and isinstance(value, list):
        return len(value) == 2 and all(type(side) is int and _is_size(name, side) for side in value)
    kind = int | float if name in _FLOAT_ARGUMENTS else int
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    return is_number and 0 <= value <= _MAX_SIZES.get(name, MAX_PIXELS)


def _check_fit(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse weights that a network of these arguments cannot load."""
    _check_sizes(config, "the weights")
    try:
        with torch.device("meta"):
            network = jit.JiT(**jit_arguments(config))
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise UserError("No network has these sizes.", f"The reason: {str(error).splitlines()[0]}.") from None
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | given.keys()):
        want, have = expected.get(name, "nothing"), given.get(name, "nothing")
        if want != have:
            raise UserError(
                "The weights do not fit the network.", f"{name}: the network has {want}, the weights {have}."
            )


def write_jit_folder(
    folder: str | Path,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write config.json and the weights, which get the metadata; an earlier export at this path is replaced.

    The config holds the network's arguments and further facts for readers, such as `label_names` and `objective`.
    """
    final = Path(folder)
    if final.exists() and not (final.is_dir() and (_is_jit_folder(final) or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not an export.", fix="Name a folder that does not exist yet.")
    _check_fit(config, state)
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    facts = {"_class_name": JIT_CLASS_NAME, "_muralist_version": __version__}
    with atomic_folder(final, replace=True) as temporary:
        atomic_write_json(temporary / CONFIG_FILE, facts | dict(config))
        atomic_write_json(
            temporary / "model_index.json", {**_PIPELINE_INDEX, "_diffusers_version": version("diffusers")}
        )
        atomic_write(temporary / "pipeline.py", _PIPELINE_CODE)
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt", **(metadata or {})})


def _is_jit_folder(folder: Path) -> bool:
    try:
        return bool(read_config(folder))
    except UserError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the config of an exported JiT."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_file(file, error) from None
    if not isinstance(config, dict) or config.get("_class_name") != JIT_CLASS_NAME:
        raise UserError(f"{file} does not describe a JiT network.", f"Its _class_name is not {JIT_CLASS_NAME}.")
    _check_sizes(config, str(file))
    return config


def read_jit_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the weights of an exported JiT."""
    config, state = read_config(Path(folder)), read_weights(Path(folder) / WEIGHTS_FILE)
    _check_fit(config, state)
    return config, state


def read_jit_spec(path: Path, description: Mapping[str, Any], which: WeightSet) -> JiTSpec:
    """Read a model's size, classes, objective and sampler.

    Weights from elsewhere get the official ones, and indices as names of the classes.
    """
    if description := description or JiTSpec.describe_export(path):
        return spec_from_description(description)
    config = infer_jit_config(read_weights(path, which, shapes_only=True))
    facts = {"label_names": _indices(config["num_classes"])}
    return spec_from_description({"model": "JiT", "img_size": config["input_size"], **facts})


def spec_from_description(description: Mapping[str, Any]) -> JiTSpec:
    """Return the spec that a checkpoint's manifest, an export's config or `JiTSpec.describe` describes."""
    given, img_size = description.get("objective"), as_size(description["img_size"])
    objective = _validated("objective", Objective, given) if given else None
    names = _validated("label_names", list[str], description.get("label_names", []))
    distilled = _validated("distilled", Distilled | None, description.get("distilled"))
    objective = objective or Objective.from_settings(ObjectiveSettings(), img_size)
    return JiTSpec(description["model"], img_size, names, objective, distilled=distilled)


def _validated(key: str, kind: Any, value: Any) -> Any:
    """Check an entry of a model's description."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (key, *first["loc"])))
        raise UserError(
            "The classes, the objective or the sampler in the model's files are damaged.", f"{where}: {first['msg']}."
        ) from None
