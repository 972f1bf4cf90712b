"""Inputs of an evaluation: image folders, data sets, reference statistics, prompts and the ledger beside the images."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from PIL import Image

from muralist.core.errors import UserError, first_line
from muralist.core.run_dir import check_exists
from muralist.data import ledger_reader
from muralist.data.decode import IMAGE_EXTENSIONS
from muralist.data.prompts import PromptRow, open_prompt_table
from muralist.data.source import Source
from muralist.data.sources import open_source
from muralist.data.tar_members import TAR, TarImage, tar_images
from muralist.evaluate.inception import FEATURES
from muralist.evaluate.metrics import Moments

_EXACT_DIR = ".exact"  # beside the images of fast mode: some of them again, generated in exact mode
_SEED_SUFFIX = re.compile(r"(.*)_seed(\d+)")


_WANTED = {*IMAGE_EXTENSIONS, TAR}
ImageFile = Path | TarImage
"""An image file, or one in a tar file."""


def find_images(folder: Path, flag: str, exclude: Path | None = None, may_be_absent: bool = False) -> list[ImageFile]:
    """Return every image below a folder, sorted by name, except hidden ones and those below `exclude`.

    Images in tar files, such as those of `generate --shards`, count as if they lay beside their tar file: metrics that
    depend on the order of the images are the same for both.
    """
    if may_be_absent and not folder.exists():
        return []
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder}, which {flag} names, {problem}.", fix="Check the path.")
    excluded = exclude.absolute() if exclude and exclude.absolute() != folder.absolute() else None
    files: list[tuple[str, ImageFile]] = []
    tars: list[tuple[str, ImageFile]] = []
    for relative, path in _files_below(folder, "", excluded, frozenset()):
        if path.suffix.lower() == TAR:
            tars += [(_place_of_member(image, folder), image) for image in tar_images(path, IMAGE_EXTENSIONS)]
        else:
            files.append((relative, path))
    found = files + tars
    if len(found) < 2 and not may_be_absent:
        raise UserError(
            f"{'Only one' if found else 'No'} image was found in {folder}, which {flag} names.",
            f"Looked for {' '.join(IMAGE_EXTENSIONS)}.",
            "Statistics need at least two images.",
        )
    return [image for _, image in sorted(found, key=itemgetter(0))]


def _files_below(
    folder: Path, prefix: str, excluded: Path | None, parents: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, Path]]:
    """Yield image and tar files, each with its path below the first folder; links to folders are followed, as by train.

    A link to nothing counts as a file: reading it is then an error, and not an image less.
    """
    try:
        status, entries = folder.stat(), list(os.scandir(folder))
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be read: {error.strerror}.") from None
    if (identity := (status.st_dev, status.st_ino)) in parents:
        return  # a link to a folder above
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if path.absolute() != excluded:
                yield from _files_below(path, f"{prefix}{entry.name}/", excluded, parents | {identity})
        elif path.suffix.lower() in _WANTED and (entry.is_file() or (entry.is_symlink() and not path.exists())):
            is_grid = entry.name == "grid.png" and (folder / "samples").is_dir()  # of GenEval: its samples once more
            if not is_grid:
                yield f"{prefix}{entry.name}", path


def _place_of_member(image: TarImage, folder: Path) -> str:
    return (image.tar.parent / PurePath(image.member).parent / image.name).relative_to(folder).as_posix()


_SOURCE_LOCK = threading.Lock()  # images are prepared in threads, and a source shares open files


@dataclass(frozen=True)
class DatasetImage:
    """One image of a data set, cropped as in training."""

    data_path: str
    img_size: int
    index: int

    def __str__(self) -> str:
        return f"image {self.index} of {self.data_path}"

    def file_bytes(self) -> bytes:
        """Return the image as a BMP file, the fastest format to write."""
        with _SOURCE_LOCK:
            pixels = _source(self.data_path, self.img_size).read(self.index).image
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "BMP")
        return buffer.getvalue()


def dataset_images(data_path: str, img_size: int, limit: int | None) -> list[tuple[bytes, DatasetImage]]:
    """Return the first images of a data set, or all, each with a key that changes when the data change."""
    source = _source(data_path, img_size)
    images = [DatasetImage(data_path, img_size, index) for index in range(min(len(source), limit or len(source)))]
    version = f"{source.fingerprint()}/{img_size}"
    return [(hashlib.sha256(f"{version}/{image.index}".encode()).digest(), image) for image in images]


@lru_cache(maxsize=1)
def _source(data_path: str, img_size: int) -> Source:
    return open_source(data_path, img_size)


@dataclass(frozen=True)
class Statistics:
    """Reference statistics; features and the SHA-256 of the DINOv2 only where `muralist stats` wrote them."""

    moments: Moments
    features: np.ndarray | None
    count: int | None
    dinov2_features: np.ndarray | None = None
    dinov2_sha256: str = ""
    resize: str | None = None
    """How Inception's input was resized, as for --resize; None where another tool wrote the file."""


_KEYS = ("mu", "sigma", "features", "number", "dinov2_features", "dinov2_sha256", "resize")
_STATS_FIX = "`muralist stats DIR -o stats.npz` writes such a file."


def read_statistics(path: Path) -> Statistics:
    """Read an .npz file with mu and sigma, by muralist, pytorch-fid or another tool."""
    check_exists(path, "reference", _STATS_FIX)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _KEYS if name in file.files}
            mean, covariance = (arrays[name].astype(np.float64) for name in ("mu", "sigma"))
    except KeyError as error:
        why = "Reference statistics are an .npz file with mu and sigma."
        raise UserError(f"{path} holds no {error}.", why, _STATS_FIX) from None
    except Exception as error:  # NumPy, zipfile and zlib raise nearly any exception on damaged bytes
        why = f"The reader reported: {first_line(error)}."
        raise UserError(f"{path} cannot be read as reference statistics.", why, _STATS_FIX) from None
    if mean.shape != (FEATURES,) or covariance.shape != (FEATURES, FEATURES):
        raise UserError(
            f"{path} holds statistics of other features: mu is {mean.shape} and sigma {covariance.shape}.",
            f"FID's Inception has {FEATURES}.",
            _STATS_FIX,
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise UserError(f"{path} holds NaN or Inf.", fix=_STATS_FIX)
    features, number, dinov2, sha256, resize = (arrays.get(name) for name in _KEYS[2:])
    if (
        (number is not None and (number.ndim or number.dtype.kind not in "iu" or number < 0))
        or (features is not None and not _is_feature_matrix(features, FEATURES))
        or (dinov2 is not None and not _is_feature_matrix(dinov2))
        or any(text is not None and text.dtype.kind != "U" for text in (sha256, resize))
    ):
        raise UserError(f"{path} holds features or a number that `muralist stats` did not write.", fix=_STATS_FIX)
    count = int(number) if number is not None else None
    ours = "pytorch-fid" if features is not None else None  # files of 0.1.0 do not say it
    return Statistics(
        Moments(mean, covariance),
        features,
        count if features is None else len(features),
        dinov2,
        str(sha256),
        ours if resize is None else str(resize),
    )


def _is_feature_matrix(features: np.ndarray, width: int | None = None) -> bool:
    return features.ndim == 2 and features.dtype.kind == "f" and width in (None, features.shape[1])


@dataclass
class LedgerFacts:
    """Prompts, failures, speed and exact-mode duplicates that a generation ledger records."""

    prompts: dict[str, str] = field(default_factory=dict)  # by file name
    failures: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, dict[str, float]] = field(default_factory=dict)  # by GPU
    exact_pairs: ExactPairs | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # the settings in the header: model, steps, guidance, ...


@dataclass(frozen=True)
class ExactPairs:
    """Images of `generate --preset fast` or `faster` that were generated in exact mode too."""

    fast: list[Path]
    exact: list[Path]
    prompts: list[str]
    psnr: list[float]


_DONE_FIELDS = ("index", "copy", "file", "prompt", "gpu", "seconds", "gpu_busy", "psnr_to_exact")
_FAILED_FIELDS = ("id", "seed", "prompt", "error", "gpu")


def read_ledger(folder: Path) -> LedgerFacts:
    """Read a folder's ledger, if there is one; the last line about a sample counts."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for line in ledger_reader.read_lines(folder / ledger_reader.LEDGER):
        names = _DONE_FIELDS if line["status"] == ledger_reader.DONE else _FAILED_FIELDS
        last[line["index"], line["copy"]] = {name: line[name] for name in names if name in line}  # to save memory
    lines = [line for _, line in sorted(last.items(), key=lambda item: item[0])]
    done = [line for line in lines if "error" not in line]
    by_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in done:
        by_gpu[line["gpu"]].append(line)
    return LedgerFacts(
        {line["file"]: line["prompt"] for line in done},
        [line for line in lines if "error" in line],
        {gpu: _speed(of_gpu) for gpu, of_gpu in sorted(by_gpu.items())},
        _exact_pairs(folder, done),
        ledger_reader.read_settings(folder / ledger_reader.LEDGER),
    )


def _speed(done: Sequence[dict[str, Any]]) -> dict[str, float]:
    seconds = sum(line.get("seconds", 0) for line in done)
    speed = {"images": len(done), "images_per_second": round(len(done) / seconds if seconds else 0.0, 4)}
    busy = [share for line in done if isinstance(share := line.get("gpu_busy"), float)]
    return speed | ({"gpu_busy": round(sum(busy) / len(busy), 4)} if busy else {})


def _exact_pairs(folder: Path, done: Sequence[dict[str, Any]]) -> ExactPairs | None:
    if not (folder / _EXACT_DIR).is_dir():
        return None
    finder = ledger_reader.ImageFinder(folder)
    by_file = {line["file"]: line for line in done if Path(line["file"]).name == line["file"]}
    pairs = [
        (line, path, folder / _EXACT_DIR / file)
        for file, line in by_file.items()
        if (folder / _EXACT_DIR / file).is_file() and (path := finder.path(line))
    ]
    values = [line.get("psnr_to_exact") for line, _, _ in pairs]
    psnr = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not psnr:
        return None
    fast, exact, prompts = ([*column] for column in zip(*((f, e, line["prompt"]) for line, f, e in pairs), strict=True))
    return ExactPairs(fast, exact, prompts, psnr)


def prompt_id(image: object) -> str:
    """Return the id in the name of an image file, which is ID.* or ID_seedN.*."""
    stem = Path(getattr(image, "name", "")).stem
    seeded = _SEED_SUFFIX.fullmatch(stem)
    return seeded[1] if seeded else stem


@dataclass(frozen=True)
class TableColumns:
    """What a prompt table says about images, by file name or path."""

    prompts: dict[str, str] = field(default_factory=dict)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Cells of the columns that generation does not read, such as category, by column and file name."""
    rows: dict[str, int] = field(default_factory=dict)
    ambiguous: list[str] = field(default_factory=list)
    """Images whose id several rows share, with other prompts."""


def match_table(table_path: str, files: Sequence[ImageFile], known: Mapping[str, str]) -> TableColumns:
    """Find the row of each image: a file called ID or ID_seedN has the prompt of the row with that id.

    Rows may share an id if their seeds differ; then only the file with the row's seed belongs to it. Where rows share
    both, as the captions of one photograph do, the file's prompt in `known` tells them apart.
    """
    table = open_prompt_table(table_path)
    by_id: dict[str, dict[int | None, list[PromptRow]]] = defaultdict(lambda: defaultdict(list))
    for row in table.rows(range(len(table))):
        by_id[row.id][row.seed].append(row)
    found: dict[str, PromptRow] = {}
    ambiguous = []
    for file in files:
        seeded = _SEED_SUFFIX.fullmatch(file.stem)
        candidates: list[tuple[str, int | None]] = [(seeded[1], int(seeded[2]))] if seeded else []
        for name, seed in [*candidates, (file.stem, None)]:
            if not (of_id := by_id.get(name)):
                continue
            rows = of_id[seed] if seed in of_id else [row for of_seed in of_id.values() for row in of_seed]
            if len({row.prompt for row in rows}) > 1:
                rows = [row for row in rows if row.prompt == known.get(file.name)]
                if not rows and len(of_id) == 1:  # else no row has the file's seed
                    ambiguous.append(file.name)
            if rows:
                found[file.name] = rows[-1]
                break
    others = table.other_columns({row.index for row in found.values()})
    return TableColumns(
        {name: row.prompt for name, row in found.items()},
        {
            column: {name: cells[row.index] for name, row in found.items() if row.index in cells}
            for column, cells in others.items()
        },
        {name: row.index for name, row in found.items()},
        ambiguous,
    )
