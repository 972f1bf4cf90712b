"""A quick look: `muralist show FILE|FOLDER` draws a picture or a sheet of many, in a terminal that can, and says where."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from muralist.data.images import EXTENSIONS, BrokenImage, decode
from muralist.errors import UserError
from muralist.runfolder import write_atomically
from muralist.settings import ShowSettings
from muralist.terminal_pictures import ability, drawn

_MOST_PICTURES = 48
_SIDE, _GAP, _LABEL = 192, 8, 18
_PAPER, _INK = (250, 248, 244), (90, 92, 100)


def show(settings: ShowSettings) -> int:
    """Find the picture or make the sheet, draw it if this terminal can, and print its path."""
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist.", fix="Give a picture, a run, or any folder with pictures in it.")
    sheet = path / "samples" / "sheet.png"
    if path.is_file():
        image = _read(path)
    elif sheet.is_file():
        path, image = sheet, _read(sheet)
    else:
        path, image = _sheet_of(path, settings)
    way = ability(os.environ) if sys.stdout.isatty() else "none"
    size = shutil.get_terminal_size()
    sys.stdout.write(drawn(image, size.columns, size.lines - 3, way))
    print(path)
    for name in ("prompt", "seed", "model"):
        if name in image.info:
            print(f"{name}: {image.info[name]}")
    return 0


def _read(path: Path) -> Image.Image:
    try:
        image = decode(path)
    except BrokenImage as error:
        raise UserError(error.what, fix="Look at another one.") from None
    with Image.open(path) as stored:
        image.info = dict(stored.info)  # what it says of itself is lost where it was turned upright
    return image


def _sheet_of(folder: Path, settings: ShowSettings) -> tuple[Path, Image.Image]:
    """A sheet of pictures evenly chosen over a folder; those that cannot be read leave their places empty."""
    target = Path(settings.output or f"{folder.resolve().name or 'pictures'}-sheet.png").expanduser()
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS and path.is_file() and path.resolve() != target.resolve()
    )
    if not found:
        looked = f"Looked for {' '.join(EXTENSIONS)} in it and below."
        raise UserError(f"There is no picture in {folder}.", looked, "Give a folder that has some.")
    count = min(_MOST_PICTURES, len(found))
    chosen = [found[(2 * number + 1) * len(found) // (2 * count)] for number in range(count)]
    image = _contact_sheet(chosen)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, buffer.getvalue())
    print(f"{count} of {len(found):,} pictures in {folder}:")
    return target, image


def _contact_sheet(pictures: Sequence[Path]) -> Image.Image:
    columns = math.ceil(math.sqrt(len(pictures) * 1.5))
    rows = math.ceil(len(pictures) / columns)
    step_x, step_y = _SIDE + _GAP, _SIDE + _LABEL + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, path in enumerate(pictures):
        x, y = _GAP + number % columns * step_x, _GAP + number // columns * step_y
        try:
            image = decode(path)
        except UserError:
            pen.text((x + _SIDE / 2, y + _SIDE / 2), "cannot be read", fill=_INK, font=font, anchor="mm")
        else:
            scale = _SIDE / max(image.size)
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            fitted = image.resize(size, Image.Resampling.LANCZOS)
            sheet.paste(fitted, (x + (_SIDE - size[0]) // 2, y + (_SIDE - size[1]) // 2))
        name = path.stem if len(path.stem) <= 30 else f"{path.stem[:14]}...{path.stem[-14:]}"
        pen.text((x + _SIDE / 2, y + _SIDE + _LABEL / 2), name, fill=_INK, font=font, anchor="mm")
    return sheet
