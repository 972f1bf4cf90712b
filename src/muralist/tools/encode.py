"""`muralist pack --encode`: run the frozen encoders of a pipeline on a data set once, ahead of training."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.image_size import height_width
from muralist.data.loader import to_unit_range
from muralist.data.packed import CAPTION_FILES, EncodedManifest, Manifest, RowWriter, StoredTensor
from muralist.models.hub import find_model
from muralist.models.spec import HUNYUAN_DIT, LatentEncoders, ModelFamily, find_family_of_pipeline
from muralist.settings import ModelSettings, PackSettings
from muralist.tools.pack import Chunk, PackFormat, PackReport, pack

SMALL = "small"
BATCH = 4  # images or captions per forward pass, always: the batch size can change the last bits of each
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TRIAL_CAPTIONS = ["", "a red car", "a quiet street with nine parked cars and two tall trees in the rain"]


def encode(settings: PackSettings, progress: bool = True) -> PackReport:
    """Pack latents and text embeddings instead of pixels and captions."""
    with _model_folder(settings) as (family, folder):
        place, workers = (settings.source, settings.destination, settings.img_size), settings.num_workers
        format = _LatentFormat(settings, family, folder)
        try:
            return pack(*place, workers, progress, settings.caption, settings.cameras, format)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                "CUDA out of memory while encoding.",
                f"The VAE encodes {BATCH} images at once; other programs may use some of the memory.",
                "Give --dtype bf16, a smaller --img_size, or a GPU that no other program uses.",
            ) from None


@contextmanager
def _model_folder(settings: PackSettings) -> Iterator[tuple[ModelFamily, Path]]:
    """Yield the family and the folder of the model; the small HunyuanDiT is built in a temporary folder."""
    name = settings.encode or SMALL
    if name != SMALL:
        folder = find_model(str(Path(name).expanduser()), "--encode")
        family = find_family_of_pipeline(folder, "--encode")
        family.check(ModelSettings(name=family.name, path=str(folder), img_size=settings.img_size))
        yield family, folder
        return
    HUNYUAN_DIT.check_size(height_width(settings.img_size))
    with tempfile.TemporaryDirectory() as place:
        yield HUNYUAN_DIT, HUNYUAN_DIT.build_small(Path(place, "model"))


class _LatentFormat(PackFormat):
    """Writes latents and text tensors: the output of the frozen encoders of a model, shaped by a few settings."""

    def __init__(self, settings: PackSettings, family: ModelFamily, folder: Path) -> None:
        self.family, self.folder, self.name = family, folder, settings.encode or SMALL
        self.dtype, self.mirrored = _DTYPES[settings.dtype], settings.random_flip
        self.dtype_name = _name(self.dtype)
        self.size = height_width(settings.img_size)
        self.fingerprints = family.encoder_fingerprints(folder)

    @property
    def row_bytes(self) -> int:
        """Bytes of the latents of an image."""
        return math.prod(self.latents.shape) * self.latents.itemsize

    def matches(self, manifest: Manifest) -> bool:
        """Return whether the same encoders and settings made a pack."""
        if not isinstance(manifest, EncodedManifest):
            return False
        made_by = (manifest.family, manifest.frozen_parts, manifest.dtype, manifest.mirrored)
        return made_by == (self.family.key, self.fingerprints, self.dtype_name, self.mirrored)

    @cached_property
    def model(self) -> LatentEncoders:
        """The encoders, loaded on first use: a pack that is already finished does not need them."""
        return self.family.load_encoders(self.folder, self.size, self.device, self.dtype)

    @cached_property
    def device(self) -> torch.device:
        """Where the encoders run."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def latents(self) -> StoredTensor:
        """Dtype and shape of the latents of an image, from a trial."""
        images = torch.rand((1, 3, *self.size), generator=torch.Generator().manual_seed(0)).to(self.device) * 2 - 1
        rows = self.model.encode_images(images)
        return StoredTensor(_name(self._stored_dtype(rows)), [2 if self.mirrored else 1, *rows.shape[1:]])  # type: ignore[arg-type]

    def open(self, folder: Path, images: int) -> None:
        """Begin a part."""
        import pyarrow

        trials = [self.model.encode_captions([caption])[0] for caption in _TRIAL_CAPTIONS]
        self.text_tensors = {name: self._describe_text(name, [trial[name] for trial in trials]) for name in trials[0]}
        columns = {"latents": pyarrow.binary(self.row_bytes), "label": pyarrow.int32(), "caption": pyarrow.int64()}
        self.rows = RowWriter(folder, columns)
        widths = {
            column: size for name, each in self.text_tensors.items() for column, size in each.columns(name).items()
        }
        columns = {
            name: pyarrow.large_binary() if size is None else pyarrow.binary(size) for name, size in widths.items()
        }
        longest = 0
        if None in widths.values():
            longest = sum(_tensor(value).nbytes for value in trials[-1].values())
        self.texts = RowWriter(folder, {**columns, "text": pyarrow.string()}, CAPTION_FILES, longest)
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
            family=self.family.key,
            frozen_parts=self.fingerprints,
            dtype=self.dtype_name,
            mirrored=self.mirrored,
            tensors={"latents": self.latents, **self.text_tensors},
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
        views = [pixels, np.ascontiguousarray(pixels[:, :, ::-1])][: self.latents.shape[0]]
        images = [to_unit_range(torch.from_numpy(view).to(self.device), None) for view in views]
        latents = torch.stack([self.model.encode_images(image) for image in images], dim=1)[:count]
        _, labels, captions = zip(*self.images, strict=True)
        self.rows.add(np.stack([self._bytes("latents", self.latents, row) for row in latents]), labels, captions)
        self.images = []

    def _write_captions(self) -> None:
        count = len(self.new_captions)
        texts = self.model.encode_captions(self.new_captions + [""] * (BATCH - count))[:count]
        columns: list[Any] = []
        for name, stored in self.text_tensors.items():
            tensors = [_tensor(text[name]) for text in texts]
            content = [self._bytes(name, stored, tensor) for tensor in tensors]
            if stored.varies:
                shapes = np.array([tensor.shape for tensor in tensors], dtype="<i8")
                columns += [[row.tobytes() for row in content], shapes.view(np.uint8).reshape(count, -1)]
            else:
                columns.append(np.stack(content))
        self.texts.add(*columns, self.new_captions)
        self.new_captions = []

    def _describe_text(self, name: str, values: Sequence[Any]) -> StoredTensor:
        """Find dtype and shape of a text tensor from those of a few captions."""
        if len({type(value) for value in values}) > 1 or not isinstance(values[0], Tensor | bool | int | float):
            kinds = " or ".join(sorted({type(value).__name__ for value in values}))
            raise UserError(
                f"Captions of {self.name} cannot be stored: {name} is {kinds}, not a tensor.",
                fix="Train it on the images themselves, without --encode.",
            )
        tensors = [_tensor(value) for value in values]
        dtype = self._stored_dtype(*tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len({len(shape) for shape in shapes}) > 1:
            raise UserError(
                f"Captions of {self.name} cannot be stored: {name} has {' or '.join(map(str, shapes))} elements.",
                fix="Train it on the images themselves, without --encode.",
            )
        shape = [sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*shapes, strict=True)]
        return StoredTensor(_name(dtype), shape, not isinstance(values[0], Tensor))  # type: ignore[arg-type]

    def _stored_dtype(self, *tensors: Tensor) -> torch.dtype:
        """Choose the dtype of the encoders where it loses nothing, as of embeddings that a pipeline widens."""
        narrow = all(
            tensor.dtype is torch.float32 and torch.equal(tensor.to(self.dtype).float(), tensor) for tensor in tensors
        )
        return self.dtype if narrow else tensors[0].dtype

    def _bytes(self, name: str, stored: StoredTensor, tensor: Tensor) -> np.ndarray:
        """Convert a tensor to the bytes of a row."""
        if (tensor.isnan() | (tensor == math.inf)).any():  # -inf is what a mask may hold
            raise UserError(
                f"{self.name} gives values beyond the range of {self.dtype_name}.",
                fix="Give --dtype bf16 or --dtype fp32.",
            )
        row = tensor.to(getattr(torch, stored.dtype))
        fits = len(stored.shape) == tensor.ndim
        fits = fits and all(size in (0, mine) for size, mine in zip(stored.shape, tensor.shape, strict=True))
        if not fits or not torch.equal(row.to(tensor.dtype), tensor):
            raise UserError(
                f"{self.name} gives {name} as {_name(tensor.dtype)} {list(tensor.shape)}, which does not fit into "
                f"{stored.dtype} {stored.shape}.",
                "Its shape or precision depends on the caption in a way that a few trial captions did not show.",
                "Give --dtype fp32, or train on the images themselves.",
            )
        return row.contiguous().cpu().flatten().view(torch.uint8).numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(value: Any) -> Tensor:
    """Return a text tensor, or a Python number as one, which keeps its precision."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
