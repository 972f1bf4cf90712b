"""The ledger of an output folder: which image is which, how it was made, and whether its file is intact.

    ledger.jsonl          first settings, versions and the batch size, then one line per finished or failed sample;
                          a command that has something to do first notes how many samples it plans in all
    .ledger/gpu0.jsonl    while a command runs: the lines of one worker; they go to the end of ledger.jsonl when it ends

Lines are only ever appended, each by one write. A worker that is killed leaves at most one torn line, which is ignored:
its image is generated again. The last line about a sample counts.
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

from muralist.core.errors import UserError
from muralist.core.run_dir import atomic_write, open_no_follow
from muralist.data.ledger_reader import DONE, FAILED, PLANNED, read_lines
from muralist.generate.model_info import ModelInfo
from muralist.generate.plan import Sample
from muralist.generate.step_caching import step_cache_for
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name

_FORMAT = "muralist ledger"
_VERSION = 1
PROMPT_TRUNCATED = "prompt_cut"
"""In an image's line: a text encoder did not read its prompt to the end."""
PSNR = "psnr_to_exact"
"""In an image's line, in fast mode: the PSNR to the same image in exact mode, in dB."""


@dataclass(frozen=True)
class Header:
    """The first line: what all images of the folder have in common."""

    settings: dict[str, Any]
    """Everything that shapes an image, the model's fingerprint included."""
    batch_size: int
    """Images generated at once, on which the last bits of an image depend."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Versions and device, on which the last bits depend too."""
    one_at_a_time: bool = False
    """Whether the model cannot batch, whatever was asked for."""

    @property
    def digest(self) -> str:
        """Short hash of the settings, in every line."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    def line(self) -> str:
        """Format the line."""
        return _encoded({"format": _FORMAT, "version": _VERSION, **asdict(self)}).decode()

    @classmethod
    def parse(cls, line: str) -> Header:
        """Parse the line; ValueError where it is not a header."""
        content = json.loads(line)
        try:
            if content.pop("format") == _FORMAT and content.pop("version") == _VERSION:
                header = cls(**content)
                if header._is_valid():
                    scheduler = header.settings.get("scheduler")
                    if isinstance(scheduler, str):  # older ledgers have it as it was typed
                        header.settings["scheduler"] = scheduler_name(scheduler)
                    return header
        except (KeyError, TypeError, AttributeError):
            pass
        raise ValueError("not the first line of a ledger")

    def _is_valid(self) -> bool:
        counts = type(self.batch_size) is int and self.batch_size > 0 and isinstance(self.one_at_a_time, bool)
        return counts and isinstance(self.settings, dict) and isinstance(self.made_with, dict)

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """Read the header of a ledger; None where there is no ledger."""
        try:
            with path.open(encoding="utf-8") as file:
                return cls.parse(file.readline())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            raise UserError(
                f"{path} is not a ledger that this muralist can read.",
                "Its first line is damaged, or another version wrote it.",
                "Choose another --output_dir, or give --overwrite to start anew in this one.",
            ) from None


def settings_identity(settings: GenerateSettings, model: ModelInfo) -> dict[str, Any]:
    """Return everything that shapes an image beside its row, for the header."""
    settings = settings.model_copy(update=model.resolved)
    names = [
        "dtype",
        "num_inference_steps",
        "guidance_scale",
        "cfg_truncation_step",
        "height",
        "width",
        "negative_prompt",
        "seed_start",
        "num_frames",
        "scheduler",
    ]
    if settings.num_frames > 1:
        names.append("video_format")
    identity = model.identity | {name: getattr(settings, name) for name in names}
    if settings.preset == "fast":  # exact mode has no entry: folders from before there were presets stay valid
        cache = step_cache_for(model.pipeline_class)
        identity["preset"] = cache.describe(settings.num_inference_steps, settings.cfg_truncation_step)
    return identity


@dataclass
class Shard:
    """One worker's lines of the current command."""

    path: Path
    digest: str

    def __post_init__(self) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise self._deleted() from None  # a new folder here would have no lock
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        os.write(self._file, b"\n")  # ends a line that a killed worker may have left torn

    def done(
        self, sample: Sample, file: Path, sha256: str, gpu: str, seconds: float, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Append an image; `extra` fields are those that only some images have, such as another batch size."""
        status = file.stat()
        facts: dict[str, Any] = {"bytes": status.st_size, "sha256": sha256, "changed": status.st_mtime_ns}
        self._append(DONE, sample, gpu, seconds, facts | dict(extra or {}))

    def failed(self, sample: Sample, reason: str, gpu: str, seconds: float) -> None:
        """Append a sample that failed by itself."""
        self._append(FAILED, sample, gpu, seconds, {"error": reason})

    def check_not_deleted(self) -> None:
        """Raise an error if the file was deleted: without its line, an image would be refused by the next command."""
        try:
            exists = os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            exists = False
        if not exists:
            raise self._deleted()

    def _deleted(self) -> OSError:
        return OSError(errno.ENOENT, "it was deleted while images were being generated", str(self.path.parent.parent))

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
        """Close the file."""
        os.close(self._file)


def _encoded(content: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return (json.dumps(content) + "\n").encode()


def start(path: Path, header: Header) -> None:
    """Write a new ledger: the batch size is on disk before the first image."""
    atomic_write(path, header.line())


def note_plan(path: Path, samples: int) -> None:
    """Append how many samples are planned in all, for the board; a later command may plan more or fewer."""
    with open_no_follow(path, "ab") as ledger:
        ledger.write((b"" if _ends_with_newline(path) else b"\n") + _encoded({PLANNED: samples}))


def merge(path: Path, shards: Path) -> None:
    """Move the workers' lines to the end of the ledger; interrupted and repeated, it may write lines twice."""
    files = sorted(shards.glob("*.jsonl"))
    if any(True for file in files for _ in read_lines(file)):
        with open_no_follow(path, "ab") as ledger:
            if not _ends_with_newline(path):  # an interrupted merge
                ledger.write(b"\n")
            for file in files:
                ledger.writelines(_encoded(line) for line in read_lines(file))
            ledger.flush()
            os.fsync(ledger.fileno())
    for file in files:
        file.unlink()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def is_intact(path: Path, line: dict[str, Any]) -> bool:
    """Return whether a file is what its line says: the same size and modification time, or else the same bytes."""
    try:
        status = path.stat()
        if status.st_size != line["bytes"]:
            return False
        if status.st_mtime_ns == line["changed"]:
            return True
        with path.open("rb") as file:  # copied to another disk, for example
            return hashlib.file_digest(file, "sha256").hexdigest() == line["sha256"]
    except OSError:
        return False
