"""Finds what there is to show under a root: runs, generation folders, evaluations."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["run", "generation", "evaluation"]
_DEEPEST = 6
_MOST_ENTRIES = (
    20_000  # looked at in one folder: one with more is full of pictures, and its sub-folders come first or not
)
_MOST_FOLDERS = 20_000
_INSIDE_A_RUN = {"checkpoints", "samples", "logs", "tensorboard", "heartbeats", "wandb"}
_SETTLED = 2.0  # seconds after which a folder's time of change tells every later change apart
_REST = 1.0


class Thing(NamedTuple):
    """Something to show."""

    kind: Kind
    folder: Path
    """Where it really lies, under the root."""
    name: Path
    """Where it was found: a link elsewhere under the root, or the same."""


class _Listing(NamedTuple):
    """What a folder holds, as far as it matters here."""

    kinds: tuple[Kind, ...]
    folders: tuple[str, ...]
    links: tuple[str, ...] = ()  # to folders


class Scanner:
    """Looks through the root; a folder that has not changed is not read again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._listings: dict[Path, tuple[int, _Listing]] = {}
        self._found: list[Thing] = []
        self._looked = -_REST
        self._lock = threading.Lock()

    def things(self) -> list[Thing]:
        """Everything under the root, by path; asked again within a second, as it was."""
        with self._lock:
            if time.monotonic() - self._looked >= _REST:
                kept = self._listings
                self._listings = {}
                self._found = sorted(self._walk(kept), key=lambda thing: (thing.name, thing.kind))
                self._looked = time.monotonic()
            return self._found

    def _walk(self, before: dict[Path, tuple[int, _Listing]]) -> Iterator[Thing]:
        level = [self.root]
        for _ in range(_DEEPEST):
            below: list[Path] = []
            for folder in level:
                if len(self._listings) >= _MOST_FOLDERS:
                    return
                listing = self._listing(folder, before)
                yield from (Thing(kind, folder, folder) for kind in listing.kinds)
                for name in listing.links:
                    yield from self._linked(folder / name, before)
                below.extend(folder / name for name in listing.folders)
            level = below

    def _linked(self, link: Path, before: dict[Path, tuple[int, _Listing]]) -> Iterator[Thing]:
        """What a link names, if that lies under the root and is for show; nothing below it, or a loop would have no end."""
        folder = Path(os.path.realpath(link))  # asked anew each time: what it names may have become another link
        if folder.is_relative_to(self.root) and all(map(_is_shown, folder.relative_to(self.root).parts)):
            yield from (Thing(kind, folder, link) for kind in self._listing(folder, before).kinds)

    def _listing(self, folder: Path, before: dict[Path, tuple[int, _Listing]]) -> _Listing:
        try:
            changed = folder.stat().st_mtime_ns
            if folder in before and before[folder][0] == changed:
                listing = before[folder][1]
            else:
                listing = _read(folder)
                if time.time() - changed / 1e9 < _SETTLED:
                    changed = -1  # another change at this very moment would have the same time
        except OSError:
            return _Listing((), ())
        self._listings[folder] = changed, listing
        return listing


def _read(folder: Path) -> _Listing:
    names: set[str] = set()
    folders: list[str] = []
    links: list[str] = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == _MOST_ENTRIES:
                break
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_symlink() and Path(entry).is_dir():  # the entry itself would raise on links in a circle
                links.append(entry.name)
            elif entry.name.endswith((".jsonl", ".json", ".yaml")):
                names.add(entry.name)
    kinds: list[Kind] = []
    if is_run := "config.yaml" in names and ("metrics.jsonl" in names or "checkpoints" in folders):
        kinds.append("run")
    if (folder / "ledger.jsonl").is_file() or (folder / ".ledger").is_dir():
        kinds.append("generation")
    if (folder / "report.json").is_file():
        kinds.append("evaluation")
    below = (name for name in folders if _is_shown(name) and not (is_run and name in _INSIDE_A_RUN))
    return _Listing(tuple(kinds), tuple(sorted(below)), tuple(filter(_is_shown, links)))


def _is_shown(name: str) -> bool:
    """Hidden folders are not for show, nor is a name that is not text and that no address could spell."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith(".")
