"""Model output to image files: uint8 conversion, PNG, JPEG and WebP with metadata, thumbnails, contact sheets."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from PIL import ExifTags, Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

if TYPE_CHECKING:
    import torch

# Pillow's decoders that are used: others, such as PostScript's, start programs on the content of a file.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MAX_JPEG_EXIF = 60_000  # bytes; a segment of a JPEG has 65,533
_PAPER, _EMPTY = (250, 248, 244), (225, 222, 215)
_INK, _CAPTION_INK, _TITLE_INK = (32, 34, 40), (90, 92, 100), (128, 130, 138)
_LABEL_WIDTH, _TITLE_HEIGHT, _CAPTION_HEIGHT = 190, 34, 18


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Convert [-1, 1], [B, 3, H, W] to uint8 [B, H, W, 3], rounded."""
    import torch  # takes seconds, which the process that starts workers must not spend

    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def to_uint8_array(images: torch.Tensor) -> np.ndarray:
    """The same as a NumPy array."""
    return to_uint8(images).cpu().numpy()


def encode_png(image: np.ndarray, metadata: dict[str, str]) -> bytes:
    """Encode a PNG with text metadata."""
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def encode_jpeg(image: np.ndarray, metadata: dict[str, str], quality: int) -> bytes:
    """Encode a JPEG without chroma subsampling (4:4:4), with metadata in EXIF."""
    buffer = io.BytesIO()
    exif = exif_metadata(_shortened(metadata, _MAX_JPEG_EXIF))
    Image.fromarray(image).save(buffer, "JPEG", quality=quality, subsampling=0, exif=exif)
    return buffer.getvalue()


def encode_webp(image: np.ndarray, metadata: dict[str, str], quality: int | None) -> bytes:
    """Encode a WebP of a quality from 1 to 100, or lossless if None, with metadata in EXIF."""
    buffer = io.BytesIO()
    options = {"lossless": True} if quality is None else {"quality": quality}
    Image.fromarray(image).save(buffer, "WEBP", exif=exif_metadata(metadata), **options)
    return buffer.getvalue()


def exif_metadata(metadata: dict[str, str]) -> bytes:
    """Return EXIF whose image description is the metadata as a JSON object."""
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = json.dumps(metadata)
    return exif.tobytes()


def _shortened(metadata: dict[str, str], limit: int) -> dict[str, str]:
    """Shorten the longest texts until the metadata fit; the ledger has the complete prompt."""
    metadata = dict(metadata)
    while len(json.dumps(metadata)) > limit:
        name = max(metadata, key=lambda name: len(metadata[name]))
        metadata[name] = f"{metadata[name][: len(metadata[name]) // 2]}..."
    return metadata


def read_metadata(image: Image.Image) -> dict[str, str]:
    """Return the text metadata of an image: of a PNG, or the JSON object in EXIF that muralist writes."""
    texts = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
    with suppress(Exception):  # damaged EXIF says nothing
        content = json.loads(image.getexif().get(ExifTags.Base.ImageDescription, ""))
        texts |= {str(name): value for name, value in content.items() if isinstance(value, str)}
    return texts


def thumbnail(file: Path | IO[bytes], side: int) -> Image.Image | None:
    """Read an image scaled into a square of this side, in RGB; None if it is not readable."""
    try:
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            image.thumbnail((side, side))
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def contact_sheet(
    rows: Sequence[Iterable[Image.Image | None]],
    columns: int,
    cell: tuple[int, int],
    gap: int,
    labels: Sequence[str] = (),
    titles: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
) -> Image.Image:
    """Draw a grid of images, each at most as large as a cell (width, height) and centered in it; None: an empty frame.

    Each row has a label at its left, each column a title above it, each cell a caption below it, where they are given.
    """
    width, height = cell
    step_x, step_y = width + gap, height + gap + (_CAPTION_HEIGHT if captions else 0)
    left, top = _LABEL_WIDTH if labels else gap, _TITLE_HEIGHT if titles else gap
    right, bottom = gap if labels else 0, gap if titles else 0
    sheet = Image.new("RGB", (left + columns * step_x + right, top + len(rows) * step_y + bottom), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        place = (left + column * step_x + width / 2, top / 2)
        pen.text(place, title, fill=_TITLE_INK, font=ImageFont.load_default(12), anchor="mm")
    for row, images in enumerate(rows):
        y = top + row * step_y
        for column, image in enumerate(images):
            x = left + column * step_x
            if image is None:
                pen.rectangle((x, y, x + width - 1, y + height - 1), outline=_EMPTY)
            else:
                sheet.paste(image, (x + (width - image.width) // 2, y + (height - image.height) // 2))
        for column, caption in enumerate(captions[row] if captions else ()):
            place = (left + column * step_x + width / 2, y + height + _CAPTION_HEIGHT / 2)
            pen.text(place, caption, fill=_CAPTION_INK, font=ImageFont.load_default(11), anchor="mm")
        if labels:
            text = "\n".join(textwrap.wrap(labels[row], 26)[:5])
            font = ImageFont.load_default(13)
            pen.multiline_text((14, y + height / 2), text, fill=_INK, font=font, anchor="lm", spacing=3)
    return sheet
