"""The ledger of an output folder: which picture is which, made how, and whether its file is whole.

    ledger.jsonl          first settings, versions and the batch shape, then one line per finished or failed sample;
                          a command that has something to do says beforehand how many samples it plans in all
    .ledger/gpu0.jsonl    while a command runs: the lines of one worker; they go to the end of ledger.jsonl when it ends

Lines are only ever appended, each by one write. A worker that is killed leaves at most one torn line, which is passed over:
its picture is made again. The last line about a sample counts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muralist.data.ledger_lines import DONE, FAILED, PLANNED, read_lines
from muralist.errors import UserError
from muralist.generate.plan import Sample
from muralist.runfolder import open_own, write_atomically
from muralist.settings.generate import scheduler_name

_FORMAT = "muralist ledger"
_VERSION = 1
CUT = "prompt_cut"
"""In the line of a picture: a text encoder did not read its prompt to the end."""


@dataclass(frozen=True)
class Header:
    """The first line: what all pictures of the folder have in common."""

    settings: dict[str, Any]
    """Everything that shapes a picture, the model's fingerprint included."""
    batch_size: int
    """Pictures made at once; a picture's last bits depend on it."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Versions and the kind of device: with others, pictures may differ in their last bits."""
    one_at_a_time: bool = False
    """Whether the model makes one at once whatever is asked for."""

    @property
    def digest(self) -> str:
        """Short name of the settings, in every line."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    def line(self) -> str:
        """As it is written."""
        return _encoded({"format": _FORMAT, "version": _VERSION, **asdict(self)}).decode()

    @classmethod
    def parse(cls, line: str) -> Header:
        """Back from a line; ValueError where it is none."""
        content = json.loads(line)
        try:
            if content.pop("format") == _FORMAT and content.pop("version") == _VERSION:
                header = cls(**content)
                if header._is_plausible():
                    written = header.settings.get("scheduler")
                    if isinstance(written, str):  # as it was typed, in older ledgers
                        header.settings["scheduler"] = scheduler_name(written)
                    return header
        except (KeyError, TypeError, AttributeError):
            pass
        raise ValueError("not a ledger's first line")

    def _is_plausible(self) -> bool:
        counts = type(self.batch_size) is int and self.batch_size > 0 and isinstance(self.one_at_a_time, bool)
        return counts and isinstance(self.settings, dict) and isinstance(self.made_with, dict)

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """The header of a ledger; None where there is no ledger."""
        try:
            with path.open(encoding="utf-8") as file:
                return cls.parse(file.readline())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            raise UserError(
                f"{path} is not a ledger that this muralist can read.",
                "Its first line is damaged, or another version wrote it.",
                "Choose another --output_dir, or give --overwrite to begin anew in this one.",
            ) from None


@dataclass
class Shard:
    """One worker's lines of the current command."""

    path: Path
    digest: str

    def __post_init__(self) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise self._deleted() from None  # a folder made anew here would have no lock
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        os.write(self._file, b"\n")  # ends a line that a killed worker may have left torn

    def done(
        self,
        sample: Sample,
        written: Path,
        sha256: str,
        gpu: str,
        seconds: float,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """A picture is there; `more` is what is known only of some, such as a batch size that is not the header's."""
        status = written.stat()
        facts: dict[str, Any] = {"bytes": status.st_size, "sha256": sha256, "changed": status.st_mtime_ns}
        self._append(DONE, sample, gpu, seconds, facts | dict(more or {}))

    def failed(self, sample: Sample, reason: str, gpu: str, seconds: float) -> None:
        """A picture could not be made, tried alone."""
        self._append(FAILED, sample, gpu, seconds, {"error": reason})

    def check_there(self) -> None:
        """An error if the file was deleted: lines would go nowhere, and pictures would have nobody to vouch for them."""
        try:
            there = os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            there = False
        if not there:
            raise self._deleted()

    def _deleted(self) -> OSError:
        return OSError(errno.ENOENT, "it was deleted while pictures were being made", str(self.path.parent.parent))

    def _append(self, status: str, sample: Sample, gpu: str, seconds: float, facts: dict[str, Any]) -> None:
        line = {
            "status": status,
            "index": sample.row,
            "copy": sample.copy,
            "id": sample.id,
            "seed": sample.seed,
            "prompt": sample.prompt,
            "negative_prompt": sample.negative_prompt,
            "height": sample.height,
            "width": sample.width,
            "file": sample.file,
            "gpu": gpu,
            "seconds": round(seconds, 4),
            "settings": self.digest,
            "key": sample.key,
            **facts,
        }
        data = _encoded(line)
        if os.write(self._file, data) < len(data):  # the rest would not fit either
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """No more lines come."""
        os.close(self._file)


def _encoded(content: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a character, which JSON can only spell out
        return (json.dumps(content) + "\n").encode()


def start(path: Path, header: Header) -> None:
    """Begin a ledger: the shape of batches is on disk before the first picture."""
    write_atomically(path, header.line())


def note_plan(path: Path, samples: int) -> None:
    """Say how many samples there are to be in all: for those who watch, the last of these lines counts.

    It is no part of the header, which stays as it is: a later command may plan more or fewer.
    """
    with open_own(path, "ab") as ledger:
        ledger.write((b"" if _ends_whole(path) else b"\n") + _encoded({PLANNED: samples}))


def merge(path: Path, shards: Path) -> None:
    """Move the workers' lines to the end of the ledger; cut off, it is done again: a line may well be there twice."""
    files = sorted(shards.glob("*.jsonl"))
    if any(True for file in files for _ in read_lines(file)):
        with open_own(path, "ab") as ledger:
            if not _ends_whole(path):  # this was cut off once
                ledger.write(b"\n")
            for file in files:
                ledger.writelines(_encoded(line) for line in read_lines(file))
            ledger.flush()
            os.fsync(ledger.fileno())
    for file in files:
        file.unlink()


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def is_whole(path: Path, line: dict[str, Any]) -> bool:
    """Whether a file is what its line says: the same size and time of change, or else the same bytes."""
    try:
        status = path.stat()
        if status.st_size != line["bytes"]:
            return False
        if status.st_mtime_ns == line["changed"]:
            return True
        with path.open("rb") as file:  # copied to another disk, say
            return hashlib.file_digest(file, "sha256").hexdigest() == line["sha256"]
    except OSError:
        return False
