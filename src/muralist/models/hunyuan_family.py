"""HunyuanDiT as a family: pictures through a VAE, captions through two text encoders, v-prediction on latents.

The network, the VAE and the encoders are diffusers' and transformers'; a model is a folder in diffusers layout. Two things
differ from diffusers by intent: rotary positions of pictures that are not square are those of the official code, and a
picture's noise is keyed, so it is the same in every precision and batch.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DPMSolverMultistepScheduler, HunyuanDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, BertModel, T5EncoderModel
from transformers.utils import logging as transformers_logging

from muralist import keyed_random
from muralist.data.driving_world import PROMPTS
from muralist.data.encoded import EncodedSource
from muralist.data.encoded_batch import EncodedText, read_empty_caption
from muralist.data.loader import Batch
from muralist.diffusion import ddpm, flow
from muralist.errors import UserError
from muralist.keyed_random import Purpose, SampleKeys
from muralist.loading import loading
from muralist.models import variants
from muralist.models.family import is_mirrored, to_unit
from muralist.models.fingerprint import fingerprint
from muralist.models.frozen import check_encoded, frozen_fingerprints
from muralist.models.lora import Lora, is_adapter
from muralist.settings import SampleSettings, TrainSettings

transformers_logging.disable_progress_bar()
NAME = "HunyuanDiT"
_PIXELS_PER_TOKEN = variants.HUNYUAN_PIXELS_PER_TOKEN
_PIXELS_PER_LATENT = 8
_BASE_GRID = 32  # tokens along a side of 512 pixels, for which rotary positions were trained
BERT_TOKENS, T5_TOKENS = 77, 256  # fixed in HunyuanDiTPipeline
_GUIDANCE = 5.0
_T5_DROP = 1  # CAPTION_DROP is a block of two numbers: the first for BERT, the second for T5


class HunyuanEncoded(NamedTuple):
    """Latents and both embeddings of the caption with their masks."""

    latents: Tensor  # [B, 4, H / 8, W / 8]
    bert: Tensor  # [B, 77, C]
    bert_mask: Tensor  # [B, 77]
    t5: Tensor  # [B, 256, D]
    t5_mask: Tensor  # [B, 256]


class Text(NamedTuple):
    """Embeddings of captions."""

    bert: Tensor
    bert_mask: Tensor
    t5: Tensor
    t5_mask: Tensor


@dataclass
class FrozenParts:
    """What is not trained: VAE, text encoders and tokenizers, loaded from a diffusers folder."""

    vae: Any
    bert: Any
    bert_tokenizer: Any
    t5: Any
    t5_tokenizer: Any
    remembered: dict[str, Text] = field(default_factory=dict)
    """Prompts that were embedded before: at every checkpoint the same ones are drawn."""

    @classmethod
    def load(cls, folder: Path) -> FrozenParts:
        """Read them, in float32 on the CPU."""
        with loading(f"the VAE of {folder}", folder / "vae"):
            vae = AutoencoderKL.from_pretrained(folder, subfolder="vae", local_files_only=True)
        with loading(f"the first text encoder of {folder}", folder / "text_encoder"):
            bert = BertModel.from_pretrained(folder, subfolder="text_encoder", local_files_only=True)
        with loading(f"the second text encoder of {folder}", folder / "text_encoder_2"):
            t5 = T5EncoderModel.from_pretrained(folder, subfolder="text_encoder_2", local_files_only=True)
        for part in (vae, bert, t5):
            part.eval().requires_grad_(False)
        tokenizers = [
            AutoTokenizer.from_pretrained(folder, subfolder=name, local_files_only=True, trust_remote_code=False)
            for name in ("tokenizer", "tokenizer_2")
        ]
        return cls(vae, bert, tokenizers[0], t5, tokenizers[1])

    def to(self, device: torch.device, dtype: torch.dtype, text_device: torch.device | None = None) -> None:
        """Move them to where training happens; the text encoders elsewhere if they are hardly needed."""
        nn.Module.to(self.vae, device, dtype)  # diffusers' own warns of nothing
        for part in (self.bert, self.t5):
            nn.Module.to(part, text_device or device, dtype)

    @torch.no_grad()
    def embed(self, captions: Sequence[str]) -> Text:
        """Both embeddings of captions, as diffusers' pipeline makes them."""
        outputs: list[Tensor] = []
        pairs = ((self.bert_tokenizer, self.bert, BERT_TOKENS), (self.t5_tokenizer, self.t5, T5_TOKENS))
        for tokenizer, encoder, length in pairs:
            tokens = tokenizer(
                list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )
            device = next(encoder.parameters()).device
            mask = tokens.attention_mask.to(device)
            outputs += [encoder(tokens.input_ids.to(device), attention_mask=mask)[0].float(), mask]
        return Text(*outputs)

    def embed_prompts(self, prompts: Sequence[str], device: torch.device) -> Text:
        """The same on a device, each prompt alone and only once: on a CPU a large text encoder takes seconds."""
        for prompt in prompts:
            if prompt not in self.remembered:
                self.remembered[prompt] = self.embed([prompt])
        texts = [self.remembered[prompt] for prompt in prompts]
        return Text(*(torch.cat(parts).to(device) for parts in zip(*texts, strict=True)))

    @torch.no_grad()
    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the latents of images in [-1, 1], in the VAE's precision."""
        posterior = self.vae.encode(images.to(self.vae.dtype)).latent_dist
        return posterior.mean, posterior.std

    def draw(self, mean: Tensor, deviation: Tensor, noise: Tensor) -> Tensor:
        """Scaled latents, drawn from the VAE's posterior with the given noise."""
        return (mean + deviation * noise).float() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents to images in [-1, 1]."""
        latents = (latents / self.vae.config.scaling_factor).to(self.vae.dtype)
        return self.vae.decode(latents, return_dict=False)[0].float().clamp(-1, 1)


@dataclass(frozen=True)
class HunyuanFamily:
    """One HunyuanDiT: its parts, picture size and how captions are dropped."""

    parts: FrozenParts
    config: dict[str, Any]  # of the transformer
    schedule: dict[str, Any]  # of the noise: version 1.2 and the ones before it differ in beta_end
    size: tuple[int, int]  # height, width
    folder: Path | None = None  # None: put together by hand, to draw with
    uncond_p: float = 0.0
    uncond_p_t5: float = 0.0
    random_flip: bool = False
    gradient_checkpointing: bool = False
    lora: Lora | None = None  # None: the whole transformer is trained
    seed: int = 0
    label_names: list[str] = field(default_factory=list)  # it has captions, no classes
    encoded: EncodedSource | None = None  # the data set, where its latents and embeddings were made ahead

    @classmethod
    def load(cls, folder: Path, size: tuple[int, int], **settings: Any) -> HunyuanFamily:
        """The model in a folder of diffusers layout."""
        variants.check_hunyuan_size(size)
        try:
            config = json.loads((folder / "transformer" / "config.json").read_text())
            schedule = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} is not a {NAME} in diffusers layout.",
                f"The reason: {error}.",
                "Give the folder of a HunyuanDiTPipeline as --model.path, or leave it out to train a small one.",
            ) from None
        kind = (schedule.get("prediction_type"), schedule.get("beta_schedule"))
        if kind != ("v_prediction", "scaled_linear"):
            raise UserError(f"{folder} has another noise schedule than {NAME}: {kind[1]} with {kind[0]}.")
        return cls(FrozenParts.load(folder), config, schedule, size, folder, **settings)

    @classmethod
    def from_settings(cls, settings: TrainSettings, encoded: EncodedSource | None = None) -> HunyuanFamily:
        """The family a training run asks for; without a folder a small model is built beside the runs."""
        model = settings.model
        folder = Path(model.path) if model.path else small_folder(settings)
        if encoded is not None:
            check_encoded(encoded, folder, settings.data.random_flip)
        return cls.load(
            folder,
            model.size,
            uncond_p=model.uncond_p,
            uncond_p_t5=model.uncond_p_t5,
            random_flip=settings.data.random_flip,
            gradient_checkpointing=model.gradient_checkpointing,
            lora=Lora(model.lora_rank, tuple(model.lora_targets)) if model.training_parts == "lora" else None,
            seed=settings.seed,
            encoded=encoded,
        )

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring what is not trained to a device; encoded data need text encoders for the prompts of samples alone."""
        self.parts.to(device, dtype, None if self.encoded is None else torch.device("cpu"))

    def network(self) -> nn.Module:
        """The transformer as the folder has it, in float32; LoRA on it changes nothing yet."""
        assert self.folder is not None
        with loading(f"the transformer of {self.folder}", self.folder / "transformer"):
            network = HunyuanDiT2DModel.from_pretrained(self.folder, subfolder="transformer", local_files_only=True)
            network = network.float().train()
        network = self._prepared(network)
        if self.lora:
            self.lora.initialise(network, self.seed)
        return network

    def skeleton(self) -> nn.Module:
        """The transformer's shapes, without memory for its weights."""
        with torch.device("meta"):
            return self._prepared(HunyuanDiT2DModel.from_config(self.config))

    def _prepared(self, network: nn.Module) -> nn.Module:
        network._no_split_modules = ("HunyuanDiTBlock",)  # type: ignore[assignment]
        if self.lora:
            self.lora.insert(network)
        if self.gradient_checkpointing:  # diffusers has none for this network
            for block in network.blocks:  # type: ignore[union-attr]
                block.forward = _recomputed(block.forward)
        return network

    def encode(self, batch: Batch, keys: SampleKeys) -> HunyuanEncoded:
        """Picture to latents and caption to embeddings; dropped captions become the empty one, for each encoder apart."""
        if batch.encoded is None:
            images = to_unit(batch.images_u8, keys if self.random_flip else None)
            text, (mean, deviation) = self.parts.embed(batch.captions), self.parts.posterior(images)
        else:
            text, (mean, deviation) = _text(batch.encoded.text), self._chosen(batch.encoded.latents, keys)
        # Not always the shape of `size`: batches may differ (--multireso).
        noise, empty = keys.normal(Purpose.LATENT, tuple(mean.shape[1:])), self._empty
        dropped = keys.uniform(Purpose.CAPTION_DROP, (2,)) < torch.tensor(
            [self.uncond_p, self.uncond_p_t5], device=noise.device
        )
        bert, t5 = dropped[:, 0, None], dropped[:, _T5_DROP, None]
        return HunyuanEncoded(
            self.parts.draw(mean, deviation, noise),
            torch.where(bert[..., None], empty.bert, text.bert),
            torch.where(bert, empty.bert_mask, text.bert_mask),
            torch.where(t5[..., None], empty.t5, text.t5),
            torch.where(t5, empty.t5_mask, text.t5_mask),
        )

    def _chosen(self, latents: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each picture, or of its mirror image where its key says so."""
        chosen = latents[:, 0]
        if self.random_flip:
            chosen = torch.where(is_mirrored(keys)[:, None, None, None, None], latents[:, 1], chosen)
        return chosen[:, 0], chosen[:, 1]

    @cached_property
    def _empty(self) -> Text:
        if self.encoded is None:
            return self.parts.embed([""])
        device = next(self.parts.vae.parameters()).device
        return Text(*(part.to(device) for part in _text(read_empty_caption(self.encoded))))

    def loss(self, network: nn.Module, encoded: HunyuanEncoded, keys: SampleKeys) -> Tensor:
        """Squared error of the predicted velocity, for each sample."""
        x = encoded.latents
        step = ddpm.draw_step(keys)
        e = flow.draw_noise(keys, tuple(x.shape[1:]))
        a = self._signal_left.to(x.device)[step]
        output = self._predict(network, ddpm.add_noise(x, e, a), step.float(), Text(*encoded[1:]))
        return (output.float() - ddpm.velocity(x, e, a)).square().mean(dim=(1, 2, 3))

    @cached_property
    def _signal_left(self) -> Tensor:
        return ddpm.signal_left(self.schedule["beta_start"], self.schedule["beta_end"])

    def _predict(self, network: nn.Module, latents: Tensor, step: Tensor, text: Text) -> Tensor:
        conditions: dict[str, Tensor | None] = {"image_meta_size": None, "style": None}
        height, width = 8 * latents.shape[-2], 8 * latents.shape[-1]
        if self.config["use_style_cond_and_image_meta_size"]:  # version 1.1 and before
            meta = torch.tensor([[width, height, width, height, 0, 0]], dtype=torch.float32, device=latents.device)
            conditions["image_meta_size"] = meta.repeat(len(latents), 1)
            conditions["style"] = torch.zeros(len(latents), dtype=torch.int64, device=latents.device)
        output = network(
            latents,
            step,
            encoder_hidden_states=text.bert,
            text_embedding_mask=text.bert_mask,
            encoder_hidden_states_t5=text.t5,
            text_embedding_mask_t5=text.t5_mask,
            image_rotary_emb=rotary_table(self.config["attention_head_dim"], (height, width), latents.device),
            return_dict=False,
            **conditions,
        )[0]
        return output.chunk(2, dim=1)[0]  # the other half is a variance that nothing samples with

    def default_prompts(self) -> list[str]:
        """The eight of guide 3."""
        return list(PROMPTS)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Any text will do."""

    @torch.no_grad()
    def sample(
        self, network: nn.Module, prompts: Sequence[str], seeds: Sequence[int], settings: SampleSettings
    ) -> Tensor:
        """Pictures by a few steps of DPM-Solver++ or DDIM with guidance."""
        device = next(network.parameters()).device
        kind = DDIMScheduler if settings.solver == "ddim" else DPMSolverMultistepScheduler
        solver = kind.from_config(self.schedule)
        solver.set_timesteps(settings.steps, device=device)
        shape = (4, self.size[0] // 8, self.size[1] // 8)
        numbers = torch.tensor(list(seeds), dtype=torch.int64)
        # Drawn on the CPU: the same seed is the same noise whatever the card.
        latents = keyed_random.normal(0, Purpose.SAMPLE_NOISE, numbers, shape).to(device) * solver.init_noise_sigma
        text = self.parts.embed_prompts(prompts, device)
        empty = self.parts.embed_prompts([""] * len(prompts), device)
        guidance = _GUIDANCE if settings.guidance == "auto" else settings.guidance
        for step in solver.timesteps:
            noisy = solver.scale_model_input(latents, step)
            at = step.float().expand(len(prompts))
            output = self._predict(network, noisy, at, text).float()
            if guidance != 1:
                without = self._predict(network, noisy, at, empty).float()
                output = without + guidance * (output - without)
            latents = solver.step(output, step, latents, return_dict=False)[0]
        return self.parts.decode(latents)

    @torch.no_grad()
    def adopt(self, network: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
        """Start from weights of another run that trains the same."""
        own = {name: value.shape for name, value in network.state_dict().items() if self.stores(name)}
        if own == {name: value.shape for name, value in weights.items()}:
            network.load_state_dict(weights, strict=False)
            return
        whole, theirs_whole = self.lora is None, not any(map(is_adapter, weights))
        if whole != theirs_whole:
            here, there = "the whole network" if whole else "LoRA", "a whole network" if theirs_whole else "LoRA alone"
            raise UserError(
                f"The weights of {origin} do not fit: here {here} is trained, and they are {there}.",
                fix=f"Make a model of them with `muralist export {origin} FOLDER`, and train it with --model.path FOLDER.",
            )
        fix = "Give the weights of the same network." if whole else "Give the same --lora_rank and --lora_targets."
        raise UserError(f"The weights of {origin} do not fit this {NAME}.", fix=fix)

    def stores(self, name: str) -> bool:
        """Everything; of LoRA, that alone: the rest is in the model's folder."""
        return self.lora is None or is_adapter(name)

    def flops_per_image(self) -> int:
        """Forward, counted once on shapes alone, and twice as much backward; VAE and text encoders come on top.

        Frozen weights have no gradients of their own: then backward takes about what forward does.
        """
        return (2 if self.lora else 3) * self._forward_flops

    @cached_property
    def _forward_flops(self) -> int:
        config = self.config
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            text = Text(
                torch.zeros(1, BERT_TOKENS, config["cross_attention_dim"]),
                torch.ones(1, BERT_TOKENS),
                torch.zeros(1, T5_TOKENS, config["cross_attention_dim_t5"]),
                torch.ones(1, T5_TOKENS),
            )
            latents = torch.zeros(1, 4, self.size[0] // 8, self.size[1] // 8)
            self._predict(self.skeleton(), latents, torch.zeros(1), text)
        return int(counter.get_total_flops())

    def tokens_per_image(self) -> int:
        """Patches of latents per picture."""
        return self.size[0] * self.size[1] // _PIXELS_PER_TOKEN**2

    def summary(self) -> str:
        """Folder, size, objective and LoRA."""
        lora = f", LoRA of rank {self.lora.rank} on {' '.join(self.lora.targets)}" if self.lora else ""
        ahead = "" if self.encoded is None else ", encoded ahead"
        return f"{NAME} of {self.folder} at {self.size[0]} x {self.size[1]} px, v-prediction{lora}{ahead}"

    def describe(self) -> dict[str, Any]:
        """The folder and what shapes the training."""
        return {
            "family": "hunyuandit",
            "model": NAME,
            "img_size": self.size[0] if self.size[0] == self.size[1] else list(self.size),
            "label_names": [],
            "folder": str(self.folder),
            "frozen_parts": self._frozen_parts,
            "beta_end": self.schedule["beta_end"],
            "uncond_p": self.uncond_p,
            "uncond_p_t5": self.uncond_p_t5,
            "lora": self._lora_facts,
        }

    @cached_property
    def _frozen_parts(self) -> str:
        """A fingerprint of what is not trained: with another VAE or text encoder a run would be another run."""
        if self.folder is None:
            return ""
        return " ".join(frozen_fingerprints(self.folder).values())

    @cached_property
    def _lora_facts(self) -> dict[str, Any] | None:
        if self.lora is None or self.folder is None:
            return None
        # The transformer beside it is not in a checkpoint, so it must be the same when the checkpoint is read.
        base = fingerprint(self.folder / "transformer")
        return {"rank": self.lora.rank, "targets": list(self.lora.targets), "base": base}


def small_folder(settings: TrainSettings) -> Path:
    """Where a small model lies, beside the runs that train it."""
    return Path(settings.results_dir) / "models" / "small-hunyuandit"


def _text(encoded: EncodedText) -> Text:
    """Embeddings that were made ahead, as embed() would give them."""
    return Text(encoded.bert.float(), encoded.bert_mask.long(), encoded.t5.float(), encoded.t5_mask.long())


def _recomputed(forward: Any) -> Any:
    """A forward whose activations are computed again in the backward pass instead of kept."""

    def run(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return recompute(forward, *inputs, use_reentrant=False, **named)

    return run


def with_official_rotation(network: Any) -> Any:
    """Let diffusers' pipeline draw with the rotary positions that were trained here, which for squares are its own."""
    forward = network.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*inputs: Any, **named: Any) -> Any:
        bound = signature.bind(*inputs, **named)
        latents = bound.arguments["hidden_states"]
        size = (latents.shape[-2] * _PIXELS_PER_LATENT, latents.shape[-1] * _PIXELS_PER_LATENT)
        bound.arguments["image_rotary_emb"] = rotary_table(network.config.attention_head_dim, size, latents.device)
        return forward(*bound.args, **bound.kwargs)

    network.forward = run
    return network


def rotary_table(head_dim: int, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens' places in a square of 32 x 32, into which a picture's longer side fits.

    n places divide the way from start to stop without its end; diffusers takes start to stop * (n - 1) / n, which is the
    same for squares only.
    """
    grid = (size[0] // _PIXELS_PER_TOKEN, size[1] // _PIXELS_PER_TOKEN)
    extents = [round(_BASE_GRID / max(grid) * count) for count in grid]  # of the picture in that square, in its middle
    rows, columns = (
        round((_BASE_GRID - extent) / 2) + extent * torch.arange(count, dtype=torch.float32, device=device) / count
        for extent, count in zip(extents, grid, strict=True)
    )
    places = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).unsqueeze(1)
    return get_2d_rotary_pos_embed_from_grid(head_dim, places, use_real=True)
