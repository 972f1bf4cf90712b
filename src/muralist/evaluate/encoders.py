"""Encoders that turn images and prompts into features: Inception, CLIP and DINOv2.

An encoder is a small description that processes can send to each other; `load` reads its weights onto a device.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from muralist.core.errors import UserError, first_line
from muralist.data.decode import decode_image, decode_pixels
from muralist.evaluate import inception

GPU_BATCH = 64
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
TEXT_LENGTH = 77  # tokens of a prompt that CLIP reads
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_FIXES = {
    "CLIP": "Give the folder of a CLIP model as transformers saves it, such as a copy of openai/clip-vit-large-patch14.",
    "DINOv2": "Give the folder of a DINOv2 model as transformers saves it, best a copy of facebook/dinov2-large.",
}


Row = Tensor | tuple[Tensor, ...]
"""The input of an encoder for one item: a tensor, or several, such as pixels and tokens."""


@dataclass(frozen=True)
class LoadedEncoder:
    """The functions of an encoder on its device."""

    prepare: Callable[[Any], Any]
    """Turn what an item holds (the bytes of an image file, a prompt, or both) into a `Row` of a batch, on the CPU;
    called in threads."""
    compute: Callable[[Any], Tensor]
    """Turn a batch into float32 features [B, D]."""
    stack: Callable[[list[Any]], Any] = torch.stack
    """Turn rows into a batch."""
    max_batch: int | None = None
    """The most items of a batch: 1 where the rows have different shapes."""


@dataclass(frozen=True)
class Encoder(ABC):
    """Defines features: `sha256`, `tf32` and `variant` determine them, apart from the device."""

    source: Path
    """The file or folder of the weights."""
    sha256: str
    """SHA-256 of the weights."""
    width: int
    """The number of features of an item."""
    name: str
    """A short name, used for folders."""
    tf32: bool = False
    """Whether a GPU may convolve and multiply in TF32."""
    variant: str = ""
    """What else determines the features; empty for the usual ones."""

    @abstractmethod
    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""

    def takes_pixels_on(self, device: torch.device) -> bool:
        """Whether `prepare` only decodes an image to uint8 [H, W, 3]: then the decoder processes do it."""
        return False


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class InceptionEncoder(Encoder):
    """The 2048 features of FID."""

    @classmethod
    def from_file(cls, weights: Path, tf32: bool = True, resize: str = "pytorch-fid") -> InceptionEncoder:
        """Describe the encoder with the weights of a file; TF32 as in pytorch-fid."""
        variant = "" if resize == "pytorch-fid" else resize
        return cls(weights, file_sha256(weights), inception.FEATURES, "inception", tf32, variant)

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        network = inception.fold_batch_norms(inception.load_inception(self.source)).to(device)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 20% faster on CPUs

        def compute(batch: Tensor) -> Tensor:
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=self.tf32):
                return network(batch.to(device).contiguous(memory_format=torch.channels_last))

        if device.type == "cpu":
            prepare = _clean_input if self.variant else lambda data: inception.preprocess(_decode(data)[None])[0]
            return LoadedEncoder(prepare, compute)
        generator = torch.Generator(device).manual_seed(0)
        probe = 2 * torch.rand(GPU_BATCH, 3, inception.SIDE, inception.SIDE, generator=generator, device=device) - 1
        inception.fuse_if_bit_exact(network, compute, probe, lambda: inception.fill_free_memory_with_nan(device))
        if self.variant:
            return LoadedEncoder(_clean_input, compute)
        copy_stream = torch.cuda.Stream(device)
        return LoadedEncoder(_decode, compute, lambda rows: _stack_on(copy_stream, rows, device))

    def takes_pixels_on(self, device: torch.device) -> bool:
        """A GPU resizes as pytorch-fid does."""
        return device.type != "cpu" and not self.variant


def _decode(data: bytes) -> Tensor:
    return torch.from_numpy(decode_pixels(data))


def _clean_input(data: bytes) -> Tensor:
    return inception.preprocess_clean(decode_pixels(data))


def _stack_on(stream: torch.cuda.Stream, images: list[Tensor], device: torch.device) -> Tensor:
    """Copy and resize a batch on a side stream, while the GPU computes the previous one."""
    with torch.cuda.stream(stream):
        batch = inception.preprocess_batch(images, device)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(stream)
    batch.record_stream(computing)  # otherwise its memory would be reused too early
    return batch


_CLIP_SIZES = {(768, 12): "B", (1024, 24): "L", (1280, 32): "H"}
CMMD_REPORTED = "ViT-L/14 at 336 px"
"""The model of published CMMD values: openai/clip-vit-large-patch14-336."""
AESTHETIC_REPORTED = "ViT-L/14 at 224 px"
"""The model whose embeddings the LAION aesthetic score was trained on: openai/clip-vit-large-patch14."""


@dataclass(frozen=True)
class ClipEncoder(Encoder):
    """L2-normalized CLIP embeddings of images (name clip) or of prompts (name clip-text)."""

    size: str = ""
    """The model's usual name and the side of its images, such as ViT-L/14 at 224 px."""

    @classmethod
    def from_checkpoint(cls, folder: Path) -> tuple[ClipEncoder, ClipEncoder]:
        """Check a checkpoint, and describe its image and text encoders."""
        from transformers import CLIPConfig, CLIPModel

        config, sha256 = _inspect_checkpoint(folder, CLIPConfig, CLIPModel, "CLIP")
        width = int(config.projection_dim or 0)
        vision = config.vision_config
        known = _CLIP_SIZES.get((vision.hidden_size, vision.num_hidden_layers), "")
        size = f"ViT{known and f'-{known}'}/{vision.patch_size} at {vision.image_size} px"
        images, texts = (cls(folder, sha256, width, name, size=size) for name in ("clip", "clip-text"))
        with _explained(f"The tokenizer or the image processor in {folder} cannot be loaded.", "CLIP"):
            images.processor()
            texts.tokenizer()
            if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers goes on with no words
                raise ValueError(f"there is none of {' and '.join(_TOKENIZER_FILES)}")
        return images, texts

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights: the complete model, because some checkpoints' halves do not record their widths."""
        from transformers import CLIPModel

        model = _load_checkpoint(self.source, CLIPModel, "CLIP").to(device)
        return self._text_encoder(model, device) if self.name == "clip-text" else self._image_encoder(model, device)

    def _image_encoder(self, model: Any, device: torch.device) -> LoadedEncoder:
        processor = self.processor()

        def prepare(data: bytes) -> Tensor:
            return processor(images=decode_image(data), return_tensors="pt")["pixel_values"][0]

        def compute(batch: Tensor) -> Tensor:
            output = model.vision_model(pixel_values=batch.to(device)).pooler_output
            return F.normalize(model.visual_projection(output), dim=-1)

        return LoadedEncoder(prepare, compute)

    def _text_encoder(self, model: Any, device: torch.device) -> LoadedEncoder:
        tokenizer = self.tokenizer()

        def prepare(prompt: str) -> Tensor:
            tokens = tokenizer(
                prompt, padding="max_length", truncation=True, max_length=TEXT_LENGTH, return_tensors="pt"
            )
            return torch.stack((tokens["input_ids"][0], tokens["attention_mask"][0]))

        def compute(batch: Tensor) -> Tensor:
            tokens, mask = batch.to(device).unbind(1)
            output = model.text_model(input_ids=tokens, attention_mask=mask).pooler_output
            return F.normalize(model.text_projection(output), dim=-1)

        return LoadedEncoder(prepare, compute)

    def processor(self) -> Any:
        """Load the checkpoint's image processor."""
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil.from_pretrained(self.source, local_files_only=True)

    def tokenizer(self) -> Any:
        """Load the checkpoint's tokenizer."""
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(self.source, local_files_only=True)

    def count_truncated(self, prompts: list[str]) -> int:
        """Return how many different prompts are longer than CLIP reads."""
        tokenizer = self.tokenizer()
        tokenizer.model_max_length = 1 << 30  # else it warns about every long prompt
        return sum(len(tokenizer(prompt)["input_ids"]) > TEXT_LENGTH for prompt in set(prompts))


def truncation_warnings(count: int, tokens: int, reader: str) -> list[str]:
    """Return what to say about so many prompts of more than `tokens` tokens."""
    prompts, verb = ("prompt", "is") if count == 1 else ("prompts", "are")
    text = f"{count:,} {prompts} {verb} longer than the {tokens} tokens {reader} reads, and {verb} truncated."
    return [text] if count else []


def crop_as_torchvision(data: bytes, side: int) -> Tensor:
    """Resize the shorter side and crop the center as torchvision does, which rounds the place where others floor it."""
    image = decode_image(data)
    short = min(image.size)
    width, height = (side if edge == short else int(side * edge / short) for edge in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    image = image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    return (pixels - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]


DINOV2_SIDE = 224
DINOV2_RESIZING = (
    "bicubic to 224 x 224 with antialiasing, by Pillow, whatever the shape; ImageNet's mean and deviation; "
    "as dgm-eval does"
)
DINOV2_REPORTED = "ViT-L/14"
"""The model of published FD-DINOv2 values."""
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DINOV2_SIZES = {(384, 12): "S", (768, 12): "B", (1024, 24): "L", (1536, 40): "g"}


@dataclass(frozen=True)
class Dinov2Encoder(Encoder):
    """The class token of DINOv2 after the last norm, as dgm-eval and EDM2 compute FD-DINOv2."""

    size: str = ""
    """The model's usual name, such as ViT-L/14."""

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Dinov2Encoder:
        """Check a checkpoint, and describe its encoder."""
        from transformers import Dinov2Config, Dinov2Model

        config, sha256 = _inspect_checkpoint(folder, Dinov2Config, Dinov2Model, "DINOv2")
        layers, width, patch = config.num_hidden_layers, config.hidden_size, config.patch_size
        if DINOV2_SIDE % patch:
            raise UserError(
                f"The DINOv2 in {folder} has patches of {patch} pixels.",
                f"{DINOV2_SIDE} is not a multiple of {patch}.",
                _FIXES["DINOv2"],
            )
        known = _DINOV2_SIZES.get((width, layers))
        size = f"ViT-{known}/{patch}" if known else f"ViT/{patch} of {layers} layers, {width} wide"
        return cls(folder, sha256, width, "dinov2", size=size)

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights."""
        from transformers import Dinov2Model

        model = _load_checkpoint(self.source, Dinov2Model, "DINOv2")
        _resize_position_embeddings(model)
        model.to(device)
        return LoadedEncoder(_dinov2_input, lambda batch: model(pixel_values=batch.to(device)).pooler_output)


def _dinov2_input(data: bytes) -> Tensor:
    image = decode_image(data).resize((DINOV2_SIDE, DINOV2_SIDE), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    return (pixels - torch.tensor(_IMAGENET_MEAN)[:, None, None]) / torch.tensor(_IMAGENET_STD)[:, None, None]


def _resize_position_embeddings(model: Any) -> None:
    """Resize the position embeddings, learned at 518 x 518, as Meta's code does.

    Meta's code interpolates with a scale factor that is 0.1 patch too large, where transformers passes the output size.
    Published values come from Meta's code.
    """
    embeddings = model.embeddings.position_embeddings
    side, target = round((embeddings.shape[1] - 1) ** 0.5), DINOV2_SIDE // model.config.patch_size
    if side == target:
        return
    grid = embeddings[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = (target + 0.1) / side
    resized = F.interpolate(grid, scale_factor=(scale, scale), mode="bicubic")
    positions = resized.permute(0, 2, 3, 1).reshape(1, target * target, -1)
    model.embeddings.position_embeddings = torch.nn.Parameter(torch.cat((embeddings[:, :1], positions), 1), False)


def _inspect_checkpoint(folder: Path, config_class: Any, model_class: Any, name: str) -> tuple[Any, str]:
    """Check that a transformers checkpoint is complete; return its configuration and the SHA-256 of its files."""
    if not folder.is_dir():
        raise UserError(f"The folder {folder}, which --{name.lower()}_path names, does not exist.", fix=_FIXES[name])
    try:
        config = config_class.from_pretrained(folder, local_files_only=True)
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        if kind != config_class.model_type or not weights:
            raise ValueError(f"the model type is {kind}, with {len(weights)} files of weights")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"The reader reported: {first_line(error)}."
        raise UserError(f"{folder} is not a {name} checkpoint.", why, _FIXES[name]) from None
    _load_checkpoint(folder, model_class, name, device_map="meta")  # reads the names and shapes of the tensors
    settings = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".txt"))
    return config, hashlib.sha256("".join(map(file_sha256, weights + settings)).encode()).hexdigest()


def _load_checkpoint(folder: Path, model_class: Any, name: str, **options: Any) -> Any:
    """Load a transformers model in float32, for inference; transformers would fill missing tensors with noise."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    what = f"The {name} model in {folder} cannot be loaded."
    with _explained(what, name):
        model, found = model_class.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **options
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(what, f"It lacks the tensor {missing[0]}, and {len(missing)} in all.", _FIXES[name])
    return model.eval().requires_grad_(False)


@contextmanager
def _explained(what: str, name: str) -> Iterator[None]:
    """Turn any error into a UserError: the readers of other libraries raise nearly any exception on foreign files."""
    try:
        yield
    except Exception as error:
        raise UserError(what, f"The reader reported: {first_line(error)}.", _FIXES[name]) from None
