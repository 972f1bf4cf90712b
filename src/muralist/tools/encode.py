"""`muralist pack --encode`: run the frozen encoders of a HunyuanDiT on a data set once, ahead of training."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.data.decode import height_width
from muralist.data.loader import to_unit_range
from muralist.data.packed import CAPTION_FILES, EncodedManifest, Manifest, RowWriter
from muralist.models.hub import find_model
from muralist.models.hunyuan_dit import BERT_TOKENS, ENCODER_COMPONENTS, T5_TOKENS, FrozenEncoders, encoder_fingerprints
from muralist.models.spec import HUNYUAN_DIT
from muralist.settings import PackSettings
from muralist.tools.pack import Chunk, PackFormat, PackReport, pack

SMALL = "small"
BATCH = 4  # images or captions per forward pass, always: the batch size can change the last bits of each
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def encode(settings: PackSettings, progress: bool = True) -> PackReport:
    """Pack latents and text embeddings instead of pixels and captions."""
    HUNYUAN_DIT.check_size(height_width(settings.img_size))
    with _model_folder(settings.encode or SMALL) as folder:
        place, workers = (settings.source, settings.destination, settings.img_size), settings.num_workers
        format = _LatentFormat(settings, folder)
        try:
            return pack(*place, workers, progress, settings.caption, settings.cameras, format)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                "CUDA out of memory while encoding.",
                f"The VAE encodes {BATCH} images at once; other programs may use some of the memory.",
                "Give --dtype bf16, a smaller --img_size, or a GPU that no other program uses.",
            ) from None


@contextmanager
def _model_folder(name: str) -> Iterator[Path]:
    """Yield the model's folder; the small model is built in a temporary folder."""
    if name != SMALL:
        folder = find_model(str(Path(name).expanduser()), "--encode")
        if missing := next((part for part in ENCODER_COMPONENTS if not (folder / part).is_dir()), None):
            raise UserError(
                f"{name} is not a HunyuanDiT in diffusers layout: it has no folder {missing}.",
                fix=f"Give --encode the folder of a HunyuanDiTPipeline, or {SMALL} for the small model of the demo.",
            )
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        yield HUNYUAN_DIT.build_small(Path(place, "model"))


class _LatentFormat(PackFormat):
    """Writes latents and text embeddings: the output of the frozen encoders of a model, shaped by a few settings."""

    def __init__(self, settings: PackSettings, folder: Path) -> None:
        self.folder, self.name = folder, settings.encode or SMALL
        self.dtype, self.mirrored = _DTYPES[settings.dtype], settings.random_flip
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.size = height_width(settings.img_size)
        self.fingerprints = encoder_fingerprints(folder)
        self.shape = [2 if self.mirrored else 1, 2, 4, self.size[0] // 8, self.size[1] // 8]
        super().__init__(math.prod(self.shape) * self.dtype.itemsize)

    def matches(self, manifest: Manifest) -> bool:
        """Return whether the same encoders and settings made a pack."""
        if not isinstance(manifest, EncodedManifest):
            return False
        made_by = (manifest.frozen_parts, manifest.dtype, manifest.mirrored)
        return made_by == (self.fingerprints, self.dtype_name, self.mirrored)

    @cached_property
    def model(self) -> FrozenEncoders:
        """The encoders, loaded on first use: a pack that is already finished does not need them."""
        model = FrozenEncoders.load(self.folder)
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"), self.dtype)
        return model

    def open(self, folder: Path, images: int) -> None:
        """Begin a part."""
        import pyarrow

        width = self.dtype.itemsize
        self.shapes = {
            "latents": self.shape,
            "bert": [BERT_TOKENS, self.model.bert.config.hidden_size],
            "t5": [T5_TOKENS, self.model.t5.config.d_model],
        }
        columns = {"latents": pyarrow.binary(self.row_bytes), "label": pyarrow.int32(), "caption": pyarrow.int64()}
        self.rows = RowWriter(folder, columns)
        columns = {
            "bert": pyarrow.binary(math.prod(self.shapes["bert"]) * width),
            "bert_mask": pyarrow.binary(BERT_TOKENS),
            "t5": pyarrow.binary(math.prod(self.shapes["t5"]) * width),
            "t5_mask": pyarrow.binary(T5_TOKENS),
            "text": pyarrow.string(),
        }
        self.texts = RowWriter(folder, columns, CAPTION_FILES)
        self.caption_rows: dict[str, int] = {}
        self.new_captions: list[str] = []
        self.images: list[tuple[np.ndarray, int, int]] = []  # pixels, label, caption's row
        self._caption_row("")
        # The number of distinct captions is unknown before the end, and their embeddings take most of the space.
        most, free = images * (self.row_bytes + self.texts.row_bytes), shutil.disk_usage(folder).free
        if most > free:
            need = f"If every image has its own caption, this needs up to {most / 1e9:,.1f} GB"
            print(f"{need}, and {free / 1e9:,.1f} GB are free; bf16 takes half as much as fp32.", file=sys.stderr)

    def add(self, chunk: Chunk) -> None:
        """Encode the images of a chunk and its new captions, in full batches."""
        for image, label, caption in zip(chunk.images, chunk.labels.tolist(), chunk.captions, strict=True):
            self.images.append((image, label, self._caption_row(caption)))
            if len(self.images) == BATCH:
                self._write_images()

    def close(self, metadata: dict[str, Any]) -> Manifest | None:
        """Encode and write the remaining rows."""
        if self.images:
            self._write_images()
        if self.new_captions:
            self._write_captions()
        if not (files := self.rows.close()):
            return None
        return EncodedManifest(
            rows_per_batch=self.rows.rows_per_batch,
            files=files,
            caption_files=self.texts.close(),
            captions_per_batch=self.texts.rows_per_batch,
            model=self.name,
            frozen_parts=self.fingerprints,
            dtype=self.dtype_name,
            mirrored=self.mirrored,
            shapes=self.shapes,
            **metadata,
        )

    def _caption_row(self, caption: str) -> int:
        if caption not in self.caption_rows:
            self.caption_rows[caption] = len(self.caption_rows)
            self.new_captions.append(caption)
            if len(self.new_captions) == BATCH:
                self._write_captions()
        return self.caption_rows[caption]

    def _write_images(self) -> None:
        count, (height, width) = len(self.images), self.size
        pixels = np.stack([image for image, _, _ in self.images]).reshape(count, height, width, 3)
        pixels = np.concatenate([pixels, pixels[-1:].repeat(BATCH - count, axis=0)])
        views = [pixels, np.ascontiguousarray(pixels[:, :, ::-1])][: self.shape[0]]
        device = next(self.model.vae.parameters()).device
        images = [to_unit_range(torch.from_numpy(view).to(device), None) for view in views]
        latents = torch.stack([torch.stack(self.model.vae_posterior(image), dim=1) for image in images], dim=1)
        _, labels, captions = zip(*self.images, strict=True)
        self.rows.add(self._bytes(latents[:count]), labels, captions)
        self.images = []

    def _write_captions(self) -> None:
        count = len(self.new_captions)
        text = self.model.encode_text(self.new_captions + [""] * (BATCH - count))
        masks = {name: getattr(text, name)[:count].to("cpu", torch.uint8).numpy() for name in ("bert_mask", "t5_mask")}
        # encode_text() widens its result to float32: converting it back loses nothing.
        bert, t5 = (self._bytes(part[:count].to(self.dtype)) for part in (text.bert, text.t5))
        self.texts.add(bert, masks["bert_mask"], t5, masks["t5_mask"], self.new_captions)
        self.new_captions = []

    def _bytes(self, rows: Tensor) -> Any:
        if not torch.isfinite(rows).all():
            raise UserError(
                f"{self.name} gives values beyond the range of {self.dtype_name}.",
                fix="Give --dtype bf16 or --dtype fp32.",
            )
        return rows.contiguous().cpu().view(torch.uint8).view(len(rows), -1).numpy()
