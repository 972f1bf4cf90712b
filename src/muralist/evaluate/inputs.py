"""What an evaluation reads: folders of pictures, reference statistics, prompts, and the ledger beside the pictures."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data import ledger_lines
from muralist.data.images import EXTENSIONS
from muralist.data.prompts import open_table
from muralist.errors import UserError
from muralist.evaluate.inception import FEATURES
from muralist.evaluate.metrics import Moments

LEDGER = "ledger.jsonl"
_SEEDED = re.compile(r"(.*)_seed(\d+)")


def find_images(folder: Path, flag: str, without: Path | None = None) -> list[Path]:
    """Every picture below a folder, in the order of their names; hidden ones and those below `without` do not count."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder}, which {flag} names, {what}.", fix="Check the path.")
    skipped = without.absolute() if without else None
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not (skipped and skipped != folder.absolute() and path.absolute().is_relative_to(skipped))
        and path.is_file()
    ]
    if len(found) < 2:
        few = f"only one image in {folder}" if found else f"no image in {folder}"
        raise UserError(
            f"There is {few}, which {flag} names.", f"Looked for {' '.join(EXTENSIONS)}.", "Two are the least."
        )
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


@dataclass(frozen=True)
class Statistics:
    """A reference known by its statistics; features only where `muralist stats` wrote them."""

    moments: Moments
    features: np.ndarray | None
    count: int | None
    dinov2: Dinov2Statistics | None = None


@dataclass(frozen=True)
class Dinov2Statistics:
    """Features of a reference by the DINOv2 with this digest."""

    features: np.ndarray
    digest: str


def read_statistics(path: Path) -> Statistics:
    """Read mu and sigma, whoever wrote them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in _KEYS if name in file.files}
            if missing := [name for name in ("mu", "sigma") if name not in held]:
                raise UserError(
                    f"{path} holds no {missing[0]!r}.",
                    "Reference statistics are an .npz file with mu and sigma.",
                    _STATS_FIX,
                )
            mean, covariance = held["mu"].astype(np.float64), held["sigma"].astype(np.float64)
    except UserError:
        raise
    except Exception as error:  # what damaged bytes make NumPy, zipfile and zlib raise has no end
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(
            f"{path} cannot be read as reference statistics.", f"The reader said: {said}", _STATS_FIX
        ) from None
    if mean.shape != (FEATURES,) or covariance.shape != (FEATURES, FEATURES):
        raise UserError(
            f"{path} holds statistics of other features: mu is {mean.shape} and sigma {covariance.shape}.",
            f"FID's Inception has {FEATURES}.",
            _STATS_FIX,
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise UserError(f"{path} holds numbers that are not finite.", fix=_STATS_FIX)
    features, number = held.get("features"), held.get("number")
    if not _fit(features, FEATURES) or (
        number is not None and (number.ndim or number.dtype.kind not in "iu" or number < 0)
    ):
        raise UserError(f"{path} holds features or a number that `muralist stats` did not write.", fix=_STATS_FIX)
    dinov2 = None
    if "dinov2_features" in held and "dinov2_sha256" in held:
        if not _fit(held["dinov2_features"]) or held["dinov2_sha256"].dtype.kind != "U":
            raise UserError(f"{path} holds DINOv2 features that `muralist stats` did not write.", fix=_STATS_FIX)
        dinov2 = Dinov2Statistics(held["dinov2_features"], str(held["dinov2_sha256"]))
    return Statistics(Moments(mean, covariance), features, None if number is None else int(number), dinov2)


def _fit(features: np.ndarray | None, width: int | None = None) -> bool:
    """Whether these are rows of features; none at all are fine too."""
    if features is None:
        return True
    return features.ndim == 2 and features.dtype.kind == "f" and width in (None, features.shape[1])


_KEYS = ("mu", "sigma", "features", "number", "dinov2_features", "dinov2_sha256")
_STATS_FIX = "`muralist stats DIR -o stats.npz` writes such a file."


_OF_DONE = ("file", "prompt", "gpu", "seconds", "gpu_busy")
_OF_FAILED = ("id", "seed", "prompt", "error", "gpu")


@dataclass
class Told:
    """What a ledger tells of a folder of pictures."""

    prompts: dict[str, str] = field(default_factory=dict)  # by file name
    failures: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, dict[str, float]] = field(default_factory=dict)  # by GPU


def read_ledger(folder: Path) -> Told:
    """Prompts, failures and speed; nothing where there is no ledger. The last line about a sample counts."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for line in ledger_lines.read_lines(folder / LEDGER):
        names = _OF_DONE if line["status"] == ledger_lines.DONE else _OF_FAILED
        last[line["index"], line["copy"]] = {
            name: line[name] for name in names if name in line
        }  # the rest fills memory
    told = Told()
    seconds: dict[str, float] = defaultdict(float)
    made: dict[str, int] = defaultdict(int)
    busy: dict[str, list[float]] = defaultdict(list)
    for _, line in sorted(last.items(), key=lambda item: item[0]):
        if "error" in line:
            told.failures.append(line)
        else:
            told.prompts[line["file"]] = line["prompt"]
            made[line["gpu"]] += 1
            seconds[line["gpu"]] += line.get("seconds", 0)
            if isinstance(share := line.get("gpu_busy"), float):
                busy[line["gpu"]].append(share)
    for gpu, images in sorted(made.items()):
        rate = images / seconds[gpu] if seconds[gpu] else 0.0
        told.speed[gpu] = {"images": images, "images_per_second": round(rate, 4)}
        if busy[gpu]:
            told.speed[gpu]["gpu_busy"] = round(sum(busy[gpu]) / len(busy[gpu]), 4)
    return told


def match_prompts(table_path: str, files: Sequence[Path]) -> dict[str, str]:
    """Prompts by file name: a file called ID or ID_seedN has the prompt of the row with that id.

    Rows may share an id if their seeds differ; then only the file with the row's seed is its picture.
    """
    table = open_table(table_path)
    by_id: dict[str, dict[int | None, str]] = defaultdict(dict)
    for row in table.rows(range(len(table))):
        by_id[row.id][row.seed] = row.prompt
    found = {}
    for file in files:
        for name, seed in _readings(file.stem):
            prompts = by_id.get(name, {})
            if seed in prompts:
                found[file.name] = prompts[seed]
            elif len(set(prompts.values())) == 1:
                found[file.name] = next(iter(prompts.values()))
            if file.name in found:
                break
    return found


def _readings(stem: str) -> list[tuple[str, int | None]]:
    """The ids and seeds that a file's name may mean."""
    seeded = _SEEDED.fullmatch(stem)
    return [(seeded[1], int(seeded[2])), (stem, None)] if seeded else [(stem, None)]
