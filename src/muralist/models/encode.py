"""`muralist pack --encode`: a data set through the frozen parts of a HunyuanDiT, once and ahead of training."""

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

from muralist.data.encoded import CAPTION_FILES
from muralist.data.images import height_width
from muralist.data.manifest import EncodedManifest, Manifest
from muralist.data.packed import Chunk, Facts, PackReport, check_space, write_pack
from muralist.data.packed_rows import RowWriter
from muralist.errors import UserError
from muralist.models import variants
from muralist.models.family import to_unit
from muralist.models.frozen import FROZEN_PARTS, frozen_fingerprints
from muralist.models.hunyuan_family import BERT_TOKENS, T5_TOKENS, FrozenParts
from muralist.settings import PackSettings

SMALL = "small"
BATCH = 4
"""Pictures or captions at once, always: how many a GPU or CPU computes together can change the last bits of each."""
_LESS_SPACE = "Free some space or choose another place; --dtype bf16 takes half of what fp32 does."
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def encode(settings: PackSettings, progress: bool = True) -> PackReport:
    """Pack latents and text embeddings instead of pixels and captions."""
    variants.check_hunyuan_size(height_width(settings.img_size))
    with _model_folder(settings.encode or SMALL) as folder:
        kind = _Encoded(settings, folder)
        try:
            return write_pack(
                settings.source,
                settings.destination,
                settings.img_size,
                kind,
                settings.num_workers,
                progress,
                settings.caption,
                settings.cameras,
            )
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                "The GPU ran out of memory while encoding.",
                f"{BATCH} pictures go through the VAE at once; other programs may take some of the memory.",
                "Give --dtype bf16, a smaller --img_size, or a GPU that other programs leave free.",
            ) from None


@contextmanager
def _model_folder(name: str) -> Iterator[Path]:
    """The model's folder; the small model is built for the time being."""
    if name != SMALL:
        folder = Path(name).expanduser()
        if missing := next((part for part in FROZEN_PARTS if not (folder / part).is_dir()), None):
            raise UserError(
                f"{name} is not a HunyuanDiT in diffusers layout: it has no folder {missing}.",
                fix=f"Give the folder of a HunyuanDiTPipeline as --encode, or {SMALL} for the small one that train builds.",
            )
        yield folder
        return
    from muralist.models.small_hunyuan import build_small_hunyuan

    with tempfile.TemporaryDirectory() as place:
        yield build_small_hunyuan(Path(place, "model"))


class _Encoded:
    """Keeps what the VAE and the text encoders make."""

    def __init__(self, settings: PackSettings, folder: Path) -> None:
        self.folder, self.name = folder, settings.encode or SMALL
        self.dtype, self.mirrored = _TYPES[settings.dtype], settings.random_flip
        self.size = height_width(settings.img_size)
        self.marks = frozen_fingerprints(folder)
        self.shape = [2 if self.mirrored else 1, 2, 4, self.size[0] // 8, self.size[1] // 8]
        self.row_bytes = math.prod(self.shape) * self.dtype.itemsize

    def made(self, manifest: Manifest) -> bool:
        """Whether the same parts made it in the same way."""
        return isinstance(manifest, EncodedManifest) and (manifest.frozen_parts, manifest.dtype, manifest.mirrored) == (
            self.marks,
            self.dtype_name,
            self.mirrored,
        )

    @property
    def dtype_name(self) -> str:
        """As a manifest names it."""
        return str(self.dtype).removeprefix("torch.")

    def writer(self, folder: Path, images: int) -> _Writer:
        """Begin a part."""
        return _Writer(self, self._parts, folder, images)

    @cached_property
    def _parts(self) -> FrozenParts:
        """Loaded when the first picture is to be encoded, not for a pack that is finished already."""
        parts = FrozenParts.load(self.folder)
        parts.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"), self.dtype)
        return parts


class _Writer:
    """Encodes and writes one part of a data set."""

    def __init__(self, kind: _Encoded, parts: FrozenParts, folder: Path, images: int) -> None:
        import pyarrow

        self.kind, self.parts, self.folder, self.left = kind, parts, folder, images
        width = kind.dtype.itemsize
        self.shapes = {
            "latents": kind.shape,
            "bert": [BERT_TOKENS, parts.bert.config.hidden_size],
            "t5": [T5_TOKENS, parts.t5.config.d_model],
        }
        columns = {"latents": pyarrow.binary(kind.row_bytes), "label": pyarrow.int32(), "caption": pyarrow.int64()}
        self.latents = RowWriter(folder, columns)
        columns = {
            "bert": pyarrow.binary(math.prod(self.shapes["bert"]) * width),
            "bert_mask": pyarrow.binary(BERT_TOKENS),
            "t5": pyarrow.binary(math.prod(self.shapes["t5"]) * width),
            "t5_mask": pyarrow.binary(T5_TOKENS),
            "text": pyarrow.string(),
        }
        self.texts = RowWriter(folder, columns, CAPTION_FILES)
        self.rows: dict[str, int] = {}  # of the captions seen so far
        self.new_captions: list[str] = []
        self.images: list[tuple[np.ndarray, int, int]] = []  # pixels, label, caption's row
        self._row_of("")
        # How many captions differ shows only on the way, and they are what takes most of the space.
        most, free = images * (kind.row_bytes + self.texts.row_bytes), shutil.disk_usage(folder).free
        if most > free:
            print(
                f"If every picture has a caption of its own, this needs up to {most / 1e9:,.1f} GB, and "
                f"{free / 1e9:,.1f} GB are free.",
                file=sys.stderr,
            )

    def add(self, chunk: Chunk) -> None:
        """Encode the images of a chunk and the captions that are new, in whole batches."""
        for image, label, caption in zip(chunk.images, chunk.labels.tolist(), chunk.captions, strict=True):
            self.images.append((image, label, self._row_of(caption)))
            if len(self.images) == BATCH:
                self._write_images()
        self.left -= chunk.asked
        check_space(self.folder, self.left * self.latents.row_bytes, _LESS_SPACE)

    def close(self, facts: Facts) -> Manifest | None:
        """Write what is left."""
        if self.images:
            self._write_images()
        if self.new_captions:
            self._write_captions()
        if not (files := self.latents.close()):
            return None
        return EncodedManifest(
            rows_per_batch=self.latents.rows_per_batch,
            files=files,
            caption_files=self.texts.close(),
            captions_per_batch=self.texts.rows_per_batch,
            model=self.kind.name,
            frozen_parts=self.kind.marks,
            dtype=self.kind.dtype_name,
            mirrored=self.kind.mirrored,
            shapes=self.shapes,
            **facts._asdict(),
        )

    def _row_of(self, caption: str) -> int:
        if caption not in self.rows:
            self.rows[caption] = len(self.rows)
            self.new_captions.append(caption)
            if len(self.new_captions) == BATCH:
                self._write_captions()
        return self.rows[caption]

    def _write_images(self) -> None:
        count, (height, width) = len(self.images), self.kind.size
        pixels = np.stack([image for image, _, _ in self.images]).reshape(count, height, width, 3)
        pixels = np.concatenate([pixels, pixels[-1:].repeat(BATCH - count, axis=0)])
        views = [pixels, np.ascontiguousarray(pixels[:, :, ::-1])][: self.kind.shape[0]]
        device = next(self.parts.vae.parameters()).device
        images = [to_unit(torch.from_numpy(view).to(device), None) for view in views]
        latents = torch.stack([torch.stack(self.parts.posterior(image), dim=1) for image in images], dim=1)
        _, labels, captions = zip(*self.images, strict=True)
        self.latents.add(self._bytes(latents[:count]), labels, captions)
        self.images = []

    def _write_captions(self) -> None:
        count = len(self.new_captions)
        text = self.parts.embed(self.new_captions + [""] * (BATCH - count))
        masks = {name: getattr(text, name)[:count].to("cpu", torch.uint8).numpy() for name in ("bert_mask", "t5_mask")}
        # embed() widens to float32 what was computed in the type asked for: narrowing it again loses nothing.
        bert, t5 = (self._bytes(part[:count].to(self.kind.dtype)) for part in (text.bert, text.t5))
        self.texts.add(bert, masks["bert_mask"], t5, masks["t5_mask"], self.new_captions)
        self.new_captions = []

    def _bytes(self, rows: Tensor) -> Any:
        if not torch.isfinite(rows).all():
            raise UserError(
                f"{self.kind.name} gives numbers beyond the range of {self.kind.dtype_name}.",
                fix="Give --dtype bf16 or --dtype fp32.",
            )
        return rows.contiguous().cpu().view(torch.uint8).view(len(rows), -1).numpy()
