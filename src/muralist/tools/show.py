"""`muralist show FILE|FOLDER`: draw an image or a contact sheet in the terminal, and print its path."""

from __future__ import annotations

import base64
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from muralist.core.errors import UserError
from muralist.core.images import contact_sheet, encode_png
from muralist.core.run_dir import atomic_write
from muralist.data.decode import IMAGE_EXTENSIONS, ImageDecodeError, decode_image
from muralist.settings import ShowSettings

Protocol = Literal["kitty", "iterm", "blocks", "none"]
_KITTY_CHUNK = 4096  # bytes of one escape sequence
_MAX_SIDE = 2000  # pixels; more are not visible in a terminal
_MAX_IMAGES, _CELL, _GAP = 48, (192, 192), 8  # of a contact sheet


def image_protocol(environment: Mapping[str, str]) -> Protocol:
    """Choose how to draw images in this terminal; multiplexers pass on text only."""
    program, term = environment.get("TERM_PROGRAM", ""), environment.get("TERM", "")
    if not term or term == "dumb":
        return "none"
    if not environment.get("TMUX") and not term.startswith(("screen", "tmux")):
        if environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty"):
            return "kitty"
        if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
            return "iterm"
    colors = environment.get("COLORTERM", "") in ("truecolor", "24bit") or "256color" in term
    return "blocks" if colors else "none"


def render(image: Image.Image, columns: int, rows: int, protocol: Protocol) -> str:
    """Return the text that draws an image in a terminal of this size."""
    if protocol == "none":
        return ""
    if protocol == "blocks":
        return _render_half_blocks(image, columns, rows)
    small = image.convert("RGB")
    small.thumbnail((_MAX_SIDE, _MAX_SIDE))
    data = base64.b64encode(encode_png(np.asarray(small), {})).decode()
    # A character cell is about twice as high as wide.
    height = min(rows, max(1, round(columns * small.height / small.width / 2)))
    if protocol == "iterm":
        return f"\x1b]1337;File=inline=1;height={height};preserveAspectRatio=1:{data}\x07\n"
    chunks = [data[start : start + _KITTY_CHUNK] for start in range(0, len(data), _KITTY_CHUNK)]
    keys = [f"m={int(index < len(chunks) - 1)}" for index in range(len(chunks))]
    keys[0] = f"a=T,f=100,r={height},{keys[0]}"
    return "".join(f"\x1b_G{key};{chunk}\x1b\\" for key, chunk in zip(keys, chunks, strict=True)) + "\n"


def _render_half_blocks(image: Image.Image, columns: int, rows: int) -> str:
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
    return "\n".join(lines) + "\n"


def show(settings: ShowSettings) -> int:
    """Find the image or make the contact sheet, draw it if the terminal supports it, and print its path."""
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist.", fix="Give an image, a run, or a folder with images.")
    sheet = path / "samples" / "sheet.png"
    if path.is_file():
        image = _read(path)
    elif sheet.is_file():
        path, image = sheet, _read(sheet)
    else:
        path, image = _sheet_of(path, settings)
    protocol = image_protocol(os.environ) if sys.stdout.isatty() else "none"
    size = shutil.get_terminal_size()
    sys.stdout.write(render(image, size.columns, size.lines - 3, protocol))
    print(path)
    for name in ("prompt", "seed", "model"):
        if name in image.info:
            print(f"{name}: {image.info[name]}")
    return 0


def _read(path: Path) -> Image.Image:
    try:
        image = decode_image(path)
    except ImageDecodeError as error:
        raise UserError(error.what, fix="Choose another image.") from None
    with Image.open(path) as stored:
        image.info = dict(stored.info)  # decoding drops the metadata of images that it rotates
    return image


def _sheet_of(folder: Path, settings: ShowSettings) -> tuple[Path, Image.Image]:
    """Write a contact sheet of images chosen evenly from a folder; unreadable ones leave their cells empty."""
    target = Path(settings.output or f"{folder.resolve().name or 'images'}-sheet.png").expanduser()
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_EXTENSIONS and path.is_file() and path.resolve() != target.resolve()
    )
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


def _fitted(path: Path) -> Image.Image | None:
    try:
        return ImageOps.contain(decode_image(path), _CELL, Image.Resampling.LANCZOS)
    except UserError:
        return None
