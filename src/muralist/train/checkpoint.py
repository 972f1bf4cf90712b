"""Checkpoints: written to a temporary folder, hashed, flushed, renamed; intact when the manifest's hashes agree.

    checkpoints/step_0000500/{manifest.json, model.safetensors, ema1.safetensors, ema2.safetensors, state/}
    checkpoints/latest                           a text file with the name of the last one

Weights are safetensors that every tool can read; `state/` (torch.distributed.checkpoint, DCP) holds the optimizer's
tensors, which only a resumed run needs. Where tensors are sharded (FSDP2), each process writes its shards of the
optimizer state, and the main process gathers the weights: the files do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_duration
from muralist.core.run_dir import (
    atomic_write,
    atomic_write_json,
    check_exists,
    disk_write_error,
    find_os_error,
    fsync,
)
from muralist.models.spec import ModelSpec
from muralist.models.weights import WeightSet, description_metadata, latest_checkpoint, read_weights
from muralist.settings import CheckpointSettings

FORMAT = 1
_READ_CHUNK = 1 << 22  # bytes
_PINNED_CHUNK = 1 << 28  # bytes
_ALIGNMENT = 64  # bytes
_NAME = r"step_\d{7,}"
_FILE = re.compile(r"(state/)?\.?\w[\w.-]{0,150}")
log = logging.getLogger("muralist")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process writes alone, as intended

Tensors = Mapping[str, Tensor]
WeightSets = Mapping[str, Tensors]
Group = dist.ProcessGroup | None
_METADATA_CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
)
_ALLOWED = {(kind.__module__, kind.__name__): kind for kind in _METADATA_CLASSES}
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class SafeStateReader(FileSystemReader):
    """Reads a DCP folder whose metadata, a pickle, may only build descriptions of tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(folder / ".metadata")

    def read_metadata(self) -> metadata.Metadata:  # type: ignore[override]  # never falls back to another file
        """Return the metadata that was checked."""
        self._metadata.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Allow the few names that DCP metadata needs."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePosixPath  # the folder it was written to, which is never opened
        raise pickle.UnpicklingError(f"it would run {module}.{name}, which no tensor needs")


def _read_metadata(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError("it does not describe a checkpoint")
        for name, entry in found.state_dict_metadata.items():
            # Anything but a tensor is a pickle of its own, which torch would load without restrictions.
            if not isinstance(name, str) or not isinstance(entry, metadata.TensorStorageMetadata):
                raise ValueError(f"{name!r:.80} is not a tensor")
        for place in found.storage_data.values():
            if place.transform_descriptors or not _DATA_FILE.fullmatch(place.relative_path):
                raise ValueError(f"it refers to {place.relative_path!r:.80}, which is not a file of a checkpoint")
        return found
    except Exception as error:  # a damaged pickle can raise almost anything
        raise UserError(
            f"{path} cannot be read: it is damaged, or not the metadata of a checkpoint.",
            f"Reason: {str(error) or type(error).__name__}.",
            "Resume from another checkpoint, or start from its weights with --init_from.",
        ) from None


class Checkpoint(NamedTuple):
    """An intact checkpoint."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps before it."""
        return int(self.manifest["step"])


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint, and of its samples."""
    return f"step_{step:07d}"


def step_of(folder: Path) -> int:
    """Step in the name of such a folder."""
    return int(folder.name.removeprefix("step_"))


def write(
    folder: Path, step: int, weights: WeightSets, state: Tensors, facts: dict[str, Any], group: Group = None
) -> Path:
    """Write one checkpoint; the folder gets its name only when everything in it is on disk.

    With a group, all its processes call this with sharded tensors. A process that fails still takes part in every
    collective; afterwards all processes fail.
    """
    final = folder / folder_name(step)
    aside = folder / f".{final.name}.tmp"  # a run has one writer, so one name is enough
    main = group is None or dist.get_rank(group) == 0
    try:
        failure = _error_of(lambda: _prepare(aside, weights, state)) if main else None
        for name, tensors in weights.items():
            complete = {}
            for key, value in tensors.items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                if main:  # the others never hold more than one full tensor
                    complete[key] = value.detach().cpu().contiguous()
            if main and failure is None:
                failure = _error_of(lambda: _write_weights(aside / f"{name}.safetensors", complete, facts))  # noqa: B023
        _raise_together(failure, group)
        dcp.save(dict(state), checkpoint_id=aside / "state", process_group=group, no_dist=group is None)
        failure = _error_of(lambda: _complete(aside, final, step, facts)) if main else None
        _raise_together(failure, group)
        return final
    except (OSError, SafetensorError, CheckpointException) as error:
        raise disk_write_error(find_os_error(_first_failure(error)), final) from None
    finally:
        if main:
            shutil.rmtree(aside, ignore_errors=True)


def _error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _first_failure(error: BaseException) -> BaseException:
    """What went wrong first in a process, behind DCP's error."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _raise_together(error: Exception | None, group: Group) -> None:
    """Raise on every process of the group if one has an error."""
    failed = torch.tensor(error is not None)
    if group is not None:
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if failed:
        raise error or UserError("Another process could not write the checkpoint.", "See its own message.")


def _prepare(aside: Path, weights: WeightSets, state: Tensors) -> None:
    """Create the temporary folder; refuse a disk that is too full."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    needed = sum(t.numel() * t.element_size() for part in (*weights.values(), state) for t in part.values())
    free = shutil.disk_usage(aside).free
    if free < needed:
        raise UserError(
            f"A checkpoint needs {needed / 1e9:.2f} GB and the disk of {aside.parent} has {free / 1e9:.2f} GB free.",
            "Nothing was written; earlier checkpoints are intact.",
            "Free some space, then run the same command to resume from the last checkpoint.",
        )


def _write_weights(file: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    save_file(tensors, file, description_metadata(facts.get("model", {})) or None)
    # safetensors creates files that only the owner can read; restore the permissions of the user's umask.
    file.chmod(file.parent.stat().st_mode & 0o666)


def _complete(aside: Path, final: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Hash and flush the files, add the manifest, and rename the folder."""
    files = {str(path.relative_to(aside)): path for path in sorted(aside.rglob("*")) if path.is_file()}
    manifest = {"format": FORMAT, "step": step, "written": time.time(), **facts}
    manifest["files"] = {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()}
    for path in (*files.values(), aside / "state"):
        fsync(path)
    atomic_write_json(aside / "manifest.json", manifest | {"sha256": _seal(manifest)})
    # Written inside, then moved: once the checkpoint has its name, nothing needs disk space any more.
    atomic_write(aside / "latest", final.name + "\n")
    fsync(aside)
    _delete(final)
    aside.replace(final)
    (final / "latest").replace(final.with_name("latest"))
    fsync(final.parent)


def _digest(path: Path) -> str:
    """SHA-256 of a file, in large chunks: between two of them this thread needs the GIL, which training holds."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_READ_CHUNK).hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """Hash of the manifest's own content, to notice a changed step or batch size."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint and verify all its files; a UserError names what is missing or changed."""
    path = checkpoint / "manifest.json"
    if not checkpoint.is_dir():
        known = ", ".join(path.name for path in list_checkpoints(checkpoint.parent)[-5:])
        fix = (
            f"The checkpoints there are {known}."
            if known
            else "Give the folder of a run, or of one of its checkpoints."
        )
        check_exists(checkpoint, "run or checkpoint", fix)
        raise UserError(f"{checkpoint} is a file, not a run or a checkpoint.", fix=fix)
    try:
        manifest = json.loads(path.read_text())
        version, seal = manifest["format"], manifest.pop("sha256", None)
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is not a complete checkpoint: it has no manifest.json.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged: it is not a checkpoint manifest.") from None
    if version != FORMAT:
        raise UserError(f"{path} has format {version}, this version of muralist reads format {FORMAT}.")
    if seal != _seal(manifest) or not _is_plausible(manifest):
        raise UserError(f"{path} is damaged: its content does not match its hash.")
    for name, expected in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise UserError(f"The checkpoint {checkpoint} is damaged: {name} is missing.")
        if file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
            raise UserError(f"The checkpoint {checkpoint} is damaged: {name} does not match its hash.")
    return manifest


def require_intact(source: Path) -> None:
    """Refuse a damaged checkpoint, a run's damaged latest one or a file of one; weights from elsewhere pass."""
    place = latest_checkpoint(source)
    folder = place if place.is_dir() else place.parent
    if (folder / "manifest.json").exists() or re.fullmatch(_NAME, folder.name):
        read_manifest(folder)


def _is_plausible(manifest: Mapping[str, Any]) -> bool:
    """Whether the fields that every manifest has are of the right type; the hash does not prove who wrote it."""
    files, step = manifest.get("files"), manifest.get("step")
    if not isinstance(manifest.get("model"), dict) or type(step) is not int or step < 0 or not isinstance(files, dict):
        return False
    described = all(isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in files.values())
    return described and all(_FILE.fullmatch(name) for name in files)  # no name leaves the checkpoint's folder


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first, intact or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(_NAME, path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def _up_to_latest(folder: Path) -> tuple[list[Path], str]:
    """Checkpoints up to the one written last, and the content of `latest`.

    Later ones were abandoned when the run resumed from an earlier step.
    """
    found, latest = list_checkpoints(folder), folder / "latest"
    last = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    names = [path.name for path in found]
    return (found[: names.index(last) + 1] if last in names else found), last


def newest_intact(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint; damaged ones are skipped with a warning, and it is an error if all are damaged."""
    candidates, last = _up_to_latest(folder)
    if candidates and candidates[-1].name != last:
        named = f"names {last:.80}, which is not there" if last else "names no checkpoint"
        log.warning("%s %s. Using the newest intact checkpoint.", folder / "latest", named)
    for path in reversed(candidates):
        try:
            return Checkpoint(path, read_manifest(path))
        except UserError as error:
            log.warning("%s Falling back to the previous checkpoint.", error)
    if candidates:
        raise UserError(
            f"None of the {len(candidates)} checkpoints in {folder} is intact.",
            fix="Nothing was deleted. Restore one from a backup, or start a new run with another --run_name.",
        )
    return None


def read_saved_weights(checkpoint: Path, which: WeightSet, network: nn.Module, spec: ModelSpec) -> dict[str, Tensor]:
    """Read one set of a checkpoint's weights: exactly those that the spec saves."""
    weights = read_weights(checkpoint, which, training=True)
    expected = {name for name in network.state_dict() if spec.is_saved(name)}
    if expected != weights.keys():
        odd = sorted(expected ^ weights.keys())
        raise UserError(
            f"The {which} weights of {checkpoint} do not fit the network: {len(odd)} are missing or unknown.",
            f"The first is {odd[0]}.",
            "Another version of muralist or another model wrote it: resume it with that one, or start a run with another "
            "--run_name.",
        )
    return weights


def read_state(checkpoint: Path, state: dict[str, Any], sharded: bool = False) -> None:
    """Fill tensors from a checkpoint's `state/` in place; a collective where they are sharded."""
    reader = SafeStateReader(checkpoint / "state")
    try:
        dcp.load(state, storage_reader=reader, no_dist=not sharded)
    except CheckpointException as error:
        raise UserError(
            f"The state of {checkpoint} does not fit this model: {first_line(_first_failure(error))}.",
            fix="Resume with the settings it was trained with, or start from its weights with --init_from.",
        ) from error


def read_whole_state(checkpoint: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint's `state/`."""
    described = SafeStateReader(checkpoint / "state").read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    read_state(checkpoint, state)
    return state


def prune(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints that are neither among the newest nor at a kept step; each is renamed before it is deleted."""
    for path in _up_to_latest(folder)[0][:-keep_last]:
        if keep_every is None or step_of(path) % keep_every:
            _delete(path)


def _delete(path: Path) -> None:
    if path.exists():
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.replace(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove checkpoints that a killed process left half written or half deleted; the caller holds the run's lock."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread; its errors are raised by `check` and `finish`."""

    def __init__(self, folder: Path, keep: CheckpointSettings, mesh: DeviceMesh | None = None) -> None:
        """Write with all processes of `mesh`, or with this one alone."""
        self.folder, self.keep, self.mesh = folder, keep, mesh
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def submit(self, step: int, weights: WeightSets, state: Tensors, facts: dict[str, Any]) -> None:
        """Copy the tensors to host memory, then write them in the background; waits for the previous checkpoint."""
        self.finish()
        sets = {
            part: {name: self._copy((part, name), value.detach()) for name, value in tensors.items()}
            for part, tensors in {**weights, "state": state}.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous
        self._pending = self._executor.submit(self._write, step, sets, sets.pop("state"), facts)

    def _write(self, step: int, weights: dict[str, Any], state: dict[str, Any], facts: dict[str, Any]) -> None:
        started, group = time.perf_counter(), self.mesh.get_group() if self.mesh else None
        path = write(self.folder, step, weights, state, facts, group)
        if self.mesh is None or self.mesh.get_rank() == 0:
            prune(self.folder, self.keep.keep_last, self.keep.keep_every)
            log.info("Saved checkpoint to %s (%s)", path, format_duration(time.perf_counter() - started))

    def check(self) -> None:
        """Raise the error of the background thread, if there was one."""
        if self._pending and self._pending.done():
            pending, self._pending = self._pending, None
            pending.result()

    def finish(self) -> None:
        """Wait until the current checkpoint is on disk; the watchdog may do so while the main thread does."""
        if pending := self._pending:
            wait([pending])
        self.check()

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return self._into_buffer(key, tensor)
        assert self.mesh is not None, "sharded tensors are written by all processes"
        shard, shape, stride = self._into_buffer(key, tensor.to_local()), tensor.shape, tensor.stride()
        return DTensor.from_local(shard, self.mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    def _into_buffer(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """Copy into a buffer that is kept for the next checkpoint: fresh or unpinned memory is slow."""
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._pinned_like(tensor) if tensor.is_cuda else torch.empty_like(tensor, device="cpu")
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _pinned_like(self, tensor: Tensor) -> Tensor:
        """Pinned memory, cut from large chunks: torch would round each tensor up to a power of two."""
        size = tensor.numel() * tensor.element_size()
        if size > len(self._pinned):
            self._pinned = torch.empty(max(size, _PINNED_CHUNK), dtype=torch.uint8, pin_memory=True)
        cut, self._pinned = self._pinned[:size], self._pinned[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return cut.view(tensor.dtype).view(tensor.shape)
