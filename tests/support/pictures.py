"""Small data sets of every kind on disk, all with the same pictures, labels and captions."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image


class Picture(NamedTuple):
    png: bytes
    label: int
    caption: str

    @property
    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.png)).convert("RGB")


def noise(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pictures(count: int, first: int = 0) -> list[Picture]:
    """Pictures of all shapes in three classes, sorted by class as a folder lists them."""
    return [
        Picture(
            encoded(noise(first + number, 24 + 7 * number % 40, 20 + 11 * number % 50)),
            number * 3 // count,
            f'picture "{number}", one of\n{count} äöü 图',
        )
        for number in range(count)
    ]


def write_folder(folder: Path, chosen: list[Picture]) -> Path:
    """One sub-folder per class, one of them nested; names in an order that is not the order of writing."""
    for number, picture in reversed(list(enumerate(chosen))):
        place = folder / f"class_{picture.label}" / ("deeper" if number == len(chosen) - 1 else "")
        place.mkdir(parents=True, exist_ok=True)
        # The nested one sorts last in its class.
        (place / f"{'z' if number == len(chosen) - 1 else 'a'}{number:03}.PNG").write_bytes(picture.png)
    return folder


def write_files(folder: Path, chosen: list[Picture]) -> list[str]:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    names = [f"files/{number}.png" for number in range(len(chosen))]
    for name, picture in zip(names, chosen, strict=True):
        (folder / name).write_bytes(picture.png)
    return names


def write_csv(path: Path, chosen: list[Picture], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["label", "Image_Path", "caption", "unused"])
        for name, picture in zip(write_files(path.parent, chosen), chosen, strict=True):
            writer.writerow([picture.label, name, picture.caption, "x"])
    return path


def write_jsonl(path: Path, chosen: list[Picture]) -> Path:
    rows = [
        {"file_name": name, "text": picture.caption, "class": picture.label}
        for name, picture in zip(write_files(path.parent, chosen), chosen, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tar(path: Path, chosen: list[Picture], first: int = 0, text: str = "txt") -> Path:
    with tarfile.open(path, "w") as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

        for number, picture in enumerate(chosen, first):
            key = f"./part/{number:06}"
            if text == "json":
                add(f"{key}.json", json.dumps({"caption": picture.caption, "label": picture.label}).encode())
            add(f"{key}.png", picture.png)
            add(f"{key}.mask.png", b"another modality, not the image")
            if text == "txt":
                add(f"{key}.txt", picture.caption.encode())
                add(f"{key}.cls", f"{picture.label}\n".encode())
        add("README", b"no sample")
    return path


def write_parquet(path: Path, chosen: list[Picture], hub: bool = True, row_group: int = 3) -> Path:
    data = [picture.png for picture in chosen]
    metadata = {}
    images = pyarrow.array(data)
    if hub:
        images = pyarrow.array([{"bytes": png, "path": None} for png in data])
        names = {"label": {"names": ["class_0", "class_1", "class_2"], "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": names}})}
    table = pyarrow.table(
        {
            "image": images,
            "label": pyarrow.array([picture.label for picture in chosen], pyarrow.int64()),
            "text": [picture.caption for picture in chosen],
        }
    ).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group)
    return path
