"""Any text-to-image or text-to-video pipeline in diffusers layout, trained on images: one spec for all classes.

The pipeline itself says how its network is called (pipeline_probe.py), and its scheduler says what the network predicts
and at which noise levels. Text is encoded one caption at a time, so that embeddings do not depend on the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import init_empty_weights
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import logging as transformers_logging

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import loading_progress
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch, select_posterior, to_unit_range
from muralist.data.packed import LatentBatch, LatentSource
from muralist.data.source import LruCache
from muralist.diffusion import noise_levels
from muralist.diffusion.noise_levels import NoiseLevels
from muralist.models.components import component_class, load_pipeline
from muralist.models.frozen_encoders import (
    PipelineEncoders,
    PromptEmbeddings,
    check_stored,
    stored_texts,
    unconditional_text,
)
from muralist.models.integrity import fingerprint, read_json
from muralist.models.lora import Lora, set_dropout_keys
from muralist.models.native_settings import ModelFiles, native_settings
from muralist.models.pipeline_class import read_index
from muralist.models.pipeline_probe import CALL_SETTINGS, CallEnded, NetworkCall, PipelineProbe
from muralist.models.pipeline_spec import PipelineSpec
from muralist.models.spec import DIFFUSERS, NETWORKS
from muralist.settings import ModelSettings, SampleSettings, TrainSettings
from muralist.settings.train import BasePrecision

_FLAG = "--model.path"
_CACHED_CAPTIONS, _CACHED_BYTES = 4096, 1 << 30  # on the device
_NEGATIVE = " "  # of pipelines that guide by `true_cfg_scale`, as their authors call them

for library in (diffusers_logging, transformers_logging):
    library.set_verbosity_error()  # long captions are cut as the pipeline does: a line for each tells nothing
    library.disable_progress_bar()


class DiffusersInputs(tuple[Any, ...]):
    """Latents [B, ...], and the text arguments of the network: rows [B, ...], or lists with an entry per image."""

    def __new__(cls, *values: Any) -> DiffusersInputs:
        """Take any number of values, which the trainer slices one by one, or one list of them, as DeepSpeed rebuilds it."""
        return super().__new__(cls, values[0] if len(values) == 1 and isinstance(values[0], list) else values)


class DiffusersSpec(PipelineSpec):
    """The network of a diffusers pipeline: how it is trained, sampled and exported."""

    compiles_blocks = True  # one block at a time: a graph of all blocks takes minutes to compile
    has_unused_weights = True  # Qwen-Image's last block computes text that nothing reads

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int],
        *,
        network_name: str,
        levels: NoiseLevels,
        uncond_p: float = 0.0,
        random_flip: bool = False,
        gradient_checkpointing: bool = False,
        lora: Lora | None = None,
        base_precision: BasePrecision = "fp32",
        swapped_blocks: int = 0,
        seed: int = 0,
        latents: LatentSource | None = None,
    ) -> None:
        """Load the frozen components on the CPU; the network itself stays on the meta device."""
        self.label_names: list[str] = []
        # A compiled FLUX.1-dev with LoRA ended in an illegal memory access (torch 2.11, H200); full training is compiled.
        self.compiles_by_default = lora is None
        self.folder, self.size, self.network_name, self.levels = folder, size, network_name, levels
        self.uncond_p, self.random_flip, self.seed = uncond_p, random_flip, seed
        self.gradient_checkpointing, self.latents = gradient_checkpointing, latents
        self.base_precision, self.swapped_blocks = base_precision, swapped_blocks
        self.class_name, self.components = read_index(folder, _FLAG)
        self.network_class: Any = component_class(folder / network_name)
        self.network_config = self.network_class.load_config(folder, subfolder=network_name)
        self.device = torch.device("cpu")
        with torch.device("meta"):
            self._stand_in: Any = self.network_class.from_config(self.network_config).eval()
        self.lora = lora and lora.for_network(self._stand_in)
        self.pipe = self._load_pipeline()
        self.probe = PipelineProbe(self.pipe, self._stand_in, levels.probe_times)
        encoders = [
            part
            for name, part in self.pipe.components.items()
            if isinstance(part, nn.Module) and name not in (*NETWORKS, "vae")
        ]
        self.prompts = PromptEmbeddings(self.pipe, encoders, self._run_on)
        self._calls: dict[tuple[int, int], NetworkCall] = {}
        self._call: NetworkCall | None = None  # of the batch that was encoded last
        self._call_size = size
        self._text_cache: LruCache[list[Any]] | None = None
        self._vae_batch = 2  # 1: the VAE encodes one image at a time

    @classmethod
    def from_settings(
        cls, settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None
    ) -> DiffusersSpec:
        """Build the spec of a training run."""
        model, folder = settings.model, DIFFUSERS.folder(settings)
        assert folder is not None, "checked before"
        if latents is not None:
            DIFFUSERS.check_latents(latents, folder, settings.data.random_flip)
        network_name = DIFFUSERS.network_name(model)
        config = read_json(folder / "scheduler" / "scheduler_config.json")
        scheduler = component_class(folder / "scheduler", "scheduler_config.json").from_config(config)
        levels = noise_levels.from_scheduler(
            config,
            getattr(scheduler, "alphas_cumprod", None),
            settings.objective.timestep_sampling,
            settings.objective.min_snr_gamma,
            DIFFUSERS.noise_range(folder, network_name),
        )
        lora = Lora.from_settings(model)
        return cls(
            folder,
            model.size,
            network_name=network_name,
            levels=levels,
            uncond_p=DIFFUSERS.caption_dropout(model),
            random_flip=settings.data.random_flip,
            gradient_checkpointing=model.gradient_checkpointing,
            lora=lora,
            base_precision=DIFFUSERS.base_precision(settings) if lora else "fp32",
            swapped_blocks=model.swap_blocks,
            seed=settings.seed,
            latents=latents,
        )

    def _load_pipeline(self) -> Any:
        """Load the pipeline with a stand-in for its network, on which no weights are spent."""
        given = {self.network_name: self._stand_in}
        with loading_progress(f"the encoders of {self.folder}", self.folder):
            pipe = load_pipeline(self.folder, self.class_name, given, lambda: self.device)
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _run_on(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def load_encoders(
        cls, folder: Path, size: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> PipelineEncoders:
        """Load the frozen components for images of this height and width."""
        spec = cls.from_settings(TrainSettings(model=ModelSettings(path=str(folder), img_size=size)), [])
        spec.to_device(device, dtype)
        call = spec._prepare_size(size)
        return PipelineEncoders(call, spec.vae_posterior, lambda caption: spec._text_arguments(caption, size))

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the frozen components, and find out how the network is called at the run's image size.

        With encoded data, only the VAE's decoder stays there.
        """
        self.device = self.prompts.device = device
        self.prompts.move_encoders(device, dtype)
        nn.Module.to(self.pipe.vae, device)  # in float32: the probe sends indices through its normalization
        self.levels = self.levels.to(device)
        call = self._prepare_size(self.size)
        self.static_shapes = not call.has_lists  # texts of varying length have many shapes
        overflows = dtype is torch.float16 and self.pipe.vae.config.get("force_upcast")
        nn.Module.to(self.pipe.vae, torch.float32 if overflows else dtype)
        if self.latents is None:
            self._check_encoder(call.latents.vae_shape)
        else:
            check_stored(self.latents, call)
            self._text_examples = self.probe.text_arguments(call, "", self.size)
            self.prompts.move_encoders(torch.device("cpu"))
            self.pipe.vae.encoder = nn.Identity()

    def prepare_prompts(self, prompts: Sequence[str], settings: SampleSettings) -> None:
        """Call the pipeline up to its network, so that a setting that it refuses is known before the first checkpoint.

        With encoded data, encode all prompts of samples now: the network needs the memory of the text encoders.
        """
        home = self.prompts.encoder_device
        self.prompts.move_encoders(self.device)
        try:
            for prompt in [*dict.fromkeys(prompts)][: 1 if self.latents is None else None]:
                with suppress(CallEnded):
                    self._call_pipeline(self.probe.recorder([], 1), [prompt], [0], settings)
        except Exception as error:  # whatever a pipeline raises
            raise UserError(
                f"{self.class_name} cannot make samples: {first_line(error)}.",
                "A trial call of the pipeline failed.",
                "Give --sample_guidance 1, another --sample_steps, or --samples_per_gpu 0 for none.",
            ) from error
        self.prompts.move_encoders(home)

    def prepare_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Find out how the network is called at each size; a size that the pipeline does not make is refused."""
        base = self._prepare_size(self.size).latents.vae_shape
        fix = "Give --img_size and --reso_step in multiples of what it needs, or leave --multireso out."
        with self.prompts.remembered():
            for size in sizes:
                try:
                    found = self._prepare_size(size).latents.vae_shape
                except UserError as error:
                    raise UserError(error.what, error.why, fix) from None
                if any(found[i] * self.size[i] != base[i] * size[i] for i in (-2, -1)):
                    self._refuse_other_size(size, fix)

    def _refuse_other_size(self, size: tuple[int, int], fix: str) -> NoReturn:
        what = f"{self.class_name} makes images of another size than {size[0]} x {size[1]} pixels."
        raise UserError(what, "It rounds the size that it is given.", fix)

    def _check_encoder(self, expected: tuple[int, ...]) -> None:
        """Refuse a VAE that encodes an image to something else than what the pipeline decodes."""
        why = ""
        for self._vae_batch in (2, 1):  # that of HunyuanVideo 1.5 takes one image at a time
            try:
                images = torch.zeros(self._vae_batch, 3, *self.size, device=self.device)
                found = tuple(self.vae_posterior(images, len(expected))[0].shape[1:])
            except Exception as error:  # and Allegro's whole clips only
                why = first_line(error)
                continue
            if found == expected:
                return
            made = [
                size * there // here for size, here, there in zip(self.size, found[-2:], expected[-2:], strict=True)
            ]
            if found[:-2] == expected[:-2] and made != [*self.size]:
                self._refuse_other_size(self.size, f"Give --img_size {made[0]} {made[1]}, which it makes instead.")
            why = f"latents of {found} instead of {expected}"
        raise UserError(
            f"{self.class_name} cannot be trained on single images of {self.size[0]} x {self.size[1]} pixels: its VAE does "
            f"not encode one to what the pipeline decodes ({why}).",
            fix=f"Give another --img_size or another {_FLAG}.",
        )

    def _prepare_size(self, size: tuple[int, int]) -> NetworkCall:
        if size not in self._calls:
            vae, dtype = self.pipe.vae, self.pipe.vae.dtype
            nn.Module.to(vae, torch.float32)
            call = self.probe.network_call(size).to(self.device)
            nn.Module.to(vae, dtype)
            self._calls[size] = call
        return self._calls[size]

    @property
    def _device(self) -> torch.device:
        return self.device

    def _build_network(self) -> Any:
        with init_empty_weights(include_buffers=False):  # constant buffers are on the CPU
            return self.network_class.from_config(self.network_config)

    def _checkpoint(self, network: Any) -> None:
        # Of transformers, diffusers 0.42 recomputes Chroma's blocks without their attention mask.
        if self.network_name == "unet" and network._supports_gradient_checkpointing:
            network.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
        else:
            super()._checkpoint(network)

    def encode(self, batch: Batch, keys: SampleKeys) -> DiffusersInputs:
        """Encode images and captions, unless they are encoded; captions are dropped to the empty one."""
        flips, stored = keys if self.random_flip else None, batch.encoded
        self._call_size = (batch.images_u8.shape[1], batch.images_u8.shape[2]) if stored is None else self.size
        self._call = call = self._prepare_size(self._call_size)
        if stored is None:
            mean, std = self.vae_posterior(to_unit_range(batch.images_u8, flips), len(call.latents.vae_shape))
            texts, empty = [self._text(caption) for caption in batch.captions], self._text("")
        else:
            mean, std = select_posterior(stored.latents, flips)
            texts, empty = stored_texts(call, stored.text, self._text_examples), self._stored_empty
        z = mean if std is None else mean + std * keys.normal(Purpose.LATENT, tuple(mean.shape[1:]))
        drop = keys.uniform(Purpose.CAPTION_DROP) < self.uncond_p
        return DiffusersInputs(call.latents.normalize(z), *self._collate(texts, empty, drop))

    @cached_property
    def _stored_empty(self) -> list[Any]:
        assert self.latents is not None
        text = LatentBatch(torch.empty(0), self.latents.read_empty_caption()).map(lambda value: value.to(self.device))
        return stored_texts(self._prepare_size(self.size), text.text, self._text_examples)[0]

    @torch.no_grad()
    def vae_posterior(self, images: Tensor, dimensions: int) -> tuple[Tensor, Tensor | None]:
        """Mean and standard deviation of the VAE's latents, of `dimensions` each; None for a deterministic VAE."""
        vae = self.pipe.vae
        if vae.config.get("in_channels") == 4:  # Qwen-Image 2.1: opaque
            images = torch.cat([images, torch.ones_like(images[:, :1])], dim=1)
        images = images.unsqueeze(2) if dimensions == 4 else images
        parts = images.to(vae.dtype).split(1 if self._vae_batch == 1 else len(images))
        encoded = [vae.encode(part) for part in parts]
        if not hasattr(encoded[0], "latent_dist"):
            return torch.cat([each.latent for each in encoded]).float(), None
        mean, std = (torch.cat([getattr(each.latent_dist, name) for each in encoded]) for name in ("mean", "std"))
        return mean.float(), std.float()

    def _text(self, caption: str) -> list[Any]:
        assert self._call is not None, "encode() comes first"
        if self._text_cache is None:
            values = self._text_arguments(caption, self._call_size)
            held = sum(tensor.nbytes for tensor in tree_leaves(values) if isinstance(tensor, Tensor))
            self._text_cache = LruCache(max(2, min(_CACHED_CAPTIONS, _CACHED_BYTES // max(1, held))))
        return self._text_cache.get((caption, self._call_size), lambda key: self._text_arguments(*key))

    def _text_arguments(self, caption: str, size: tuple[int, int]) -> list[Any]:
        """Encode a caption; an empty one, as of dropped captions, is what samples are guided away from."""
        call = self._prepare_size(size)
        values = self.probe.text_arguments(call, caption, size)
        sized = {"height": size[0], "width": size[1]}
        return values if caption else unconditional_text(call, values, lambda more: self._guided_calls(**sized, **more))

    def _guided_calls(self, **more: Any) -> list[dict[str, Any]]:
        """Return the arguments of the network in the first two calls of a sample with the prompt ""."""
        calls: list[dict[str, Any]] = []
        try:
            self._call_pipeline(self.probe.recorder(calls, 2), [""], [0], SampleSettings(), **more)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # CallEnded, or whatever a pipeline raises that lacks a negative prompt or another setting
            pass
        return calls

    def _collate(self, texts: list[list[Any]], empty: list[Any], drop: Tensor) -> list[Any]:
        """Batch the text arguments of single captions; those of dropped captions are the empty caption's."""
        assert self._call is not None
        columns: list[Any] = []
        dropped = drop.tolist() if self._call.has_lists and self.uncond_p else None
        for index, argument in enumerate(self._call.text):
            values = [text[index] for text in texts]
            if self._call.ragged or argument.is_list:
                values = [empty[index] if dropped and dropped[row] else value for row, value in enumerate(values)]
                columns.append([value[0] for value in values] if argument.is_list else values)
            else:
                rows = torch.cat(values)
                mask = drop.view(-1, *[1] * (rows.ndim - 1))
                columns.append(torch.where(mask, empty[index], rows) if self.uncond_p else rows)
        return columns

    def loss(self, network: nn.Module, encoded: Any, keys: SampleKeys) -> Tensor:
        """Compute the mean squared error of what the network predicts, weighted by noise level, for each sample."""
        assert self._call is not None, "encode() comes first"
        x, *texts = encoded
        level = self.levels.sample(keys, self._call.mu)
        e = keys.normal(Purpose.NOISE, tuple(x.shape[1:]))
        if self.lora and self.lora.dropout:
            set_dropout_keys(network, keys)
        output = self._call.predict(network, level.add_noise(x, e), level.timestep, texts)
        error = (output.float() - level.target(x, e)).square().flatten(1).mean(dim=1)
        return error if level.weight is None else error * level.weight

    def default_prompts(self) -> list[str]:
        """Return none: captions of the training data are used."""
        return []

    @torch.no_grad()
    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Call the pipeline with its own scheduler, steps and guidance, unless the settings say otherwise."""
        try:
            for other in self._other_networks:
                nn.Module.to(other, self.device)
            # Prompts of different lengths would be padded to the longest, which changes some images.
            alone = self._prepare_size(self.size).ragged or self._vae_batch == 1
            count = 1 if alone else len(prompts)
            groups = [slice(start, start + count) for start in range(0, len(prompts), count)]
            images = torch.cat([self._call_pipeline(network.forward, prompts[g], seeds[g], settings) for g in groups])
        finally:
            for other in self._other_networks:
                nn.Module.to(other, "cpu")
        images = images[:, 0] if images.ndim == 5 else images  # the only frame of a clip
        return images[:, :3].float() * 2.0 - 1.0  # without opacity

    def _call_pipeline(
        self, forward: Any, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings, **more: Any
    ) -> Tensor:
        native = native_settings(self._files)
        parameters = inspect.signature(type(self.pipe).__call__).parameters
        steps = native.settings.get("num_inference_steps", 50) if settings.steps == "auto" else settings.steps
        guidance = native.settings.get("guidance_scale", 1.0) if settings.guidance == "auto" else settings.guidance
        given = {
            "prompt": list(prompts),
            "height": self.size[0],
            "width": self.size[1],
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            **CALL_SETTINGS,
            "generator": [torch.Generator().manual_seed(seed) for seed in seeds],
            **more,
        }
        if "true_cfg_scale" in parameters and self._files.network.get("guidance_embeds") is not True:
            given |= {"true_cfg_scale": guidance, "negative_prompt": [_NEGATIVE] * len(prompts)}
            given.pop("guidance_scale")
        self._stand_in.forward = forward
        try:
            with self.prompts.remembered():
                images: Tensor = self.pipe(**{name: value for name, value in given.items() if name in parameters})[0]
        finally:
            del self._stand_in.forward
        return images

    @property
    def _other_networks(self) -> list[nn.Module]:
        """Networks of the pipeline that are not trained."""
        parts = [getattr(self.pipe, name, None) for name in NETWORKS if name != self.network_name]
        return [part for part in parts if isinstance(part, nn.Module)]

    @cached_property
    def _files(self) -> ModelFiles:
        return ModelFiles.read(self.folder, self.class_name, self.components)

    @cached_property
    def _forward_flops(self) -> int:
        call = self._prepare_size(self.size).to(torch.device("meta"))
        empty = self._stored_empty if self.latents else self.probe.text_arguments(call, "", self.size)
        texts: list[Any] = [
            [_to_meta(value)] if call.ragged else [_to_meta(value[0])] if argument.is_list else _to_meta(value)
            for argument, value in zip(call.text, empty, strict=True)
        ]
        latents = torch.zeros(1, *call.latents.shape, device="meta")
        try:
            with FlopCounterMode(display=False) as counter:
                call.predict(self._stand_in, latents, torch.zeros(1, device="meta"), texts)
            return int(counter.get_total_flops())
        except Exception:  # a network that reads values on the way cannot run on the meta device
            count = sum(parameter.numel() for parameter in self._stand_in.parameters())
            return 2 * count * self.tokens_per_image()

    def tokens_per_image(self) -> int:
        """Patches of latents per image."""
        return self._tokens(self._prepare_size(self.size))

    def _tokens(self, call: NetworkCall) -> int:
        shape = call.latents.shape
        if len(shape) == 2:
            return shape[0]
        patch = self.network_config.get("patch_size", 1)
        patch = patch[-1] if isinstance(patch, list | tuple) else patch
        return math.prod(shape[-2:]) // (patch if isinstance(patch, int) else 1) ** 2

    def summary(self) -> str:
        """Pipeline, folder, image size, objective, LoRA."""
        lora = ""
        if self.lora:
            lora = f", {self.lora.summary()}"
            lora += f", frozen weights in {self.base_precision}" if self.base_precision != "fp32" else ""
            lora += f", {self.swapped_blocks} blocks in host memory" if self.swapped_blocks else ""
        size = f"{self.size[0]} x {self.size[1]} px"
        encoded = "" if self.latents is None else ", encoded ahead of training"
        what = f"{self.network_name} of {self.class_name} in {self.folder} at {size}"
        return f"{what}, {self.levels.summary()}{lora}{encoded}"

    def describe(self) -> dict[str, Any]:
        """Name the folder, and everything that shapes the training."""
        encoders = [part for part in self.components if part not in (self.network_name, "scheduler")]
        return {
            "family": DIFFUSERS.key,
            "model": self.class_name,
            "img_size": self.size[0] if self.size[0] == self.size[1] else list(self.size),
            "label_names": [],
            "folder": str(self.folder),
            "network": self.network_name,
            "frozen_parts": " ".join(fingerprint(self.folder / name) for name in encoders),
            "objective": self.levels.describe(),
            "uncond_p": self.uncond_p,
            "lora": self._lora_description,
        }


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).to("meta")  # as the weights, without autocast
