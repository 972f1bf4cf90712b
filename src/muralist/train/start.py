"""Where a run starts from: its own last checkpoint, a named one, weights of another run, or nothing; never in silence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from muralist.config import flatten, from_yaml, identity, to_yaml
from muralist.errors import UserError
from muralist.models.weights import read_weights
from muralist.runfolder import RunFolder, write_atomically
from muralist.settings import TrainSettings
from muralist.train import checkpoint

log = logging.getLogger("muralist")


class OtherSettings(UserError):
    """A run of this name exists and is another run."""


def claim(run: RunFolder, settings: TrainSettings) -> None:
    """Write the run's settings; a folder that holds a run with other settings is refused with the difference shown."""
    refuse_other(run, settings)
    write_atomically(run.config, to_yaml(settings))


def refuse_other(run: RunFolder, settings: TrainSettings) -> None:
    """Refuse a folder that holds a run with other settings."""
    if run.config.exists() and checkpoint.all_in(run.checkpoints):
        before = from_yaml(TrainSettings, run.config)
        there, here = identity(before), identity(settings)
        was, now = flatten(before), flatten(settings)
        differing = [
            f"{path}: {was[path]!r} there, {now[path]!r} here"
            for path in sorted(there | here)
            if there.get(path) != here.get(path)
        ]
        if differing:
            raise OtherSettings(
                f"The run {run.root} was started with other settings: {'; '.join(differing)}.",
                fix="Give another --run_name, or the settings it was started with.",
            )


def find_checkpoint(run: RunFolder, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, whole and verified, or None to start at step 0."""
    if resume == "auto":
        return checkpoint.newest_whole(run.checkpoints)
    if resume == "none":
        existing = checkpoint.all_in(run.checkpoints)
        if existing:
            raise UserError(
                f"--resume none would start over a run that has {len(existing)} checkpoints, the last at {existing[-1]}.",
                fix="Give another --run_name, or delete the folder yourself.",
            )
        return None
    path = Path(resume)
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_whole(path / "checkpoints")
        if found is None:
            raise UserError(f"The run {path} has no checkpoint to resume from.")
        return found
    return path, checkpoint.manifest_of(path)


def check_same_model(then: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """A checkpoint of another model cannot be gone on from."""
    differing = [
        f"{key}: {then.get(key)!r} there, {now[key]!r} here"
        for key in now
        if key != "folder" and then.get(key) != now[key]  # a folder may move; what is in it has a key of its own
    ]
    if differing:
        raise UserError(
            f"The checkpoint {path} is of another model: {'; '.join(differing)}.",
            fix="Give the settings it was trained with, or start a new run with --init_from.",
        )


def check_same_data(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Going on with other data under the same name would be a different run."""
    if then != now:
        how = "with other names or contents" if then["samples"] == now["samples"] else "another number"
        raise UserError(
            f"The data changed since this run started: {then['samples']:,} training images then, {now['samples']:,} now "
            f"({how}).",
            "Going on would train on another order of images than the run's own.",
            "Restore the data, or start a new run with --run_name and --init_from.",
        )


def find_initial_weights(settings: TrainSettings, results_dir: str) -> tuple[dict[str, Tensor], str] | None:
    """Weights to start a new run from, with their origin, or None."""
    wanted = settings.checkpoint.init_from
    if wanted == "default":
        wanted = "auto" if settings.model.enable_condition else "none"
    if wanted == "none":
        return None
    if wanted != "auto":
        path = Path(wanted)
        if (path / "checkpoints").is_dir():
            found = checkpoint.newest_whole(path / "checkpoints")
            if found is None:
                raise UserError(f"The run {path} has no checkpoint to start from.")
            path = found[0]
        return read_weights(path, "ema1"), str(path)
    path_or_none = _newest_unconditional(settings, Path(results_dir))
    if path_or_none is None:
        log.info("No unconditional run of %s at %d px under %s: starting from scratch.",
                 settings.model.name, settings.model.img_size, results_dir)  # fmt: skip
        return None
    return read_weights(path_or_none, "ema1"), str(path_or_none)


def _newest_unconditional(settings: TrainSettings, results: Path) -> Path | None:
    """Manifests are read first and files are hashed only where they fit: there may be many large runs."""
    wanted = (settings.model.name, settings.model.img_size)
    fitting: list[tuple[float, Path]] = []
    for manifest in results.glob("*/checkpoints/step_*/manifest.json"):
        try:
            content = json.loads(manifest.read_text())
            model = content["model"]
            if (model["model"], model["img_size"]) == wanted and not model["label_names"]:
                fitting.append((content["written"], manifest.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a manifest; what is wrong with it is said when its own run is resumed
    for _, path in sorted(fitting, reverse=True):
        try:
            checkpoint.manifest_of(path)
            return path
        except UserError as error:
            log.warning("%s Passing over it.", error)
    return None
