"""A run is a folder a person can read; every file is written aside and renamed, so that none is ever half there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from muralist.errors import UserError

_TORN_BY_TORCH = ("inline_container.cc", "PytorchStreamWriter")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing: aside, flushed to disk, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with aside.open("xb") as file:  # a new file: a link that somebody left under this name is not followed
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file by itself
        raise
    finally:
        aside.unlink(missing_ok=True)


def open_own(path: Path, mode: str, encoding: str | None = None, buffering: int = -1) -> IO[Any]:
    """Open a file that goes on growing where it lies; a link under its name, in a folder from elsewhere, is refused."""
    return open(path, mode, buffering, encoding=encoding, opener=_without_links)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file for people and programs."""
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def flush_folder(path: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: BaseException) -> OSError:
    """What the disk said, where safetensors and torch hide it; any other error is a bug and goes on its way."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError):
            return behind
        if said := re.search(r"\(os error (\d+)\)", str(behind)):
            return OSError(int(said[1]), os.strerror(int(said[1])))
        behind = behind.__cause__ or behind.__context__
    if any(sign in str(error) for sign in _TORN_BY_TORCH):  # from another process, without what was behind it
        return OSError(errno.EIO, "the disk did not take all of it")
    raise error


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(error: OSError, path: Path) -> UserError:
    """The sentence for a disk that cannot be written."""
    if is_full(error):
        return UserError(
            f"No space left on the disk that holds {path}.",
            "The file was not written; everything written before it is whole.",
            "Free some space and run the same command again: it goes on from what is whole.",
        )
    return UserError(f"Cannot write {path}: {error.strerror}.", fix="Check that the folder exists and may be written.")


def safe_name(text: str) -> str:
    """A text as a run's name: what such a name may not hold becomes a dash."""
    return re.sub(r"[^\w.+=@-]+", "-", text).lstrip(".")


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run goes."""

    root: Path

    @classmethod
    def named(cls, results_dir: str, name: str) -> RunFolder:
        """The folder of a run; a name that would leave results_dir is refused."""
        if not name or safe_name(name) != name:
            raise UserError(
                f"--run_name {name!r} cannot be a folder name.", fix="Use letters, digits, and any of . _ + = @ - only."
            )
        return cls(Path(results_dir) / name)

    @property
    def config(self) -> Path:
        """The settings; `--config` reads them back."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, and `latest`, a text file with a name."""
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        """Pictures made during training."""
        return self.root / "samples"

    @property
    def log(self) -> Path:
        """What was printed."""
        return self.root / "logs" / "train.log"

    @property
    def metrics(self) -> Path:
        """One JSON object per line and step."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.root / "tensorboard"

    @property
    def heartbeats(self) -> Path:
        """What each process is doing, in a file of its own."""
        return self.root / "heartbeats"

    @property
    def shapes(self) -> Path:
        """Height and width of every picture of the data, where --multireso had to look at them."""
        return self.root / "picture_shapes.npz"

    @property
    def forecast(self) -> Path:
        """How long the run expected to take, and how far that was off."""
        return self.root / "forecast.json"

    @property
    def profile(self) -> Path:
        """Traces of some steps, where --profile asked for them."""
        return self.root / "profile"

    @property
    def save_request(self) -> Path:
        """Touch this file to get a checkpoint at the next step."""
        return self.root / "save"

    def create(self) -> None:
        """Make the folders, or say why they cannot be made."""
        try:
            for folder in (self.checkpoints, self.samples, self.log.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise no_space(error, self.root) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run: a second trainer on the same folder is refused; the lock dies with its process."""
        try:
            file = open_own(self.root / "lock", "a+")
        except OSError as error:
            raise no_space(error, self.root / "lock") from None
        with file:
            _hold(file, self.root)
            yield


def _hold(file: IO[str], root: Path) -> None:
    try:
        # Not flock: loader processes would inherit that one, and hold it for seconds after their trainer was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().strip() or "another process"
        raise UserError(
            f"The run {root} is being trained by {owner}.", fix="Wait for it, stop it, or give another --run_name."
        ) from None
    try:
        file.truncate(0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        raise no_space(error, root) from None
