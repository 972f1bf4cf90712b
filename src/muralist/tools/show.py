"""`muralist show FILE|FOLDER`: draw an image or a contact sheet in the terminal, and print its path."""

from __future__ import annotations

import io
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from rich.console import Console

from muralist.core.errors import UserError
from muralist.core.images import contact_sheet, encode_png, read_metadata
from muralist.core.run_dir import atomic_write
from muralist.data.decode import IMAGE_EXTENSIONS, ImageDecodeError, decode_image, read_image_file
from muralist.data.tar_members import TAR, TarImage, find_member, tar_images
from muralist.settings import ShowSettings

_MAX_IMAGES, _CELL, _GAP = 48, (192, 192), 8  # of a contact sheet


def show(settings: ShowSettings) -> int:
    """Find the image or make the contact sheet, draw it if the terminal supports it, and print its path."""
    path = Path(settings.path).expanduser()
    if not path.exists() and not find_member(path):
        raise UserError(f"{path} does not exist.", fix="Give an image, a run, or a folder with images.")
    sheet = path / "samples" / "sheet.png"
    if not path.is_dir():
        image = _read(path)
    elif sheet.is_file():
        path, image = sheet, _read(sheet)
    else:
        path, image = _sheet_of(path, settings)
    if Console().color_system in ("256", "truecolor"):
        size = shutil.get_terminal_size()
        print(render(image, size.columns, size.lines - 3))
    print(path)
    for name in ("prompt", "seed", "model"):
        if name in image.info:
            print(f"{name}: {image.info[name]}")
    return 0


def render(image: Image.Image, columns: int, rows: int) -> str:
    """Draw two pixels per character: the foreground color is the upper one, the background color the lower one."""
    scale = min(columns / image.width, 2 * rows / image.height)
    size = (max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2)))
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in zip(upper, lower, strict=True)
        )
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


def _read(path: Path) -> Image.Image:
    try:
        data = read_image_file(path)
        image = decode_image(data, str(path))
    except ImageDecodeError as error:
        raise UserError(error.what, fix="Choose another image.") from None
    with Image.open(io.BytesIO(data)) as stored:
        image.info = dict[Any, Any](read_metadata(stored))  # decoding drops the metadata of images that it rotates
    return image


def _sheet_of(folder: Path, settings: ShowSettings) -> tuple[Path, Image.Image]:
    """Write a contact sheet of images chosen evenly from a folder; unreadable ones leave their cells empty."""
    target = Path(settings.output or f"{folder.resolve().name or 'images'}-sheet.png").expanduser()
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in (*IMAGE_EXTENSIONS, TAR) and path.is_file() and path.resolve() != target.resolve()
    )
    found: list[Path | TarImage] = []
    for path in files:
        found += tar_images(path, IMAGE_EXTENSIONS) if path.suffix.lower() == TAR else [path]
    if not found:
        raise UserError(
            f"There are no images in {folder}.",
            f"It has no {' '.join(IMAGE_EXTENSIONS)} files, and neither have its subfolders.",
            "Give a folder with images.",
        )
    count = min(_MAX_IMAGES, len(found))
    chosen = [found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count)]
    columns = math.ceil(math.sqrt(count * 1.5))
    rows = [chosen[start : start + columns] for start in range(0, count, columns)]
    names = [[re.sub(r"(.{14}).{3,}(.{14})", r"\1...\2", path.stem) for path in row] for row in rows]
    image = contact_sheet([map(_fitted, row) for row in rows], columns, _CELL, _GAP, captions=names)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, encode_png(np.asarray(image), {}))
    print(f"{count} of {len(found):,} images in {folder}:")
    return target, image


def _fitted(path: Path | TarImage) -> Image.Image | None:
    try:
        return ImageOps.contain(decode_image(read_image_file(path)), _CELL, Image.Resampling.LANCZOS)
    except UserError:
        return None
