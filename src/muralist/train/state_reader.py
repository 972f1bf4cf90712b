"""Reads the optimizer's state of a checkpoint without running code out of it, wherever the run's folder came from.

torch.distributed.checkpoint keeps its table of contents, `.metadata`, as a pickle, and would unpickle whatever it finds
there. Here it may name only what describes tensors, and only tensors are read, each by torch's restricted reader.
"""

from __future__ import annotations

import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.filesystem import _StorageInfo

from muralist.errors import UserError

_CLASSES = (
    contents.Metadata,
    contents.TensorStorageMetadata,
    contents.BytesStorageMetadata,
    contents.TensorProperties,
    contents.ChunkStorageMetadata,
    contents.MetadataIndex,
    contents.StorageMeta,
    contents._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class StateReader(FileSystemReader):
    """Reads a `state/` folder whose table of contents was looked at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._contents = _read_contents(folder / ".metadata")

    def read_metadata(self) -> contents.Metadata:  # type: ignore[override]  # no other file is tried where this one fails
        """The table of contents."""
        self._contents.storage_meta = contents.StorageMeta(load_id=self.load_id)
        return self._contents


class _DescriptionsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The few names that such a table needs."""
        if found := next((kind for kind in _CLASSES if (kind.__module__, kind.__name__) == (module, name)), None):
            return found
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePosixPath  # where the checkpoint was written: a mere name here
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}, which no tensor needs")


def _layout(name: str) -> torch.layout:
    if name != str(torch.strided):
        raise pickle.UnpicklingError(f"it has tensors of the layout {name!r:.40}")
    return torch.strided


def _read_contents(path: Path) -> contents.Metadata:
    try:
        with path.open("rb") as file:
            found = _DescriptionsOnly(file).load()
        _check(found)
        return found
    except Exception as error:  # what a foreign file can make a reader raise has no end
        raise UserError(
            f"{path} cannot be read: it is damaged, or no checkpoint's table of contents.",
            f"The reader said: {str(error) or type(error).__name__}.",
            "Resume from another checkpoint, or start from its weights with --init_from.",
        ) from None


def _check(found: Any) -> None:
    if not isinstance(found, contents.Metadata):
        raise ValueError("it describes no checkpoint")
    for name, entry in found.state_dict_metadata.items():
        # Anything else than a tensor is a pickle of its own, which torch would load without restrictions.
        if not isinstance(name, str) or not isinstance(entry, contents.TensorStorageMetadata):
            raise ValueError(f"{name!r:.80} is not a tensor")
    for place in found.storage_data.values():
        if place.transform_descriptors or not _DATA_FILE.fullmatch(place.relative_path):
            raise ValueError(f"it points to {place.relative_path!r:.80}, which is no file of a checkpoint")
