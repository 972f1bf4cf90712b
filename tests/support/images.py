"""Small data sets of every kind on disk, all with the same images, labels and captions."""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image


class EncodedSample(NamedTuple):
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


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_file(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of three colors, made of filtered rows that need not fit its size."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def encoded_samples(count: int, first: int = 0) -> list[EncodedSample]:
    """Images of all shapes in three classes, sorted by class as a folder lists them."""
    return [
        EncodedSample(
            encoded(noise(first + number, 24 + 7 * number % 40, 20 + 11 * number % 50)),
            number * 3 // count,
            f'image "{number}", one of\n{count} äöü 图',
        )
        for number in range(count)
    ]


def write_folder(folder: Path, chosen: list[EncodedSample]) -> Path:
    """One sub-folder per class, one of them nested; names in an order that is not the order of writing."""
    for number, sample in reversed(list(enumerate(chosen))):
        place = folder / f"class_{sample.label}" / ("deeper" if number == len(chosen) - 1 else "")
        place.mkdir(parents=True, exist_ok=True)
        # The nested one sorts last in its class.
        (place / f"{'z' if number == len(chosen) - 1 else 'a'}{number:03}.PNG").write_bytes(sample.png)
    return folder


def write_files(folder: Path, chosen: list[EncodedSample]) -> list[str]:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    names = [f"files/{number}.png" for number in range(len(chosen))]
    for name, sample in zip(names, chosen, strict=True):
        (folder / name).write_bytes(sample.png)
    return names


def write_csv(path: Path, chosen: list[EncodedSample], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["label", "Image_Path", "caption", "unused"])
        for name, sample in zip(write_files(path.parent, chosen), chosen, strict=True):
            writer.writerow([sample.label, name, sample.caption, "x"])
    return path


def write_jsonl(path: Path, chosen: list[EncodedSample]) -> Path:
    rows = [
        {"file_name": name, "text": sample.caption, "class": sample.label}
        for name, sample in zip(write_files(path.parent, chosen), chosen, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tar(path: Path, chosen: list[EncodedSample], first: int = 0, text: str = "txt") -> Path:
    with tarfile.open(path, "w") as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

        for number, sample in enumerate(chosen, first):
            key = f"./part/{number:06}"
            if text == "json":
                add(f"{key}.json", json.dumps({"caption": sample.caption, "label": sample.label}).encode())
            add(f"{key}.png", sample.png)
            add(f"{key}.mask.png", b"another modality, not the image")
            if text == "txt":
                add(f"{key}.txt", sample.caption.encode())
                add(f"{key}.cls", f"{sample.label}\n".encode())
        add("README", b"no sample")
    return path


def write_parquet(path: Path, chosen: list[EncodedSample], hub: bool = True, row_group: int = 3) -> Path:
    data = [sample.png for sample in chosen]
    metadata = {}
    images = pyarrow.array(data)
    if hub:
        images = pyarrow.array([{"bytes": png, "path": None} for png in data])
        names = {"label": {"names": ["class_0", "class_1", "class_2"], "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": names}})}
    table = pyarrow.table(
        {
            "image": images,
            "label": pyarrow.array([sample.label for sample in chosen], pyarrow.int64()),
            "text": [sample.caption for sample in chosen],
        }
    ).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
