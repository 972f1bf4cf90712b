"""HunyuanDiT: images through a VAE, captions through two text encoders, v-prediction on latents.

The transformer, the VAE and the text encoders are those of diffusers and transformers; a model is a folder in
diffusers layout. Two things differ from diffusers by intent: RoPE of images that are not square is that of the
official code, and the noise of an image is a function of its seed, so it is the same in every precision and batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DPMSolverMultistepScheduler, HunyuanDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, BertModel, T5EncoderModel
from transformers.utils import logging as transformers_logging

from muralist.core import rng
from muralist.core.formatting import loading_progress
from muralist.core.rng import Purpose, SampleKeys
from muralist.data.loader import Batch, select_posterior, to_unit_range
from muralist.data.packed import LatentSource, TextTensors
from muralist.diffusion.noise_levels import NoiseLevels, alphas_cumprod
from muralist.models.components import checked_loading
from muralist.models.lora import Lora, set_dropout_keys
from muralist.models.pipeline_spec import PipelineSpec
from muralist.models.spec import HUNYUAN_DIT, resolve
from muralist.settings import SampleSettings, TrainSettings
from muralist.settings.train import BasePrecision

BERT_TOKENS, T5_TOKENS = 77, 256  # fixed in HunyuanDiTPipeline
_PIXELS_PER_TOKEN = HUNYUAN_DIT.pixels_per_token
_PIXELS_PER_LATENT = 8
_BLOCK = "HunyuanDiTBlock"
_ROPE_GRID = 32  # tokens along a side of 512 pixels, the size at which RoPE was trained
_GUIDANCE = 5.0

transformers_logging.disable_progress_bar()


class HunyuanDiTInputs(NamedTuple):
    """Latents and both text embeddings with their masks."""

    latents: Tensor  # [B, 4, H / 8, W / 8]
    bert: Tensor  # [B, 77, C]
    bert_mask: Tensor  # [B, 77]
    t5: Tensor  # [B, 256, D]
    t5_mask: Tensor  # [B, 256]


class EncodedText(NamedTuple):
    """The embeddings of captions by both text encoders, with their masks."""

    bert: Tensor
    bert_mask: Tensor
    t5: Tensor
    t5_mask: Tensor


@dataclass
class FrozenEncoders:
    """VAE, text encoders and tokenizers, which are not trained."""

    vae: Any
    bert: Any
    bert_tokenizer: Any
    t5: Any
    t5_tokenizer: Any
    prompt_cache: dict[str, EncodedText] = field(default_factory=dict)
    """Embeddings of sample prompts, which are the same at every checkpoint."""

    @classmethod
    def load(cls, folder: Path) -> FrozenEncoders:
        """Load the components of a pipeline folder in float32 on the CPU."""
        loaders: dict[str, Any] = {"vae": AutoencoderKL, "text_encoder": BertModel, "text_encoder_2": T5EncoderModel}
        components = []
        for name, loader in loaders.items():
            with loading_progress(f"{name} of {folder}", folder / name), checked_loading():
                component: Any = loader.from_pretrained(folder, subfolder=name, local_files_only=True)
            components.append(component.eval().requires_grad_(False))
        vae, bert, t5 = components
        bert_tokenizer, t5_tokenizer = (
            AutoTokenizer.from_pretrained(folder, subfolder=name, local_files_only=True, trust_remote_code=False)
            for name in ("tokenizer", "tokenizer_2")
        )
        return cls(vae, bert, bert_tokenizer, t5, t5_tokenizer)

    def to(self, device: torch.device, dtype: torch.dtype, text_device: torch.device | None = None) -> None:
        """Move the components to a device; text encoders that are rarely used may stay on another."""
        nn.Module.to(self.vae, device, dtype)  # diffusers' own `to` logs a warning
        for encoder in (self.bert, self.t5):
            nn.Module.to(encoder, text_device or device, dtype)

    @torch.no_grad()
    def encode_text(self, captions: Sequence[str]) -> EncodedText:
        """Encode captions with both text encoders, as HunyuanDiTPipeline does."""
        outputs: list[Tensor] = []
        encoders = ((self.bert_tokenizer, self.bert, BERT_TOKENS), (self.t5_tokenizer, self.t5, T5_TOKENS))
        for tokenizer, encoder, length in encoders:
            tokens = tokenizer(
                list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )
            device = next(encoder.parameters()).device
            mask = tokens.attention_mask.to(device)
            outputs += [encoder(tokens.input_ids.to(device), attention_mask=mask)[0].float(), mask]
        return EncodedText(*outputs)

    def encode_prompts(self, prompts: Sequence[str], device: torch.device) -> EncodedText:
        """Encode each prompt alone and only once: on a CPU, a large text encoder takes seconds."""
        for prompt in prompts:
            if prompt not in self.prompt_cache:
                self.prompt_cache[prompt] = self.encode_text([prompt])
        texts = [self.prompt_cache[prompt] for prompt in prompts]
        return EncodedText(*(torch.cat(tensors).to(device) for tensors in zip(*texts, strict=True)))

    @torch.no_grad()
    def vae_posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the latents of images in [-1, 1], in the VAE's precision."""
        posterior = self.vae.encode(images.to(self.vae.dtype)).latent_dist
        return posterior.mean, posterior.std

    def encode_images(self, images: Tensor) -> Tensor:
        """Return mean and standard deviation of the latents of images in [-1, 1], [B, 2, ...]."""
        return torch.stack(self.vae_posterior(images), dim=1)

    def encode_captions(self, captions: Sequence[str]) -> list[dict[str, Any]]:
        """Return the embeddings of each caption in the dtype of its text encoder, and masks of a byte per token."""
        text = self.encode_text(captions)
        dtypes = (self.bert.dtype, torch.uint8, self.t5.dtype, torch.uint8)
        # encode_text() widens embeddings to float32: converting them back loses nothing.
        stored = [tensor.to(dtype) for tensor, dtype in zip(text, dtypes, strict=True)]
        return [dict(zip(EncodedText._fields, row, strict=True)) for row in zip(*stored, strict=True)]

    def sample_latents(self, mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """Sample scaled latents from the VAE's posterior with the given noise."""
        return (mean + std * noise).float() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode scaled latents to images in [-1, 1]."""
        latents = (latents / self.vae.config.scaling_factor).to(self.vae.dtype)
        return self.vae.decode(latents, return_dict=False)[0].float().clamp(-1, 1)


@dataclass(frozen=True)
class HunyuanDiTSpec(PipelineSpec):
    """A HunyuanDiT: its components, image size and caption dropout."""

    network_class = HunyuanDiT2DModel

    encoders: FrozenEncoders
    config: dict[str, Any]  # of the transformer
    scheduler_config: dict[str, Any]  # beta_end differs between version 1.2 and those before
    size: tuple[int, int]  # height, width
    folder: Path = Path()  # not given where a caller assembles the components, for sampling only
    uncond_p: float = 0.0
    uncond_p_t5: float = 0.0
    random_flip: bool = False
    gradient_checkpointing: bool = False
    lora: Lora | None = None  # None: the full transformer is trained
    base_precision: BasePrecision = "fp32"  # of frozen weights, with LoRA
    seed: int = 0
    label_names: list[str] = field(default_factory=list)  # captions, no classes
    latents: LatentSource | None = None  # the data set, if it was encoded ahead of training

    @classmethod
    def load(cls, folder: Path, size: tuple[int, int], **settings: Any) -> HunyuanDiTSpec:
        """Load a folder in diffusers layout."""
        HUNYUAN_DIT.check_size(size)
        configs = HUNYUAN_DIT.read_configs(folder)
        return cls(FrozenEncoders.load(folder), *configs, size, folder, **settings)

    @classmethod
    def from_settings(
        cls, settings: TrainSettings, label_names: list[str], latents: LatentSource | None = None
    ) -> HunyuanDiTSpec:
        """Build the spec of a training run; without `--model.path` that of the small model."""
        model, folder = settings.model, HUNYUAN_DIT.folder(settings)
        if latents is not None:
            HUNYUAN_DIT.check_latents(latents, folder, settings.data.random_flip)
        return cls.load(
            folder,
            model.size,
            uncond_p=model.uncond_p,
            uncond_p_t5=model.uncond_p_t5,
            random_flip=settings.data.random_flip,
            gradient_checkpointing=model.gradient_checkpointing,
            lora=Lora.from_settings(model),
            base_precision=HUNYUAN_DIT.base_precision(settings),
            seed=settings.seed,
            latents=latents,
        )

    @staticmethod
    def load_encoders(folder: Path, size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> FrozenEncoders:
        """Load the frozen components; they encode images of every size."""
        encoders = FrozenEncoders.load(folder)
        encoders.to(device, dtype)
        return encoders

    def to_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the frozen components; with encoded data, the text encoders only serve samples and stay on the CPU."""
        self.encoders.to(device, dtype, None if self.latents is None else torch.device("cpu"))
        # Cached before the loss is compiled: a tensor created inside a CUDA graph is overwritten by its next replay.
        self.__dict__["_levels"] = self._levels.to(device)  # the cached value; the class is frozen

    @property
    def _device(self) -> torch.device:
        return next(self.encoders.vae.parameters()).device  # type: ignore[no-any-return]

    def _build_network(self) -> nn.Module:
        with torch.device("meta"):
            return HunyuanDiT2DModel.from_config(self.config)  # type: ignore[no-any-return]

    def encode(self, batch: Batch, keys: SampleKeys) -> HunyuanDiTInputs:
        """Encode images and captions; each text encoder drops captions on its own, to the empty caption."""
        if batch.encoded is None:
            images = to_unit_range(batch.images_u8, keys if self.random_flip else None)
            text, (mean, std) = self.encoders.encode_text(batch.captions), self.encoders.vae_posterior(images)
        else:
            text = _widen(batch.encoded.text)
            mean, deviation = select_posterior(batch.encoded.latents, keys if self.random_flip else None)
            assert deviation is not None, "HunyuanDiT's VAE is not deterministic"
            std = deviation
        # The shape is the batch's own: with --multireso, batches differ in size.
        noise, empty = keys.normal(Purpose.LATENT, tuple(mean.shape[1:])), self._empty_caption
        probabilities = torch.tensor([self.uncond_p, self.uncond_p_t5], device=noise.device)
        drop = keys.uniform(Purpose.CAPTION_DROP, (2,)) < probabilities  # [B, 2]: BERT, T5
        drop_bert, drop_t5 = drop[:, 0, None], drop[:, 1, None]
        return HunyuanDiTInputs(
            self.encoders.sample_latents(mean, std, noise),
            torch.where(drop_bert[..., None], empty.bert, text.bert),
            torch.where(drop_bert, empty.bert_mask, text.bert_mask),
            torch.where(drop_t5[..., None], empty.t5, text.t5),
            torch.where(drop_t5, empty.t5_mask, text.t5_mask),
        )

    @cached_property
    def _empty_caption(self) -> EncodedText:
        if self.latents is None:
            return self.encoders.encode_text([""])
        device = next(self.encoders.vae.parameters()).device
        return EncodedText(*(tensor.to(device) for tensor in _widen(self.latents.read_empty_caption())))

    def loss(self, network: nn.Module, encoded: HunyuanDiTInputs, keys: SampleKeys) -> Tensor:
        """Compute the mean squared error of the predicted velocity, for each sample."""
        x = encoded.latents
        level = self._levels.sample(keys)
        e = keys.normal(Purpose.NOISE, tuple(x.shape[1:]))
        if self.lora and self.lora.dropout:
            set_dropout_keys(network, keys)
        output = self._predict(network, level.add_noise(x, e), level.timestep, EncodedText(*encoded[1:]))
        return (output.float() - level.target(x, e)).square().mean(dim=(1, 2, 3))

    @cached_property
    def _levels(self) -> NoiseLevels:
        alphas = alphas_cumprod(self.scheduler_config["beta_start"], self.scheduler_config["beta_end"])
        return NoiseLevels("velocity", "uniform", len(alphas), alphas=alphas)

    def _predict(self, network: nn.Module, latents: Tensor, t: Tensor, text: EncodedText) -> Tensor:
        conditions: dict[str, Tensor | None] = {"image_meta_size": None, "style": None}
        height, width = _PIXELS_PER_LATENT * latents.shape[-2], _PIXELS_PER_LATENT * latents.shape[-1]
        if self.config["use_style_cond_and_image_meta_size"]:  # version 1.1 and before
            meta = torch.tensor([[width, height, width, height, 0, 0]], dtype=torch.float32, device=latents.device)
            conditions["image_meta_size"] = meta.repeat(len(latents), 1)
            conditions["style"] = torch.zeros(len(latents), dtype=torch.int64, device=latents.device)
        output = network(
            latents,
            t,
            encoder_hidden_states=text.bert,
            text_embedding_mask=text.bert_mask,
            encoder_hidden_states_t5=text.t5,
            text_embedding_mask_t5=text.t5_mask,
            image_rotary_emb=rope_table(self.config["attention_head_dim"], (height, width), latents.device),
            return_dict=False,
            **conditions,
        )[0]
        return output.chunk(2, dim=1)[0]  # the other half is a learned variance that no sampler uses

    def default_prompts(self) -> list[str]:
        """Return the eight driving scenes of the embedded data set."""
        return list(resolve("muralist.demo.driving_world:PROMPTS"))

    @torch.no_grad()
    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Sample with DPM-Solver++ or DDIM and classifier-free guidance."""
        device = next(network.parameters()).device
        scheduler_class = DDIMScheduler if settings.solver == "ddim" else DPMSolverMultistepScheduler
        scheduler = scheduler_class.from_config(self.scheduler_config)
        scheduler.set_timesteps(settings.step_count, device=device)
        shape = (4, self.size[0] // _PIXELS_PER_LATENT, self.size[1] // _PIXELS_PER_LATENT)
        # Drawn on the CPU: a seed gives the same noise on every device.
        noise = rng.normal(0, Purpose.SAMPLE_NOISE, torch.tensor(list(seeds), dtype=torch.int64), shape)
        latents = noise.to(device) * scheduler.init_noise_sigma
        text = self.encoders.encode_prompts(prompts, device)
        empty = self.encoders.encode_prompts([""] * len(prompts), device)
        guidance = _GUIDANCE if settings.guidance == "auto" else settings.guidance
        for t in scheduler.timesteps:
            noisy = scheduler.scale_model_input(latents, t)
            times = t.float().expand(len(prompts))
            output = self._predict(network, noisy, times, text).float()
            if guidance != 1:
                unconditional = self._predict(network, noisy, times, empty).float()
                output = unconditional + guidance * (output - unconditional)
            latents = scheduler.step(output, t, latents, return_dict=False)[0]
        return self.encoders.decode(latents)

    @cached_property
    def _forward_flops(self) -> int:
        config = self.config
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            text = EncodedText(
                torch.zeros(1, BERT_TOKENS, config["cross_attention_dim"]),
                torch.ones(1, BERT_TOKENS),
                torch.zeros(1, T5_TOKENS, config["cross_attention_dim_t5"]),
                torch.ones(1, T5_TOKENS),
            )
            latents = torch.zeros(1, 4, self.size[0] // _PIXELS_PER_LATENT, self.size[1] // _PIXELS_PER_LATENT)
            self._predict(self.meta_model(), latents, torch.zeros(1), text)
        return int(counter.get_total_flops())

    def tokens_per_image(self) -> int:
        """Patches of latents per image."""
        return self.size[0] * self.size[1] // _PIXELS_PER_TOKEN**2

    def summary(self) -> str:
        """Folder, image size, objective, LoRA."""
        lora = f", {self.lora.summary()}" if self.lora else ""
        encoded = "" if self.latents is None else ", encoded ahead of training"
        return f"HunyuanDiT of {self.folder} at {self.size[0]} x {self.size[1]} px, v-prediction{lora}{encoded}"

    def describe(self) -> dict[str, Any]:
        """Name the folder, and everything that shapes the training."""
        return {
            "family": HUNYUAN_DIT.key,
            "model": HUNYUAN_DIT.name,
            "img_size": self.size[0] if self.size[0] == self.size[1] else list(self.size),
            "label_names": [],
            "folder": str(self.folder),
            "frozen_parts": self._frozen_parts,
            "beta_end": self.scheduler_config["beta_end"],
            "uncond_p": self.uncond_p,
            "uncond_p_t5": self.uncond_p_t5,
            "lora": self._lora_description,
        }

    @cached_property
    def _frozen_parts(self) -> str:
        return " ".join(HUNYUAN_DIT.encoder_fingerprints(self.folder).values())

    @staticmethod
    def trained_components(
        weights: Mapping[str, Tensor], description: Mapping[str, Any], dtype: torch.dtype
    ) -> dict[str, nn.Module]:
        """Load the transformer, with the RoPE of training."""
        components = PipelineSpec.trained_components(weights, description, dtype)
        return {name: _use_official_rope(network) for name, network in components.items()}


def _widen(stored: TextTensors) -> EncodedText:
    """Convert stored embeddings to the dtypes of encode_text()."""
    tensors: Any = (stored[name] for name in EncodedText._fields)
    return EncodedText(*(tensor.float() if tensor.is_floating_point() else tensor.long() for tensor in tensors))


def _use_official_rope(network: Any) -> Any:
    """Make diffusers' pipeline use the RoPE of training, which for square images is its own."""
    forward = network.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*inputs: Any, **named: Any) -> Any:
        bound = signature.bind(*inputs, **named)  # callers may pass every argument by position
        latents = bound.arguments["hidden_states"]
        size = (latents.shape[-2] * _PIXELS_PER_LATENT, latents.shape[-1] * _PIXELS_PER_LATENT)
        bound.arguments["image_rotary_emb"] = rope_table(network.config.attention_head_dim, size, latents.device)
        return forward(*bound.args, **bound.kwargs)

    network.forward = run
    return network


def rope_table(head_dim: int, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the official 2-D RoPE: positions in a 32 x 32 square that the longer side fills.

    A side of n tokens divides [start, stop) evenly; diffusers uses stop * (n - 1) / n as its end, which is the same for
    squares only.
    """
    grid = (size[0] // _PIXELS_PER_TOKEN, size[1] // _PIXELS_PER_TOKEN)
    extents = [round(_ROPE_GRID / max(grid) * count) for count in grid]  # of the image, centered in the square
    rows, columns = (
        round((_ROPE_GRID - extent) / 2) + extent * torch.arange(count, dtype=torch.float32, device=device) / count
        for extent, count in zip(extents, grid, strict=True)
    )
    positions = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).unsqueeze(1)
    return get_2d_rotary_pos_embed_from_grid(head_dim, positions, use_real=True)
