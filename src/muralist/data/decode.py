"""Decode image files to RGB and crop them to one size: the one image decoder of training, evaluation and tools."""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps

from muralist.core.errors import UserError
from muralist.core.image_size import Size, height_width
from muralist.core.images import IMAGE_FORMATS
from muralist.data.tar_members import TarImage, find_member

try:  # the extra `fast`
    import pyspng
    from isal import isal_zlib

    HAS_FAST_PNG = True
except ImportError:
    HAS_FAST_PNG = False

IMAGE_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

_SWAPS_SIDES = (5, 6, 7, 8)  # values of the EXIF orientation

# Of an image scaled for cropping (0.8 GB); only strips thousands of times longer than wide have more.
_MAX_SCALED_PIXELS = 1 << 28


class ImageDecodeError(UserError):
    """An image that cannot be decoded completely: `name` is its file, `reason` the cause."""

    def __init__(
        self,
        name: str,
        reason: str,
        fix: str = "Remove it, or train with --on_broken skip; `muralist pack` leaves broken images out and lists them.",
    ) -> None:
        super().__init__(f"{name or 'The image'} is a broken image: {reason}.", fix=fix)
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[ImageDecodeError], tuple[str, str, str]]:
        return type(self), (self.name, self.reason, self.fix)


def decode_image(data: bytes | Path, name: str = "") -> Image.Image:
    """Decode a complete image file to upright 8-bit RGB, on white if transparent, or raise ImageDecodeError."""
    if isinstance(data, Path):
        name = name or str(data)
        data = read_image_file(data, name)
    if not data:
        raise ImageDecodeError(name, "the file is empty")
    if (pixels := decode_png_fast(data)) is not None:
        return Image.fromarray(pixels)
    # Other libraries set this to make Pillow fill missing rows with gray.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _wrap_pillow_errors(name), Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        image.load()
        _check_integrity(image, data)
        with suppress(Exception):  # unreadable EXIF has no influence on the pixels: every viewer shows such an image
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def decode_pixels(data: bytes) -> np.ndarray:
    """Decode an image file to a writable array, uint8 [H, W, 3], or raise ImageDecodeError."""
    pixels = decode_png_fast(data)
    return np.array(decode_image(data)) if pixels is None else pixels


def decode_cropped(data: bytes | Path, size: Size, name: str = "") -> np.ndarray:
    """Decode an image file and center-crop it to uint8 [H, W, 3]."""
    image = decode_image(data, name)
    height, width = height_width(size)
    if height * image.width <= width * image.height:
        pixels = width * width * image.height // image.width
    else:
        pixels = height * height * image.width // image.height
    if pixels > _MAX_SCALED_PIXELS:
        reason = f"it is a strip of {image.width} x {image.height} pixels, not an image"
        raise ImageDecodeError(name or str(data), reason)
    return center_crop(image, size)


def center_crop(image: Image.Image, size: Size) -> np.ndarray:
    """Scale an image until it just covers `size` and cut out the center: uint8 [H, W, 3], as ADM and official JiT do.

    Box filters halve large images first, as in the training data of the published models.
    """
    height, width = height_width(size)
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.array(image.crop((left, top, left + width, top + height)))


def read_image_file(path: Path | TarImage, name: str = "") -> bytes:
    """Return the bytes of an image file; it may be in a tar file: `00000.tar/000001_seed42.png`."""
    if isinstance(path, TarImage):
        return path.read()
    try:
        return path.read_bytes()
    except NotADirectoryError as error:
        if member := find_member(path):
            return member.read()
        raise _unreadable(name or str(path), error) from error
    except OSError as error:
        raise _unreadable(name or str(path), error) from error


def read_unchanged_image(path: Path | TarImage, sha256: bytes) -> bytes:
    """Return the bytes of an image file that was hashed before; a file that changed since is an error."""
    data = read_image_file(path)
    if hashlib.sha256(data).digest() != sha256:
        raise UserError(
            f"The image {path} changed while it was evaluated.",
            "Another process still writes into its folder.",
            "Wait until that process ends and run the same command again: only missing features are computed.",
        )
    return data


def read_image_shape(data: bytes | Path, name: str = "") -> tuple[int, int]:
    """Return height and width of what `decode_image` would return, from the header of an image file alone."""
    name = name or str(data) if isinstance(data, Path) else name
    try:
        file = data.open("rb") if isinstance(data, Path) else io.BytesIO(data)
    except OSError as error:
        raise _unreadable(name, error) from error
    with file, _wrap_pillow_errors(name), Image.open(file, formats=IMAGE_FORMATS) as image:
        width, height = image.size
        with suppress(Exception):  # unreadable EXIF, as in `decode_image`; Pillow reports TIFFs upright
            # Not `image.getexif`, which for a PNG would read the pixels to find EXIF after them.
            orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
            if image.format != "TIFF" and orientation in _SWAPS_SIDES:
                return width, height
        return height, width


def _unreadable(name: str, error: OSError) -> UserError:
    # Not an ImageDecodeError: a lost disk or a moved folder must not end as a data set with missing images.
    return UserError(
        f"The image {name} could not be read: {error.strerror}.", fix="Check that it exists and is readable."
    )


@contextmanager
def _wrap_pillow_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Image.UnidentifiedImageError as error:
        raise ImageDecodeError(name, "no image decoder recognizes its content") from error
    except Image.DecompressionBombError as error:
        reason = "it has more pixels than any photograph, which could exhaust the memory"
        raise ImageDecodeError(name, reason) from error
    except Exception as error:  # on damaged bytes Pillow raises nearly every kind of exception
        raise ImageDecodeError(name, str(error).rstrip(".") or type(error).__name__) from error


def _check_integrity(image: Image.Image, data: bytes) -> None:
    """Refuse truncated files that Pillow accepts, such as an interrupted copy that ends in zeros."""
    if image.format == "PNG":
        with Image.open(io.BytesIO(data), formats=("PNG",)) as unread:
            unread.verify()  # the checksum of every chunk
    elif image.format in ("JPEG", "MPO") and not _has_jpeg_end(data):
        raise ValueError("image file is truncated (it has no end marker)")


def _has_jpeg_end(data: bytes) -> bool:
    """Return whether an end-of-image marker follows the start of the scan (thumbnails in the header have their own)."""
    position = 2
    while 0 <= (position := data.find(b"\xff", position)) < len(data) - 3:
        marker = data[position + 1]
        if marker == 0xDA:
            return b"\xff\xd9" in data[position:]
        if marker in (0x00, 0xFF):  # junk and fill bytes, which decoders skip
            position += 1
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels are integers of more than 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        on_white = Image.new("RGBA", image.size, "white")
        on_white.alpha_composite(image.convert("RGBA"))
        return on_white.convert("RGB")
    return image.convert("RGB")


# -- Plain RGB PNGs, 2.5 times as fast as Pillow: ISA-L checks and inflates, libspng applies the filters.

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_PLAIN_RGB = bytes((8, 2, 0, 0, 0))  # bit depth, color type, compression, filter, not interlaced
_PNG_HEADER_BYTES = len(_PNG_SIGNATURE) + 25
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_MAX_PNG_PIXELS = 1 << 24
_MAX_PNG_TEXT = 1 << 20  # bytes; Pillow has its own limits for more
# Pixels in one piece, with chunks around them that do not change a pixel.
_PNG_CHUNKS = re.compile(rb"IHDR(gAMA|sRGB|pHYs|tIME|tEXt|iTXt)*(IDAT)+(gAMA|sRGB|pHYs|tIME|tEXt|iTXt)*IEND")
_STORED_BLOCK = 0xFFFF  # bytes of an uncompressed deflate block


def decode_png_fast(data: bytes) -> np.ndarray | None:
    """Decode a plain RGB PNG to uint8 [H, W, 3], equal to Pillow's; None leaves every other file to Pillow."""
    if not HAS_FAST_PNG or data[:8] != _PNG_SIGNATURE or data[24:29] != _PNG_PLAIN_RGB:
        return None
    width, height = struct.unpack(">II", data[16:24])
    compressed = _png_pixel_data(data)
    if compressed is None or not 0 < width * height <= _MAX_PNG_PIXELS:
        return None
    size = height * (3 * width + 1)
    try:
        stream = isal_zlib.decompressobj()
        inflated = stream.decompress(compressed, max_length=size + 1)  # a few bytes may inflate to gigabytes
        if len(inflated) != size or not stream.eof:
            return None
        return pyspng.load(_uncompressed_png(data[:_PNG_HEADER_BYTES], inflated))
    except Exception:  # ISA-L's or libspng's own error types
        return None


def _png_pixel_data(data: bytes) -> bytes | None:
    """Return the content of all IDAT chunks, if every chunk is intact and known."""
    view, place, pixels, kinds = memoryview(data), len(_PNG_SIGNATURE), [], b""
    while place + 12 <= len(data) and not kinds.endswith(b"IEND"):
        (length,) = struct.unpack_from(">I", data, place)
        kind, content = data[place + 4 : place + 8], view[place + 8 : place + 8 + length]
        check = data[place + 8 + length : place + 12 + length]
        if check != struct.pack(">I", isal_zlib.crc32(view[place + 4 : place + 8 + length])):
            return None
        if kind in (b"tEXt", b"iTXt") and not _is_plain_text(kind, bytes(content)):
            return None
        if kind == b"IDAT":
            pixels.append(content)
        kinds += kind
        place += 12 + length
    return b"".join(pixels) if _PNG_CHUNKS.fullmatch(kinds) else None


def _is_plain_text(kind: bytes, text: bytes) -> bool:
    """Return whether a text chunk is uncompressed and cannot hold an EXIF orientation or a transparency."""
    name, found, rest = text.partition(b"\0")
    return (
        bool(found and name)
        and len(text) <= _MAX_PNG_TEXT
        and not name.startswith((b"Raw profile", b"XML:", b"transparency"))
        and (kind == b"tEXt" or rest[:1] == b"\0")
    )


def _uncompressed_png(header: bytes, inflated: bytes) -> bytes:
    """Return the same image as a PNG of stored deflate blocks, which leaves only the filters to its reader."""
    view = memoryview(inflated)
    parts: list[bytes | memoryview] = [b"IDAT\x78\x01"]
    for start in range(0, len(view), _STORED_BLOCK):
        part = view[start : start + _STORED_BLOCK]
        parts += [struct.pack("<BHH", start + _STORED_BLOCK >= len(view), len(part), len(part) ^ 0xFFFF), part]
    parts.append(struct.pack(">I", isal_zlib.adler32(inflated)))
    chunk = b"".join(parts)
    size, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", isal_zlib.crc32(chunk))
    return b"".join((header, size, chunk, check, _PNG_END))
