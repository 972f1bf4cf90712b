"""Models by name: a folder or file on this machine, or the id of a model on the Hugging Face Hub.

Only what muralist reads is downloaded: safetensors, configs and tokenizers, neither pickles nor code. A model that is
complete in the cache is used without a request, so that a resumed run keeps its model when the Hub has a newer one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_bytes
from muralist.core.run_dir import check_exists, exists
from muralist.settings import TrainSettings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_INDEX = "model_index.json"
_DESCRIPTIONS = (_INDEX, "*config.json")
# Weights without a variant in their name: model.fp16.safetensors would be a second copy.
_WEIGHTS = ("*model.safetensors", "*model-?????-of-?????.safetensors", "pytorch_lora_weights.safetensors")
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", *_WEIGHTS)
_IN_FOLDERS = "*/*"
_WEIGHT_FILES = (".safetensors", ".pth")


def find_model(name: str, flag: str, kind: str = "model") -> Path:
    """Return the path of a model, or of another `kind`; an id on the Hub becomes its folder in the cache."""
    fix = f"Give a folder or a file on this machine, or the id of a {kind} on the Hugging Face Hub, as {flag}."
    try:
        check_exists(Path(name), kind, fix)
    except UserError as error:
        if not _may_be_id(name):
            raise
        return _find_snapshot(name, kind, error.why)
    return Path(name)


def _may_be_id(name: str) -> bool:
    """Return whether a name that does not exist here may be an id on the Hub; a mistyped run or weights file is not."""
    if not _HUB_ID.fullmatch(name) or Path(name).suffix in _WEIGHT_FILES:
        return False
    folder = Path(name).parent
    holds_runs = exists(folder) and any(folder.glob("*/checkpoints"))
    return not holds_runs and folder.name != TrainSettings.model_fields["results_dir"].default


@cache
def _find_snapshot(name: str, kind: str, not_local: str) -> Path:
    """Return the folder of a Hub model; `not_local` says why the name is not a path on this machine."""
    from huggingface_hub import constants, errors, is_offline_mode

    what = f"The {kind} {name} was not found, neither on this machine nor "
    place = f"the cache {constants.HF_HUB_CACHE}"
    ask = f"Check the name, or give a folder; `hf download {name}` shows the Hub's full answer."
    try:
        folder = _snapshot(name, _DESCRIPTIONS, (_IN_FOLDERS,))
        parts = _components(folder / _INDEX)
        if not parts:
            return _snapshot(name, _FILES, (_IN_FOLDERS,))
        return _snapshot(name, (_INDEX, *(f"{part}/{pattern}" for part in parts for pattern in _FILES)), ())
    except errors.GatedRepoError:
        why = "Its owner asks every user to accept its terms."
        fix = f"Accept them at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run `hf auth login`."
        raise UserError(f"The {kind} {name} on the Hugging Face Hub is gated.", why, fix) from None
    except errors.RepositoryNotFoundError:
        why = f"{not_local} {constants.ENDPOINT} has no such model, or it is private."
        fix = "Check the path or the id; for a private model set HF_TOKEN or run `hf auth login`."
        raise UserError(f"{what}on the Hugging Face Hub.", why, fix) from None
    except errors.LocalEntryNotFoundError as error:
        if is_offline_mode():
            reason = f"HF_HUB_OFFLINE is set, and it is not complete in {place}."
            way_out = "unset HF_HUB_OFFLINE, or "
        else:
            cause = first_line(error.__cause__ or error)
            reason = f"{constants.ENDPOINT} cannot be reached ({cause}), and it is not complete in {place}."
            way_out = ""
        fix = f"Check the path. If it is an id on the Hub, {way_out}copy a cache from where `hf download {name}` ran."
        raise UserError(f"{what}in the cache of the Hugging Face Hub.", f"{not_local} {reason}", fix) from None
    except Exception as error:  # of the network, the disk or the server
        what = f"The {kind} {name} is not on this machine, and was not downloaded: {first_line(error)}."
        raise UserError(what, not_local, ask) from None


def _snapshot(name: str, allowed: Sequence[str], ignored: Sequence[str]) -> Path:
    """Return the snapshot of a Hub model in the cache with all files of these patterns."""
    from huggingface_hub import constants, errors, get_cached_repo_tree, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    patterns: dict[str, Any] = {"allow_patterns": list(allowed), "ignore_patterns": list(ignored)}
    try:
        files = get_cached_repo_tree(
            name
        )  # without the list of files, an incomplete snapshot passes for a complete one
        try:
            return Path(snapshot_download(name, local_files_only=True, **patterns))
        except errors.LocalEntryNotFoundError:
            sizes = [file.size for file in filter_repo_objects(files, key=lambda file: file.path, **patterns)]
            if os.environ.get("RANK", "0") == "0" and allowed is not _DESCRIPTIONS:
                amount = f"{len(sizes)} files, {format_bytes(sum(sizes))}"
                print(f"Downloading {name} ({amount}) from {constants.ENDPOINT} to the cache.", file=sys.stderr)
    except errors.CachedRepoTreeNotFoundError:
        pass
    return Path(snapshot_download(name, **patterns))


def _components(index: Path) -> list[str]:
    """Return the subfolders that a pipeline in diffusers layout names; none for other models and exported JiTs."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        lists = {part: origin for part, origin in content.items() if isinstance(origin, list)}
    except (OSError, ValueError, AttributeError):
        return []
    is_jit = isinstance(content.get("_class_name"), list)  # a pipeline with code of its own: only a JiT of ours is read
    return [] if is_jit else [part for part in lists if re.fullmatch(r"[a-zA-Z]\w*", part)]
