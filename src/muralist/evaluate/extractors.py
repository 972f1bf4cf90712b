"""What turns pictures and prompts into features: each is described by something small that processes can send each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from muralist.data.images import decode
from muralist.errors import UserError
from muralist.evaluate import inception

TEXT_LENGTH = 77
AT_ONCE = 64  # pictures that a GPU computes


@dataclass(frozen=True)
class Loaded:
    """An extractor on its device, as functions; those of a CPU's work run in threads."""

    prepare: Callable[[Any], Tensor]
    """On the CPU: one picture, as the bytes of its file, or one prompt, as a row of a batch."""
    compute: Callable[[Tensor], Tensor]
    """A batch to float32 features [B, D]."""
    stack: Callable[[list[Tensor]], Tensor] = torch.stack
    """Rows to a batch."""
    takes_pixels: bool = False
    """Whether `prepare` only decodes a picture, to uint8 [H, W, 3]: then other processes can do it."""


class Extractor(Protocol):
    """Which features: digest and tf32 name everything that they depend on, apart from the device."""

    @property
    def name(self) -> str:
        """Short, for folders."""

    @property
    def digest(self) -> str:
        """SHA-256 of the weights."""

    @property
    def width(self) -> int:
        """How many numbers describe an item."""

    @property
    def source(self) -> Path:
        """The file or folder of its weights."""

    @property
    def tf32(self) -> bool:
        """Whether a GPU may round to 10 bits before it multiplies."""

    def load(self, device: torch.device) -> Loaded:
        """Read the weights."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pixels(data: bytes) -> Tensor:
    return torch.from_numpy(np.array(decode(data)))


@dataclass(frozen=True)
class InceptionFeatures:
    """The 2048 numbers of FID."""

    weights: Path
    digest: str
    name: str = "inception"
    width: int = inception.FEATURES

    tf32: bool = True
    """Whether a GPU may round to 10 bits before it multiplies, as for pytorch-fid; bench/fid_speed.py measures it."""

    @classmethod
    def of(cls, weights: Path, tf32: bool = True) -> InceptionFeatures:
        """Features by the weights of a file."""
        return cls(weights, file_digest(weights), tf32=tf32)

    @property
    def source(self) -> Path:
        """The file or folder of its weights."""
        return self.weights

    def load(self, device: torch.device) -> Loaded:
        """Read the weights."""
        from muralist.evaluate.inception_weights import load_inception

        network = inception.fold_norms(load_inception(self.weights)).to(device)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a fifth faster on CPUs

        def compute(batch: Tensor) -> Tensor:
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=self.tf32):
                return network(batch.to(device).contiguous(memory_format=torch.channels_last))

        if device.type == "cpu":
            return Loaded(lambda data: inception.network_input(_pixels(data)), compute)
        generator = torch.Generator(device).manual_seed(0)
        probe = 2 * torch.rand(AT_ONCE, 3, inception.SIDE, inception.SIDE, generator=generator, device=device) - 1
        inception.fuse_where_the_same(network, compute, probe, lambda: inception.spoil_memory(device))
        copies = torch.cuda.Stream(device)
        return Loaded(_pixels, compute, lambda rows: _resized_beside(rows, device, copies), takes_pixels=True)


def _resized_beside(pictures: list[Tensor], device: torch.device, copies: torch.cuda.Stream) -> Tensor:
    """A batch that the GPU fetches and resizes while it computes the one before."""
    with torch.cuda.stream(copies):
        batch = inception.resized(pictures, device)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(copies)
    batch.record_stream(computing)  # else its memory would be taken for free too early
    return batch


@dataclass(frozen=True)
class ClipFeatures:
    """CLIP's embeddings of pictures (name clip) or of prompts (name clip-text), of length 1."""

    folder: Path
    digest: str
    width: int
    name: str
    tf32: bool = False

    @classmethod
    def both(cls, folder: Path) -> tuple[ClipFeatures, ClipFeatures]:
        """Pictures' and prompts' features by one checkpoint, after a look at what it says of itself."""
        from transformers import CLIPConfig

        config, digest = look_at_checkpoint(folder, CLIPConfig, "CLIP", "--clip_path", _CLIP_FIX)
        width = int(config.projection_dim or 0)
        return cls(folder, digest, width, "clip"), cls(folder, digest, width, "clip-text")

    @property
    def source(self) -> Path:
        """The file or folder of its weights."""
        return self.folder

    def load(self, device: torch.device) -> Loaded:
        """Read the weights."""
        return self._load_text(device) if self.name == "clip-text" else self._load_images(device)

    def _load_images(self, device: torch.device) -> Loaded:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        model = _read_clip(self.folder).to(device)
        processor = CLIPImageProcessorPil.from_pretrained(self.folder, local_files_only=True)

        def prepare(data: bytes) -> Tensor:
            return processor(images=decode(data), return_tensors="pt")["pixel_values"][0]

        def compute(batch: Tensor) -> Tensor:
            return _unit(model.visual_projection(model.vision_model(pixel_values=batch.to(device)).pooler_output))

        return Loaded(prepare, compute)

    def _load_text(self, device: torch.device) -> Loaded:
        model = _read_clip(self.folder).to(device)
        tokenizer = self.tokenizer()

        def prepare(prompt: str) -> Tensor:
            words = tokenizer(
                prompt, padding="max_length", truncation=True, max_length=TEXT_LENGTH, return_tensors="pt"
            )
            return torch.stack((words["input_ids"][0], words["attention_mask"][0]))

        def compute(batch: Tensor) -> Tensor:
            words, mask = batch.to(device).unbind(1)
            return _unit(model.text_projection(model.text_model(input_ids=words, attention_mask=mask).pooler_output))

        return Loaded(prepare, compute)

    def tokenizer(self) -> Any:
        """What cuts prompts into CLIP's words."""
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(self.folder, local_files_only=True)

    def count_cut(self, prompts: list[str]) -> int:
        """How many prompts are longer than CLIP reads."""
        tokenizer = self.tokenizer()
        tokenizer.model_max_length = 1 << 30  # else it warns about every long one
        return sum(len(tokenizer(prompt)["input_ids"]) > TEXT_LENGTH for prompt in set(prompts))


_CLIP_FIX = "Give the folder of a CLIP model as transformers saves it, such as a copy of openai/clip-vit-large-patch14."


def _read_clip(folder: Path) -> Any:
    """The whole model: some checkpoints' halves do not say their widths."""
    from transformers import CLIPModel

    return read_checkpoint(folder, CLIPModel, "CLIP", _CLIP_FIX)


def look_at_checkpoint(folder: Path, config_class: Any, name: str, flag: str, fix: str) -> tuple[Any, str]:
    """What a folder that transformers wrote says of itself, and the SHA-256 of all that it holds."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}, which {flag} names.", fix=fix)
    try:
        config = config_class.from_pretrained(folder, local_files_only=True)
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is not a {name} checkpoint.", f"The reader said: {_first_line(error)}.", fix
        ) from None
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    if kind != config_class.model_type or not weights:
        raise UserError(f"{folder} is not a {name} checkpoint.", fix=fix)
    settings = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".txt"))
    return config, hashlib.sha256("".join(map(file_digest, weights + settings)).encode()).hexdigest()


def read_checkpoint(folder: Path, model_class: Any, name: str, fix: str) -> Any:
    """A model of transformers in float32, ready to compute."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        said = _first_line(error)
        raise UserError(f"The {name} model in {folder} cannot be loaded.", f"The reader said: {said}.", fix) from None
    return model.eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")


def _unit(embeds: Tensor) -> Tensor:
    return embeds / embeds.norm(dim=-1, keepdim=True)
