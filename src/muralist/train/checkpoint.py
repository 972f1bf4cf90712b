"""Checkpoints: written aside, flushed, hashed, renamed. One exists when its manifest does, counts when its hashes agree.

    checkpoints/step_0000500/{manifest.json, model.safetensors, ema1.safetensors, ema2.safetensors, state/}
    checkpoints/latest                           a text file with a name

Weights are stored once, as safetensors that every tool can read; `state/` (torch.distributed.checkpoint) holds what only
a resumed run needs, the optimizer's tensors. Where they lie in parts on several processes (FSDP2), each process writes
its parts of the optimizer's tensors, and the main one puts the weights together; what is on disk then does not tell how
many processes there were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from muralist.errors import UserError
from muralist.models.family import Family
from muralist.models.weights import Which, latest_checkpoint, read_weights
from muralist.runfolder import disk_error, flush_folder, no_space, write_atomically, write_json
from muralist.train.state_reader import StateReader

FORMAT = 1
_PIECE = 1 << 22  # bytes
_LONGEST_NAME = 200
_NAME = r"step_\d{7,}"
log = logging.getLogger("muralist")


def folder_name(step: int) -> str:
    """The name of a step's checkpoint and samples folders."""
    return f"step_{step:07d}"


def step_of(folder: Path) -> int:
    """The step in such a name."""
    return int(folder.name.removeprefix("step_"))


def optimizer_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name; zeros before the first step, so that it can also be loaded into."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


def write(
    folder: Path,
    step: int,
    weights: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
    facts: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint; the folder appears under its name only when everything in it is on disk.

    With a group, all its processes call this, for tensors that lie in parts on them. A process that fails goes on
    meeting the others in every collective; afterwards all fail.
    """
    final, aside = folder / folder_name(step), _aside(folder, step)
    main = group is None or dist.get_rank(group) == 0
    try:
        failure = _failure_of(lambda: _prepare(aside, weights, state)) if main else None
        for name, tensors in weights.items():
            complete = {}
            for key, value in tensors.items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                if main:  # the others never hold more than one whole tensor
                    complete[key] = value.detach().cpu().contiguous()
            if main and failure is None:
                failure = _failure_of(lambda: _write_weights(aside / f"{name}.safetensors", complete))  # noqa: B023
        _meet(failure, group)
        with _alone():
            dcp.save(state, checkpoint_id=aside / "state", process_group=group, no_dist=group is None)
        failure = _failure_of(lambda: _complete(folder, step, facts)) if main else None
        _meet(failure, group)
        return final
    except (OSError, SafetensorError) as error:
        raise no_space(disk_error(error), final) from None
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise no_space(disk_error(first), final) from None
    finally:
        if main:
            shutil.rmtree(aside, ignore_errors=True)


def _failure_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _meet(failure: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise a failure on every process of the group."""
    failed = torch.tensor(failure is not None)
    if group is not None:
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if failed:
        raise failure or UserError("Another process could not write the checkpoint.", "Its own message says why.")


def _prepare(aside: Path, weights: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor]) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _require_space(aside.parent, weights, state)


def _aside(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name; one run has one writer, so one name will do."""
    return folder / f".{folder_name(step)}.tmp"


def _write_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), file)
    # safetensors lets only the owner read; a checkpoint is for others too, as far as the user's mask allows.
    file.chmod(file.parent.stat().st_mode & 0o666)


def _complete(folder: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Hash and flush what lies aside, add the manifest, and give the checkpoint its name."""
    final, aside = folder / folder_name(step), _aside(folder, step)
    files = {str(path.relative_to(aside)): path for path in sorted(aside.rglob("*")) if path.is_file()}
    manifest = {"format": FORMAT, "step": step, "written": time.time(), **facts}
    manifest["files"] = {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()}
    for path in files.values():
        _flush(path)
    flush_folder(aside / "state")
    write_json(aside / "manifest.json", manifest | {"sha256": _seal(manifest)})
    # Written inside, then moved out: once the checkpoint has its name, nothing needs space any more.
    write_atomically(aside / "latest", final.name + "\n")
    flush_folder(aside)
    _discard(final)
    aside.replace(final)
    (final / "latest").replace(folder / "latest")
    flush_folder(folder)
    return final


def _require_space(folder: Path, weights: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor]) -> None:
    needed = sum(t.numel() * t.element_size() for part in (*weights.values(), state) for t in part.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"A checkpoint needs {needed / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free.",
            "Nothing was written; earlier checkpoints are whole.",
            "Free some space and run the same command again: it goes on from the last checkpoint.",
        )


def _digest(path: Path) -> str:
    """Of a file, in large pieces: after each, this thread needs Python's lock again, which training holds."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """The manifest's own hash, over its content: without it a changed step or batch would go unnoticed."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and unchanged; anything else is an error that says what."""
    path = checkpoint / "manifest.json"
    if not checkpoint.is_dir():
        raise UserError(f"There is no checkpoint at {checkpoint}.", fix=_list_known(checkpoint.parent))
    try:
        manifest = json.loads(path.read_text())
        version, seal = manifest["format"], manifest.pop("sha256", None)
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a whole checkpoint: it has no manifest.json.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged: it is not a checkpoint manifest.") from None
    if version != FORMAT:
        raise UserError(f"{path} has format {version}, this version of muralist reads format {FORMAT}.")
    if seal != _seal(manifest) or not _is_plausible(manifest):
        raise UserError(f"{path} is damaged: it is not what was written.")
    for name, expected in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise UserError(f"The checkpoint {checkpoint} is damaged: {name} is missing.")
        if file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
            raise UserError(f"The checkpoint {checkpoint} is damaged: {name} is not what was written.")
    return manifest


def require_whole(source: Path) -> None:
    """Refuse a checkpoint, a run's latest one or a file of one that is not what was written; weights from elsewhere pass."""
    place = latest_checkpoint(source)
    folder = place if place.is_dir() else place.parent
    if (folder / "manifest.json").exists() or re.fullmatch(_NAME, folder.name):
        manifest_of(folder)


def _is_plausible(manifest: Mapping[str, Any]) -> bool:
    """Whether what every manifest says is of the kind it should be; a seal is no lock, and anybody can write one."""
    files, step = manifest.get("files"), manifest.get("step")
    return (
        isinstance(manifest.get("model"), dict)
        and type(step) is int
        and step >= 0
        and isinstance(files, dict)
        and all(
            _is_inside(name) and isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys()
            for name, facts in files.items()
        )
    )


def _is_inside(name: str) -> bool:
    """Whether a file of a checkpoint lies in it: what it does not name there is not read."""
    return (
        not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name and len(name) < _LONGEST_NAME
    )


def _list_known(folder: Path) -> str:
    known = [path.name for path in all_in(folder)]
    return f"Known here: {', '.join(known[-5:])}." if known else ""


def all_in(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(_NAME, path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def _latest(folder: Path) -> str:
    """The name in `latest`; empty where there is none."""
    latest = folder / "latest"
    return latest.read_text(errors="replace").strip() if latest.is_file() else ""


def _in_line(folder: Path) -> list[Path]:
    """Checkpoints up to the one written last; any beyond it were left behind when the run was set back to an earlier one."""
    found, last = all_in(folder), _latest(folder)
    names = [path.name for path in found]
    return found[: names.index(last) + 1] if last in names else found


def newest_whole(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint; damaged ones are passed over and said so; all damaged is an error."""
    candidates, last = _in_line(folder), _latest(folder)
    if candidates and candidates[-1].name != last:
        named = f"names {last:.80}, which is not there" if last else "names no checkpoint"
        log.warning("%s %s. Taking the newest that is whole.", folder / "latest", named)
    for path in reversed(candidates):
        try:
            return path, manifest_of(path)
        except UserError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
    if candidates:
        raise UserError(
            f"None of the {len(candidates)} checkpoints in {folder} is whole.",
            fix="Nothing was deleted. Restore one from a copy, or start anew with another --run_name.",
        )
    return None


def read_stored(checkpoint: Path, which: Which, network: nn.Module, family: Family) -> dict[str, Tensor]:
    """One set of a checkpoint's weights: all that the family stores of the network, and nothing else."""
    weights = read_weights(checkpoint, which)
    wanted = {name for name in network.state_dict() if family.stores(name)}
    if wanted != weights.keys():
        odd = sorted(wanted ^ weights.keys())
        raise UserError(
            f"The {which} weights of {checkpoint} do not fit the network: {len(odd)} are missing or unknown.",
            f"The first is {odd[0]}.",
        )
    return weights


def read_state(checkpoint: Path, state: dict[str, Any], together: bool = False) -> None:
    """Fill the given tensors from a checkpoint's `state/`, in place; `together` where they lie in parts on all processes."""
    reader = StateReader(checkpoint / "state")
    try:
        with _alone():
            dcp.load(state, storage_reader=reader, no_dist=not together)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise UserError(
            f"The state of {checkpoint} does not fit this model: {str(first).splitlines()[0] if str(first) else first!r}.",
            fix="Resume with the settings it was trained with, or start from its weights with --init_from.",
        ) from error


@contextmanager
def _alone() -> Iterator[None]:
    """Keep torch from warning that one process writes alone: here that is the intent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def prune(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints that are neither among the newest nor at a kept step; a name is taken away before its contents."""
    for path in _in_line(folder)[:-keep_last]:
        if keep_every is None or step_of(path) % keep_every:
            _discard(path)


def _discard(path: Path) -> None:
    if path.exists():
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.replace(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what an earlier process left half written or half deleted; the caller holds the run's lock."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)
