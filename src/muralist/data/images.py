"""From the bytes of an image file to the RGB array that training sees, all of one size, or a sentence about why not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from muralist.errors import UserError

Size = int | tuple[int, int]
"""How large pictures are made: the side of a square, or height and width, in pixels."""

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Only these decoders are tried: Pillow knows dozens more, some of which start other programs (PostScript).
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)

_MOST_PIXELS = (
    1 << 28
)  # of a picture scaled for cropping: 0.8 GB, reached only by strips thousands of times longer than wide


class BrokenImage(UserError):
    """A picture that cannot be decoded whole; `name` says which and `reason` why."""

    def __init__(
        self, name: str, reason: str, fix: str = "`muralist pack` leaves broken images out and lists them."
    ) -> None:
        super().__init__(f"{name or 'The image'} is a broken image: {reason}.", fix=fix)
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[BrokenImage], tuple[str, str, str]]:
        return type(self), (self.name, self.reason, self.fix)


def decode(data: bytes | Path, name: str = "") -> Image.Image:
    """Decode a whole image file to upright 8-bit RGB, on white where it is transparent, or raise `BrokenImage`."""
    if isinstance(data, Path):
        name = name or str(data)
        data = read_image_file(data, name)
    if not data:
        raise BrokenImage(name, "the file is empty")
    # Other libraries set this to make Pillow fill missing rows with grey.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _broken_where_pillow_fails(name), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        image.load()
        _check_container(image, data)
        return _to_rgb(_upright(image))


def read_image_file(path: Path, name: str = "") -> bytes:
    """Return the bytes of an image file; one that cannot be read is an error, whatever is in it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(name or str(path), error) from error


def stored_shape(data: bytes | Path, name: str = "") -> tuple[int, int]:
    """Height and width of what `decode` would return, from the header of an image file alone; or raise `BrokenImage`."""
    name = name or str(data) if isinstance(data, Path) else name
    try:
        file = data.open("rb") if isinstance(data, Path) else io.BytesIO(data)
    except OSError as error:
        raise _unreadable(name, error) from error
    with file, _broken_where_pillow_fails(name), Image.open(file, formats=_FORMATS) as image:
        width, height = image.size
        turned = image.format != "TIFF" and _orientation(image) in _ON_ITS_SIDE  # of a TIFF, Pillow tells it upright
        return (width, height) if turned else (height, width)


def _unreadable(name: str, error: OSError) -> UserError:
    """Not a broken image: a lost disk or a moved folder must not end as a data set with holes."""
    return UserError(
        f"The image {name} could not be read: {error.strerror}.", fix="Check that it exists and is readable."
    )


@contextmanager
def _broken_where_pillow_fails(name: str) -> Iterator[None]:
    try:
        yield
    except Image.UnidentifiedImageError as error:
        raise BrokenImage(name, "no image decoder recognises its content") from error
    except Image.DecompressionBombError as error:
        raise BrokenImage(name, "it has more pixels than any photograph, which could exhaust the memory") from error
    except Exception as error:  # on damaged bytes Pillow raises nearly every kind of exception
        raise BrokenImage(name, str(error).rstrip(".") or type(error).__name__) from error


def height_width(size: Size) -> tuple[int, int]:
    """Return height and width; one number stands for both."""
    return (size, size) if isinstance(size, int) else size


def size_words(size: Size) -> str:
    """Write a size for people: `64`, or `512 x 768` (height first)."""
    height, width = height_width(size)
    return str(height) if height == width else f"{height} x {width}"


def centre_crop(image: Image.Image, size: Size) -> np.ndarray:
    """Scale a picture until it just covers `size` and cut out the middle: uint8 [H, W, 3], as ADM and official JiT do.

    Box filters halve large pictures first, because that is how the published models saw theirs.
    """
    height, width = height_width(size)
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.array(image.crop((left, top, left + width, top + height)))


def read_cropped(data: bytes | Path, size: Size, name: str = "") -> np.ndarray:
    """Decode an image file and centre-crop it to uint8 [H, W, 3]; all sources of encoded images go through here."""
    image = decode(data, name)
    height, width = height_width(size)
    if height * image.width <= width * image.height:
        pixels = width * width * image.height // image.width
    else:
        pixels = height * height * image.width // image.height
    if pixels > _MOST_PIXELS:
        raise BrokenImage(name or str(data), f"it is a strip of {image.width} x {image.height} pixels, not a picture")
    return centre_crop(image, size)


def _check_container(image: Image.Image, data: bytes) -> None:
    """Refuse what Pillow takes for a whole picture: an interrupted copy whose missing end is filled with zeros."""
    if image.format == "PNG":
        with Image.open(io.BytesIO(data), formats=("PNG",)) as unread:
            unread.verify()  # the checksum of every chunk
    elif image.format in ("JPEG", "MPO") and not _jpeg_ends(data):
        raise ValueError("image file is truncated (it has no end marker)")


def _jpeg_ends(data: bytes) -> bool:
    """Say whether an end-of-image marker follows the start of the scan (thumbnails in the header have their own)."""
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


def _orientation(image: Image.Image) -> int | None:
    """How a picture lies, without decoding it: Pillow would read a whole PNG in case its EXIF follows the pixels."""
    try:
        return Image.Image.getexif(image).get(_ORIENTATION_TAG)
    except Exception:  # as below
        return None


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # unreadable EXIF says nothing about the pixels: show the picture as every viewer does
        return image
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no known range")
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
