"""A picture from every GPU at every checkpoint, and the sheet that shows them side by side.

    samples/step_0000500/gpu_0_sample.png, gpu_0_prompt.txt      and, for further pictures, gpu_0_sample_2.png, ...
    samples/sheet.png                                            rows: prompts, columns: checkpoints

No collective runs here: a rank that fails says so, and the others never notice.
"""

from __future__ import annotations

import io
import logging
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import nn

from muralist.errors import UserError
from muralist.models.family import Family, to_u8
from muralist.runfolder import write_atomically
from muralist.settings import SampleSettings
from muralist.train.checkpoint import all_in, folder_name, step_of
from muralist.train.monitors import Monitor

log = logging.getLogger("muralist")
_MOST_COLUMNS = 10
_LONGEST_NAME = 256  # bytes; a longer prompt is no file name, and asking the disk for one would be an error
_PAPER, _INK, _FAINT = (250, 248, 244), (32, 34, 40), (128, 130, 138)


def prompts_of_rank(prompts: Sequence[str], rank: int, ranks: int, count: int) -> list[int]:
    """Which prompts a GPU draws: r, r + ranks, ... modulo their number, none twice."""
    chosen = [(rank + turn * ranks) % len(prompts) for turn in range(count)]
    return list(dict.fromkeys(chosen))


def read_prompts(given: Sequence[str], family: Family) -> list[str]:
    """Prompts from the settings: a text file's lines, the texts themselves, or the model's own."""
    prompts = [prompt.strip() for prompt in given]
    if len(prompts) == 1 and len(prompts[0].encode()) < _LONGEST_NAME and Path(prompts[0]).is_file():
        prompts = _lines(Path(prompts[0]))
    prompts = prompts or family.default_prompts()
    family.check_prompts(prompts)
    return prompts


def _lines(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"Cannot read the prompts in {file}: {reason}.") from None
    if not lines:
        raise UserError(f"The file {file} holds no prompts.", fix="Write one prompt per line.")
    return lines


@torch.no_grad()
def draw(
    family: Family,
    network: nn.Module,
    prompts: Sequence[str],
    chosen: Sequence[int],
    settings: SampleSettings,
    autocast: torch.dtype | None,
) -> np.ndarray:
    """The chosen prompts' pictures."""
    device = next(network.parameters()).device
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        images = family.sample(network, [prompts[i] for i in chosen], [settings.seed + i for i in chosen], settings)
    return to_u8(images)


def write_samples(
    folder: Path,
    step: int,
    rank: int,
    ranks: int,
    family: Family,
    network: nn.Module,
    prompts: Sequence[str],
    settings: SampleSettings,
    autocast: torch.dtype | None,
    monitors: Sequence[Monitor],
    logger: logging.Logger = log,
) -> None:
    """Make and store this rank's pictures of a step; whatever goes wrong is written down and training goes on."""
    target = folder / folder_name(step)
    chosen = prompts_of_rank(prompts, rank, ranks, settings.per_gpu)
    was_training = network.training
    try:
        network.eval()
        logger.info("Generating samples at step %d", step)
        target.mkdir(parents=True, exist_ok=True)
        pictures = draw(family, network, prompts, chosen, settings, autocast)
        for turn, (index, picture) in enumerate(zip(chosen, pictures, strict=True)):
            number = f"_{turn + 1}" if turn else ""
            facts = {"prompt": prompts[index], "seed": str(settings.seed + index), "step": str(step)}
            write_atomically(target / f"gpu_{rank}_sample{number}.png", encode_png(picture, facts))
            write_atomically(target / f"gpu_{rank}_prompt{number}.txt", prompts[index] + "\n")
            for monitor in monitors:
                monitor.picture(step, f"samples/gpu_{rank}{number}", picture, prompts[index])
        if rank == 0:
            write_sheet(folder, prompts)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.error("Error during sampling on GPU %d: %s", rank, reason)
        try:
            write_atomically(target / f"gpu_{rank}_error.txt", reason + "\n")
        except OSError:
            pass  # the disk itself is the reason; the log has it
    finally:
        network.train(was_training)


def pictures_of_others(folder: Path, step: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """Name, pixels and prompt of what all processes but the main one drew at a step."""
    for text in sorted((folder / folder_name(step)).glob("gpu_*_prompt*.txt")):
        file = _picture_of(text)
        if text.name.startswith("gpu_0_") or not file.is_file():
            continue
        with Image.open(file) as image:
            name = file.stem.replace("_sample", "", 1)
            yield f"samples/{name}", np.asarray(image.convert("RGB")), text.read_text(encoding="utf-8").strip()


def _picture_of(prompt: Path) -> Path:
    return prompt.with_name(re.sub(r"_prompt(.*)\.txt$", r"_sample\1.png", prompt.name))


def encode_png(picture: np.ndarray, facts: dict[str, str]) -> bytes:
    """A PNG that carries how it was made."""
    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def write_sheet(folder: Path, prompts: Sequence[str]) -> Path | None:
    """The contact sheet of a run: rows are prompts, columns checkpoints, evenly chosen when there are many."""
    columns = _columns(folder)
    if not columns:
        return None
    if len(columns) > _MOST_COLUMNS:
        kept = sorted({round(i * (len(columns) - 1) / (_MOST_COLUMNS - 1)) for i in range(_MOST_COLUMNS)})
        columns = [columns[i] for i in kept]
    rows = [prompt for prompt in prompts if any(prompt in pictures for _, pictures in columns)]
    if not rows:
        return None
    first = next(iter(columns[-1][1].values()))
    with Image.open(first) as image:
        scale = max(1, math.ceil(96 / image.width))
        width = min(256, image.width * scale)
        height = round(width * image.height / image.width)
    gap, left, top = 6, 190, 34
    whole = (left + len(columns) * (width + gap) + gap, top + len(rows) * (height + gap) + gap)
    sheet = Image.new("RGB", whole, _PAPER)
    pen = ImageDraw.Draw(sheet)
    body, small = ImageFont.load_default(13), ImageFont.load_default(12)
    for column, (step, pictures) in enumerate(columns):
        x = left + column * (width + gap)
        pen.text((x + width / 2, top / 2), f"step {step:,}", fill=_FAINT, font=small, anchor="mm")
        for row, prompt in enumerate(rows):
            y = top + row * (height + gap)
            if prompt in pictures:
                with Image.open(pictures[prompt]) as image:
                    smooth = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
                    sheet.paste(smooth, (x, y))
            else:
                pen.rectangle((x, y, x + width - 1, y + height - 1), outline=(225, 222, 215))
    for row, prompt in enumerate(rows):
        text = "\n".join(textwrap.wrap(prompt, 26)[:5])
        pen.multiline_text(
            (14, top + row * (height + gap) + height / 2), text, fill=_INK, font=body, anchor="lm", spacing=3
        )
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    write_atomically(folder / "sheet.png", buffer.getvalue())
    return folder / "sheet.png"


def _columns(folder: Path) -> list[tuple[int, dict[str, Path]]]:
    columns = []
    for step_folder in all_in(folder):
        pictures: dict[str, Path] = {}
        for text in sorted(step_folder.glob("gpu_*_prompt*.txt")):
            picture = _picture_of(text)
            if picture.is_file():
                pictures.setdefault(text.read_text(encoding="utf-8").strip(), picture)
        if pictures:
            columns.append((step_of(step_folder), pictures))
    return columns
