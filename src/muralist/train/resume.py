"""Where a run starts: at its last checkpoint, at a named one, at the weights of another run, or from scratch."""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.run_dir import RunDir, atomic_write
from muralist.models.hub import find_model
from muralist.models.weights import read_weights
from muralist.settings import CheckpointSettings, DistillationSettings, TrainSettings
from muralist.settings.load import flatten, identity, identity_digest, read_yaml, to_yaml
from muralist.train.checkpoint import Checkpoint, list_checkpoints, newest_intact, read_manifest, require_intact
from muralist.train.distributed import World

log = logging.getLogger("muralist")


class SettingsMismatch(UserError):
    """The run folder holds a run with other settings."""


def claim(run: RunDir, settings: TrainSettings) -> None:
    """Write the run's settings; a folder that holds a run with other settings is refused with the difference."""
    check_same_settings(run, settings)
    _warn_of_earlier_name(run, settings)
    atomic_write(run.config, to_yaml(settings))


def check_same_settings(run: RunDir, settings: TrainSettings) -> None:
    """Refuse a folder that holds a run with other settings, and a distillation whose teacher is damaged or changed."""
    if settings.distill.teacher:
        _check_teacher(run, settings.distill)
    if not (run.config.exists() and list_checkpoints(run.checkpoints)):
        return
    before = read_yaml(TrainSettings, run.config)
    if before.distill.teacher and not settings.distill.teacher:
        raise SettingsMismatch(
            f"The run {run.root} is a student of {before.distill.teacher}, which plain training cannot continue.",
            "It is trained beside its teacher and a critic.",
            f"Continue it with `muralist train --config {run.config} --run_name {run.root.name}`, or give another "
            "--run_name.",
        )
    there, here = identity(before), identity(settings)
    if _decays_with_epochs(run):
        there, here = ({key: value for key, value in one.items() if key != "max_steps"} for one in (there, here))
    was, now = flatten(before), flatten(settings)
    if different := [path for path in sorted(there | here) if there.get(path) != here.get(path)]:
        raise SettingsMismatch(
            f"The run {run.root} was started with other settings: {_differences(different, was, now)}.",
            fix="Give the settings it was started with, or continue from it in a new run with these settings: "
            f"--resume {run.root} --run_name NEW.",
        )


def _check_teacher(run: RunDir, distill: DistillationSettings) -> None:
    """Refuse a damaged teacher, and another one than that of the run's checkpoints."""
    from muralist.models.jit_distill import find_teacher, fingerprint_of

    teacher = find_teacher(distill)
    require_intact(teacher)
    try:
        written = json.loads((list_checkpoints(run.checkpoints)[-1] / "manifest.json").read_text())
        before, taught_by = written["model"]["distilled"]["teacher"], read_yaml(TrainSettings, run.config).distill
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return  # no checkpoint yet, or one of another kind: refused with the other differences
    if fingerprint_of(teacher, distill.weights) != before:
        raise UserError(
            f"The teacher of the run {run.root} has changed: {teacher} holds other weights than when the run started.",
            f"It started from {taught_by.teacher}, --distill.weights {taught_by.weights}.",
            f"Give that teacher as it was, or distill {teacher} in a new run: --run_name NEW.",
        )


def _warn_of_earlier_name(run: RunDir, settings: TrainSettings) -> None:
    """Say where version 0.1 keeps this run: --max_steps was not part of the name of a cosine run then."""
    without = settings.model_copy(update={"max_steps": None})
    earlier = RunDir(run.root.with_name(run.root.name[:-6] + identity_digest(without)))
    is_new = settings.run_name is None and earlier.root != run.root and not list_checkpoints(run.checkpoints)
    if is_new and list_checkpoints(earlier.checkpoints) and _decays_with_epochs(earlier):
        log.warning(
            "Version 0.1 trained these settings as %s: `--run_name %s` resumes it. This run is a new one, because the "
            "cosine schedule now ends with --max_steps.",
            earlier.root, earlier.root.name,
        )  # fmt: skip


def _decays_with_epochs(run: RunDir) -> bool:
    """Whether version 0.1 began this run: its cosine schedule ends with the epochs, and max_steps may change."""
    try:
        return "lr_decay_steps" not in json.loads((list_checkpoints(run.checkpoints)[-1] / "manifest.json").read_text())
    except (OSError, ValueError, TypeError):
        return False  # damaged; the newest intact checkpoint is looked for later


def _differences(keys: list[str], there: dict[str, Any], here: dict[str, Any]) -> str:
    return "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in keys)


def find_checkpoint(
    run: RunDir, settings: CheckpointSettings, model: dict[str, Any], data: dict[str, Any]
) -> Checkpoint | None:
    """The intact checkpoint to resume from, of the same model and data; None to start at step 0."""
    resume = settings.resume
    if resume == "none":
        if existing := list_checkpoints(run.checkpoints):
            raise UserError(
                f"--resume none would start over a run that has {len(existing)} checkpoints, the last {existing[-1]}.",
                fix="Give another --run_name, or delete the folder yourself.",
            )
        return None
    if resume == "auto":
        found = newest_intact(run.checkpoints)
    elif _is_in(run, Path(resume)):
        found = _open(Path(resume))
    else:
        found = _fork(run, settings)
    if found is None:
        return None
    then = found.manifest["model"]
    if "distilled" in then and "distilled" not in model:
        raise UserError(
            f"The checkpoint {found.path} is that of a student, which plain training cannot continue.",
            "It is trained beside its teacher and a critic.",
            "Resume its run with the same `muralist distill` command, or start from its teacher.",
        )
    # A folder may move; its content has a key of its own.
    if different := [key for key in model if key != "folder" and then.get(key) != model.get(key)]:
        raise UserError(
            f"The checkpoint {found.path} is of another model: {_differences(different, then, model)}.",
            fix="Give the settings it was trained with, or start a new run from weights that fit, with --init_from.",
        )
    if (before := found.manifest["data"]) != data:
        how = "with other names or contents" if before["samples"] == data["samples"] else "another number"
        counts = f"{before['samples']:,} training images then, {data['samples']:,} now ({how})"
        raise UserError(
            f"The data changed since this run started: {counts}.",
            "Resuming would train on the images in another order.",
            f"Restore the data, or start a new run from its weights: --run_name NEW --init_from {found.path}.",
        )
    return found


def is_own(run: RunDir, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint belongs to this run; another run's makes this one a fork."""
    return checkpoint.path.parent.resolve() == run.checkpoints.resolve()


def _is_in(run: RunDir, path: Path) -> bool:
    """Whether a path is the run's folder or one of its checkpoints."""
    return run.root.resolve() in (path.resolve(), path.resolve().parent.parent)


def _fork(run: RunDir, settings: CheckpointSettings) -> Checkpoint:
    """The checkpoint of another run that a new run continues, or its own newest one once it has some."""
    if settings.init_from not in ("default", "none"):
        raise UserError(
            f"--resume {settings.resume} and --init_from {settings.init_from} both name the weights to start from.",
            "--resume continues from weights, optimizer and images seen; --init_from takes the weights alone.",
            "Leave one of them out.",
        )
    own = newest_intact(run.checkpoints)
    if own:  # the other run may have deleted its checkpoint meanwhile
        log.info("%s has checkpoints of its own: resuming from its last one, not from %s.", run.root, settings.resume)
    return own or _open(Path(settings.resume))


def _open(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest intact one of a run."""
    if not (path / "checkpoints").is_dir():
        return Checkpoint(path, read_manifest(path))
    found = newest_intact(path / "checkpoints")
    if found is None:
        raise UserError(f"The run {path} has no checkpoint to start from.")
    return found


def check_ranks_agree(world: World, checkpoint: Checkpoint | None, data: dict[str, Any], total_batch: int) -> None:
    """Refuse to train where processes found different checkpoints or data, as on a file system that lags behind."""
    step, name = (checkpoint.step, checkpoint.path.name) if checkpoint else (0, "")
    digest = zlib.crc32(json.dumps([step, name, data, total_batch], sort_keys=True).encode())
    if world.all_reduce_min(digest) != world.all_reduce_max(digest):
        raise UserError(
            "The processes do not see the same checkpoint and data.",
            f"Rank {world.rank} would start at step {step} ({name or 'from scratch'}) with {data['samples']:,} images.",
            "Check that all machines share the results folder and have the same data, then run the same command again.",
        )


def find_initial_weights(settings: TrainSettings) -> tuple[dict[str, Tensor], str] | None:
    """The weights that a new run starts from (--init_from), with their origin, or None."""
    init_from, model = settings.checkpoint.init_from, settings.model
    if init_from == "none" or (init_from == "default" and (not model.enable_condition or settings.distill.teacher)):
        return None  # a student starts as its teacher
    if init_from in ("auto", "default"):
        found = _best_unconditional(settings)
        where = f"{model.name} at {model.size[0]} x {model.size[1]} px under {settings.results_dir}"
        if found is None:
            log.info("No unconditional run of %s: starting from scratch.", where)
            return None
        images, path, runs = found
        others = f", the most of {runs} such runs; --init_from RUN names another" if runs > 1 else ""
        log.info("--init_from auto: the unconditional run of %s has seen %s images%s.", where, f"{images:,}", others)
    elif ((path := find_model(init_from, "--init_from")) / "checkpoints").is_dir():
        path = _open(path).path
    return read_weights(path, "ema1"), str(path)


def _best_unconditional(settings: TrainSettings) -> tuple[int, Path, int] | None:
    """The intact checkpoint of an unconditional run with most images seen, those images, and how many runs there are.

    Of several with as many images it is the newest. Files are hashed only where the manifest matches.
    """
    model = settings.model.model_dump(mode="json")  # a rectangle is a list there, as in the manifest
    matching: list[tuple[int, float, Path]] = []
    for manifest in Path(settings.results_dir).glob("*/checkpoints/step_*/manifest.json"):
        try:
            content = json.loads(manifest.read_text())
            found = content["model"]
            same_model = found["model"] == model["name"] and found["img_size"] == model["img_size"]
            if same_model and not found["label_names"] and "distilled" not in found:
                matching.append((int(content["images"]), float(content["written"]), manifest.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; reported when its own run is resumed
    for images, _, path in sorted(matching, reverse=True):
        try:
            read_manifest(path)
            return images, path, len({checkpoint.parent for _, _, checkpoint in matching})
        except UserError as error:
            log.warning("%s Skipping it.", error)
    return None
