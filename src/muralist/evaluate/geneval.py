"""The folders of classic GenEval: `00000/metadata.jsonl` with a row of its prompt file, `00000/samples/00000.png`, ...

Its detector needs mmdet, which muralist does not have: images in these folders are scored like any others, and
images of `generate` are put into such folders for GenEval's own scripts.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from muralist.core.errors import UserError, first_line
from muralist.core.run_dir import atomic_write, disk_write_error
from muralist.data.decode import decode_image, read_image_file
from muralist.data.tables import table_rows
from muralist.evaluate.inputs import ImageFile, TableColumns
from muralist.settings import EvaluateSettings

_METADATA, _SAMPLES = "metadata.jsonl", "samples"
_FIX = "Give prompts/evaluation_metadata.jsonl of djghosh13/geneval as --prompts_csv."


def read_layout(files: Sequence[ImageFile]) -> TableColumns:
    """Return what the metadata beside images say about them, by path: the prompt, and texts and numbers such as tag."""
    found = TableColumns()
    for file in files:
        if isinstance(file, Path) and file.parent.name == _SAMPLES:
            row = _read_metadata(file.parent.parent / _METADATA)
            if isinstance(row.get("prompt"), str):
                found.prompts[str(file)] = row["prompt"]
            for name, value in row.items():
                if name != "prompt" and isinstance(value, str | int | float):
                    found.others.setdefault(name, {})[str(file)] = value
    return found


@lru_cache(maxsize=1)  # images come sorted by folder
def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        # Half a surrogate pair, which JSON may hold, becomes a question mark.
        row = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: dict(map(_as_utf8, pairs)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read.", f"The reader reported: {first_line(error)}.", "Copy it again."
        ) from None
    return row if isinstance(row, dict) else {}


def _as_utf8(pair: tuple[str, Any]) -> tuple[str, Any]:
    name, value = (text.encode(errors="replace").decode() if isinstance(text, str) else text for text in pair)
    return name, value


def read_metadata_table(settings: EvaluateSettings) -> list[dict[str, Any]]:
    """Return the rows of GenEval's prompt file for --geneval_layout; another table is an error."""
    path, layout = settings.prompts_csv, Path(settings.geneval_layout or "")
    if layout.absolute().is_relative_to(Path(settings.images).absolute()):
        why = "Its images would be evaluated once more by the next command."
        raise UserError(f"--geneval_layout {layout} lies in the folder of the images.", why, "Give a folder outside.")
    if path is None or Path(path).suffix != ".jsonl":
        raise UserError("--geneval_layout needs GenEval's prompt file.", "Its scripts read each row of it.", _FIX)
    rows = [dict(cells) for _, cells in table_rows(Path(path))]
    if lacking := next(
        (number for number, row in enumerate(rows, 1) if not {"tag", "include", "prompt"} <= row.keys()), 0
    ):
        raise UserError(
            f"Row {lacking} of {path} has no tag, include or prompt.", "GenEval's scripts read all three.", _FIX
        )
    return rows


def write_layout(
    folder: Path, rows: Sequence[Mapping[str, Any]], images: Sequence[ImageFile], row_of: Mapping[str, int]
) -> int:
    """Put images into GenEval's folders, as links where possible; returns their number.

    `row_of` is the row of each image by file name; an image without one is left out.
    """
    by_row: dict[int, list[ImageFile]] = {}
    for image in images:
        if image.name in row_of:
            by_row.setdefault(row_of[image.name], []).append(image)
    names = {f"{row:05d}": row for row in by_row}
    with suppress(FileNotFoundError):
        if other := sorted(
            entry.name for entry in folder.iterdir() if entry.name.isdigit() and entry.name not in names
        ):
            raise UserError(
                f"{folder}, which --geneval_layout names, holds images of other prompts, such as {other[0]}.",
                "GenEval's scripts would count them too.",
                "Give another folder, or delete this one.",
            )
    try:
        for name, row in names.items():
            shutil.rmtree(folder / name / _SAMPLES, ignore_errors=True)
            (folder / name / _SAMPLES).mkdir(parents=True)
            atomic_write(folder / name / _METADATA, json.dumps(rows[row]))
            for number, image in enumerate(by_row[row]):
                _place(image, folder / name / _SAMPLES / f"{number:05d}.png")
    except OSError as error:
        raise disk_write_error(error, folder) from None
    return sum(map(len, by_row.values()))


def _place(image: ImageFile, place: Path) -> None:
    """Link a PNG, or write the image as one: GenEval's scripts read nothing else."""
    if isinstance(image, Path) and image.suffix.lower() == ".png":
        try:
            os.link(image, place)
            return
        except OSError:  # another disk, or a file system without links
            pass
    data = read_image_file(image)
    if Path(image.name).suffix.lower() != ".png":
        buffer = io.BytesIO()
        decode_image(data).save(buffer, "PNG")
        data = buffer.getvalue()
    atomic_write(place, data)
