"""What callers know about a model: a ModelFamily before torch is imported, a ModelSpec to train and sample it.

One entry of FAMILIES per family. Callers look an entry up with `find_family` and ask for a property or a method; no
caller asks which family it has.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from muralist.core.errors import UserError
from muralist.core.run_dir import check_exists
from muralist.models import configs
from muralist.models.hub import find_model
from muralist.models.integrity import check_integrity, fingerprint, read_json, stored_parameters
from muralist.settings import ModelSettings, ObjectiveSettings, SampleSettings, TrainSettings
from muralist.settings.train import PIPELINE_OBJECTIVE, BasePrecision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from muralist.core.rng import SampleKeys
    from muralist.data.loader import Batch
    from muralist.data.packed import LatentSource
    from muralist.models.native_settings import Native


NETWORKS = ("transformer", "transformer_2", "unet")
"""Components of a pipeline that may be trained."""
_FLAG = "--model.path"


@dataclass(frozen=True)
class ModelFamily:
    """One kind of model; the defaults fit a network on pixels without further features."""

    key: str
    """The field `family` of a checkpoint's manifest."""
    name: str
    """The family's name in messages."""
    name_pattern: str
    """The form of its model names, for the message about an unknown one."""
    spec: str
    """The ModelSpec, as "module:class"."""
    uses_captions: bool = False
    """Trained on captions; without any, a run warns."""
    supports_latents: bool = False
    """Can be trained on the latents of `muralist pack --encode`."""
    supports_lora: bool = False
    supports_swap: bool = False
    """Frozen blocks can be kept in host memory."""
    supports_fp8: bool = False
    single_size: bool = False
    """One image size per run: no `--multireso`."""
    solvers: tuple[str, ...] = ()
    """The values of `--sample_solver` besides auto; empty: any."""
    objective_settings: tuple[str, ...] = ()
    """The settings of the objective that have an effect."""
    own_settings: tuple[str, ...] = ()
    """Other settings that have an effect on this family only."""
    pixels_per_token: int = 1
    """Divides both sides of every image."""
    has_formulas: bool = False
    """FLOPs, tokens and memory follow from the model's name and the image size: `muralist estimate` needs them."""
    distillation: str = ""
    """The ModelSpec of a few-step student, as "module:class"; empty: there is none."""
    pipeline_class: str | None = None
    """The diffusers pipeline whose transformer is trained; checkpoints name the folder of its frozen components."""

    def matches(self, name: str) -> bool:
        """Return whether a model name belongs to this family."""
        return name.casefold() == self.name.casefold()

    def check_size(self, size: tuple[int, int]) -> None:
        """Refuse image sizes (height, width) that the tokens do not cover."""
        (height, width), step = size, self.pixels_per_token
        if height % step or width % step:
            raise UserError(
                f"An image size of {height} x {width} pixels does not fit --model {self.name}.",
                f"Both sides must be multiples of {self.pixels_per_token}.",
                f"Give --img_size {' '.join(str(max(1, side // step) * step) for side in dict.fromkeys(size))}.",
            )

    def check(self, model: ModelSettings) -> None:
        """Refuse a model that does not exist, is incomplete, or does not have this image size."""
        self.check_size(model.size)

    def folder(self, settings: TrainSettings) -> Path | None:
        """Return the folder of the pretrained model that a run trains, if there is one."""
        return find_model(settings.model.path, _FLAG) if settings.model.path else None

    def prepare(self, settings: TrainSettings) -> None:
        """Build, once for all processes, whatever the spec reads from disk."""

    def base_precision(self, settings: TrainSettings) -> BasePrecision:
        """Return the precision in which frozen weights of a LoRA run are stored."""
        return "fp32" if settings.model.base_precision == "auto" else settings.model.base_precision

    def parameter_count(self, model: ModelSettings, num_classes: int) -> int:
        """Count the network's parameters without building it; 0 if unknown."""
        return stored_parameters(find_model(model.path, _FLAG) / "transformer") if model.path else 0

    def activation_bytes(self, model: ModelSettings, bf16: bool, compiled: bool) -> float | None:
        """Estimate the bytes that one image keeps for the backward pass; None without a formula."""
        return None

    def origin(self, model: ModelSettings) -> str:
        """Describe where the model comes from, for a person."""
        height, width = model.size
        return f"{model.path} is intact" if model.path else f"{model.name} at {height} x {width} px is built here"

    def warning(self, model: ModelSettings) -> str:
        """Return what a user must know before training this model, for the run summary; empty for most models."""
        return ""

    def encoder_components(self, folder: Path) -> Sequence[str]:
        """Name the frozen components whose output `muralist pack --encode` stores."""
        return ()

    def encoder_fingerprints(self, folder: Path) -> dict[str, str]:
        """Return a fingerprint of each frozen component of a model folder."""
        return {name: fingerprint(folder / name) for name in self.encoder_components(folder)}

    def load_encoders(
        self, folder: Path, size: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> LatentEncoders:
        """Load the frozen components for images of this height and width."""
        encoders: LatentEncoders = self.spec_class().load_encoders(folder, size, device, dtype)
        return encoders

    def check_latents(self, source: LatentSource, folder: Path, random_flip: bool) -> None:
        """Refuse encoded data that another model made, or without the mirror images that the settings need."""
        manifest = source.manifest
        if random_flip and not manifest.mirrored:
            raise UserError(
                f"{source.folder} was encoded without mirror images, which random flips need.",
                fix="Train with --no_random_flip, or encode the data set again without it.",
            )
        if manifest.family != self.key:
            other = next((family.name for family in FAMILIES if family.key == manifest.family), manifest.family)
            raise UserError(
                f"{source.folder} was encoded for --model {other}, and this run trains --model {self.name}.",
                fix=f"Give --model {other}, or encode the data set again.",
            )
        if not folder.is_dir():
            return  # the small HunyuanDiT, which is built and checked when the run starts
        marks = self.encoder_fingerprints(folder)
        if differing := [name for name, mark in marks.items() if manifest.frozen_parts.get(name) != mark]:
            raise UserError(
                f"{source.folder} was encoded by another model than {folder}: by {manifest.model}.",
                f"They differ in {', '.join(differing)}.",
                f"Train with {_FLAG} of the model that encoded it, or encode the data again with --encode {folder}.",
            )

    def check_description(self, description: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's description lacks what other commands rely on."""
        if self.pipeline_class and not description.get("folder"):
            raise ValueError("the folder of the fine-tuned model is missing")

    def spec_class(self) -> Any:
        """Import the family's ModelSpec."""
        return resolve(self.spec)


class JiTFamily(ModelFamily):
    """JiT: pixels, class labels, everything known from the name."""

    def matches(self, name: str) -> bool:
        """Return whether this is JiT-<config>/<patch size>."""
        return configs.is_jit_name(name)

    def check(self, model: ModelSettings) -> None:
        """Refuse an image size that the patches do not divide."""
        configs.check_image_size(configs.parse_jit_name(model.name)[1], model.img_size)

    def parameter_count(self, model: ModelSettings, num_classes: int) -> int:
        """Count by formula; an unconditional model has one class."""
        config, patch = configs.parse_jit_name(model.name)
        return configs.parameter_count(config, patch, num_classes if model.enable_condition else 1)

    def activation_bytes(self, model: ModelSettings, bf16: bool, compiled: bool) -> float | None:
        """Estimate by formula."""
        return configs.activation_bytes(model.name, model.img_size, bf16, compiled, model.gradient_checkpointing)


_HUNYUAN_COMPONENTS = {
    "transformer": "HunyuanDiT2DModel",
    "vae": "AutoencoderKL",
    "text_encoder": "BertModel",
    "text_encoder_2": "T5EncoderModel",
    "tokenizer": "BertTokenizer",
    "tokenizer_2": "T5Tokenizer",
    "scheduler": "DDPMScheduler",
}


class HunyuanDiTFamily(ModelFamily):
    """HunyuanDiT: a pipeline in diffusers layout; without `--model.path`, a small one is built beside the runs."""

    def check(self, model: ModelSettings) -> None:
        """Refuse an image size that the tokens do not cover, and a folder that is not a complete HunyuanDiT."""
        self.check_size(model.size)
        if model.path is not None:
            folder = find_model(model.path, _FLAG)
            self.read_configs(folder)
            check_integrity(folder, _HUNYUAN_COMPONENTS)

    def read_configs(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the configs of a model's transformer and scheduler; refuse a folder that is not a HunyuanDiT."""
        check_exists(folder, "model", "Give the folder of a HunyuanDiTPipeline as --model.path.")
        try:
            transformer = json.loads((folder / "transformer" / "config.json").read_text())
            scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} is not a HunyuanDiT in diffusers layout.",
                f"The reason: {error}.",
                "Give the folder of a HunyuanDiTPipeline as --model.path, or leave it out to train a small one.",
            ) from None
        kind = (scheduler.get("prediction_type"), scheduler.get("beta_schedule"))
        if kind != ("v_prediction", "scaled_linear"):
            raise UserError(f"{folder} has another noise schedule than HunyuanDiT: {kind[1]} with {kind[0]}.")
        return transformer, scheduler

    def encoder_components(self, folder: Path) -> Sequence[str]:
        """Name the VAE, both text encoders and their tokenizers."""
        return ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")

    def folder(self, settings: TrainSettings) -> Path:
        """Return `--model.path`, or where the small model is built."""
        path = settings.model.path
        return find_model(path, _FLAG) if path else Path(settings.results_dir) / "models" / "small-hunyuandit"

    def warning(self, model: ModelSettings) -> str:
        """Say that the small model is trained where nobody asked for it."""
        if model.path is not None:
            return ""
        return (
            "no --model.path was given: this trains a small HunyuanDiT from random weights, for trials; "
            "--model.path FOLDER fine-tunes a published one, in diffusers layout"
        )

    def prepare(self, settings: TrainSettings) -> None:
        """Build the small model unless `--model.path` names one."""
        if settings.model.path is None:
            self.build_small(self.folder(settings))

    def build_small(self, folder: Path) -> Path:
        """Write the small HunyuanDiT into a folder, or find it there."""
        return resolve("muralist.demo.small_hunyuan_dit:build_small_hunyuan_dit")(folder)


_UNTRAINED = {
    "audio_vae": "it makes sound beside the images.",
    "sound_tokenizer": "it makes sound beside the images.",
    "unconditional_transformer": "it guides its samples with a second network, unconditional_transformer.",
    "vision_language_encoder": "its network is given tokens that a language model draws.",
    "prior": "its network is given an image's embedding that a prior draws.",
}
"""Components of pipelines that need another training than that of one network on images and captions."""


class DiffusersFamily(ModelFamily):
    """Any text-to-image or text-to-video pipeline in diffusers layout."""

    def check(self, model: ModelSettings) -> None:
        """Refuse a folder that is not a complete pipeline, and a pipeline without network, VAE or text to train on."""
        from muralist.models.pipeline_class import PIPELINES

        if model.path is None:
            raise UserError(
                "--model diffusers needs a pipeline.", fix="Give --model.path FOLDER, in diffusers layout, or a Hub id."
            )
        folder = find_model(model.path, _FLAG)
        name, components = self._index(folder)
        if name in PIPELINES:
            raise UserError(
                f"{name} cannot be trained yet: it takes an image beside the prompt.", fix=f"Give another {_FLAG}."
            )
        if "vae" not in components or not {"transformer", "unet"} & set(components):
            raise UserError(
                f"{name} cannot be trained yet: it has no VAE with one transformer or U-Net.",
                f"Its components are {', '.join(components)}.",
                f"Give another {_FLAG}.",
            )
        for reason in (_UNTRAINED[part] for part in components if part in _UNTRAINED):
            raise UserError(f"{name} cannot be trained yet: {reason}", fix=f"Give another {_FLAG}.")
        if "img_size" not in model.model_fields_set:
            native = self._native(folder).settings
            own = f"{native['height']} {native['width']}" if {"height", "width"} <= native.keys() else "HEIGHT WIDTH"
            raise UserError(
                "The image size is missing.",
                "The default size is that of a small JiT.",
                f"Give --img_size {own}, for which {name} was made, or a smaller size.",
            )
        self.check_size(model.size)
        self.network_name(model)

    def _index(self, folder: Path) -> tuple[str, tuple[str, ...]]:
        from muralist.models.pipeline_class import read_index  # imports NumPy

        return read_index(folder, _FLAG)

    def _native(self, folder: Path) -> Native:
        from muralist.models.native_settings import ModelFiles, native_settings

        return native_settings(ModelFiles.read(folder, *self._index(folder)))

    def _distillation_warning(self, folder: Path) -> str:
        from muralist.models.native_settings import ModelFiles, distillation_warning

        return distillation_warning(ModelFiles.read(folder, *self._index(folder)))

    def network_name(self, model: ModelSettings) -> str:
        """Return the component that is trained."""
        folder = find_model(model.path or "", _FLAG)
        components = self._index(folder)[1]
        if model.network is not None and model.network not in components:
            raise UserError(
                f"The pipeline in {folder} has no {model.network}.",
                f"Its components are {', '.join(components)}.",
                "Leave --model.network out.",
            )
        return model.network or ("transformer" if "transformer" in components else "unet")

    def encoder_components(self, folder: Path) -> Sequence[str]:
        """Name every component but the networks and the scheduler."""
        return [name for name in self._index(folder)[1] if name not in (*NETWORKS, "scheduler")]

    def noise_range(self, folder: Path, network: str) -> tuple[float, float]:
        """Return the noise levels, from 0 (data) to 1, that a network of the pipeline is for."""
        boundary = read_json(folder / "model_index.json").get("boundary_ratio")
        if not isinstance(boundary, float) or not (folder / "transformer_2").is_dir():
            return 0.0, 1.0
        return (0.0, boundary) if network == "transformer_2" else (boundary, 1.0)

    def base_precision(self, settings: TrainSettings) -> BasePrecision:
        """Store as autocast computes, unless that is fp16."""
        if settings.model.base_precision == "auto" and settings.mixed and settings.precision != "fp16":
            return "bf16"
        return super().base_precision(settings)

    def caption_dropout(self, model: ModelSettings) -> float:
        """Return the probability of dropping a caption: guidance that is distilled into the network needs none."""
        return 0.0 if self._distilled_guidance(model) else model.uncond_p

    def _distilled_guidance(self, model: ModelSettings) -> bool:
        config = read_json(find_model(model.path or "", _FLAG) / self.network_name(model) / "config.json")
        return config.get("guidance_embeds") is True

    def parameter_count(self, model: ModelSettings, num_classes: int) -> int:
        """Count the parameters in the files of the network."""
        return stored_parameters(find_model(model.path, _FLAG) / self.network_name(model)) if model.path else 0

    def warning(self, model: ModelSettings) -> str:
        """Say what training changes in a distilled model."""
        if model.path is None:
            return ""
        folder = find_model(model.path, _FLAG)
        if said := self._distillation_warning(folder):
            return said
        if (folder / "transformer_2").is_dir():
            low, high = self.noise_range(folder, self.network_name(model))
            return (
                f"this pipeline has two networks: {self.network_name(model)}, for noise levels {low:g} to {high:g}, is "
                "trained, the other is not (--model.network)"
            )
        return ""


JIT = JiTFamily(
    key="jit",
    name="JiT",
    name_pattern=f"JiT-<config>/<patch size> with one of {', '.join(configs.JIT_CONFIGS)}",
    spec="muralist.models.jit_spec:JiTSpec",
    supports_fp8=True,
    single_size=True,
    has_formulas=True,
    distillation="muralist.models.jit_distill:JiTStudent",
    solvers=("heun", "euler", "abm2"),
    objective_settings=tuple(name for name in ObjectiveSettings.model_fields if name not in PIPELINE_OBJECTIVE),
    own_settings=("model.attn_dropout", "model.proj_dropout", "samples.interval", "samples.official_last_step"),
)
HUNYUAN_DIT = HunyuanDiTFamily(
    key="hunyuandit",
    name="HunyuanDiT",
    name_pattern="HunyuanDiT",
    spec="muralist.models.hunyuan_dit:HunyuanDiTSpec",
    uses_captions=True,
    supports_latents=True,
    supports_lora=True,
    solvers=("dpm++", "ddim"),
    own_settings=("model.uncond_p_t5",),
    pixels_per_token=16,  # the VAE's factor of 8 and patches of 2
    pipeline_class="HunyuanDiTPipeline",
)
DIFFUSERS = DiffusersFamily(
    key="diffusers",
    name="diffusers",
    name_pattern="diffusers, with --model.path FOLDER",
    spec="muralist.models.diffusers_model:DiffusersSpec",
    uses_captions=True,
    supports_latents=True,
    supports_lora=True,
    solvers=("auto",),  # the pipeline's own scheduler
    supports_swap=True,
    objective_settings=PIPELINE_OBJECTIVE,
    own_settings=("model.network",),
    pixels_per_token=16,  # a VAE's factor of 8 and patches of 2; a pipeline that needs more says so itself
    pipeline_class="DiffusionPipeline",
)
FAMILIES: tuple[ModelFamily, ...] = (JIT, HUNYUAN_DIT, DIFFUSERS)


def find_family(name: str) -> ModelFamily:
    """Return the family of a model name, or refuse the name."""
    for family in FAMILIES:
        if family.matches(name):
            return family
    raise configs.unknown_model(name, [family.name_pattern for family in FAMILIES])


def find_family_by_key(key: str) -> ModelFamily:
    """Return the family that a checkpoint's manifest names; ValueError if it is unknown."""
    for family in FAMILIES:
        if family.key == key:
            return family
    raise ValueError(f"unknown model family {key!r:.40}")


def find_family_of_pipeline(folder: Path, flag: str) -> ModelFamily:
    """Return the family that is made for the pipeline in a folder, or else the one for all pipelines."""
    from muralist.models.pipeline_class import read_index  # imports NumPy

    name, _ = read_index(folder, flag)
    return next((family for family in FAMILIES if family.pipeline_class == name), DIFFUSERS)


_BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nf4": 0.5625}  # nf4: 4 bits, and a float32 scale for every 64


def frozen_bytes(settings: TrainSettings) -> float:
    """Return the bytes of a frozen parameter of a LoRA run: of the blocks', which are nearly all."""
    return _BASE_BYTES[find_family(settings.model.name).base_precision(settings)]


def families_with(feature: str) -> str:
    """Name the families that have a feature, for messages such as "Supported by HunyuanDiT."."""
    return ", ".join(family.name for family in FAMILIES if getattr(family, feature))


def resolve(reference: str) -> Any:
    """Import "module:name": specs are heavy, and the demo is a layer above this one."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


Encoded: TypeAlias = "tuple[Tensor, ...]"
"""The network's training inputs after the frozen components: a named tuple of the family's own."""


class LatentEncoders(Protocol):
    """The frozen components of a model, as `muralist pack --encode` runs them."""

    def encode_images(self, images: Tensor) -> Tensor:
        """Return mean and deviation, or the latents alone, of images in [-1, 1]: [B, 2 or 1, ...]."""

    def encode_captions(self, captions: Sequence[str]) -> list[dict[str, Any]]:
        """Return the text tensors of each caption by name."""


class ModelSpec(Protocol):
    """A model: how it is built, trained, sampled, saved and exported; a subclass inherits the methods with a body."""

    label_names: list[str]
    """Class names by label; empty without classes."""
    compiles_blocks: bool = False
    """Whether torch.compile sees one block at a time instead of the entire loss."""
    compiles_by_default: bool = True
    """Whether `--compile auto` compiles on a GPU."""
    captures_step: bool = True
    """Whether a compiled step may be captured as a CUDA graph."""
    static_shapes: bool = True
    """Whether the network sees the same few shapes in every batch, for each of which torch.compile builds a graph."""
    has_unused_weights: bool = False
    """Whether some trained weights may have no gradient."""
    held_out_seed: int = 0
    """Seed of the noise of val/loss: not the run's own, so that val/loss is comparable between runs."""

    def network(self) -> nn.Module:
        """Build the trainable network on the CPU; its initial weights depend on the seed alone."""

    def meta_model(self) -> nn.Module:
        """Build the network on the meta device, for a state dict to be assigned."""

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the frozen components, if there are any, to a device."""
        return

    def encode(self, batch: Batch, keys: SampleKeys) -> Encoded:
        """Run the frozen components; every tensor has one row per sample."""

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """Compute the loss of each sample, [B]; pure and compilable."""

    def prepare_prompts(self, prompts: Sequence[str], settings: SampleSettings) -> None:
        """Encode the prompts of samples while the device still has room for text encoders: the network is not there yet."""
        return

    def prepare_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse image sizes (height, width) of buckets that the model cannot have."""
        return

    def default_prompts(self) -> list[str]:
        """Return the prompts of samples when none are given."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that the model cannot generate."""
        return

    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Generate images in [-1, 1], [B, 3, H, W]; each depends on its prompt and seed alone."""

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold this weight; frozen weights that network() loads need not be saved."""
        return True

    def lr_scale(self, name: str) -> float:
        """Return the learning rate of a weight as a multiple of the run's."""
        return 1.0

    def init_from(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Initialize the network from the weights of another run."""

    def flops_per_image(self) -> int:
        """FLOPs of one training pass (forward and backward) on one image."""

    def tokens_per_image(self) -> int:
        """Image tokens per image."""

    def summary(self) -> str:
        """Describe the model in one line, for the run summary."""

    def notes(self) -> list[str]:
        """Further lines of the run summary, each with its title."""
        return []

    def describe(self) -> dict[str, Any]:
        """Return the field `model` of a checkpoint's manifest, which rebuilds the model without the run's settings."""

    @staticmethod
    def export(weights: Mapping[str, Tensor], description: Mapping[str, Any], folder: Path) -> str:
        """Write weights as a folder that `muralist generate` loads, and describe what was written."""


def build_spec(settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None) -> ModelSpec:
    """Build the spec of a training run; `latents` is the data set if it was encoded ahead of training."""
    family = find_family(settings.model.name)
    chosen = resolve(family.distillation) if settings.distill.teacher else family.spec_class()
    spec: ModelSpec = chosen.from_settings(settings, label_names, latents)
    return spec
